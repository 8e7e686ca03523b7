// The second pass: all weights once more, from q, k and lse, summed over bins of query rows.
//
// An item owns some keys of one head and takes all swept rows through them, so that every sum has
// one owner and one order. Tiles begin at absolute multiples of their size: a bin's bits depend
// neither on the bins around it nor on the threads.
#pragma once

namespace multihead {
namespace {

// What the keys of a block got from the bin under way. A tile's rows are added in float32, tiles in
// float64: a bin may hold all rows of a long text.
struct BinTotals {
  double* sums;
  float* peaks;
  int64_t* viewers;

  INLINE BinTotals from(int64_t key) const { return {sums + key, peaks + key, viewers + key}; }
};

template <class Product>
struct SweptTile {
  TileRows rows;
  alignas(64) float lse[kTile];
  typename Product::Element* query;  // Q^T [D, tile]
  bool skipped;                      // sees none of the item's keys
  RowBits seeing;                    // rows that see one of them
};

template <class Product>
struct SweepScratch {
  typedef typename Product::Element Element;
  Arena arena;
  int64_t query_steps;
  SweptTile<Product>* tiles;
  Element *queries, *keys;
  float* strip;
  BinTotals totals;
  BlockScratch block;

  SweepScratch(const SweepArgs& s, void* memory)
      : arena(memory),
        query_steps(steps_for<Product>(s.call.head_dim)),
        tiles(arena.take<SweptTile<Product>>(s.tiles_per_group)),
        queries(arena.take<Element>(s.tiles_per_group * query_steps * kTile)),
        keys(arena.take<Element>(kKeyBlock * query_steps)),
        strip(arena.take<float>(round_up(s.call.head_dim, kLanes))),
        totals{arena.take<double>(s.keys_per_item), arena.take<float>(s.keys_per_item),
               arena.take<int64_t>(s.keys_per_item)},
        block(s.call, arena) {}
};

INLINE int64_t mask_row(const SweepArgs& s, int64_t b, int64_t h) {
  return b % s.mask_batch * s.mask_heads + h % s.mask_heads;
}

// A window's tiles see few keys each: found once, those of the other items cost them nothing.
void place_columns(const SweepArgs& s, int64_t b, int64_t h, int64_t tile) {
  TileRows rows;
  place_rows(s.call, {b, h, 1, 0}, (s.first_tile + tile) * kTile, rows);
  Columns columns = columns_of(s.call, b, rows);
  narrow_to_ids(s.call, b, rows.id_min, rows.id_max, columns);
  s.columns[mask_row(s, b, h) * s.tiles + tile] = columns;
}

INLINE bool overlap(const Columns& columns, int64_t begin, int64_t end) {
  return begin < columns.keep || (begin < columns.end && columns.low < end);
}

// Scores become e^(logit - lse), whatever stands where a key is hidden. A logit is rounded to
// float32 first, as lse is: of a key that takes all of a row they then are equal.
INLINE void weigh_by_lse(const ForwardArgs& a, float* scores, int begin, int end,
                         const float* lse) {
  const float scale = makes_logits(a) ? 1.0f : size_of_scale(a);
  for_scores(scores, begin, end, [=](Vec s, int, int j) {
    return exp(s * set1(scale) - load(lse + j * kLanes));
  });
}

// x[i] = join over the vectors of the rows `lanes` of key k + i, 0 where it is hidden or not below
// `end`.
template <class Join>
INLINE void fold_vectors(const float* weights, const RowBits* bits, RowBits lanes, int k, int end,
                         Vec x[kLanes], Join join) {
  UNROLL for (int i = 0; i < kLanes; ++i) x[i] = set1(0.0f);
  for (int j = 0; j < kTileVectors; ++j) {
    if (!(lanes >> (j * kLanes) & (kAllRows >> (kTile - kLanes)))) continue;
    UNROLL for (int i = 0; i < kLanes; ++i) {
      const RowBits shown = k + i < end ? (bits ? bits[k + i] : kAllRows) & lanes : 0;
      const Vec w = load(weights + (k + i) * kTile + j * kLanes);
      x[i] = join(x[i], select(lanes_of(shown >> (j * kLanes)), w, set1(0.0f)));
    }
  }
}

// The rows `lanes` of a tile, all of one bin, join its totals; `bits` is null where they see all.
NOINLINE void add_to_bin(const SweepArgs& s, const float* weights, const RowBits* bits,
                         RowBits lanes, int begin, int end, bool counts, const BinTotals& totals) {
  static_assert(kKeyBlock % kLanes == 0, "whole vectors of keys");
  for (int k = begin - begin % kLanes; k < end; k += kLanes) {
    Vec x[kLanes];
    float each[kLanes];
    fold_vectors(weights, bits, lanes, k, end, x,
                 [](Vec a, Vec b) INLINE_LAMBDA { return a + b; });
    store(each, sums_of(x));
    for (int i = 0; i < kLanes; ++i) totals.sums[k + i] += each[i];
    if (!s.peaks) continue;
    fold_vectors(weights, bits, lanes, k, end, x,
                 [](Vec a, Vec b) INLINE_LAMBDA { return max(a, b); });
    store(totals.peaks + k, max(load(totals.peaks + k), largest_of(x)));
  }
  if (!counts) return;
  for (int k = begin; k < end; ++k)
    totals.viewers[k] += __builtin_popcountll((bits ? bits[k] : kAllRows) & lanes);
}

INLINE void clear(const BinTotals& totals, int64_t count) {
  for (int64_t k = 0; k < count; ++k) {
    totals.sums[k] = 0.0;
    totals.peaks[k] = 0.0f;
    totals.viewers[k] = 0;
  }
}

// Writes the totals of a bin and begins the next one. Maxima drop a NaN that sums keep.
NOINLINE void end_bin(const SweepArgs& s, const SweepItem& item, int64_t bin, int64_t first_key,
                      int count, bool counts, const BinTotals& totals) {
  const ForwardArgs& a = s.call;
  const int64_t row = (item.batch * a.heads + item.head) * s.bins + bin;
  float* sums = s.sums + row * a.key_length + first_key;
  for (int k = 0; k < count; ++k) sums[k] = static_cast<float>(totals.sums[k]);
  if (s.peaks) {
    float* peaks = s.peaks + row * a.key_length + first_key;
    for (int k = 0; k < count; ++k) peaks[k] = sums[k] != sums[k] ? sums[k] : totals.peaks[k];
  }
  if (counts) {
    const int64_t mask_bin = mask_row(s, item.batch, item.head) * s.bins + bin;
    int64_t* viewers = s.viewers + mask_bin * a.key_length + first_key;
    for (int k = 0; k < count; ++k) viewers[k] = totals.viewers[k];
  }
  clear(totals, count);
}

// The tile's weights for a block of keys, in scratch.block.scores.
template <class Product>
INLINE Visibility weigh_tile(const ForwardArgs& a, const SweepItem& item,
                             const SweepScratch<Product>& scratch, SweptTile<Product>& tile,
                             KeyValueBlock<Product>& block) {
  const int64_t b = item.batch;
  Visibility seen =
      look(a, b, tile.rows, block.begin, block.end, scratch.block.bits, scratch.block.bias);
  if (seen.hidden) return seen;
  const int count = static_cast<int>(block.end - block.begin);
  take_whole_rows(seen, count);
  if (!block.has_keys) {
    const int64_t kv_head = item.head / (a.heads / a.kv_heads);
    block.keys = key_operand(a, b, kv_head, block.begin, count, scratch.keys);
    block.has_keys = true;
  }
  float* scores = scratch.block.scores;
  Needs needs;
  score_block<Product>(block.keys.data + seen.begin * block.keys.stride, block.keys.stride,
                       tile.query, scratch.query_steps, seen.end - seen.begin,
                       needs.find(scratch.block.bits, seen), scores + seen.begin * kTile);
  make_logits(a, b, block.begin, count, tile.rows, seen, scratch.block);
  weigh_by_lse(a, scores, seen.begin, seen.end, tile.lse);
  return seen;
}

template <class Product>
NOINLINE void place_tile(const SweepArgs& s, const SweepItem& item, int64_t tile_index,
                         int64_t end_key, const SweepScratch<Product>& scratch,
                         SweptTile<Product>& tile) {
  const ForwardArgs& a = s.call;
  const int64_t b = item.batch, h = item.head;
  tile.seeing = 0;
  tile.skipped = !overlap(s.columns[mask_row(s, b, h) * s.tiles + tile_index], item.first_key,
                          end_key);
  if (tile.skipped) return;
  place_rows(a, {b, h, 1, 0}, (s.first_tile + tile_index) * kTile, tile.rows);
  pack_query(a, b, tile.rows, scratch.strip, tile.query);
  for (int r = 0; r < kTile; ++r) {
    const float lse = s.lse[(b * a.heads + h) * a.query_length + tile.rows.query[r]];
    // A row that sees nothing has -inf, and gives nothing.
    tile.lse[r] = lse == kHidden ? -kHidden : lse;
  }
}

template <class Product>
void sweep(const SweepArgs& s, const SweepItem& item, void* memory) {
  const ForwardArgs& a = s.call;
  const SweepScratch<Product> scratch(s, memory);
  const int64_t left = a.key_length - item.first_key;
  const int64_t end_key = item.first_key + (left < s.keys_per_item ? left : s.keys_per_item);
  const int64_t last_key = key_end(a, item.batch);
  const bool counts = item.batch < s.mask_batch && item.head < s.mask_heads;
  clear(scratch.totals, s.keys_per_item);

  int64_t first_bin = 0;
  for (int64_t group = 0; group < s.tiles; group += s.tiles_per_group) {
    const int64_t tile_count =
        s.tiles - group < s.tiles_per_group ? s.tiles - group : s.tiles_per_group;
    for (int64_t n = 0; n < tile_count; ++n) {
      scratch.tiles[n].query = scratch.queries + n * scratch.query_steps * kTile;
      place_tile(s, item, group + n, end_key, scratch, scratch.tiles[n]);
    }
    int64_t bin = first_bin;
    for (int64_t begin = item.first_key; begin < end_key; begin += kKeyBlock) {
      const BinTotals totals = scratch.totals.from(begin - item.first_key);
      const int64_t end = begin + kKeyBlock < end_key ? begin + kKeyBlock : end_key;
      KeyValueBlock<Product> block;
      block.begin = begin;
      block.end = end < last_key ? end : last_key;
      block.has_keys = false;
      bin = first_bin;
      for (int64_t n = 0; n < tile_count; ++n) {
        SweptTile<Product>& tile = scratch.tiles[n];
        Visibility seen{true, false, 0, 0};
        const int64_t tile_index = group + n;
        if (!tile.skipped && block.begin < block.end &&
            overlap(s.columns[mask_row(s, item.batch, item.head) * s.tiles + tile_index], begin,
                    block.end))
          seen = weigh_tile(a, item, scratch, tile, block);
        const RowBits* bits = seen.full ? nullptr : scratch.block.bits;
        const int64_t first_row = (s.first_tile + tile_index) * kTile;
        for (; bin < s.bins && s.edges[bin] < first_row + kTile; ++bin) {
          const int64_t low = s.edges[bin] - first_row, high = s.edges[bin + 1] - first_row;
          if (!seen.hidden) {
            const int from = low > 0 ? static_cast<int>(low) : 0;
            const int to = high < kTile ? static_cast<int>(high) : kTile;
            const RowBits lanes = kAllRows >> (kTile - to) & ~((RowBits{1} << from) - 1);
            add_to_bin(s, scratch.block.scores, bits, lanes, seen.begin, seen.end, counts, totals);
          }
          if (high > kTile) break;
          end_bin(s, item, bin, begin, static_cast<int>(end - begin), counts, totals);
        }
        if (counts && !seen.hidden)
          for (int k = seen.begin; k < seen.end; ++k) tile.seeing |= bits ? bits[k] : kAllRows;
      }
    }
    first_bin = bin;
    if (!counts) continue;
    for (int64_t n = 0; n < tile_count; ++n) {
      const SweptTile<Product>& tile = scratch.tiles[n];
      if (!tile.seeing) continue;
      uint8_t* seeing = s.seeing + mask_row(s, item.batch, item.head) * a.query_length;
      // Items of other keys may say the same of the row meanwhile.
      for (int r = 0; r < tile.rows.count; ++r)
        if (tile.seeing >> r & 1)
          __atomic_store_n(seeing + tile.rows.query[r], uint8_t{1}, __ATOMIC_RELAXED);
    }
  }
}

#ifdef MULTIHEAD_TILES
NOINLINE void sweep_in_tiles(const SweepArgs& s, const SweepItem& item, void* memory) {
  _tile_loadconfig(&kTileConfig);
  sweep<TileProduct>(s, item, memory);
  _tile_release();
}
#endif

template <class Product>
size_t sweep_scratch_bytes(const SweepArgs& s) {
  return SweepScratch<Product>(s, nullptr).arena.bytes;
}

}  // namespace
}  // namespace multihead
