// What each instruction set's unit offers to the dispatcher.
#pragma once

#include <cstddef>

#include "../args.h"

namespace multihead {

struct Unit {
  int tile_rows;                                          // queries in one tile
  size_t (*scratch_bytes)(const ForwardArgs&);            // per thread
  void (*forward)(const ForwardArgs&, const WorkItem&, void* scratch);
  double (*peak_fma)(int64_t steps);     // runs float32 FMAs, returns how many operations
  double (*peak_dpbf16)(int64_t steps);  // the same for dpbf16ps; null where there is none
};

}  // namespace multihead
