// bfloat16 operands in tiles: tdpbf16ps multiplies 16 rows of 16 pairs with 16 pairs of rows of 16.
//
// The left operand lies in rows, K as it is and V transposed, and the right one has an element for
// each query, as in the other products. Everything is padded with zeros to whole tiles.
#pragma once

namespace multihead {
namespace {

// Two neighboring terms of a sum. A type of its own: operands lie otherwise than for dpbf16ps.
struct Pair {
  uint16_t of[2];
};

struct TileProduct {
  typedef Pair Element;
  static constexpr int terms = 2;
  static constexpr int step_multiple = 16;            // pairs in a row of a tile
  static constexpr int column_multiple = kBlockRows;  // columns of V

  static INLINE void store_weights(Element* p, Vec first, Vec second) {
    _mm512_storeu_si512(p, interleave(first, second));
  }
};

constexpr int kTileRows = 16;
static_assert(kBlockRows == 2 * kTileRows && kKeyBlock % kBlockRows == 0 && kTileVectors <= 2,
              "the 2 x 2 tiles of multiply()");

// Every tile has 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
constexpr TileConfig kTileConfig = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// out[m, :] = sum_k left[m, k] right[k, :] for 32 rows: 2 x 2 tiles, since a tdpbf16ps takes 52
// cycles and a new one may start every 16. The other four tiles hold the operands. 2 x 3 would load
// less, but the scores and outputs of 48 queries leave the first-level cache.
INLINE void multiply(const Pair* left, ptrdiff_t left_stride, const Pair* right, ptrdiff_t steps,
                     float* out) {
  const ptrdiff_t left_bytes = left_stride * static_cast<ptrdiff_t>(sizeof(Pair));
  constexpr ptrdiff_t kRowBytes = kTile * sizeof(float);
  asm volatile("" : : : "memory");  // the compiler does not know that tile loads read memory
  _tile_zero(0);
  _tile_zero(2);
  if (kTileVectors == 2) {
    _tile_zero(1);
    _tile_zero(3);
  }
  for (ptrdiff_t k = 0; k < steps; k += TileProduct::step_multiple) {
    const Pair* b = right + k * kTile;
    _tile_loadd(4, left + k, left_bytes);
    _tile_loadd(6, b, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, left + k + kTileRows * left_stride, left_bytes);
    _tile_dpbf16ps(2, 5, 6);
    if (kTileVectors == 2) {
      _tile_loadd(7, b + kLanes, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  float* below = out + kTileRows * kTile;
  _tile_stored(0, out, kRowBytes);
  if (kTileVectors == 2) _tile_stored(1, out + kLanes, kRowBytes);
  _tile_stored(2, below, kRowBytes);
  if (kTileVectors == 2) _tile_stored(3, below + kLanes, kRowBytes);
}

// tdpbf16ps adds the 32 terms of a tile before they join the sum: no chain is long.
template <>
INLINE void score_block<TileProduct>(const Pair* keys, ptrdiff_t key_stride, const Pair* query,
                                     ptrdiff_t steps, int count, const Vectors*, float* scores) {
  for (int k = 0; k < count; k += kBlockRows)
    multiply(keys + k * key_stride, key_stride, query, steps, scores + k * kTile);
}

template <>
NOINLINE void value_block<TileProduct>(const Pair* values, ptrdiff_t, const Pair* weights,
                                       ptrdiff_t steps, const Vectors*, const float* decay,
                                       int64_t columns, float* out) {
  constexpr int kColumns = kBlockRows;
  alignas(64) float sums[kColumns * kTile];
  Vec d[kTileVectors];
  UNROLL for (int j = 0; j < kTileVectors; ++j) d[j] = load(decay + j * kLanes);
  for (int64_t m = 0; m < columns; m += kColumns) {
    multiply(values + m * kKeyPairs, kKeyPairs, weights, steps, sums);
    const int count = static_cast<int>(columns - m < kColumns ? columns - m : kColumns);
    for (int i = 0; i < count; ++i)
      UNROLL for (int j = 0; j < kTileVectors; ++j) {
        float* o = out + (m + i) * kTile + j * kLanes;
        store(o, fma(d[j], load(o), load(sums + i * kTile + j * kLanes)));
      }
  }
}

NOINLINE __m512i read_strided_pairs(const uint16_t* from, int64_t stride, int64_t n) {
  alignas(64) uint16_t numbers[32] = {};
  for (int64_t i = 0; i < n; ++i) numbers[i] = from[i * stride];
  return _mm512_load_si512(numbers);
}

// Up to 32 numbers as 16 pairs, zeros behind them.
INLINE __m512i read_pairs(const uint16_t* from, int64_t stride, int64_t n) {
  n = n < 32 ? n : 32;
  if (stride == 1)
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), from);
  return read_strided_pairs(from, stride, n);
}

NOINLINE void pack_query(const ForwardArgs& a, int64_t b, const TileRows& rows, float*,
                         Pair* query) {
  const __m512i signs = _mm512_set1_epi32(a.scale < 0 ? static_cast<int>(0x80008000u) : 0);
  const int64_t step = a.query.strides[3];
  const uint16_t* queries = static_cast<const uint16_t*>(a.query.data);
  for (int64_t d = 0; d < a.head_dim; d += 32)
    for (int r = 0; r < kTile; r += 16) {
      Vec x[16];
      UNROLL for (int i = 0; i < 16; ++i) {
        const uint16_t* q =
            queries + offset_of(a.query.strides, b, rows.head[r + i], rows.query[r + i]);
        x[i] = (Vec)_mm512_xor_si512(read_pairs(q + d * step, step, a.head_dim - d), signs);
      }
      transpose(x);
      UNROLL for (int i = 0; i < 16; ++i)
        _mm512_storeu_ps(query + (d / 2 + i) * kTile + r, x[i]);
    }
}

// K in place where whole tiles can be read, else padded copies of its rows.
NOINLINE Operand<Pair> key_operand(const ForwardArgs& a, int64_t b, int64_t kv_head, int64_t begin,
                                   int count, Pair* copy) {
  const int64_t* strides = a.key.strides;
  const uint16_t* keys = static_cast<const uint16_t*>(a.key.data);
  if (strides[3] == 1 && strides[2] % 2 == 0 && a.head_dim % 32 == 0 && count % kBlockRows == 0)
    return {reinterpret_cast<const Pair*>(keys + offset_of(strides, b, kv_head, begin)),
            strides[2] / 2};
  const int64_t pairs = steps_for<TileProduct>(a.head_dim);
  for (int k = 0; k < count; ++k) {
    const uint16_t* key = keys + offset_of(strides, b, kv_head, begin + k);
    for (int64_t d = 0; d < a.head_dim; d += 32)
      _mm512_storeu_si512(copy + k * pairs + d / 2,
                          read_pairs(key + d * strides[3], strides[3], a.head_dim - d));
  }
  return {copy, pairs};
}

// V^T [Dv, block], zeros behind the last key.
NOINLINE Operand<Pair> value_operand(const ForwardArgs& a, int64_t b, int64_t kv_head,
                                     int64_t begin, int count, Pair* copy) {
  const int64_t* strides = a.value.strides;
  const int64_t step = strides[3];
  const uint16_t* values = static_cast<const uint16_t*>(a.value.data);
  for (int k = 0; k < count; k += kBlockRows)
    for (int64_t d = 0; d < a.value_dim; d += 16) {
      const int64_t n = a.value_dim - d < 16 ? a.value_dim - d : 16;
      const auto read = [&](int key) INLINE_LAMBDA {
        if (key >= count) return _mm512_setzero_si512();
        const uint16_t* v = values + offset_of(strides, b, kv_head, begin + key) + d * step;
        return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(read_pairs(v, step, n)));
      };
      Vec x[16];
      UNROLL for (int i = 0; i < 16; ++i) {
        const int key = k + 2 * i;
        x[i] = (Vec)_mm512_or_si512(read(key), _mm512_slli_epi32(read(key + 1), 16));
      }
      transpose(x);
      UNROLL for (int i = 0; i < 16; ++i)
        _mm512_storeu_ps(copy + (d + i) * kKeyPairs + k / 2, x[i]);
    }
  return {copy, 1};
}

INLINE void clear_value(Pair* copy, int64_t, int key, int64_t d) {
  copy[d * kKeyPairs + key / 2].of[key % 2] = 0;
}
INLINE Operand<Pair> copied(Operand<Pair> values, int64_t, int, Pair*) { return values; }

}  // namespace
}  // namespace multihead
