// Keys and values as a cache holds them: in pages, and as int8 with a scale for each token.
#pragma once

namespace multihead {
namespace {

// Calls f(token, page, row of the page, count) for the parts of [begin, end) that lie in one page
// each; without pages, once, with the batch row for the page.
template <class Function>
INLINE void for_pages(const Pages& pages, int64_t b, int64_t begin, int64_t end, Function f) {
  if (!pages.table) return f(begin, b, begin, end - begin);
  const int32_t* table = pages.table + b * pages.batch_stride;
  while (begin < end) {
    const int64_t row = begin % pages.size, left = pages.size - row;
    const int64_t count = left < end - begin ? left : end - begin;
    f(begin, static_cast<int64_t>(table[begin / pages.size]), row, count);
    begin += count;
  }
}

// Whether a block lies in one page, and is read there.
INLINE bool blocks_lie_in_pages(const Pages& pages) { return pages.size % kKeyBlock == 0; }

// The tokens [begin, end) of keys or values in pages, as a tensor of which only these are there:
// what reads a block then knows nothing of pages. `copy` takes the tokens of several small pages.
INLINE Tensor4 block_in_pages(const ForwardArgs& a, const Tensor4& x, int64_t width, int64_t b,
                              int64_t kv_head, int64_t begin, int64_t end, char* copy) {
  const int64_t bytes = element_bytes(a.held.dtype);
  const char* data = static_cast<const char*>(x.data);
  const auto at = [&](int64_t page, int64_t row) INLINE_LAMBDA {
    return data + offset_of(x.strides, page, kv_head, row) * bytes;
  };
  const char* first = copy;
  int64_t stride = width;
  for_pages(a.held.pages, b, begin, end, [&](int64_t j, int64_t page, int64_t row, int64_t count)
                                             INLINE_LAMBDA {
    if (blocks_lie_in_pages(a.held.pages)) {
      first = at(page, row);
      stride = x.strides[2];
      return;
    }
    for (int64_t k = 0; k < count; ++k)
      __builtin_memcpy(copy + (j - begin + k) * width * bytes, at(page, row + k),
                       static_cast<size_t>(width * bytes));
  });
  const uintptr_t origin =
      reinterpret_cast<uintptr_t>(first) - static_cast<uintptr_t>(begin * stride * bytes);
  return {reinterpret_cast<const void*>(origin), {0, 0, stride, 1}};
}

// Asks for the tokens [begin, end) of pages that will be copied.
INLINE void fetch_pages(const ForwardArgs& a, const Tensor4& x, int64_t width, int64_t b,
                        int64_t kv_head, int64_t begin, int64_t end) {
  const int64_t bytes = element_bytes(a.held.dtype);
  for_pages(a.held.pages, b, begin, end, [&](int64_t, int64_t page, int64_t row, int64_t count)
                                             INLINE_LAMBDA {
    for (int64_t k = row; k < row + count; ++k) {
      const char* from =
          static_cast<const char*>(x.data) + offset_of(x.strides, page, kv_head, k) * bytes;
      for (int64_t at = 0; at < width * bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
    }
  });
}

// to[i] = the scale of token begin + i.
INLINE void read_scales(const ForwardArgs& a, const Scales& x, int64_t b, int64_t kv_head,
                        int64_t begin, int64_t end, float* to) {
  for_pages(a.held.pages, b, begin, end, [&](int64_t j, int64_t page, int64_t row, int64_t count)
                                             INLINE_LAMBDA {
    const float* from = x.data + offset_of(x.strides, page, kv_head, row);
    for (int64_t k = 0; k < count; ++k) to[j - begin + k] = from[k * x.strides[2]];
  });
}

template <int kWidth>
INLINE void scale_folded(float* scores, int count, const float* scale) {
  for (int k = 0; k < count; ++k)
    UNROLL for (int r = 0; r < kWidth; ++r) scores[k * kWidth + r] *= scale[k];
}

// scores[k, r] *= scale[k], for the `rows` that exist of `width`. With `bits`, which say whether
// row r sees key k, those of hidden keys stay as they are: their scale may be NaN.
NOINLINE void scale_keys(float* scores, int width, int rows, int count, const float* scale,
                         const RowBits* bits) {
  if (!bits && width == 1) return scale_folded<1>(scores, count, scale);
  if (!bits && width == 2) return scale_folded<2>(scores, count, scale);
  if (!bits && width == 4) return scale_folded<4>(scores, count, scale);
  for (int k = 0; k < count; ++k)
    for (int r = 0; r < rows; ++r)
      if (!bits || bits[k] >> r & 1) scores[k * width + r] *= scale[k];
}

}  // namespace
}  // namespace multihead
