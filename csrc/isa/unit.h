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

// Of a pooled map: what each item leaves, and how a head's items, side by side, are summed.
struct Pooler {
  size_t (*item_bytes)(const ForwardArgs&);
  void (*finish)(const ForwardArgs&, int64_t batch, int64_t head, void* pools, int64_t items);
};

// The second pass over all pairs: an item takes all rows through some keys of one head.
struct Sweeper {
  int64_t block_keys;
  size_t (*scratch_bytes)(const SweepArgs&);  // per thread
  void (*place)(const SweepArgs&, int64_t batch, int64_t head, int64_t tile);  // fills `columns`
  void (*sweep)(const SweepArgs&, const SweepItem&, void* scratch);
};

struct Unit {
  int tile_rows;                                          // rows in one tile
  int few_rows;  // up to which the decoder is faster than tiles, which a group then fits
  size_t (*scratch_bytes)(const ForwardArgs&);            // per thread
  void (*forward)(const ForwardArgs&, const WorkItem&, void* scratch, void* item_pool);
  Instruction instruction;       // all but fma take bfloat16 alone
  double (*peak)(int64_t steps); // runs the instruction, returns how many operations
  Pooler pooler;
  Decoder decoder;               // of the narrow fma units alone, for every dtype
  Sweeper sweeper;               // of the wide units alone
  // Turns the tokens [begin, end) of a batch row, in all heads; of the wide units alone.
  void (*rotate)(const RotateArgs&, int64_t batch, int64_t begin, int64_t end);
};

}  // namespace multihead
