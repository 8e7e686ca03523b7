// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

namespace multihead {
namespace {

typedef __m512 Vec;
typedef __mmask16 LaneMask;

constexpr int kLanes = 16;
#ifdef MULTIHEAD_TILES
constexpr int kWideTileVectors = 2;  // see multiply() of the tiles
#else
// 32 registers: 8 x 3 accumulators, 3 vectors of the right-hand side, one broadcast. 24 chains
// hide 4 to 6 cycles of latency on two ports, and 11 loads for 24 multiply-adds leave the load
// ports time to refill the first-level cache: 8 x 2, which loads 10 for 16, was 10 % slower.
constexpr int kWideTileVectors = 3;
constexpr int kWideBlockRows = 8;
#endif

INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
INLINE Vec broadcast(const float* p) {
  Vec x = _mm512_set1_ps(*p);
  // In a register: as a memory operand of each FMA it would be loaded once per vector.
  asm("" : "+v"(x));
  return x;
}
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }

// The second operand where either is NaN.
INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }

INLINE LaneMask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE LaneMask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
INLINE Vec select(LaneMask m, Vec yes, Vec no) { return _mm512_mask_blend_ps(m, no, yes); }

// Lane i of the mask is bit i of `bits`.
INLINE LaneMask lanes_of(uint64_t bits) { return static_cast<LaneMask>(bits); }
INLINE uint32_t bits_of(LaneMask m) { return m; }
INLINE uint32_t equal_bits(const int32_t* row, int32_t x) {
  return _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(row), _mm512_set1_epi32(x));
}
INLINE uint32_t at_most_bits(const int32_t* row, int32_t x) {
  return _mm512_cmple_epi32_mask(_mm512_loadu_si512(row), _mm512_set1_epi32(x));
}

INLINE Vec widen_bfloat16(const uint16_t* p) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
INLINE Vec widen_float16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

INLINE Vec widen_int8(const int8_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x));
}

// Lane i is what join(., .) makes of the numbers in x[i].
template <class Join>
INLINE Vec folded(const Vec x[16], Join join) {
  Vec y[8], z[4];
  UNROLL for (int i = 0; i < 8; ++i)
    y[i] = join(_mm512_shuffle_f32x4(x[i], x[i + 8], 0x44),
                _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee));
  // The lower half of y[i] has what is left of x[i], the upper half of x[i + 8].
  UNROLL for (int i = 0; i < 4; ++i)
    z[i] = join(_mm512_shuffle_f32x4(y[i], y[i + 4], 0x88),
                _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd));
  // z[i] has x[i], x[i + 8], x[i + 4], x[i + 12] in its quarters.
  const Vec a = join(_mm512_unpacklo_ps(z[0], z[1]), _mm512_unpackhi_ps(z[0], z[1]));
  const Vec b = join(_mm512_unpacklo_ps(z[2], z[3]), _mm512_unpackhi_ps(z[2], z[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  const Vec all = join(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  return _mm512_shuffle_f32x4(all, all, 0xd8);
}

// Lane i is the sum, or the largest, of the numbers in x[i].
INLINE Vec sums_of(const Vec x[16]) {
  return folded(x, [](Vec a, Vec b) INLINE_LAMBDA { return a + b; });
}
INLINE Vec largest_of(const Vec x[16]) {
  return folded(x, [](Vec a, Vec b) INLINE_LAMBDA { return max(a, b); });
}

// Lane j of x[i] and lane i of x[j] change places.
INLINE void transpose(Vec x[16]) {
  Vec y[16];
  UNROLL for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  }
  const auto low = [](Vec a, Vec b) INLINE_LAMBDA {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](Vec a, Vec b) INLINE_LAMBDA {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  // Then 128-bit part n of x[4 i + c] holds lane 4 n + c of what was in 4 i to 4 i + 3.
  UNROLL for (int i = 0; i < 16; i += 4) {
    x[i] = low(y[i], y[i + 2]);
    x[i + 1] = high(y[i], y[i + 2]);
    x[i + 2] = low(y[i + 1], y[i + 3]);
    x[i + 3] = high(y[i + 1], y[i + 3]);
  }
  UNROLL for (int c = 0; c < 4; ++c) {
    const Vec a = _mm512_shuffle_f32x4(x[c], x[4 + c], 0x44);
    const Vec b = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0x44);
    const Vec d = _mm512_shuffle_f32x4(x[c], x[4 + c], 0xee);
    const Vec e = _mm512_shuffle_f32x4(x[8 + c], x[12 + c], 0xee);
    x[c] = _mm512_shuffle_f32x4(a, b, 0x88);
    x[4 + c] = _mm512_shuffle_f32x4(a, b, 0xdd);
    x[8 + c] = _mm512_shuffle_f32x4(d, e, 0x88);
    x[12 + c] = _mm512_shuffle_f32x4(d, e, 0xdd);
  }
}

// x * 2^n for x in [0.5, 2]; 0 below the normal range, whatever x is. The lanes are masked because
// scalef itself is slow where it underflows.
INLINE Vec scale_by_power(Vec x, Vec n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set1(-125.0f), _CMP_NLT_UQ), x, n);
}

}  // namespace
}  // namespace multihead
