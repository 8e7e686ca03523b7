// What each instruction set's unit offers to the dispatcher.
#pragma once

#include <cstddef>

#include "../args.h"

namespace multihead {

// What the two matrix products of a unit are made of.
enum class Instruction { fma, dpbf16, tdpbf16 };

// Calls of few rows: one item takes the rows of a KV head through one chunk of its keys, and the
// parts of all chunks, side by side, are joined.
struct Decoder {
  int64_t chunk_keys;
  size_t (*scratch_bytes)(const ForwardArgs&);  // per thread
  size_t (*part_bytes)(const ForwardArgs&);
  void (*decode)(const ForwardArgs&, const WorkItem&, int64_t chunk, void* scratch, void* part);
  void (*finish)(const ForwardArgs&, const WorkItem&, void* scratch, void* parts, int64_t chunks);
};

struct Unit {
  int tile_rows;                                          // rows in one tile
  size_t (*scratch_bytes)(const ForwardArgs&);            // per thread
  void (*forward)(const ForwardArgs&, const WorkItem&, void* scratch);
  Instruction instruction;       // all but fma take bfloat16 alone
  double (*peak)(int64_t steps); // runs the instruction, returns how many operations
  Decoder decoder;               // of the narrow fma units alone, for every dtype
};

}  // namespace multihead
