// Attention forward: a few tiles of query rows of one KV head go through its keys together.
#pragma once

namespace multihead {
namespace {

template <class Product>
struct Tile {
  TileRows rows;
  RowState state;
  typename Product::Element* query;  // Q^T [D, tile]
  float* out;                        // O^T [Dv, tile]
  TilePool* pool;                    // null where no map is asked for
};

// A thread's memory: O(tile * width + block * width), whatever the length.
template <class Product>
struct Scratch {
  typedef typename Product::Element Element;
  Arena arena;
  int64_t query_steps, out_rows;
  Tile<Product>* tiles;
  Element *queries;
  float* outs;
  Element *keys, *values;   // copies of one block, where it can't be read in place
  Element* paired_weights;  // bfloat16 weights [block / 2, tile]
  float* strip;             // one row of Q, V or the output
  BlockScratch block;

  Scratch(const ForwardArgs& a, void* memory)
      : arena(memory),
        query_steps(steps_for<Product>(a.head_dim)),
        out_rows(round_up(a.value_dim, kLanes)),
        tiles(arena.take<Tile<Product>>(a.tiles_per_item)),
        queries(arena.take<Element>(a.tiles_per_item * query_steps * kTile)),
        outs(arena.take<float>(a.tiles_per_item * out_rows * kTile)),
        keys(arena.take<Element>(kKeyBlock * query_steps)),
        values(arena.take<Element>(kKeyBlock / Product::terms *
                                   round_up(a.value_dim, Product::column_multiple))),
        paired_weights(arena.take<Element>(Product::terms == 1 ? 0 : kKeyPairs * kTile)),
        strip(arena.take<float>(
            round_up(a.head_dim > a.value_dim ? a.head_dim : a.value_dim, kLanes))),
        block(a, arena) {}
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
NOINLINE void scrub_values(const ForwardArgs& a, int64_t b, int64_t kv_head, float* strip,
                           typename Product::Element* copy, KeyValueBlock<Product>& block) {
  block.is_scrubbed = true;
  const int count = static_cast<int>(block.end - block.begin);
  for (int k = 0; k < count; ++k) {
    const int64_t offset = offset_of(a.value.strides, b, kv_head, block.begin + k);
    const bool together = a.value.strides[3] == 1;
    if (together && all_finite(a.dtype, a.value.data, offset, a.value_dim)) continue;
    read_floats(a.dtype, a.value.data, offset, a.value.strides[3], a.value_dim, strip);
    if (!together && all_finite(strip, a.value_dim)) continue;
    if (block.odd_count == 0) block.values = copied(block.values, a.value_dim, count, copy);
    block.odd[block.odd_count++] = static_cast<uint8_t>(k);
    for (int64_t d = 0; d < a.value_dim; ++d)
      if (!all_finite(strip + d, 1)) clear_value(copy, a.value_dim, k, d);
  }
}

// out[d * column_stride + r * row_stride] for row r and column d of V.
template <class Product>
NOINLINE void add_odd_values(const ForwardArgs& a, int64_t b, int64_t kv_head, float* strip,
                             const KeyValueBlock<Product>& block, const Visibility& seen,
                             const BlockScratch& scratch, int rows, int64_t row_stride,
                             int64_t column_stride, float* out) {
  for (int n = 0; n < block.odd_count; ++n) {
    const int k = block.odd[n];
    if (k < seen.begin || k >= seen.end) continue;
    read_floats(a.dtype, a.value.data,
                offset_of(a.value.strides, b, kv_head, block.begin + k), a.value.strides[3],
                a.value_dim, strip);
    for (int64_t d = 0; d < a.value_dim; ++d) {
      if (all_finite(strip + d, 1)) continue;
      for (int r = 0; r < rows; ++r)
        if (seen.full || scratch.bits[k] >> r & 1)
          out[d * column_stride + r * row_stride] += scratch.scores[k * kTile + r] * strip[d];
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

// One query tile meets one key block: scores, softmax, output.
template <class Product>
INLINE void attend(const ForwardArgs& a, int64_t b, int64_t kv_head, KeyValueBlock<Product>& block,
                   const Scratch<Product>& scratch, Tile<Product>& tile) {
  Visibility seen =
      look(a, b, tile.rows, block.begin, block.end, scratch.block.bits, scratch.block.bias);
  if (seen.hidden) return;
  const int count = static_cast<int>(block.end - block.begin);
  take_whole_rows(seen, count);
  const int begin = seen.begin, end = seen.end;
  float* scores = scratch.block.scores;

  if (!block.has_keys) {
    block.keys = key_operand(a, b, kv_head, block.begin, count, scratch.keys);
    block.has_keys = true;
  }
  Needs needs;
  const Vectors* need = needs.find(scratch.block.bits, seen);
  score_block<Product>(block.keys.data + begin * block.keys.stride, block.keys.stride, tile.query,
                       scratch.query_steps, end - begin, need, scores + begin * kTile);

  if (tile.pool) open_bin_of_block(a, block.begin, tile.state, *tile.pool);
  weigh_block(a, b, block.begin, count, tile.rows, seen, scratch.block, tile.state);
  if (tile.pool) pool_block(a, block.begin, seen, scratch.block, tile.state, *tile.pool);

  if (!block.has_values) {
    block.values = value_operand(a, b, kv_head, block.begin, count, scratch.values);
    block.has_values = true;
  }
  if (!seen.full && !block.is_scrubbed)
    scrub_values(a, b, kv_head, scratch.strip, scratch.values, block);
  // Pairs go over the weights, in the first-level cache, unless odd values still need those.
  typename Product::Element* paired = block.odd_count
                                          ? scratch.paired_weights
                                          : reinterpret_cast<typename Product::Element*>(scores);
  const typename Product::Element* weights =
      weights_operand(Product{}, scores, begin, end, paired);
  const int first_step = begin / Product::terms;
  value_block<Product>(block.values.data + first_step * block.values.stride, block.values.stride,
                       weights + first_step * kTile, steps_for<Product>(end) - first_step, need,
                       tile.state.decay, a.value_dim, tile.out);
  if (block.odd_count)
    add_odd_values(a, b, kv_head, scratch.strip, block, seen, scratch.block, kTile, 1, kTile,
                   tile.out);
}

// The columns that some row of the item may see.
template <class Product>
INLINE Columns columns_of(const ForwardArgs& a, int64_t b, const Tile<Product>* tiles,
                          int64_t count) {
  Columns all{0, a.key_length, 0};
  int32_t id_min = INT32_MAX, id_max = INT32_MIN;
  for (int64_t n = 0; n < count; ++n) {
    const Columns columns = columns_of(a, b, tiles[n].rows);
    id_min = lower(id_min, tiles[n].rows.id_min);
    id_max = higher(id_max, tiles[n].rows.id_max);
    if (columns.keep > all.keep) all.keep = columns.keep;
    if (columns.low < all.low) all.low = columns.low;
    if (columns.end > all.end) all.end = columns.end;
  }
  // Up to a whole register block, but not past the last key: look() hides the excess.
  const int64_t length = key_end(a, b);
  all.end = round_up(all.end, kBlockRows);
  if (all.end > length) all.end = length;
  narrow_to_ids(a, b, id_min, id_max, all);
  return all;
}

template <class Product>
void forward(const ForwardArgs& a, const WorkItem& item, void* memory, void* item_pool) {
  Scratch<Product> scratch(a, memory);
  const int64_t b = item.batch;
  const int64_t kv_head = item.first_head / (a.heads / a.kv_heads);
  int64_t tile_count = (item.heads * a.query_length - item.first_row + kTile - 1) / kTile;
  if (tile_count > a.tiles_per_item) tile_count = a.tiles_per_item;

  for (int64_t n = 0; n < tile_count; ++n) {
    Tile<Product>& tile = scratch.tiles[n];
    tile.query = scratch.queries + n * scratch.query_steps * kTile;
    tile.out = scratch.outs + n * scratch.out_rows * kTile;
    place_rows(a, item, item.first_row + n * kTile, tile.rows);
    pack_query(a, b, tile.rows, scratch.strip, tile.query);
    begin_rows(tile.state);
    for (int64_t x = 0; x < a.value_dim * kTile; ++x) tile.out[x] = 0.0f;
    tile.pool = nullptr;
    if (item_pool) {
      tile.pool = scratch.arena.template take<TilePool>(1);
      *tile.pool = TilePool(a, scratch.arena);
      begin_pool(a, *tile.pool);
    }
  }

  const Columns columns = columns_of(a, b, scratch.tiles, tile_count);
  for (int64_t begin = next_block(columns, 0); begin < columns.end;
       begin = next_block(columns, begin + kKeyBlock)) {
    KeyValueBlock<Product> block;
    block.begin = begin;
    block.end = begin + kKeyBlock < columns.end ? begin + kKeyBlock : columns.end;
    block.has_keys = block.has_values = block.is_scrubbed = false;
    block.odd_count = 0;
    const int64_t next = next_block(columns, begin + kKeyBlock);
    const int64_t next_end = next + kKeyBlock < columns.end ? next + kKeyBlock : columns.end;
    for (int64_t n = 0; n < tile_count; ++n) {
      fetch_rows(a, a.key, a.head_dim, b, kv_head, next, next_end, n, tile_count);
      fetch_rows(a, a.value, a.value_dim, b, kv_head, next, next_end, n, tile_count);
      attend(a, b, kv_head, block, scratch, scratch.tiles[n]);
    }
  }

  for (int64_t n = 0; n < tile_count; ++n) {
    const Tile<Product>& tile = scratch.tiles[n];
    turn_blocks(tile.out, a.value_dim);
    finish_rows(a, b, tile.rows, tile.state, scratch.strip,
                [&](int r, float factor, float* strip) INLINE_LAMBDA {
                  read_row(tile.out, a.value_dim, r, factor, strip);
                });
  }
  if (!item_pool) return;
  const ItemPool pool(a, item.first_row, item_pool);
  begin_item_pool(a, pool);
  for (int64_t n = 0; n < tile_count; ++n)
    finish_pool(a, scratch.tiles[n].rows, scratch.tiles[n].state, *scratch.tiles[n].pool, pool);
}

template <class Product>
size_t scratch_bytes(const ForwardArgs& a) {
  Scratch<Product> scratch(a, nullptr);
  for (int64_t n = 0; a.map.mass && n < a.tiles_per_item; ++n) {
    scratch.arena.template take<TilePool>(1);
    TilePool(a, scratch.arena);
  }
  return scratch.arena.bytes;
}

#ifdef MULTIHEAD_TILES
// Tiles belong to the thread. Released, they are no state that a switch of threads must save.
NOINLINE void forward_in_tiles(const ForwardArgs& a, const WorkItem& item, void* memory,
                               void* item_pool) {
  _tile_loadconfig(&kTileConfig);
  forward<TileProduct>(a, item, memory, item_pool);
  _tile_release();
}
#endif

}  // namespace
}  // namespace multihead
