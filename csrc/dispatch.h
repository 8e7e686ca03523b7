// Which instruction set runs, and the parallel loop over a call's work items.
#pragma once

#include <string>
#include <vector>

#include "args.h"

namespace multihead {

// Names of the instruction sets that this build holds and this processor runs, slowest first:
// "baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx".
std::vector<std::string> instruction_sets();

// Chooses one set for every later call of the process, or with "" the fastest for each dtype; the
// environment variable MULTIHEAD_ISA does so from the start.
// Throws std::invalid_argument for a name that is not in instruction_sets().
void use_instruction_set(const std::string& name);

// Whether the kernel for few rows takes such a call; it pools no map.
bool decodes(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t query_length);

// Whether calls of few rows take kernels of their own, as they do from the start. Tests turn it off
// to run small cases through the tiles.
void use_decoder(bool on);

// The set that serves `dtype` now. The sets after "avx512" hold bfloat16 only: float32 takes
// "avx512".
// Throws std::invalid_argument, as forward() does, if MULTIHEAD_ISA is not in instruction_sets().
std::string instruction_set_for(Dtype dtype);

// Runs the call on at most `threads` threads. The same bits come out for any number of them.
void forward(const ForwardArgs& args, int threads);

// Fills sums, peaks, viewers and seeing; the fields of how the work is cut are set here. The same
// bits come out for any number of threads and for a bin among any others.
void sweep(SweepArgs args, int threads);

// Turns the rows of x by their positions. The same bits come out for any number of threads.
void rotate(const RotateArgs& args, int threads);

// GF/s of "fma" (float32), "dpbf16" or "amx" (bfloat16) on `threads` threads; NaN where the
// processor lacks it.
// Throws std::invalid_argument for another kind.
double peak(const std::string& kind, int threads);

}  // namespace multihead
