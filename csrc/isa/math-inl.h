// The tile's shape, the constants of the softmax, and elementary functions on vectors.
#pragma once

namespace multihead {
namespace {

#ifdef MULTIHEAD_NARROW
// For calls whose rows fit a vector or two: 8 chains hide the latency.
constexpr int kTileVectors = 1;
#else
constexpr int kTileVectors = kWideTileVectors;
#endif
// Keys, or columns of V, that the registers take together.
#if defined(MULTIHEAD_TILES)
constexpr int kBlockRows = 32;
#elif defined(MULTIHEAD_NARROW)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = kWideBlockRows;
#endif
constexpr int kTile = kTileVectors * kLanes;  // queries in a tile, one per lane

// A number that is known to the compiler, as an argument.
template <int n>
struct Count {
  static constexpr int count = n;
};

constexpr float kLog2E = 1.442695041f;
constexpr double kLn2 = 0.6931471805599453;

// A row's maximum before it has seen a key. Finite, so that no difference of maxima is inf - inf.
constexpr float kNoMaximum = -0x1.fffffep127f;
// Visible scores are not lower than this, whatever a bias holds: above kNoMaximum, so that a row
// whose every bias is the lowest finite float still is a softmax.
constexpr float kLowestScore = -0x1.fffffcp127f;
constexpr float kHidden = -__builtin_inff();

// 2^(n + r) for a whole n and |r| <= 0.5, relative error 2e-9 before rounding.
INLINE Vec power_of_two(Vec n, Vec r) {
  Vec p = set1(1.535336196e-04f);
  p = fma(p, r, set1(1.339887502e-03f));
  p = fma(p, r, set1(9.618436918e-03f));
  p = fma(p, r, set1(5.550332367e-02f));
  p = fma(p, r, set1(2.402264774e-01f));
  p = fma(p, r, set1(6.931471825e-01f));
  p = fma(p, r, set1(1.0f));
  return scale_by_power(p, n);
}

// Where a float's unit is 1, a sum is rounded to an integer: the product is within 2^22, or so low
// that its power is 0.
INLINE Vec round_product(Vec x, Vec factor) {
  const Vec unit_is_one = set1(0x1.8p23f);
  return fma(x, factor, unit_is_one) - unit_is_one;
}

// 2^(factor x) for factor x <= 0. Below 2^-125.5, for -inf too, the result is exactly 0, which is
// what a hidden key must weigh; NaN stays NaN.
INLINE Vec exp2(Vec x, Vec factor) {
  const Vec n = round_product(x, factor);
  // Taken from the product again, which a fused multiply-add has not rounded, the integer leaves
  // the exact rest.
  return power_of_two(n, fms(x, factor, n));
}

// e^x in its last digit for large |x| too, where exp2(x, log2 e) would round log2 e: Cody and
// Waite's two parts of ln 2, of which multiples of the first are exact. 0 and NaN as above; inf
// from 88.7 on.
INLINE Vec exp(Vec x) {
  const Vec most = set1(88.7f), bounded = min(most, x);
  const Vec n = round_product(bounded, set1(kLog2E));
  const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), bounded));
  const Vec e = power_of_two(n, r * set1(kLog2E));
  return select(greater(x, most), set1(__builtin_inff()), e);
}

// Odd polynomial below 0.625 (relative error 4e-9), where 1 - 2 / (1 + e^2x) would cancel.
INLINE Vec tanh(Vec x) {
  const Vec size = abs(x);
  const Vec square = x * x;
  Vec p = set1(-5.704222713e-03f);
  p = fma(p, square, set1(2.063843049e-02f));
  p = fma(p, square, set1(-5.373952165e-02f));
  p = fma(p, square, set1(1.333144009e-01f));
  p = fma(p, square, set1(-3.333328068e-01f));
  const Vec small = fma(p * square, x, x);
  const Vec decay = exp2(size, set1(-2.0f * kLog2E));
  const Vec large = (set1(1.0f) - decay) / (set1(1.0f) + decay);
  const Vec signed_large = select(greater(set1(0.0f), x), set1(0.0f) - large, large);
  return select(greater(set1(0.625f), size), small, signed_large);
}

}  // namespace
}  // namespace multihead
