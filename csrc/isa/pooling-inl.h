// The matrix of weights pooled to a few cells in the pass that computes the output.
//
// While a tile goes through the keys, each row sums its weights over one bin of columns after the
// other, each sum relative to the row's maximum at that time. At the end of the row they are
// brought to the final maximum, divided, and summed over the bin's rows.
#pragma once

namespace multihead {
namespace {

// What one tile gathers.
struct TilePool {
  int64_t bin;                 // the column bin that is open
  alignas(64) float open[kTile];  // its sums, which decay with the row's state
  float *mass, *maximum;       // [column_bins, tile]: sums, and the maximum they are relative to
  RowBits* viewers;            // [column_bins]: the rows that see a key of the bin

  TilePool(const ForwardArgs& a, Arena& arena)
      : bin(0),
        mass(arena.take<float>(a.map.column_bins * kTile)),
        maximum(arena.take<float>(a.map.column_bins * kTile)),
        viewers(arena.take<RowBits>(a.map.column_bins)) {}
};

INLINE void begin_pool(const ForwardArgs& a, TilePool& pool) {
  pool.bin = 0;
  for (int r = 0; r < kTile; ++r) pool.open[r] = 0.0f;
  for (int64_t n = 0; n < a.map.column_bins; ++n) pool.viewers[n] = 0;
  for (int64_t x = 0; x < a.map.column_bins * kTile; ++x) {
    pool.mass[x] = 0.0f;
    pool.maximum[x] = kNoMaximum;
  }
}

INLINE int64_t column_edge(const ForwardArgs& a, int64_t bin) {
  return bin * a.key_length / a.map.column_bins;
}

// Closes the open bin and opens the one that holds `column`.
INLINE void open_bin(const ForwardArgs& a, int64_t column, const RowState& state, TilePool& pool) {
  for (int r = 0; r < kTile; ++r) {
    pool.mass[pool.bin * kTile + r] = pool.open[r];
    pool.maximum[pool.bin * kTile + r] = state.max[r];
    pool.open[r] = 0.0f;
  }
  pool.bin = ((column + 1) * a.map.column_bins - 1) / a.key_length;
}

// A bin that ended before this block closes with the maxima that its sums still are relative to:
// hence before the state decays.
INLINE void open_bin_of_block(const ForwardArgs& a, int64_t first_key, const RowState& state,
                              TilePool& pool) {
  if (first_key >= column_edge(a, pool.bin + 1)) open_bin(a, first_key, state, pool);
}

// The weights of a block join.
NOINLINE void pool_block(const ForwardArgs& a, int64_t first_key, const Visibility& seen,
                         const BlockScratch& block, const RowState& state, TilePool& pool) {
  for (int r = 0; r < kTile; ++r) pool.open[r] *= state.decay[r];
  int k = seen.begin;
  while (k < seen.end) {
    const int64_t edge = column_edge(a, pool.bin + 1) - first_key;
    const int stop = edge < seen.end ? static_cast<int>(edge) : seen.end;
    add_terms(block.scores, k, stop, pool.open, [](Vec, int, int) { return set1(1.0f); });
    for (; k < stop; ++k) pool.viewers[pool.bin] |= seen.full ? kAllRows : block.bits[k];
    if (k < seen.end) open_bin(a, first_key + k, state, pool);
  }
}

// What the tiles of one item gathered: over the rows of each row bin that it touches the sums of
// weights, the number of rows that see a key, and the cells in which a pair is visible.
struct ItemPool {
  int64_t first_bin, bins;
  double* mass;      // [bins, column_bins]
  int32_t* live;     // [bins]
  uint8_t* visible;  // [bins, column_bins]
  size_t bytes;      // the same for all items of a call

  ItemPool(const ForwardArgs& a, int64_t first_row, void* memory) {
    const int64_t rows = a.tiles_per_item * kTile;
    const int64_t last = first_row + rows < a.query_length ? first_row + rows : a.query_length;
    first_bin = row_bin(a, first_row);
    bins = row_bin(a, last - 1) + 1 - first_bin;
    const int64_t most = rows * a.map.row_bins / a.query_length + 2;
    Arena arena(memory);
    mass = arena.take<double>(most * a.map.column_bins);
    live = arena.take<int32_t>(most);
    visible = arena.take<uint8_t>(most * a.map.column_bins);
    bytes = arena.bytes;
  }

  static int64_t row_bin(const ForwardArgs& a, int64_t query) {
    return ((query + 1) * a.map.row_bins - 1) / a.query_length;
  }
};

INLINE void begin_item_pool(const ForwardArgs& a, const ItemPool& pool) {
  for (int64_t n = 0; n < pool.bins; ++n) pool.live[n] = 0;
  for (int64_t x = 0; x < pool.bins * a.map.column_bins; ++x) {
    pool.mass[x] = 0.0;
    pool.visible[x] = 0;
  }
}

// The tile's rows are done: their sums join those of the item.
NOINLINE void finish_pool(const ForwardArgs& a, const TileRows& rows, const RowState& state,
                          TilePool& pool, const ItemPool& item) {
  open_bin(a, a.key_length - 1, state, pool);
  const float per_bit = makes_logits(a) ? kLog2E : kLog2E * size_of_scale(a);
  double share[kTile];  // of a weight relative to the row's maximum
  for (int r = 0; r < kTile; ++r) {
    const bool has_sink = a.sinks != nullptr;
    const RowEnd end = end_row(a, state, r, has_sink, has_sink ? a.sinks[rows.head[r]] : 0.0);
    share[r] = state.sum[r] == 0 ? 0.0 : end.key_share / end.sum;
  }
  RowBits seeing = 0;  // rows that see a key, though its logit be -inf
  for (int64_t n = 0; n < a.map.column_bins; ++n) seeing |= pool.viewers[n];
  int begin = 0;
  while (begin < rows.count) {
    const int64_t bin = ItemPool::row_bin(a, rows.query[begin]) - item.first_bin;
    int stop = begin;
    RowBits lanes = 0;
    for (; stop < rows.count && ItemPool::row_bin(a, rows.query[stop]) - item.first_bin == bin;
         ++stop) {
      lanes |= RowBits{1} << stop;
      if (seeing >> stop & 1) ++item.live[bin];
    }
    for (int64_t n = 0; n < a.map.column_bins; ++n) {
      if (!(pool.viewers[n] & lanes)) continue;
      item.visible[bin * a.map.column_bins + n] = 1;
      float mass[kTile];
      UNROLL for (int j = 0; j < kTileVectors; ++j) {
        const int r = j * kLanes;
        const Vec below = load(pool.maximum + n * kTile + r) - load(state.max + r);
        store(mass + r, load(pool.mass + n * kTile + r) * exp2(below, set1(per_bit)));
      }
      double sum = 0.0;
      for (int r = begin; r < stop; ++r) sum += mass[r] * share[r];
      item.mass[bin * a.map.column_bins + n] += sum;
    }
    begin = stop;
  }
}

// Sums what the items of one head gathered, `pools` side by side in the order of their rows, and
// writes the head's map: means over the rows that see a key, NaN where no pair is visible.
void finish_map(const ForwardArgs& a, int64_t batch, int64_t head, void* pools, int64_t items) {
  const int64_t columns = a.map.column_bins;
  float* map = a.map.mass + (batch * a.heads + head) * a.map.row_bins * columns;
  const auto pool_of = [&](int64_t n) {
    const int64_t bytes = static_cast<int64_t>(ItemPool(a, 0, nullptr).bytes);
    return ItemPool(a, n * a.tiles_per_item * kTile, static_cast<char*>(pools) + n * bytes);
  };
  int64_t first = 0, stop = 0;  // the items that touch the bin
  for (int64_t bin = 0; bin < a.map.row_bins; ++bin) {
    while (pool_of(first).first_bin + pool_of(first).bins <= bin) ++first;
    while (stop < items && pool_of(stop).first_bin <= bin) ++stop;
    for (int64_t c = 0; c < columns; ++c) {
      bool visible = false;
      double mass = 0.0;
      int32_t live = 0;
      for (int64_t n = first; n < stop; ++n) {
        const ItemPool pool = pool_of(n);
        const int64_t row = bin - pool.first_bin;
        visible |= pool.visible[row * columns + c] != 0;
        mass += pool.mass[row * columns + c];
        live += pool.live[row];
      }
      map[bin * columns + c] = visible ? static_cast<float>(mass / live) : __builtin_nanf("");
    }
  }
}

size_t item_pool_bytes(const ForwardArgs& a) { return ItemPool(a, 0, nullptr).bytes; }

}  // namespace
}  // namespace multihead
