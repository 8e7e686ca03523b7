// What each instruction set's unit offers to the dispatcher.
#pragma once

#include <cstddef>

#include "../args.h"

namespace multihead {

// What the two matrix products of a unit are made of.
enum class Instruction { fma, dpbf16, tdpbf16 };

struct Unit {
  int tile_rows;                                          // queries in one tile
  size_t (*scratch_bytes)(const ForwardArgs&);            // per thread
  void (*forward)(const ForwardArgs&, const WorkItem&, void* scratch);
  Instruction instruction;       // all but fma take bfloat16 alone
  double (*peak)(int64_t steps); // runs the instruction, returns how many operations
};

}  // namespace multihead
