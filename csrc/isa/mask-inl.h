// Which keys of a block the queries of a tile see.
#pragma once

namespace multihead {
namespace {

// Keys in a block. With 64 keys of width 64 the block's K or V, the tile's queries or outputs and
// the scores fit a first-level cache of 32 to 48 KiB together.
constexpr int kKeyBlock = 64;
constexpr int kKeyPairs = kKeyBlock / 2;

// A bit for each row of a tile: which rows see a key.
typedef uint64_t RowBits;
static_assert(kTile <= 64, "a row of the tile for each bit");
constexpr RowBits kAllRows = kTile == 64 ? ~RowBits{0} : (RowBits{1} << (kTile & 63)) - 1;

// The rows of one tile, a query of some head each, and the closed forms of their mask: row r sees a
// key at position pos if (low[r] <= pos or pos < keep[r]) and pos < end[r]. Lanes beyond the last
// row repeat it.
struct TileRows {
  int64_t head[kTile], query[kTile];
  int count;                 // rows that exist
  bool one_head;
  alignas(64) int32_t low[kTile], keep[kTile], end[kTile], id[kTile];
  float offset[kTile];       // the row's position relative to `origin`
  float slope[kTile];        // of ALiBi, 0 where there is none
  int64_t origin;            // position of the first row
  int32_t low_min, low_max, keep_min, keep_max, end_min, end_max, id_min, id_max;
  int64_t range_begin, range_end;  // hull of the rows' ranges
};

struct Visibility {
  bool hidden, full;
  int begin, end;  // the part of the block that some row sees
};

INLINE int32_t saturate(int64_t x) {
  return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : static_cast<int32_t>(x);
}
INLINE int32_t lower(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t higher(int32_t a, int32_t b) { return a > b ? a : b; }

INLINE void span_of(const int32_t* x, int n, int32_t& smallest, int32_t& largest) {
  int32_t lo = x[0], hi = x[0];
  for (int i = 1; i < n; ++i) {
    lo = lower(lo, x[i]);
    hi = higher(hi, x[i]);
  }
  smallest = lo;
  largest = hi;
}

INLINE const int32_t* ranges_of(const ForwardArgs& a, int64_t b, const TileRows& rows, int r) {
  const Mask& mask = a.mask;
  return mask.ranges + b * mask.ranges_batch_stride + rows.head[r] * mask.ranges_head_stride +
         rows.query[r] * mask.range_count * 2;
}

// The rows from first_row on.
NOINLINE void place_rows(const ForwardArgs& a, const WorkItem& item, int64_t first_row,
                         TileRows& rows) {
  const Mask& mask = a.mask;
  const int64_t b = item.batch, last = item.heads * a.query_length - 1;
  // Explicit positions say themselves where a text begins.
  const int64_t first = mask.key_positions.data ? 0 : value_at(mask.first, b);
  const int64_t prefix = value_at(mask.prefix, b);
  const int64_t query_end = mask.query_lengths ? mask.query_lengths[b] : a.query_length;
  rows.count = static_cast<int>(last - first_row < kTile ? last - first_row + 1 : kTile);
  rows.range_begin = a.key_length;
  rows.range_end = 0;
  int64_t h = item.first_head + first_row / a.query_length, i = first_row % a.query_length;
  for (int r = 0; r < kTile; ++r) {
    if (r > 0 && r < rows.count && ++i == a.query_length) {
      i = 0;
      ++h;
    }
    rows.head[r] = h;
    rows.query[r] = i;
    const int64_t left = value_at(mask.left, h), keep_first = value_at(mask.keep_first, h);
    const int64_t right = value_at(mask.right, h);
    const int64_t p = mask.query_positions.data
                          ? mask.query_positions.data[b * mask.query_positions.batch_stride + i]
                          : value_at(mask.start, b) + i;
    if (r == 0) rows.origin = p;
    rows.offset[r] = static_cast<float>(p - rows.origin);
    rows.slope[r] = a.slopes ? a.slopes[h] : 0.0f;
    rows.low[r] = mask.has_left ? saturate(p - left) : INT32_MIN;
    rows.keep[r] = mask.has_left && keep_first > 0 ? saturate(first + keep_first) : INT32_MIN;
    int64_t end = p + right + 1;
    if (prefix > 0 && first + prefix > end) end = first + prefix;
    rows.end[r] = mask.has_right ? saturate(end) : INT32_MAX;
    rows.id[r] = mask.query_ids.data
                     ? mask.query_ids.data[b * mask.query_ids.batch_stride + i]
                     : 0;
    if (i >= query_end || rows.id[r] < 0) rows.end[r] = INT32_MIN;
    if (mask.ranges && rows.end[r] != INT32_MIN) {
      const int32_t* range = ranges_of(a, b, rows, r);
      for (int64_t n = 0; n < mask.range_count; ++n, range += 2) {
        if (range[0] >= range[1]) continue;
        if (range[0] < rows.range_begin) rows.range_begin = range[0];
        if (range[1] > rows.range_end) rows.range_end = range[1];
      }
    }
  }
  rows.one_head = rows.head[0] == rows.head[kTile - 1];
  span_of(rows.low, kTile, rows.low_min, rows.low_max);
  span_of(rows.keep, kTile, rows.keep_min, rows.keep_max);
  span_of(rows.end, kTile, rows.end_min, rows.end_max);
  span_of(rows.id, kTile, rows.id_min, rows.id_max);
}

// Marks where each row's visible intervals begin and end, then sweeps over the keys: O(rows +
// keys) instead of O(rows * keys).
struct Sweep {
  RowBits* toggles;  // [kKeyBlock + 1]
  int64_t begin, end;

  INLINE void interval(RowBits row, int64_t from, int64_t to) const {
    if (from < begin) from = begin;
    if (to > end) to = end;
    if (from >= to) return;
    toggles[from - begin] ^= row;
    toggles[to - begin] ^= row;
  }
};

INLINE void sweep_columns(const ForwardArgs& a, int64_t b, const TileRows& rows,
                          int64_t begin, int64_t end, RowBits* bits) {
  const Sweep sweep{bits, begin, end};
  const int count = static_cast<int>(end - begin);
  for (int k = 0; k <= count; ++k) bits[k] = 0;
  for (int r = 0; r < kTile; ++r) {
    const RowBits row = RowBits{1} << r;
    if (a.mask.ranges) {
      if (rows.end[r] == INT32_MIN) continue;
      const int32_t* range = ranges_of(a, b, rows, r);
      for (int64_t n = 0; n < a.mask.range_count; ++n, range += 2)
        sweep.interval(row, range[0], range[1]);
    } else if (rows.keep[r] >= rows.low[r]) {
      sweep.interval(row, 0, rows.end[r]);
    } else {
      sweep.interval(row, 0, lower(rows.keep[r], rows.end[r]));
      sweep.interval(row, rows.low[r], rows.end[r]);
    }
  }
  for (int k = 1; k < count; ++k) bits[k] ^= bits[k - 1];
}

// compare(row, x) gives a bit for each lane of one vector; this, for each row of the tile.
template <class Compare>
INLINE RowBits rows_where(Compare compare, const int32_t* rows, int32_t x) {
  RowBits bits = 0;
  UNROLL for (int j = 0; j < kTileVectors; ++j)
    bits |= RowBits{compare(rows + j * kLanes, x)} << (j * kLanes);
  return bits;
}

INLINE void compare_positions(const TileRows& rows, const int32_t* positions, int count,
                              RowBits* bits) {
  for (int k = 0; k < count; ++k) {
    const int32_t pos = positions[k];
    bits[k] = (rows_where(at_most_bits, rows.low, pos) |
               ~rows_where(at_most_bits, rows.keep, pos)) &
              ~rows_where(at_most_bits, rows.end, pos) & kAllRows;
  }
}

// Whether a broadcast tensor says the same to every row of the tile.
INLINE bool same_for_rows(const int64_t* strides, const TileRows& rows) {
  return strides[2] == 0 && (strides[1] == 0 || rows.one_head);
}

INLINE void hide_by_dense(const ForwardArgs& a, int64_t b, const TileRows& rows,
                          int64_t begin, int count, RowBits* bits) {
  const Tensor4& dense = a.mask.dense;
  const uint8_t* visible = static_cast<const uint8_t*>(dense.data);
  const int64_t step = dense.strides[3];
  if (same_for_rows(dense.strides, rows)) {
    const uint8_t* v = visible + offset_of(dense.strides, b, rows.head[0], 0) + begin * step;
    for (int k = 0; k < count; ++k)
      if (!v[k * step]) bits[k] = 0;
    return;
  }
  RowBits seen[kKeyBlock] = {};
  for (int r = 0; r < kTile; ++r) {
    const uint8_t* v =
        visible + offset_of(dense.strides, b, rows.head[r], rows.query[r]) + begin * step;
    if (step == 1)
      for (int k = 0; k < count; ++k) seen[k] |= RowBits{v[k] != 0} << r;
    else
      for (int k = 0; k < count; ++k) seen[k] |= RowBits{v[k * step] != 0} << r;
  }
  for (int k = 0; k < count; ++k) bits[k] &= seen[k];
}

// The bias of a block, transposed; -inf hides its key.
NOINLINE void read_bias(const ForwardArgs& a, int64_t b, const TileRows& rows, int64_t begin,
                        int count, float* bias, RowBits* bits) {
  const int64_t* strides = a.bias.strides;
  const auto read = [&](int r, float* strip) INLINE_LAMBDA {
    read_floats(a.bias_dtype, a.bias.data,
                offset_of(strides, b, rows.head[r], rows.query[r]) + begin * strides[3],
                strides[3], count, strip);
  };
  // The bias itself is compared: added to a NaN or infinite score it would not be seen.
  if (same_for_rows(strides, rows)) {
    float strip[kKeyBlock];
    read(0, strip);
    for (int k = 0; k < count; ++k) {
      if (strip[k] == kHidden) bits[k] = 0;
      UNROLL for (int j = 0; j < kTileVectors; ++j)
        store(bias + k * kTile + j * kLanes, set1(strip[k]));
    }
    return;
  }
  alignas(64) float strips[kLanes][kKeyBlock] = {};
  for (int j = 0; j < kTileVectors; ++j) {
    for (int i = 0; i < kLanes; ++i) read(j * kLanes + i, strips[i]);
    for (int k = 0; k < count; k += kLanes) {
      Vec x[kLanes];
      UNROLL for (int i = 0; i < kLanes; ++i) x[i] = load(strips[i] + k);
      transpose(x);
      UNROLL for (int i = 0; i < kLanes; ++i) {
        store(bias + (k + i) * kTile + j * kLanes, x[i]);
        bits[k + i] &= ~(RowBits{bits_of(equal(x[i], set1(kHidden)))} << (j * kLanes));
      }
    }
  }
}

// Fills bits[k], a bit for each row that sees key begin + k, unless the block is wholly hidden or
// its closed form already shows it to be wholly visible.
NOINLINE Visibility look(const ForwardArgs& a, int64_t b, const TileRows& rows,
                         int64_t begin, int64_t end, RowBits* bits, float* bias) {
  const Mask& mask = a.mask;
  const int count = static_cast<int>(end - begin);
  const Visibility hidden{true, false, 0, 0};

  int32_t pos_min = saturate(begin), pos_max = saturate(end - 1);
  const int32_t* positions = nullptr;
  if (mask.key_positions.data) {
    positions = mask.key_positions.data + b * mask.key_positions.batch_stride + begin;
    span_of(positions, count, pos_min, pos_max);
  }
  if ((pos_max < rows.low_min && pos_min >= rows.keep_max) || pos_min >= rows.end_max)
    return hidden;
  if (mask.ranges && (end <= rows.range_begin || begin >= rows.range_end)) return hidden;
  const int32_t* ids = nullptr;
  if (mask.key_ids.data) {
    ids = mask.key_ids.data + b * mask.key_ids.batch_stride + begin;
    int32_t id_min, id_max;
    span_of(ids, count, id_min, id_max);
    if (id_max < rows.id_min || id_min > rows.id_max) return hidden;
    // One document within the block and one within the tile: it is the same.
    if (id_min == id_max && rows.id_min == rows.id_max) ids = nullptr;
  }

  const bool full = !mask.ranges && (pos_min >= rows.low_max || pos_max < rows.keep_min) &&
                    pos_max < rows.end_min;
  const bool plain = !ids && !mask.key_visible && !mask.dense.data && !a.bias.data;
  if (full && plain) return {false, true, 0, count};

  if (full)
    for (int k = 0; k < count; ++k) bits[k] = kAllRows;
  else if (positions && !mask.ranges)
    compare_positions(rows, positions, count, bits);
  else
    sweep_columns(a, b, rows, begin, end, bits);

  if (ids)
    for (int k = 0; k < count; ++k) bits[k] &= rows_where(equal_bits, rows.id, ids[k]);
  if (mask.key_visible) {
    const uint8_t* visible = mask.key_visible + b * mask.key_visible_batch_stride + begin;
    for (int k = 0; k < count; ++k)
      if (!visible[k]) bits[k] = 0;
  }
  if (mask.dense.data) hide_by_dense(a, b, rows, begin, count, bits);
  if (a.bias.data) read_bias(a, b, rows, begin, count, bias, bits);

  RowBits some = 0, every = kAllRows;
  int first = count, last = 0;
  for (int k = 0; k < count; ++k) {
    some |= bits[k];
    every &= bits[k];
    if (bits[k] && first == count) first = k;
    if (bits[k]) last = k;
  }
  if (!some) return hidden;
  if (every == kAllRows) return {false, true, 0, count};
  return {false, false, first, last + 1};
}

}  // namespace
}  // namespace multihead
