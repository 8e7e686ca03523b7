// bfloat16 operands: an element is a pair of neighboring terms of the sum, which dpbf16ps
// multiplies and adds in float32.
#pragma once

namespace multihead {
namespace {

struct PairProduct {
  typedef uint32_t Element;
  static constexpr int terms = 2;

  static INLINE __m512i load_row(const Element* p) { return _mm512_loadu_si512(p); }
  static INLINE __m512i broadcast_element(const Element* p) {
    int32_t pair;  // K is read in place: a pair need not be aligned
    __builtin_memcpy(&pair, p, sizeof pair);
    __m512i x = _mm512_set1_epi32(pair);
    asm("" : "+v"(x));
    return x;
  }
  static INLINE Vec multiply_add(__m512i a, __m512i b, Vec c) {
    return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
  }
  // The weights of two neighboring keys, rounded and interleaved.
  static INLINE void store_weights(Element* p, Vec first, Vec second) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(first));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(second));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};

}  // namespace
}  // namespace multihead
