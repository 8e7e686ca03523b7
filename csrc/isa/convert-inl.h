// Strips of elements of any float type and stride, read as and written from float32.
#pragma once

namespace multihead {
namespace {

INLINE float from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
INLINE uint32_t to_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINE float from_bfloat16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

// Round to nearest even; a NaN keeps its sign and stays quiet.
INLINE uint16_t to_bfloat16(float x) {
  const uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

INLINE float from_float16(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t rest = x & 0x7fffu;
  if (rest >= 0x7c00u) return from_bits(sign | 0x7f800000u | rest << 13);
  // Shifted into float32's fields the exponent is 112 too small; the product is exact, also for
  // subnormal numbers.
  return from_bits(sign | to_bits(from_bits(rest << 13) * 0x1p112f));
}

// Round to nearest even, subnormal numbers included; a NaN keeps its sign and stays quiet.
INLINE uint16_t to_float16(float x) {
  const uint32_t bits = to_bits(x);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (size < 0x38800000u)  // below 2^-14: the sum's last bit is worth 2^-24
    return static_cast<uint16_t>(sign | (to_bits(from_bits(size) + 0.5f) - to_bits(0.5f)));
  return static_cast<uint16_t>(sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13);
}

INLINE int64_t element_bytes(Dtype dtype) {
  switch (dtype) {
    case Dtype::float64: return 8;
    case Dtype::float32: return 4;
    case Dtype::int8: return 1;
    default: return 2;
  }
}

template <class Element, class Convert>
INLINE void read_strip(const Element* from, int64_t stride, int64_t n, float* to,
                       Convert convert) {
  if (stride == 1)
    for (int64_t i = 0; i < n; ++i) to[i] = convert(from[i]);
  else
    for (int64_t i = 0; i < n; ++i) to[i] = convert(from[i * stride]);
}

// to[i] = element offset + i * stride of `data`.
NOINLINE void read_floats(Dtype dtype, const void* data, int64_t offset, int64_t stride,
                          int64_t n, float* to) {
  switch (dtype) {
    case Dtype::float32:
      return read_strip(static_cast<const float*>(data) + offset, stride, n, to,
                        [](float x) { return x; });
    case Dtype::bfloat16:
      return read_strip(static_cast<const uint16_t*>(data) + offset, stride, n, to,
                        from_bfloat16);
    case Dtype::float16:
      return read_strip(static_cast<const uint16_t*>(data) + offset, stride, n, to, from_float16);
    case Dtype::float64:
      return read_strip(static_cast<const double*>(data) + offset, stride, n, to,
                        [](double x) { return static_cast<float>(x); });
    case Dtype::int8:
      return read_strip(static_cast<const int8_t*>(data) + offset, stride, n, to,
                        [](int8_t x) { return static_cast<float>(x); });
  }
}

template <class Element, class Convert>
INLINE void write_strip(const float* from, int64_t n, Element* to, int64_t stride,
                        Convert convert) {
  if (stride == 1)
    for (int64_t i = 0; i < n; ++i) to[i] = convert(from[i]);
  else
    for (int64_t i = 0; i < n; ++i) to[i * stride] = convert(from[i]);
}

// Element offset + i * stride of `data` = from[i].
NOINLINE void write_floats(Dtype dtype, void* data, int64_t offset, int64_t stride, int64_t n,
                           const float* from) {
  uint16_t* halves = static_cast<uint16_t*>(data) + offset;
  switch (dtype) {
    case Dtype::float32:
      return write_strip(from, n, static_cast<float*>(data) + offset, stride,
                         [](float x) { return x; });
    case Dtype::bfloat16: return write_strip(from, n, halves, stride, to_bfloat16);
    case Dtype::float16: return write_strip(from, n, halves, stride, to_float16);
    case Dtype::float64:
      return write_strip(from, n, static_cast<double*>(data) + offset, stride,
                         [](float x) { return static_cast<double>(x); });
    case Dtype::int8: return;  // nothing is written as int8
  }
}

// Whether a strip holds inf or NaN: their magnitude bits are the largest.
INLINE bool all_finite(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = to_bits(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < 0x7f800000u;
}

INLINE bool all_finite(const uint16_t* x, int64_t n, uint16_t infinity) {
  uint16_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t magnitude = x[i] & 0x7fffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest < infinity;
}

// The same of elements that lie together, in place.
NOINLINE bool all_finite(Dtype dtype, const void* data, int64_t offset, int64_t n) {
  const uint16_t* halves = static_cast<const uint16_t*>(data) + offset;
  if (dtype == Dtype::bfloat16) return all_finite(halves, n, 0x7f80);
  if (dtype == Dtype::float16) return all_finite(halves, n, 0x7c00);
  return all_finite(static_cast<const float*>(data) + offset, n);
}

INLINE int64_t offset_of(const int64_t* strides, int64_t b, int64_t h, int64_t row) {
  return b * strides[0] + h * strides[1] + row * strides[2];
}

INLINE int32_t value_at(const Integers& x, int64_t i) { return x.data ? x.data[i] : x.value; }

}  // namespace
}  // namespace multihead
