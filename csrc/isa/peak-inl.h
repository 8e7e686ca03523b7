// The processor's limit for the one instruction that the products are made of.
#pragma once

namespace multihead {
namespace {

// As many chains as hide the latency of a multiply-add, up to 6 cycles, on two ports.
constexpr int kChains = 12;

template <class Product>
double peak(int64_t steps) {
  typename Product::Element element[2 * kLanes] = {};
  Vec chain[kChains];
  UNROLL for (int i = 0; i < kChains; ++i) chain[i] = set1(0.0f);
  auto a = Product::load_row(element), b = Product::load_row(element + kLanes);
  asm volatile("" : "+m"(a), "+m"(b));
  for (int64_t step = 0; step < steps; ++step)
    UNROLL for (int i = 0; i < kChains; ++i) chain[i] = Product::multiply_add(a, b, chain[i]);
  UNROLL for (int i = 0; i < kChains; ++i) asm volatile("" : : "m"(chain[i]));
  return 2.0 * Product::terms * kLanes * kChains * static_cast<double>(steps);
}

#ifdef MULTIHEAD_TILES
// Six chains, as in the products.
NOINLINE double peak_of_tiles(int64_t steps) {
  _tile_loadconfig(&kTileConfig);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_release();
  constexpr double kOperations = 2.0 * 16 * 16 * 32;
  return 6 * kOperations * static_cast<double>(steps);
}
#endif

}  // namespace
}  // namespace multihead
