// The rows of a tile meet the keys of a block: products in, weights out, statistics on the way.
#pragma once

namespace multihead {
namespace {

// What a thread holds of one tile and one block; [block, tile], or a number for each key.
struct BlockScratch {
  float *scores, *bias;
  float* key_offset;  // positions of the keys relative to the tile's first row
  RowBits* bits;      // the rows that see a key

  BlockScratch(const ForwardArgs& a, Arena& arena)
      : scores(arena.take<float>(kKeyBlock * kTile)),
        bias(arena.take<float>(a.bias.data ? kKeyBlock * kTile : 0)),
        key_offset(arena.take<float>(kKeyBlock)),
        bits(arena.take<RowBits>(kKeyBlock + 1)) {}
};

INLINE bool wants_offsets(const ForwardArgs& a) {
  return a.slopes || a.statistics.mean_distance;
}

INLINE void place_keys(const ForwardArgs& a, int64_t b, int64_t begin, int count, int64_t origin,
                       float* key_offset) {
  const Rows& positions = a.mask.key_positions;
  for (int k = 0; k < count; ++k) {
    const int64_t j = begin + k;
    const int64_t pos = positions.data ? positions.data[b * positions.batch_stride + j] : j;
    key_offset[k] = static_cast<float>(pos - origin);
  }
}

// Scores as logits where they are more than scaled products, -inf where hidden. Returns what turns
// a difference of them into a power of two.
INLINE float make_logits(const ForwardArgs& a, int64_t b, int64_t first_key, int count,
                         const TileRows& rows, const Visibility& seen, const BlockScratch& block) {
  float* scores = block.scores;
  const int begin = seen.begin, end = seen.end;
  float per_bit = kLog2E * size_of_scale(a);
  if (makes_logits(a)) {
    if (a.softcap > 0)
      cap_scores(scores, begin, end, size_of_scale(a), static_cast<float>(a.softcap));
    else
      scale_scores(scores, begin, end, size_of_scale(a));
    per_bit = kLog2E;
  }
  if (a.bias.data) add_bias(scores, begin, end, block.bias);
  if (wants_offsets(a)) place_keys(a, b, first_key, count, rows.origin, block.key_offset);
  if (a.slopes) add_slope(scores, begin, end, rows.slope, rows.offset, block.key_offset);
  if (!seen.full) hide_scores(scores, begin, end, block.bits);
  return per_bit;
}

// The products of the keys [seen.begin, seen.end) become weights e^(s - m); the rows' state and
// state.decay follow.
INLINE void weigh_block(const ForwardArgs& a, int64_t b, int64_t first_key, int count,
                        const TileRows& rows, const Visibility& seen, const BlockScratch& block,
                        RowState& state) {
  float* scores = block.scores;
  const int begin = seen.begin, end = seen.end;
  if (makes_logits(a) && a.statistics.max_qk)
    raise_visible_maximum(scores, begin, end, seen.full ? nullptr : block.bits, state.max_product);
  const float per_bit = make_logits(a, b, first_key, count, rows, seen, block);

  float old_max[kTile];
  __builtin_memcpy(old_max, state.max, sizeof old_max);
  raise_maximum(scores, begin, end, state);
  decay_state(old_max, per_bit, state);
  if (a.statistics.argmax) find_maximum(scores, begin, end, first_key, old_max, state);
  if (a.statistics.entropy)
    weigh<true>(scores, begin, end, per_bit, state);
  else
    weigh<false>(scores, begin, end, per_bit, state);
  if (a.statistics.participation) add_squares(scores, begin, end, state);
  if (a.statistics.mean_distance)
    add_distances(scores, begin, end, rows.offset, block.key_offset, state);
  if (a.statistics.sink_mass) {
    const int64_t first = value_at(a.mask.first, b) - first_key;
    if (begin <= first && first < end)
      for (int r = 0; r < kTile; ++r) state.first_key[r] += scores[first * kTile + r];
  }
}

// Whole register blocks: keys before the first or after the last visible one cost less than a
// shorter product, and the order of each sum stays the one of the absolute column.
INLINE void take_whole_rows(Visibility& seen, int count) {
  seen.begin -= seen.begin % kBlockRows;
  seen.end = lower(static_cast<int>(round_up(seen.end, kBlockRows)), count);
}

// Which vectors of the tile see something of each register block of keys, for the products; null
// where all see something of all.
struct Needs {
  Vectors of[(kKeyBlock + kBlockRows - 1) / kBlockRows];

  INLINE const Vectors* find(const RowBits* bits, const Visibility& seen) {
    if (seen.full || kTileVectors == 1) return nullptr;
    constexpr RowBits kVectorRows = (RowBits{1} << kLanes) - 1;
    bool spares = false;
    for (int k = seen.begin; k < seen.end; k += kBlockRows) {
      RowBits some = 0;
      for (int i = k; i < k + kBlockRows && i < seen.end; ++i) some |= bits[i];
      Vectors& v = of[k / kBlockRows] = {0, kTileVectors};
      while (v.first + 1 < v.end && !(some >> v.first * kLanes & kVectorRows)) ++v.first;
      while (v.first + 1 < v.end && !(some >> (v.end - 1) * kLanes & kVectorRows)) --v.end;
      spares |= v.end - v.first < kTileVectors;
    }
    return spares ? of + seen.begin / kBlockRows : nullptr;
  }
};

// The keys that exist for a batch row.
INLINE int64_t key_end(const ForwardArgs& a, int64_t b) {
  return a.mask.key_lengths && a.mask.key_lengths[b] < a.key_length ? a.mask.key_lengths[b]
                                                                    : a.key_length;
}

INLINE Columns columns_of(const ForwardArgs& a, int64_t b, const TileRows& rows) {
  const int64_t length = key_end(a, b);
  if (a.mask.key_positions.data) return {length, 0, length};
  Columns columns = a.mask.ranges ? Columns{0, rows.range_begin, rows.range_end}
                                  : Columns{rows.keep_max, rows.low_min, rows.end_max};
  if (columns.keep < 0) columns.keep = 0;
  if (columns.low < 0) columns.low = 0;
  if (columns.end > length) columns.end = length;
  return columns;
}

// Leaves out the blocks, from either end, that hold no document of the rows.
INLINE void narrow_to_ids(const ForwardArgs& a, int64_t b, int32_t id_min, int32_t id_max,
                          Columns& columns) {
  if (!a.mask.key_ids.data) return;
  const int32_t* ids = a.mask.key_ids.data + b * a.mask.key_ids.batch_stride;
  const auto holds = [&](int64_t begin) INLINE_LAMBDA {
    const int64_t left = a.key_length - begin;
    int32_t lowest, highest;
    span_of(ids + begin, static_cast<int>(left < kKeyBlock ? left : kKeyBlock), lowest, highest);
    return lowest <= id_max && id_min <= highest;
  };
  int64_t low = columns.low / kKeyBlock * kKeyBlock;
  while (low < columns.end && !holds(low)) low += kKeyBlock;
  if (low > columns.low) columns.low = low;
  while (columns.end > columns.low && !holds((columns.end - 1) / kKeyBlock * kKeyBlock))
    columns.end = (columns.end - 1) / kKeyBlock * kKeyBlock;
}

// The first block at `begin` or behind it that holds a visible column; at or behind columns.end
// where there is none.
INLINE int64_t next_block(const Columns& columns, int64_t begin) {
  const bool between = begin >= columns.keep && begin + kKeyBlock <= columns.low;
  return between ? columns.low / kKeyBlock * kKeyBlock : begin;
}

}  // namespace
}  // namespace multihead
