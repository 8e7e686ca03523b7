// Attention forward: a few query tiles of one head go through its keys together.
#pragma once

namespace multihead {
namespace {

template <class Product>
struct Tile {
  TileRows rows;
  RowState state;
  typename Product::Element* query;  // Q^T [D, tile]
  float* out;                        // O^T [Dv, tile]
};

// A thread's memory: O(tile * width + block * width), whatever the length.
template <class Product>
struct Scratch {
  typedef typename Product::Element Element;
  Tile<Product>* tiles;
  Element *keys, *values;   // copies of one block, where it can't be read in place
  Element* paired_weights;  // bfloat16 weights [block / 2, tile]
  float *scores, *bias;     // [block, tile]
  float* strip;             // one row of Q, V or the output
  float* key_offset;        // positions of the block's keys relative to the tile's first row
  RowBits* bits;            // the block's visibility
  size_t bytes;

  Scratch(const ForwardArgs& a, void* memory) : bytes(0) {
    const uintptr_t base = reinterpret_cast<uintptr_t>(memory);
    const int64_t width = a.head_dim > a.value_dim ? a.head_dim : a.value_dim;
    const int64_t out_rows = round_up(a.value_dim, kLanes);
    const int64_t query_steps = steps_for<Product>(a.head_dim);
    tiles = take<Tile<Product>>(base, a.tiles_per_item);
    Element* queries = take<Element>(base, a.tiles_per_item * query_steps * kTile);
    float* outs = take<float>(base, a.tiles_per_item * out_rows * kTile);
    keys = take<Element>(base, kKeyBlock * query_steps);
    values = take<Element>(base, kKeyBlock / Product::terms *
                                     round_up(a.value_dim, Product::column_multiple));
    paired_weights = take<Element>(base, Product::terms == 1 ? 0 : kKeyPairs * kTile);
    scores = take<float>(base, kKeyBlock * kTile);
    bias = take<float>(base, a.bias.data ? kKeyBlock * kTile : 0);
    strip = take<float>(base, round_up(width, kLanes));
    key_offset = take<float>(base, kKeyBlock);
    bits = take<RowBits>(base, kKeyBlock + 1);
    if (!base) return;
    for (int64_t n = 0; n < a.tiles_per_item; ++n) {
      tiles[n].query = queries + n * query_steps * kTile;
      tiles[n].out = outs + n * out_rows * kTile;
    }
  }

  template <class T>
  T* take(uintptr_t base, int64_t count) {
    T* here = reinterpret_cast<T*>(base + bytes);
    bytes += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return here;
  }
};

// One key block of one KV head, prepared when the first tile needs it.
template <class Product>
struct KeyValueBlock {
  int64_t begin, end;
  bool has_keys, has_values, is_scrubbed;
  Operand<typename Product::Element> keys, values;
  int odd_count;            // keys whose values hold inf or NaN, once scrubbed
  uint8_t odd[kKeyBlock];
};

// A hidden key's weight is 0, and 0 * NaN is NaN: where some row does not see all of the block,
// infinities and NaN are taken out of a copy, and added for the rows that see them.
template <class Product>
NOINLINE void scrub_values(const ForwardArgs& a, int64_t b, int64_t kv_head,
                           const Scratch<Product>& scratch, KeyValueBlock<Product>& block) {
  block.is_scrubbed = true;
  const int count = static_cast<int>(block.end - block.begin);
  for (int k = 0; k < count; ++k) {
    read_floats(a.dtype, a.value.data,
                offset_of(a.value.strides, b, kv_head, block.begin + k), a.value.strides[3],
                a.value_dim, scratch.strip);
    if (all_finite(scratch.strip, a.value_dim)) continue;
    if (block.odd_count == 0)
      block.values = copied(block.values, a.value_dim, count, scratch.values);
    block.odd[block.odd_count++] = static_cast<uint8_t>(k);
    for (int64_t d = 0; d < a.value_dim; ++d)
      if (!all_finite(scratch.strip + d, 1)) clear_value(scratch.values, a.value_dim, k, d);
  }
}

template <class Product>
NOINLINE void add_odd_values(const ForwardArgs& a, int64_t b, int64_t kv_head,
                             const Scratch<Product>& scratch, const KeyValueBlock<Product>& block,
                             const Visibility& seen, float* out) {
  for (int n = 0; n < block.odd_count; ++n) {
    const int k = block.odd[n];
    if (k < seen.begin || k >= seen.end) continue;
    read_floats(a.dtype, a.value.data,
                offset_of(a.value.strides, b, kv_head, block.begin + k), a.value.strides[3],
                a.value_dim, scratch.strip);
    for (int64_t d = 0; d < a.value_dim; ++d) {
      if (all_finite(scratch.strip + d, 1)) continue;
      for (int r = 0; r < kTile; ++r)
        if (seen.full || scratch.bits[k] >> r & 1)
          out[d * kTile + r] += scratch.scores[k * kTile + r] * scratch.strip[d];
    }
  }
}

INLINE const float* weights_operand(FloatProduct, const float* weights, int, int, float*) {
  return weights;
}

#ifdef MULTIHEAD_PAIRS
// Of keys 2i and 2i + 1 together, zeros behind the last key.
template <class Product>
INLINE const typename Product::Element* weights_operand(Product, const float* weights, int begin,
                                                        int end,
                                                        typename Product::Element* paired) {
  const int padded = static_cast<int>(steps_for<Product>(end)) * Product::terms;
  for (int k = begin; k < padded; k += 2)
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      const float* w = weights + k * kTile + j * kLanes;
      const Vec first = k < end ? load(w) : set1(0.0f);
      const Vec second = k + 1 < end ? load(w + kTile) : set1(0.0f);
      Product::store_weights(paired + k / 2 * kTile + j * kLanes, first, second);
    }
  return paired;
}
#endif

INLINE bool wants_offsets(const ForwardArgs& a) {
  return a.slopes || a.statistics.mean_distance;
}

INLINE void place_keys(const ForwardArgs& a, int64_t b, int64_t begin, int64_t end, int64_t origin,
                       float* key_offset) {
  const Rows& positions = a.mask.key_positions;
  for (int64_t j = begin; j < end; ++j) {
    const int64_t pos = positions.data ? positions.data[b * positions.batch_stride + j] : j;
    key_offset[j - begin] = static_cast<float>(pos - origin);
  }
}

// With one vector of queries the products wait for memory: the rows that come next are fetched
// ahead. Wide tiles compute long enough on a block for the processor's own prefetcher.
INLINE void fetch_ahead(const ForwardArgs& a, const Tensor4& x, int64_t width, int64_t b,
                        int64_t kv_head, int64_t begin) {
  if (kTileVectors > 1 || x.strides[3] != 1) return;
  const int64_t end = begin + kKeyBlock < a.key_length ? begin + kKeyBlock : a.key_length;
  const int64_t bytes = element_bytes(a.dtype);
  for (int64_t j = begin; j < end; ++j) {
    const char* row =
        static_cast<const char*>(x.data) + offset_of(x.strides, b, kv_head, j) * bytes;
    for (int64_t at = 0; at < width * bytes; at += 64) __builtin_prefetch(row + at);
  }
}

// One query tile meets one key block: scores, softmax, output.
template <class Product>
INLINE void attend(const ForwardArgs& a, const WorkItem& item, int64_t kv_head,
                   KeyValueBlock<Product>& block, const Scratch<Product>& scratch,
                   Tile<Product>& tile) {
  const int64_t b = item.batch, h = item.head;
  const Visibility seen =
      look(a, b, h, tile.rows, block.begin, block.end, scratch.bits, scratch.bias);
  if (seen.hidden) return;
  const int begin = seen.begin, end = seen.end;
  const int count = static_cast<int>(block.end - block.begin);
  float* scores = scratch.scores;
  RowState& state = tile.state;

  if (!block.has_keys) {
    block.keys = key_operand(a, b, kv_head, block.begin, count, scratch.keys);
    block.has_keys = true;
  }
  fetch_ahead(a, a.value, a.value_dim, b, kv_head, block.begin);
  score_block<Product>(block.keys.data + begin * block.keys.stride, block.keys.stride, tile.query,
                       steps_for<Product>(a.head_dim), end - begin, scores + begin * kTile);

  float per_bit = kLog2E * size_of_scale(a);
  if (makes_logits(a)) {
    if (a.statistics.max_qk)
      raise_visible_maximum(scores, begin, end, seen.full ? nullptr : scratch.bits,
                            state.max_product);
    if (a.softcap > 0)
      cap_scores(scores, begin, end, size_of_scale(a), static_cast<float>(a.softcap));
    else
      scale_scores(scores, begin, end, size_of_scale(a));
    per_bit = kLog2E;
  }
  if (a.bias.data) add_bias(scores, begin, end, scratch.bias);
  if (wants_offsets(a))
    place_keys(a, b, block.begin, block.end, tile.rows.origin, scratch.key_offset);
  if (a.slopes)
    add_slope(scores, begin, end, a.slopes[h], tile.rows.offset, scratch.key_offset);
  if (!seen.full) hide_scores(scores, begin, end, scratch.bits);

  float old_max[kTile];
  __builtin_memcpy(old_max, state.max, sizeof old_max);
  raise_maximum(scores, begin, end, state);
  decay_state(old_max, per_bit, state);
  if (a.statistics.argmax) find_maximum(scores, begin, end, block.begin, old_max, state);
  if (a.statistics.entropy)
    weigh<true>(scores, begin, end, per_bit, state);
  else
    weigh<false>(scores, begin, end, per_bit, state);
  if (a.statistics.participation) add_squares(scores, begin, end, state);
  if (a.statistics.mean_distance)
    add_distances(scores, begin, end, tile.rows.offset, scratch.key_offset, state);
  if (a.statistics.sink_mass) {
    const int64_t first = value_at(a.mask.first, b) - block.begin;
    if (begin <= first && first < end)
      for (int r = 0; r < kTile; ++r) state.first_key[r] += scores[first * kTile + r];
  }

  if (!block.has_values) {
    block.values = value_operand(a, b, kv_head, block.begin, count, scratch.values);
    block.has_values = true;
  }
  if (!seen.full && !block.is_scrubbed) scrub_values(a, b, kv_head, scratch, block);
  fetch_ahead(a, a.key, a.head_dim, b, kv_head, block.end);
  // Pairs go over the weights, in the first-level cache, unless odd values still need those.
  typename Product::Element* paired = block.odd_count
                                          ? scratch.paired_weights
                                          : reinterpret_cast<typename Product::Element*>(scores);
  const typename Product::Element* weights =
      weights_operand(Product{}, scores, begin, end, paired);
  const int first_step = begin / Product::terms;
  value_block<Product>(block.values.data + first_step * block.values.stride, block.values.stride,
                       weights + first_step * kTile,
                       steps_for<Product>(end) - first_step, state.decay, a.value_dim, tile.out);
  if (block.odd_count) add_odd_values(a, b, kv_head, scratch, block, seen, tile.out);
}

// The columns that some row of the item may see: [0, keep) and [low, end).
struct Columns {
  int64_t keep, low, end;
};

template <class Product>
INLINE Columns columns_of(const ForwardArgs& a, int64_t b, const Tile<Product>* tiles,
                          int64_t count) {
  const int64_t length = a.mask.key_lengths && a.mask.key_lengths[b] < a.key_length
                             ? a.mask.key_lengths[b]
                             : a.key_length;
  if (a.mask.key_positions.data) return {length, 0, length};
  Columns all{0, length, 0};
  for (int64_t n = 0; n < count; ++n) {
    const TileRows& rows = tiles[n].rows;
    const bool ranges = a.mask.ranges != nullptr;
    const int64_t low = ranges ? rows.range_begin : rows.low_min;
    const int64_t end = ranges ? rows.range_end : rows.end_max;
    if (!ranges && rows.keep_max > all.keep) all.keep = rows.keep_max;
    if (low < all.low) all.low = low;
    if (end > all.end) all.end = end;
  }
  // Whole register blocks, where there are keys: the rows hide what they don't see.
  all.end = (all.end + kBlockRows - 1) / kBlockRows * kBlockRows;
  if (all.end > length) all.end = length;
  if (all.low < 0) all.low = 0;
  return all;
}

template <class Product>
void forward(const ForwardArgs& a, const WorkItem& item, void* memory) {
  const Scratch<Product> scratch(a, memory);
  const int64_t b = item.batch;
  const int64_t kv_head = item.head / (a.heads / a.kv_heads);
  int64_t tile_count = (a.query_length - item.first_query + kTile - 1) / kTile;
  if (tile_count > a.tiles_per_item) tile_count = a.tiles_per_item;

  for (int64_t n = 0; n < tile_count; ++n) {
    Tile<Product>& tile = scratch.tiles[n];
    place_rows(a, b, item.head, item.first_query + n * kTile, tile.rows);
    pack_query(a, b, item.head, tile.rows, scratch.strip, tile.query);
    begin_rows(tile.state);
    for (int64_t x = 0; x < a.value_dim * kTile; ++x) tile.out[x] = 0.0f;
  }

  const Columns columns = columns_of(a, b, scratch.tiles, tile_count);
  for (int64_t begin = 0; begin < columns.end; begin += kKeyBlock) {
    if (begin >= columns.keep && begin + kKeyBlock <= columns.low) {
      begin = columns.low / kKeyBlock * kKeyBlock;
      if (begin >= columns.end) break;
    }
    KeyValueBlock<Product> block;
    block.begin = begin;
    block.end = begin + kKeyBlock < columns.end ? begin + kKeyBlock : columns.end;
    block.has_keys = block.has_values = block.is_scrubbed = false;
    block.odd_count = 0;
    for (int64_t n = 0; n < tile_count; ++n)
      attend(a, item, kv_head, block, scratch, scratch.tiles[n]);
  }

  for (int64_t n = 0; n < tile_count; ++n) {
    const int64_t first_query = item.first_query + n * kTile;
    const int64_t left = a.query_length - first_query;
    finish_tile(a, item, first_query, static_cast<int>(left < kTile ? left : kTile),
                scratch.tiles[n].state, scratch.tiles[n].out, scratch.strip);
  }
}

template <class Product>
size_t scratch_bytes(const ForwardArgs& a) {
  return Scratch<Product>(a, nullptr).bytes;
}

#ifdef MULTIHEAD_TILES
// Tiles belong to the thread. Released, they are no state that a switch of threads must save.
NOINLINE void forward_in_tiles(const ForwardArgs& a, const WorkItem& item, void* memory) {
  _tile_loadconfig(&kTileConfig);
  forward<TileProduct>(a, item, memory);
  _tile_release();
}
#endif

}  // namespace
}  // namespace multihead
