// Sixteen floats: AVX-512 F, BW, DQ and VL.
#pragma once

#include <immintrin.h>

namespace multihead {
namespace {

typedef __m512 Vec;
typedef __mmask16 LaneMask;

constexpr int kLanes = 16;
// 32 registers: 8 x 3 accumulators, 3 vectors of the right-hand side, one broadcast. 24 chains
// hide 4 to 6 cycles of latency on two ports, and 11 loads for 24 multiply-adds leave the load
// ports time to refill the first-level cache: 8 x 2, which loads 10 for 16, was 10 % slower.
constexpr int kWideTileVectors = 3;
constexpr int kWideBlockRows = 8;

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

INLINE Vec round(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// x * 2^n for x in [0.5, 2]; 0 below the normal range, whatever x is. The lanes are masked because
// scalef itself is slow where it underflows.
INLINE Vec scale_by_power(Vec x, Vec n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, set1(-125.0f), _CMP_NLT_UQ), x, n);
}

}  // namespace
}  // namespace multihead
