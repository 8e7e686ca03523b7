// bfloat16 operands: an element is a pair of neighboring terms of the sum, which dpbf16ps
// multiplies and adds in float32.
#pragma once

namespace multihead {
namespace {

// Two vectors rounded to bfloat16, their lanes in turn.
INLINE __m512i interleave(Vec first, Vec second) {
  alignas(64) static constexpr uint16_t kInTurn[32] = {
      0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInTurn),
                                  (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

struct PairProduct {
  typedef uint32_t Element;
  static constexpr int terms = 2;
  static constexpr int step_multiple = 1;
  static constexpr int column_multiple = 1;

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
  static INLINE void store_weights(Element* p, Vec first, Vec second) {
    _mm512_storeu_si512(p, interleave(first, second));
  }
};

}  // namespace
}  // namespace multihead
