// Attention of a few rows on many keys: every KV head is read once for all rows of its group.
//
// The rows fit one narrow tile. A vector holds neighboring numbers of one key or value here, since
// one number for each row, as in forward-inl.h, would leave most lanes idle and wait for memory
// all the same. Scores go to S^T [block, tile] as there, or folded to [block, rows] where all rows
// see the keys: masks, softmax and statistics are one code.
// Keys are split into chunks of fixed length, whose results are joined in order: the bits depend
// neither on the threads nor on the batch.
#pragma once

namespace multihead {
namespace {

// Long enough that joining costs nothing beside reading, short enough that one KV head of some
// thousand keys feeds several threads.
constexpr int64_t kChunkKeys = 1024;

// Elements that are widened to float32 while they are read, a vector or its first n lanes at a
// time.
struct Floats {
  typedef float Element;
  static INLINE Vec read(const Element* p) { return load(p); }
};
struct Bfloats {
  typedef uint16_t Element;
  static INLINE Vec read(const Element* p) { return widen_bfloat16(p); }
};
#ifdef MULTIHEAD_AVX512
struct Halves {
  typedef uint16_t Element;
  static INLINE Vec read(const Element* p) { return widen_float16(p); }
};
#endif

struct Bytes {
  typedef int8_t Element;
  static INLINE Vec read(const Element* p) { return widen_int8(p); }
};

template <class Source>
INLINE Vec read_first(const typename Source::Element* p, int64_t n) {
  typename Source::Element lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, static_cast<size_t>(n) * sizeof lanes[0]);
  return Source::read(lanes);
}

// Rows of K or V, in place or in a copy as float32.
struct Strips {
  Dtype dtype;
  const char* data;
  int64_t stride;  // elements from one key to the next
};

INLINE bool can_widen(Dtype dtype) {
#ifdef MULTIHEAD_AVX512
  if (dtype == Dtype::float16) return true;
#endif
  return dtype == Dtype::float32 || dtype == Dtype::bfloat16 || dtype == Dtype::int8;
}

INLINE Strips strips_in_place(const ForwardArgs& a, const Tensor4& x, int64_t b, int64_t kv_head,
                              int64_t begin) {
  return {a.held.dtype,
          static_cast<const char*>(x.data) +
              offset_of(x.strides, b, kv_head, begin) * element_bytes(a.held.dtype),
          x.strides[2]};
}

INLINE Strips strips_of(const ForwardArgs& a, const Tensor4& x, int64_t width, int64_t b,
                        int64_t kv_head, int64_t begin, int count, float* copy) {
  if (x.strides[3] == 1 && can_widen(a.held.dtype)) return strips_in_place(a, x, b, kv_head, begin);
  for (int k = 0; k < count; ++k)
    read_floats(a.held.dtype, x.data, offset_of(x.strides, b, kv_head, begin + k), x.strides[3],
                width, copy + k * width);
  return {Dtype::float32, reinterpret_cast<const char*>(copy), width};
}

// Calls f(Source, pointer to the first row's elements).
template <class Function>
INLINE void with_source(const Strips& x, Function f) {
  switch (x.dtype) {
    case Dtype::bfloat16: return f(Bfloats{}, reinterpret_cast<const uint16_t*>(x.data));
    case Dtype::int8: return f(Bytes{}, reinterpret_cast<const int8_t*>(x.data));
#ifdef MULTIHEAD_AVX512
    case Dtype::float16: return f(Halves{}, reinterpret_cast<const uint16_t*>(x.data));
#endif
    default: return f(Floats{}, reinterpret_cast<const float*>(x.data));
  }
}

// The rows that are read next, fetched into the second-level cache while these are multiplied: the
// products wait for memory. Into the first level they would arrive no sooner (-13 % in float32).
struct Ahead {
  const char* data;
  int64_t stride, count;  // bytes from one row to the next, rows

  INLINE void fetch(int64_t row, int64_t from, int64_t to) const {
    if (row >= count) return;
    const char* at = data + row * stride;
    for (; from < to; from += 64) __builtin_prefetch(at + from, 0, 2);
  }
};

INLINE Ahead ahead(const ForwardArgs& a, const Tensor4& x, int64_t b, int64_t kv_head,
                   int64_t begin, int64_t count) {
  if (x.strides[3] != 1) return {nullptr, 0, 0};
  const Strips strips = strips_in_place(a, x, b, kv_head, begin);
  return {strips.data, strips.stride * element_bytes(a.held.dtype), count};
}

// scores[k, :] = sum_d keys[k, d] queries[:, d] for kRows rows: kLanes sums at a time.
template <class Source, int kRows>
NOINLINE void score_rows(const typename Source::Element* keys, int64_t stride,
                         const float* queries, int64_t query_stride, int64_t width, int count,
                         const Ahead& values, int64_t value_bytes, float* scores,
                         int score_stride) {
  constexpr int kKeys = kLanes / kRows;
  for (int k = 0; k < count; k += kKeys) {
    const typename Source::Element* row[kKeys];
    UNROLL for (int i = 0; i < kKeys; ++i) {
      row[i] = keys + (k + i < count ? k + i : count - 1) * stride;
      values.fetch(k + i, 0, value_bytes);
    }
    Vec sum[kLanes];
    UNROLL for (int i = 0; i < kLanes; ++i) sum[i] = set1(0.0f);
    const auto multiply = [&](int64_t d, auto read) INLINE_LAMBDA {
      Vec q[kRows];
      UNROLL for (int r = 0; r < kRows; ++r) q[r] = load(queries + r * query_stride + d);
      UNROLL for (int i = 0; i < kKeys; ++i) {
        const Vec x = read(row[i] + d);
        UNROLL for (int r = 0; r < kRows; ++r)
          sum[i * kRows + r] = fma(x, q[r], sum[i * kRows + r]);
      }
    };
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes)
      multiply(d, [](const typename Source::Element* p) INLINE_LAMBDA { return Source::read(p); });
    if (d < width)
      multiply(d, [&](const typename Source::Element* p) INLINE_LAMBDA {
        return read_first<Source>(p, width - d);
      });
    float each[kLanes];
    store(each, sums_of(sum));
    for (int i = 0; i < kKeys && k + i < count; ++i)
      __builtin_memcpy(scores + (k + i) * score_stride, each + i * kRows, kRows * sizeof(float));
  }
}

// out[r, :] = decay[r] out[r, :] + sum_k weights[k, r] values[k, :] for kRows rows. The sum of a
// block starts from zero and joins `out` once, as in the wide tiles.
template <class Source, int kRows>
NOINLINE void add_rows(const typename Source::Element* values, int64_t stride,
                       const float* weights, int weight_stride, int64_t width, int count,
                       const Ahead& keys, const float* decay, float* out, int64_t out_stride) {
  // Accumulators that the registers hold beside values and weights: 16, or 8 where there are 16.
  constexpr int kMost = (kLanes == 16 ? 16 : 8) / kRows, kVectors = kMost < 8 ? kMost : 8;
  constexpr int64_t kBytes = sizeof(typename Source::Element);
  const auto add = [&](int64_t d, auto vectors, auto read) INLINE_LAMBDA {
    constexpr int n = decltype(vectors)::count;
    Vec sum[kRows][n];
    UNROLL for (int r = 0; r < kRows; ++r)
      UNROLL for (int i = 0; i < n; ++i) sum[r][i] = set1(0.0f);
    for (int k = 0; k < count; ++k) {
      keys.fetch(k, d * kBytes, (d + n * kLanes) * kBytes);
      Vec x[n];
      UNROLL for (int i = 0; i < n; ++i) x[i] = read(values + k * stride + d + i * kLanes);
      UNROLL for (int r = 0; r < kRows; ++r) {
        const Vec w = broadcast(weights + k * weight_stride + r);
        UNROLL for (int i = 0; i < n; ++i) sum[r][i] = fma(w, x[i], sum[r][i]);
      }
    }
    UNROLL for (int r = 0; r < kRows; ++r)
      UNROLL for (int i = 0; i < n; ++i) {
        float* o = out + r * out_stride + d + i * kLanes;
        store(o, fma(set1(decay[r]), load(o), sum[r][i]));
      }
  };
  const auto whole = [](const typename Source::Element* p) INLINE_LAMBDA {
    return Source::read(p);
  };
  int64_t d = 0;
  for (; d + kVectors * kLanes <= width; d += kVectors * kLanes) add(d, Count<kVectors>{}, whole);
  constexpr int kHalf = kVectors / 2;  // width 64 of a lone row: one vector would wait for itself
  for (; d + kHalf * kLanes <= width; d += kHalf * kLanes) add(d, Count<kHalf>{}, whole);
  for (; d + kLanes <= width; d += kLanes) add(d, Count<1>{}, whole);
  if (d < width)
    add(d, Count<1>{}, [&](const typename Source::Element* p) INLINE_LAMBDA {
      return read_first<Source>(p, width - d);
    });
}

// Calls f(first row, Count<1, 2 or 4>) until the rows are covered; rows beyond the last are zeros.
template <class Function>
INLINE void for_rows(int rows, Function f) {
  for (int r = 0; r < rows; r += 4) {
    if (rows - r == 1)
      f(r, Count<1>{});
    else if (rows - r == 2)
      f(r, Count<2>{});
    else
      f(r, Count<4>{});
  }
}

// What the rows got from one chunk of keys.
struct Part {
  RowState* state;
  float* out;  // O [rows, Dv]
  int64_t out_stride;
  size_t bytes;

  Part(const ForwardArgs& a, void* memory) {
    Arena arena(memory);
    state = arena.take<RowState>(1);
    out_stride = round_up(a.value_dim, kLanes);
    const int64_t rows = round_up(a.heads / a.kv_heads * a.query_length, 4);
    out = arena.take<float>(rows * out_stride);
    bytes = arena.bytes;
  }
};

struct DecodeScratch {
  Arena arena;
  int64_t query_stride;
  TileRows* rows;
  float* queries;          // Q [rows, D], zeros behind D and behind the last row
  float *keys, *values;    // copies of one block, where it can't be read in place
  char *paged_keys, *paged_values;  // the block's tokens of several pages
  float* scales;           // of the block's tokens
  float* strip;
  BlockScratch block;

  DecodeScratch(const ForwardArgs& a, void* memory)
      : arena(memory),
        query_stride(round_up(a.head_dim, kLanes)),
        rows(arena.take<TileRows>(1)),
        queries(arena.take<float>(kTile * query_stride)),
        keys(arena.take<float>(kKeyBlock * a.head_dim)),
        values(arena.take<float>(kKeyBlock * a.value_dim)),
        paged_keys(arena.take<char>(paged_bytes(a, a.head_dim))),
        paged_values(arena.take<char>(paged_bytes(a, a.value_dim))),
        scales(arena.take<float>(a.held.key_scale.data ? kKeyBlock : 0)),
        strip(arena.take<float>(round_up(a.value_dim, kLanes))),
        block(a, arena) {}

  static INLINE int64_t paged_bytes(const ForwardArgs& a, int64_t width) {
    const bool copied = a.held.pages.table && !blocks_lie_in_pages(a.held.pages);
    return copied ? kKeyBlock * width * element_bytes(a.held.dtype) : 0;
  }
};

// Few rows are folded: with `width` of them, a power of two, a vector takes the scores of
// kTile / width keys, and lane i is a part of row i % width. The parts of a row share its maximum;
// what goes from key to key stands in the first `width` lanes. More than half a tile is no fold.
INLINE int folded_width(int rows) {
  int width = 1;
  while (width < rows) width *= 2;
  return width;
}

INLINE void share_maximum(int width, float* maximum) {
  for (int r = 0; r < width; ++r) {
    float top = maximum[r];
    for (int i = r + width; i < kTile; i += width) top = maximum[i] > top ? maximum[i] : top;
    for (int i = r; i < kTile; i += width) maximum[i] = top;
  }
}

INLINE void fold_rows(int width, RowState& state) {
  for (int i = width; i < kTile; ++i) {
    state.max[i] = state.max[i % width];
    state.sum[i] = state.shifted[i] = state.squares[i] = 0.0f;
  }
}

// Pairs of sums, then pairs of those: one after the other they would lose digits.
INLINE void unfold_rows(int width, RowState& state) {
  for (int half = kTile / 2; half >= width; half /= 2)
    for (int i = 0; i < half; ++i) {
      state.sum[i] += state.sum[i + half];
      state.shifted[i] += state.shifted[i + half];
      state.squares[i] += state.squares[i + half];
    }
}

// As weigh_block(), on folded products of `count` keys that all rows see. What asks which key is
// which goes from key to key.
INLINE void weigh_folded(const ForwardArgs& a, int64_t b, int64_t first_key, int count, int width,
                         const TileRows& rows, const BlockScratch& block, RowState& state) {
  float* scores = block.scores;
  const int vectors = (count * width + kTile - 1) / kTile;
  for (int x = count * width; x < vectors * kTile; ++x) scores[x] = kHidden;
  const float per_bit = kLog2E * size_of_scale(a);

  float old_max[kTile];
  __builtin_memcpy(old_max, state.max, sizeof old_max);
  raise_maximum(scores, 0, vectors, state);
  share_maximum(width, state.max);
  decay_state(old_max, per_bit, state);
  if (a.statistics.argmax)
    for (int r = 0; r < width; ++r)
      for (int k = 0; state.max[r] > old_max[r] && k < count; ++k)
        if (scores[k * width + r] == state.max[r]) {
          state.argmax[r] = first_key + k;
          break;
        }
  if (a.statistics.entropy)
    weigh<true>(scores, 0, vectors, per_bit, state);
  else
    weigh<false>(scores, 0, vectors, per_bit, state);
  if (a.statistics.participation) add_squares(scores, 0, vectors, state);
  if (a.statistics.mean_distance) {
    place_keys(a, b, first_key, count, rows.origin, block.key_offset);
    for (int r = 0; r < width; ++r) {
      double sum = 0.0;
      for (int k = 0; k < count; ++k)
        sum += scores[k * width + r] * __builtin_fabsf(rows.offset[r] - block.key_offset[k]);
      state.distance[r] += static_cast<float>(sum);
    }
  }
  if (a.statistics.sink_mass) {
    const int64_t first = value_at(a.mask.first, b) - first_key;
    if (0 <= first && first < count)
      for (int r = 0; r < width; ++r) state.first_key[r] += scores[first * width + r];
  }
}

// Whether every row sees all keys in [seen.begin, seen.end).
INLINE bool sees_all(const Visibility& seen, const RowBits* bits) {
  for (int k = seen.begin; !seen.full && k < seen.end; ++k)
    if (bits[k] != kAllRows) return false;
  return true;
}

// The rows meet one block of keys; `next_key` holds those behind it. `width` is that of the state's
// fold, kTile for none.
INLINE void decode_block(const ForwardArgs& a, int64_t b, int64_t kv_head, int64_t begin,
                         int64_t end, const Tensor4& next_key, const DecodeScratch& scratch,
                         const Part& part, int& width) {
  const TileRows& rows = *scratch.rows;
  RowState& state = *part.state;
  const BlockScratch& block = scratch.block;
  const Visibility seen = look(a, b, rows, begin, end, block.bits, block.bias);
  if (seen.hidden) return;
  const int64_t first = begin + seen.begin;
  const int count = seen.end - seen.begin;
  const bool all = sees_all(seen, block.bits);
  const int wanted = all && !makes_logits(a) ? folded_width(rows.count) : kTile;
  if (width != wanted) {
    unfold_rows(width, state);
    fold_rows(wanted, state);
    width = wanted;
  }
  float* scores = block.scores + (width < kTile ? 0 : seen.begin * kTile);

  const Strips keys = strips_of(a, a.key, a.head_dim, b, kv_head, first, count, scratch.keys);
  const Ahead next_values = ahead(a, a.value, b, kv_head, first, count);
  with_source(keys, [&](auto source, auto data) INLINE_LAMBDA {
    for_rows(rows.count, [&](int r, auto together) INLINE_LAMBDA {
      score_rows<decltype(source), decltype(together)::count>(
          data, keys.stride, scratch.queries + r * scratch.query_stride, scratch.query_stride,
          a.head_dim, count, next_values, a.value_dim * element_bytes(a.held.dtype), scores + r,
          width);
    });
  });

  const Scales &key_scale = a.held.key_scale, &value_scale = a.held.value_scale;
  if (key_scale.data) {
    read_scales(a, key_scale, b, kv_head, first, first + count, scratch.scales);
    scale_keys(scores, width, rows.count, count, scratch.scales, nullptr);
  }

  if (width < kTile)
    weigh_folded(a, b, first, count, width, rows, block, state);
  else
    weigh_block(a, b, begin, static_cast<int>(end - begin), rows, seen, block, state);

  if (value_scale.data) {
    read_scales(a, value_scale, b, kv_head, first, first + count, scratch.scales);
    scale_keys(scores, width, rows.count, count, scratch.scales,
               all ? nullptr : block.bits + seen.begin);
  }

  // Hidden keys weigh 0, and their values may be infinite or NaN, but for int8.
  KeyValueBlock<FloatProduct> odd;
  odd.begin = first;
  odd.end = begin + seen.end;
  odd.odd_count = 0;
  Strips values = strips_of(a, a.value, a.value_dim, b, kv_head, first, count, scratch.values);
  if (!all && !value_scale.data) {
    odd.values = value_operand(a, b, kv_head, first, count, scratch.values);
    scrub_values(a, b, kv_head, scratch.strip, scratch.values, odd);
    if (odd.odd_count)
      values = {Dtype::float32, reinterpret_cast<const char*>(odd.values.data), odd.values.stride};
  }
  const int64_t left = a.key_length - end;
  const Ahead next_keys =
      ahead(a, next_key, b, kv_head, end < a.key_length ? end : 0,
            left < kKeyBlock ? left : kKeyBlock);
  with_source(values, [&](auto source, auto data) INLINE_LAMBDA {
    for_rows(rows.count, [&](int r, auto together) INLINE_LAMBDA {
      add_rows<decltype(source), decltype(together)::count>(
          data, values.stride, scores + r, width, a.value_dim, count, next_keys, state.decay + r,
          part.out + r * part.out_stride, part.out_stride);
    });
  });
  if (odd.odd_count) {
    const Visibility shifted{false, seen.full, 0, count};
    BlockScratch from = block;
    from.scores += seen.begin * kTile;
    from.bits += seen.begin;
    add_odd_values(a, b, kv_head, scratch.strip, odd, shifted, from, rows.count, part.out_stride, 1,
                   part.out);
  }
}

// Makes key and value of `paged` those of the block [begin, end), and returns the keys behind it,
// to be fetched; of small pages they are fetched here, with their values.
NOINLINE Tensor4 turn_page(const ForwardArgs& a, int64_t b, int64_t kv_head, int64_t begin,
                           int64_t end, const DecodeScratch& scratch, ForwardArgs& paged) {
  paged.key = block_in_pages(a, a.key, a.head_dim, b, kv_head, begin, end, scratch.paged_keys);
  paged.value =
      block_in_pages(a, a.value, a.value_dim, b, kv_head, begin, end, scratch.paged_values);
  const int64_t next = end + kKeyBlock < a.key_length ? end + kKeyBlock : a.key_length;
  if (!blocks_lie_in_pages(a.held.pages)) {
    fetch_pages(a, a.key, a.head_dim, b, kv_head, end, next);
    fetch_pages(a, a.value, a.value_dim, b, kv_head, end, next);
    return {nullptr, {0, 0, 0, 0}};
  }
  if (end == next) return {nullptr, {0, 0, 0, 0}};
  return block_in_pages(a, a.key, a.head_dim, b, kv_head, end, next, nullptr);
}

// All rows of a KV head, which fit one tile, on the keys of one chunk.
void decode(const ForwardArgs& a, const WorkItem& item, int64_t chunk, void* memory,
            void* part_memory) {
  const DecodeScratch scratch(a, memory);
  const Part part(a, part_memory);
  const int64_t b = item.batch, kv_head = item.first_head / (a.heads / a.kv_heads);
  TileRows& rows = *scratch.rows;
  place_rows(a, item, item.first_row, rows);
  const float sign = a.scale < 0 ? -1.0f : 1.0f;
  const int64_t padded = round_up(rows.count, 4);
  for (int64_t x = 0; x < padded * scratch.query_stride; ++x) scratch.queries[x] = 0.0f;
  for (int r = 0; r < rows.count; ++r) {
    float* query = scratch.queries + r * scratch.query_stride;
    read_floats(a.dtype, a.query.data, offset_of(a.query.strides, b, rows.head[r], rows.query[r]),
                a.query.strides[3], a.head_dim, query);
    for (int64_t d = 0; d < a.head_dim; ++d) query[d] *= sign;
  }
  // Lanes without a row are computed too, on what is left there: zeros at first, so that it is
  // defined. None of it reaches a row.
  for (int x = 0; x < kKeyBlock * kTile; ++x) scratch.block.scores[x] = 0.0f;
  begin_rows(*part.state);
  for (int64_t x = 0; x < padded * part.out_stride; ++x) part.out[x] = 0.0f;

  Columns columns = columns_of(a, b, rows);
  narrow_to_ids(a, b, rows.id_min, rows.id_max, columns);
  const int64_t chunk_end = (chunk + 1) * kChunkKeys;
  const int64_t stop = chunk_end < columns.end ? chunk_end : columns.end;
  int width = kTile;
  ForwardArgs paged;
  const bool in_pages = a.held.pages.table;
  if (in_pages) paged = a;
  Tensor4 next_key = a.key;
  for (int64_t begin = next_block(columns, chunk * kChunkKeys); begin < stop;
       begin = next_block(columns, begin + kKeyBlock)) {
    const int64_t end = begin + kKeyBlock < stop ? begin + kKeyBlock : stop;
    if (in_pages) next_key = turn_page(a, b, kv_head, begin, end, scratch, paged);
    decode_block(in_pages ? paged : a, b, kv_head, begin, end, next_key, scratch, part, width);
  }
  unfold_rows(width, *part.state);
}

// Joins the parts of all chunks into the first, and writes the rows.
void finish_decode(const ForwardArgs& a, const WorkItem& item, void* memory, void* parts,
                   int64_t chunks) {
  const DecodeScratch scratch(a, memory);
  const Part whole(a, parts);
  const float per_bit = makes_logits(a) ? kLog2E : kLog2E * size_of_scale(a);
  TileRows& rows = *scratch.rows;
  place_rows(a, item, item.first_row, rows);
  for (int64_t n = 1; n < chunks; ++n) {
    const Part part(a, static_cast<char*>(parts) + n * static_cast<int64_t>(whole.bytes));
    float share[kTile];  // of the part's sums
    join_states(*part.state, per_bit, *whole.state, share);
    for (int r = 0; r < rows.count; ++r) {
      const Vec decay = set1(whole.state->decay[r]), add = set1(share[r]);
      for (int64_t d = 0; d < whole.out_stride; d += kLanes) {
        float* o = whole.out + r * whole.out_stride + d;
        store(o, fma(decay, load(o), add * load(part.out + r * whole.out_stride + d)));
      }
    }
  }
  finish_rows(a, item.batch, rows, *whole.state, scratch.strip,
              [&](int r, float factor, float* strip) INLINE_LAMBDA {
                for (int64_t d = 0; d < whole.out_stride; d += kLanes)
                  store(strip + d, load(whole.out + r * whole.out_stride + d) * set1(factor));
              });
}

size_t decode_scratch_bytes(const ForwardArgs& a) { return DecodeScratch(a, nullptr).arena.bytes; }
size_t part_bytes(const ForwardArgs& a) { return Part(a, nullptr).bytes; }

}  // namespace
}  // namespace multihead
