// Four floats in the compiler's portable vectors: SSE2 on x86-64, NEON on AArch64.
#pragma once

namespace multihead {
namespace {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IntVec __attribute__((vector_size(16)));
typedef uint32_t BitVec __attribute__((vector_size(16)));
typedef IntVec LaneMask;

constexpr int kLanes = 4;
// 16 registers: 4 x 2 accumulators, 2 vectors of the right-hand side, one broadcast.
constexpr int kWideTileVectors = 2;
constexpr int kWideBlockRows = 4;

INLINE Vec set1(float x) { return Vec{x, x, x, x}; }
INLINE Vec load(const float* p) {
  Vec x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store(float* p, Vec x) { __builtin_memcpy(p, &x, sizeof x); }
INLINE Vec broadcast(const float* p) { return set1(*p); }
INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
INLINE Vec fms(Vec a, Vec b, Vec c) { return a * b - c; }

// The second operand where either is NaN.
INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }
INLINE Vec abs(Vec a) { return (Vec)((IntVec)a & 0x7fffffff); }

INLINE LaneMask equal(Vec a, Vec b) { return a == b; }
INLINE LaneMask greater(Vec a, Vec b) { return a > b; }
INLINE Vec select(LaneMask m, Vec yes, Vec no) { return m ? yes : no; }

// Lane i of the mask is bit i of `bits`.
INLINE LaneMask lanes_of(uint64_t bits) {
  const IntVec lane = {1, 2, 4, 8};
  const int32_t b = static_cast<int32_t>(bits);
  return (IntVec{b, b, b, b} & lane) != 0;
}
INLINE uint32_t bits_of(LaneMask m) {
  return (m[0] & 1u) | (m[1] & 2u) | (m[2] & 4u) | (m[3] & 8u);
}
INLINE uint32_t equal_bits(const int32_t* row, int32_t x) {
  IntVec r;
  __builtin_memcpy(&r, row, sizeof r);
  return bits_of(r == x);
}
INLINE uint32_t at_most_bits(const int32_t* row, int32_t x) {
  IntVec r;
  __builtin_memcpy(&r, row, sizeof r);
  return bits_of(r <= x);
}

INLINE Vec widen_bfloat16(const uint16_t* p) {
  return (Vec)BitVec{static_cast<uint32_t>(p[0]) << 16, static_cast<uint32_t>(p[1]) << 16,
                     static_cast<uint32_t>(p[2]) << 16, static_cast<uint32_t>(p[3]) << 16};
}

INLINE Vec widen_int8(const int8_t* p) {
  return __builtin_convertvector((IntVec{p[0], p[1], p[2], p[3]}), Vec);
}

// Lane i is the sum of the numbers in x[i].
INLINE Vec sums_of(const Vec x[4]) {
  const auto sum = [](Vec v) INLINE_LAMBDA { return (v[0] + v[2]) + (v[1] + v[3]); };
  return Vec{sum(x[0]), sum(x[1]), sum(x[2]), sum(x[3])};
}
// Lane i is the largest of the numbers in x[i].
INLINE Vec largest_of(const Vec x[4]) {
  const auto most = [](float a, float b) INLINE_LAMBDA { return a > b ? a : b; };
  const auto top = [most](Vec v) INLINE_LAMBDA { return most(most(v[0], v[2]), most(v[1], v[3])); };
  return Vec{top(x[0]), top(x[1]), top(x[2]), top(x[3])};
}

// Lane j of x[i] and lane i of x[j] change places.
INLINE void transpose(Vec x[4]) {
  const Vec a = x[0], b = x[1], c = x[2], d = x[3];
  for (int i = 0; i < 4; ++i) x[i] = Vec{a[i], b[i], c[i], d[i]};
}

// x * 2^n for x in [0.5, 2]; 0 below the normal range, whatever x is.
INLINE Vec scale_by_power(Vec x, Vec n) {
  // A NaN exponent converts to 0 or to 2^31, which the shift drops: a NaN x stays as it is.
  const BitVec exponent =
      (BitVec)__builtin_convertvector(max(set1(-127.0f), n), IntVec) << 23;
  return n < set1(-125.0f) ? set1(0.0f) : (Vec)((BitVec)x + exponent);
}

}  // namespace
}  // namespace multihead
