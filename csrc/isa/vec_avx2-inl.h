// Eight floats: AVX2 with FMA.
#pragma once

#include <immintrin.h>

namespace multihead {
namespace {

typedef __m256 Vec;
typedef __m256 LaneMask;

constexpr int kLanes = 8;
// 16 registers: 4 x 3 accumulators, 3 vectors of the right-hand side, one broadcast.
constexpr int kWideTileVectors = 3;
constexpr int kWideBlockRows = 4;

INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
INLINE Vec broadcast(const float* p) { return _mm256_broadcast_ss(p); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }

// The second operand where either is NaN.
INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
INLINE Vec abs(Vec a) { return _mm256_andnot_ps(set1(-0.0f), a); }

INLINE LaneMask equal(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
INLINE LaneMask greater(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
INLINE Vec select(LaneMask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }

// Lane i of the mask is bit i of `bits`.
INLINE LaneMask lanes_of(uint64_t bits) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i b = _mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), lane);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(b, lane));
}
INLINE uint32_t bits_of(LaneMask m) { return static_cast<uint32_t>(_mm256_movemask_ps(m)); }
INLINE uint32_t equal_bits(const int32_t* row, int32_t x) {
  const __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
  return bits_of(_mm256_castsi256_ps(_mm256_cmpeq_epi32(r, _mm256_set1_epi32(x))));
}
INLINE uint32_t at_most_bits(const int32_t* row, int32_t x) {
  const __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
  return 0xffu & ~bits_of(_mm256_castsi256_ps(_mm256_cmpgt_epi32(r, _mm256_set1_epi32(x))));
}

INLINE Vec widen_bfloat16(const uint16_t* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}

INLINE Vec widen_int8(const int8_t* p) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
}

// Lane i is the sum of the numbers in x[i].
INLINE Vec sums_of(const Vec x[8]) {
  const Vec a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  const Vec b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
}
// Lane i is the largest of the numbers in x[i].
INLINE Vec largest_of(const Vec x[8]) {
  const auto four = [](const Vec* v) INLINE_LAMBDA {
    const Vec a = max(_mm256_unpacklo_ps(v[0], v[1]), _mm256_unpackhi_ps(v[0], v[1]));
    const Vec b = max(_mm256_unpacklo_ps(v[2], v[3]), _mm256_unpackhi_ps(v[2], v[3]));
    return max(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  };
  const Vec a = four(x), b = four(x + 4);
  return max(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Lane j of x[i] and lane i of x[j] change places.
INLINE void transpose(Vec x[8]) {
  Vec y[8];
  UNROLL for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  // Then half n of x[i] holds lane 4 n + i % 4 of what was in four vectors, from i / 4 * 4 on.
  UNROLL for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  UNROLL for (int i = 0; i < 4; ++i) {
    const Vec low = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
    x[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
    x[i] = low;
  }
}

// x * 2^n for x in [0.5, 2]; 0 below the normal range, whatever x is.
INLINE Vec scale_by_power(Vec x, Vec n) {
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  const Vec scaled =
      _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
  // A NaN exponent converts to 0x80000000, which the shift drops: a NaN x stays as it is.
  return _mm256_andnot_ps(_mm256_cmp_ps(n, set1(-125.0f), _CMP_LT_OQ), scaled);
}

}  // namespace
}  // namespace multihead
