// Query, key and value as the products want them: in place where the layout allows, else a copy of
// one block.
#pragma once

namespace multihead {
namespace {

INLINE int64_t elements_for(int64_t terms_per_element, int64_t n) {
  return (n + terms_per_element - 1) / terms_per_element;
}

INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Steps of the sum over `width` terms.
template <class Product>
INLINE int64_t steps_for(int64_t width) {
  return round_up(elements_for(Product::terms, width), Product::step_multiple);
}

// Q^T [D, tile]. The sign of the scale goes into Q, which rounds nothing, and its size into the
// exponent: the largest product then is the largest score for negative scales too.
NOINLINE void pack_query(const ForwardArgs& a, int64_t b, const TileRows& rows, float* strip,
                         float* query) {
  const float sign = a.scale < 0 ? -1.0f : 1.0f;
#ifdef MULTIHEAD_AVX512
  // Transposed in registers where 16 numbers of a row lie together: a walk down a column for each
  // row took 3 % of a full 1024 call.
  if (a.dtype == Dtype::float32 && a.query.strides[3] == 1 && a.head_dim % kLanes == 0) {
    const float* queries = static_cast<const float*>(a.query.data);
    for (int r = 0; r < kTile; r += kLanes)
      for (int64_t d = 0; d < a.head_dim; d += kLanes) {
        Vec x[kLanes];
        UNROLL for (int i = 0; i < kLanes; ++i)
          x[i] = load(queries + offset_of(a.query.strides, b, rows.head[r + i], rows.query[r + i]) +
                      d) * set1(sign);
        transpose(x);
        UNROLL for (int i = 0; i < kLanes; ++i) store(query + (d + i) * kTile + r, x[i]);
      }
    return;
  }
#endif
  for (int r = 0; r < kTile; ++r) {
    read_floats(a.dtype, a.query.data,
                offset_of(a.query.strides, b, rows.head[r], rows.query[r]), a.query.strides[3],
                a.head_dim, strip);
    for (int64_t d = 0; d < a.head_dim; ++d) query[d * kTile + r] = sign * strip[d];
  }
}

NOINLINE void pack_query(const ForwardArgs& a, int64_t b, const TileRows& rows, float*,
                         uint32_t* query) {
  const int64_t step = a.query.strides[3];
  const uint32_t signs = a.scale < 0 ? 0x80008000u : 0;
  for (int r = 0; r < kTile; ++r) {
    const uint16_t* q = static_cast<const uint16_t*>(a.query.data) +
                        offset_of(a.query.strides, b, rows.head[r], rows.query[r]);
    for (int64_t d = 0; d < a.head_dim; d += 2) {
      const uint32_t second = d + 1 < a.head_dim ? q[(d + 1) * step] : 0;
      query[d / 2 * kTile + r] = (q[d * step] | second << 16) ^ signs;
    }
  }
}

template <class Element>
struct Operand {
  const Element* data;
  ptrdiff_t stride;  // elements from one key to the next (for paired values: from pair to pair)
};

// Rows of other heads between those of one (as in [B, L, H, D]) spread a block over few sets of the
// cache; several tiles that share it gain more from a compact copy than it costs.
INLINE bool reads_in_place(const ForwardArgs& a, const int64_t* strides, int64_t width) {
  return a.dtype == Dtype::float32 && strides[3] == 1 &&
         (a.tiles_per_item == 1 || strides[2] <= 2 * width);
}

// Asks for part n of `of` of a block's rows, which go to the second-level cache while an earlier
// block is multiplied: K and V of several heads come from further away, and the tile that meets
// them first would wait for each row. Large parts hold up the loads of the product itself: 64 rows
// at once cost a lone tile 4 %.
INLINE void fetch_rows(const ForwardArgs& a, const Tensor4& x, int64_t width, int64_t b,
                       int64_t kv_head, int64_t begin, int64_t end, int64_t n, int64_t of) {
  constexpr int64_t kFewest = 4;
  if (of < kFewest || x.strides[3] != 1) return;
  const int64_t bytes = element_bytes(a.dtype), count = end - begin;
  for (int64_t k = begin + count * n / of; k < begin + count * (n + 1) / of; ++k) {
    const char* row =
        static_cast<const char*>(x.data) + offset_of(x.strides, b, kv_head, k) * bytes;
    for (int64_t at = 0; at < width * bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
  }
}

NOINLINE Operand<float> key_operand(const ForwardArgs& a, int64_t b, int64_t kv_head,
                                    int64_t begin, int count, float* copy) {
  const int64_t* strides = a.key.strides;
  if (reads_in_place(a, strides, a.head_dim))
    return {static_cast<const float*>(a.key.data) + offset_of(strides, b, kv_head, begin),
            strides[2]};
  for (int k = 0; k < count; ++k)
    read_floats(a.dtype, a.key.data, offset_of(strides, b, kv_head, begin + k), strides[3],
                a.head_dim, copy + k * a.head_dim);
  return {copy, a.head_dim};
}

NOINLINE Operand<uint32_t> key_operand(const ForwardArgs& a, int64_t b, int64_t kv_head,
                                       int64_t begin, int count, uint32_t* copy) {
  const int64_t* strides = a.key.strides;
  const uint16_t* keys = static_cast<const uint16_t*>(a.key.data);
  if (strides[3] == 1 && a.head_dim % 2 == 0 && strides[2] % 2 == 0)
    return {reinterpret_cast<const uint32_t*>(keys + offset_of(strides, b, kv_head, begin)),
            strides[2] / 2};
  const int64_t pairs = elements_for(2, a.head_dim);
  for (int k = 0; k < count; ++k) {
    const uint16_t* key = keys + offset_of(strides, b, kv_head, begin + k);
    for (int64_t d = 0; d < a.head_dim; d += 2) {
      const uint32_t second = d + 1 < a.head_dim ? key[(d + 1) * strides[3]] : 0;
      copy[k * pairs + d / 2] = key[d * strides[3]] | second << 16;
    }
  }
  return {copy, pairs};
}

NOINLINE Operand<float> value_operand(const ForwardArgs& a, int64_t b, int64_t kv_head,
                                      int64_t begin, int count, float* copy) {
  const int64_t* strides = a.value.strides;
  if (reads_in_place(a, strides, a.value_dim))
    return {static_cast<const float*>(a.value.data) + offset_of(strides, b, kv_head, begin),
            strides[2]};
  for (int k = 0; k < count; ++k)
    read_floats(a.dtype, a.value.data, offset_of(strides, b, kv_head, begin + k), strides[3],
                a.value_dim, copy + k * a.value_dim);
  return {copy, a.value_dim};
}

// The values of keys 2i and 2i + 1 interleaved; an odd last key is paired with zeros.
NOINLINE Operand<uint32_t> value_operand(const ForwardArgs& a, int64_t b, int64_t kv_head,
                                         int64_t begin, int count, uint32_t* copy) {
  const int64_t* strides = a.value.strides;
  const int64_t step = strides[3];
  for (int k = 0; k < count; k += 2) {
    const uint16_t* first = static_cast<const uint16_t*>(a.value.data) +
                            offset_of(strides, b, kv_head, begin + k);
    const uint16_t* second = first + strides[2];
    uint32_t* to = copy + k / 2 * a.value_dim;
    if (k + 1 == count)
      for (int64_t d = 0; d < a.value_dim; ++d) to[d] = first[d * step];
    else if (step == 1)
      for (int64_t d = 0; d < a.value_dim; ++d)
        to[d] = first[d] | static_cast<uint32_t>(second[d]) << 16;
    else
      for (int64_t d = 0; d < a.value_dim; ++d)
        to[d] = first[d * step] | static_cast<uint32_t>(second[d * step]) << 16;
  }
  return {copy, a.value_dim};
}

INLINE void clear_value(float* copy, int64_t value_dim, int key, int64_t d) {
  copy[key * value_dim + d] = 0.0f;
}
INLINE void clear_value(uint32_t* copy, int64_t value_dim, int key, int64_t d) {
  copy[key / 2 * value_dim + d] &= key % 2 ? 0x0000ffffu : 0xffff0000u;
}
INLINE Operand<float> copied(Operand<float> values, int64_t value_dim, int count, float* copy) {
  if (values.data != copy)
    for (int k = 0; k < count; ++k)
      __builtin_memcpy(copy + k * value_dim, values.data + k * values.stride,
                       static_cast<size_t>(value_dim) * sizeof(float));
  return {copy, value_dim};
}
INLINE Operand<uint32_t> copied(Operand<uint32_t> values, int64_t, int, uint32_t*) {
  return values;
}

}  // namespace
}  // namespace multihead
