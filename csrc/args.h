// What one call of the kernel reads and writes: plain pointers, sizes and strides.
//
// Nothing here has a member function: this header is compiled into every instruction set's unit,
// and an inline function that two units emit would be merged by the linker.
#pragma once

#include <cstdint>

namespace multihead {

enum class Dtype : int32_t { float32, bfloat16, float16, float64, int8 };

// A 4-D tensor read through its strides, which count elements and may be 0 (broadcast) or odd.
struct Tensor4 {
  const void* data;
  int64_t strides[4];
};

// Tokens in pages: the first axis of keys, values and scales is the page, and token j of batch row
// b is token j % size of page table[b * batch_stride + j / size]. With a null table it is the row.
struct Pages {
  const int32_t* table;
  int64_t batch_stride, size;
};

// One float32 for each token and KV head, on the axes of the key or value but the last. Null data
// means that there are none.
struct Scales {
  const float* data;
  int64_t strides[3];
};

// How a cache holds keys and values, zeros but for the dtype where they are plain tensors. Calls of
// few rows alone read what is not plain.
struct Held {
  Dtype dtype;  // the call's, or int8, whose last axis is then contiguous; in pages too
  Pages pages;
  Scales key_scale, value_scale;  // int8: a number is the element times the scale
};

// One integer for the whole call, or one per batch row or head where `data` is set.
struct Integers {
  const int32_t* data;
  int32_t value;
};

// An int32 array [B|1, L]; `batch_stride` is 0 where one row serves all batches.
struct Rows {
  const int32_t* data;
  int64_t batch_stride;
};

// The parts of a lowered mask. A null pointer or a false flag means that the part hides nothing.
// Query row i stands at p = query_positions[b, i] or start[b] + i, key column j at pos =
// key_positions[b, j] or j; a key is visible if every part agrees.
struct Mask {
  Integers start;
  Rows query_positions, key_positions;
  Integers first;              // first column that counts, per batch row
  bool has_left, has_right;
  Integers left, keep_first;   // pos >= p - left[h], or pos < first + keep_first[h]
  Integers right, prefix;      // pos <= p + right[h], or pos < first + prefix[b]
  const int32_t* key_lengths;    // [B]: j < key_lengths[b]
  const int32_t* query_lengths;  // [B]: i < query_lengths[b]
  const uint8_t* key_visible;    // [B|1, Lk]
  int64_t key_visible_batch_stride;
  Rows query_ids, key_ids;       // equal and not negative
  const int32_t* ranges;         // [B|1, H|1, Lq, range_count, 2], disjoint, half-open
  int64_t range_count, ranges_batch_stride, ranges_head_stride;
  Tensor4 dense;                 // bool, broadcast by stride 0
};

// Row statistics, each [B, H, Lq] contiguous, null where not asked for.
struct Statistics {
  float *lse, *entropy, *max_logit, *max_qk, *max_weight, *mean_distance, *sink_mass,
      *participation;
  int64_t* argmax;
};

// The matrix of weights, pooled: bin i of n over N places holds those from i N / n up to, without,
// (i + 1) N / n. No bin is empty.
struct PooledMap {
  int64_t row_bins, column_bins;
  float* mass;  // [B, H, row_bins, column_bins], null where not asked for
};

struct ForwardArgs {
  Dtype dtype;  // of query and out, key and value: float32, bfloat16 or float16
  int64_t batch, heads, kv_heads, query_length, key_length, head_dim, value_dim;
  Tensor4 query, key, value;
  Held held;
  void* out;
  int64_t out_strides[4];
  double scale;
  double softcap;      // 0 where there is none
  const float* sinks;  // [H] or null
  const float* slopes; // [H] or null: ALiBi subtracts slope * |p - pos|
  Tensor4 bias;        // null data where there is none
  Dtype bias_dtype;
  Mask mask;
  Statistics statistics;
  PooledMap map;
  int64_t tiles_per_item;  // query tiles that one work item takes through the keys together
};

// The query rows of `heads` neighboring heads of one KV head, one head after the other: row n is
// query n % Lq of head first_head + n / Lq. A work item begins at first_row.
struct WorkItem {
  int64_t batch, first_head, heads, first_row;
};

// The columns that some row of a tile may see: [0, keep) and [low, end).
struct Columns {
  int64_t keep, low, end;
};

// Weights formed again from lse, and summed over bins of query rows.
struct SweepArgs {
  ForwardArgs call;      // its logits; no values, output, sinks or statistics
  const float* lse;      // [B, H, Lq], natural log, sinks included
  const int64_t* edges;  // [bins + 1], ascending: bin i has the rows from edges[i] to edges[i + 1]
  int64_t bins;
  float *sums, *peaks;   // [B, H, bins, Lk]; peaks null where not asked for
  // What the mask lets in, for the batch rows and heads that it tells apart, all or one.
  int64_t mask_batch, mask_heads;
  int64_t* viewers;      // [mask_batch, mask_heads, bins, Lk]: rows of a bin that see the key
  uint8_t* seeing;       // [mask_batch, mask_heads, Lq]: set to 1 for rows that see some key
  // How the work is cut, on which no result depends.
  int64_t first_tile, tiles, tiles_per_group, keys_per_item;
  Columns* columns;      // [mask_batch, mask_heads, tiles]
};

// Keys of one head, from first_key on.
struct SweepItem {
  int64_t batch, head, first_key;
};

// Rotary positions: lanes i and i + pairs turn by the angle of token and pair.
struct RotateArgs {
  Dtype dtype;  // of x and out: float32, bfloat16 or float16
  int64_t batch, heads, length, head_dim;
  int64_t pairs;  // at most head_dim / 2; lanes from 2 pairs on are copied
  Tensor4 x;
  void* out;
  int64_t out_strides[4];
  const float *cos, *sin;       // [B|1, L, pairs]
  int64_t angles_batch_stride;  // 0 where one row serves all batches
};

}  // namespace multihead
