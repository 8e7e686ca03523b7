// The two matrix products of attention as one: C[m, lane] = sum_k A(m, k) B[k, lane].
//
// Tiles are transposed. A row of B holds one number for each query of the tile, a number of A is
// broadcast to all of them: scores are S^T = K Q^T, the output is O^T = V^T P^T. K and V are read
// where they lie, and softmax, masks and statistics need no sum across lanes.
#pragma once

namespace multihead {
namespace {

// float32 operands; a step is one term of the sum.
struct FloatProduct {
  typedef float Element;
  static constexpr int terms = 1;            // numbers of a sum that one element holds
  static constexpr int step_multiple = 1;    // operands are padded to multiples of these
  static constexpr int column_multiple = 1;

  static INLINE Vec load_row(const Element* p) { return load(p); }
  static INLINE Vec broadcast_element(const Element* p) { return broadcast(p); }
  static INLINE Vec multiply_add(Vec a, Vec b, Vec c) { return fma(a, b, c); }
};

// Vectors of the tile, [first, end).
struct Vectors {
  int first, end;
};
template <int kFirst, int kEnd>
struct ConstantVectors {
  static constexpr int first = kFirst, end = kEnd;
};
typedef ConstantVectors<0, kTileVectors> AllVectors;

// Calls f with constants that cover `v`.
template <class Function>
INLINE void with_vectors(Vectors v, Function f) {
  if constexpr (kTileVectors > 1) {
    if (v.end == 1) return f(ConstantVectors<0, 1>{});
    if (v.first == kTileVectors - 1) return f(ConstantVectors<kTileVectors - 1, kTileVectors>{});
  }
  if constexpr (kTileVectors > 2) {
    if (v.end == kTileVectors - 1 && v.first == 0)
      return f(ConstantVectors<0, kTileVectors - 1>{});
    if (v.end == kTileVectors && v.first == 1) return f(ConstantVectors<1, kTileVectors>{});
  }
  f(AllVectors{});
}

template <int M>
struct RegisterBlock {
  Vec at[M][kTileVectors];

  INLINE void clear() {
    UNROLL for (int m = 0; m < M; ++m)
      UNROLL for (int j = 0; j < kTileVectors; ++j) at[m][j] = set1(0.0f);
  }
};

// c(m, :) += sum_k A(m, k) B[k, :] with A(m, k) = a[m * row + k * step]; one of row and step is the
// constant 1 in each of the two uses.
template <class Product, class Part, int M>
INLINE void multiply_add(const typename Product::Element* a, ptrdiff_t row, ptrdiff_t step,
                         const typename Product::Element* b, ptrdiff_t steps,
                         RegisterBlock<M>& c) {
  for (ptrdiff_t k = 0; k < steps; ++k) {
    decltype(Product::load_row(b)) b_row[kTileVectors];
    UNROLL for (int j = Part::first; j < Part::end; ++j) b_row[j] =
        Product::load_row(b + j * kLanes);
    UNROLL for (int m = 0; m < M; ++m) {
      const auto x = Product::broadcast_element(a + m * row);
      UNROLL for (int j = Part::first; j < Part::end; ++j) {
        c.at[m][j] = Product::multiply_add(x, b_row[j], c.at[m][j]);
      }
    }
    a += step;
    b += kTile;
  }
}

// scores[m, :] (+)= sum_k keys[m, k] query[k, :] for M keys.
template <class Product, int M, bool kAdd, class Part = AllVectors>
INLINE void score_keys(const typename Product::Element* keys, ptrdiff_t key_stride,
                       const typename Product::Element* query, ptrdiff_t steps, float* scores) {
  RegisterBlock<M> c;
  c.clear();
  multiply_add<Product, Part>(keys, key_stride, 1, query, steps, c);
  UNROLL for (int m = 0; m < M; ++m)
    UNROLL for (int j = Part::first; j < Part::end; ++j) {
      float* s = scores + m * kTile + j * kLanes;
      store(s, kAdd ? load(s) + c.at[m][j] : c.at[m][j]);
    }
}

// The terms of a sum over keys: all vectors take all steps, or those that a register block of keys
// needs.
struct WholeSteps {
  ptrdiff_t count;

  template <class Function>
  INLINE void for_each(Function f) const {
    f(0, count, AllVectors{});
  }
};
template <class Product>
struct NeededSteps {
  ptrdiff_t count;
  const Vectors* need;

  template <class Function>
  INLINE void for_each(Function f) const {
    constexpr ptrdiff_t kSteps = kBlockRows / Product::terms;
    const Vectors* vectors = need;
    for (ptrdiff_t begin = 0; begin < count; begin += kSteps, ++vectors) {
      const ptrdiff_t left = count - begin;
      with_vectors(*vectors, [&](auto part) INLINE_LAMBDA {
        f(begin, left < kSteps ? left : kSteps, part);
      });
    }
  }
};

// out[m, :] = decay[:] * out[m, :] + sum_k weights[k, :] values[k, m] for M columns of V.
// The sum starts from zero and joins `out` once: a chain through all key blocks would lose digits.
template <class Product, int M, class Steps>
INLINE void add_values(const typename Product::Element* values, ptrdiff_t value_stride,
                       const typename Product::Element* weights, const Steps& steps,
                       const float* decay, float* out) {
  RegisterBlock<M> c;
  c.clear();
  steps.for_each([&](ptrdiff_t begin, ptrdiff_t count, auto part) INLINE_LAMBDA {
    multiply_add<Product, decltype(part)>(values + begin * value_stride, 1, value_stride,
                                          weights + begin * kTile, count, c);
  });
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    const Vec d = load(decay + j * kLanes);
    UNROLL for (int m = 0; m < M; ++m) {
      float* o = out + m * kTile + j * kLanes;
      store(o, fma(d, load(o), c.at[m][j]));
    }
  }
}

// `need` says which vectors each register block of keys needs, null where all need all: at an edge
// of the mask some see none of its keys, and would add zeros. Their scores stay what they were.
template <class Product, bool kAdd>
NOINLINE void score_part(const typename Product::Element* keys, ptrdiff_t key_stride,
                         const typename Product::Element* query, ptrdiff_t steps, int count,
                         const Vectors* need, float* scores) {
  int k = 0;
  for (; need && k + kBlockRows <= count; k += kBlockRows)
    with_vectors(*need++, [&](auto part) INLINE_LAMBDA {
      score_keys<Product, kBlockRows, kAdd, decltype(part)>(keys + k * key_stride, key_stride,
                                                            query, steps, scores + k * kTile);
    });
  for (; k + kBlockRows <= count; k += kBlockRows)
    score_keys<Product, kBlockRows, kAdd>(keys + k * key_stride, key_stride, query, steps,
                                          scores + k * kTile);
  for (; k + 4 <= count; k += 4)
    score_keys<Product, 4, kAdd>(keys + k * key_stride, key_stride, query, steps,
                                 scores + k * kTile);
  for (; k < count; ++k)
    score_keys<Product, 1, kAdd>(keys + k * key_stride, key_stride, query, steps,
                                 scores + k * kTile);
}

// Terms of a score that are summed in one chain; more would lose digits at large widths.
constexpr ptrdiff_t kChain = 128;

template <class Product>
INLINE void score_block(const typename Product::Element* keys, ptrdiff_t key_stride,
                        const typename Product::Element* query, ptrdiff_t steps, int count,
                        const Vectors* need, float* scores) {
  constexpr ptrdiff_t kMost = kChain / Product::terms;
  ptrdiff_t part = steps < kMost ? steps : kMost;
  score_part<Product, false>(keys, key_stride, query, part, count, need, scores);
  for (ptrdiff_t done = part; done < steps; done += part) {
    part = steps - done < kMost ? steps - done : kMost;
    score_part<Product, true>(keys + done, key_stride, query + done * kTile, part, count, need,
                              scores);
  }
}

template <class Product, class Steps>
INLINE void add_columns(const typename Product::Element* values, ptrdiff_t value_stride,
                        const typename Product::Element* weights, const Steps& steps,
                        const float* decay, int64_t columns, float* out) {
  int64_t m = 0;
  for (; m + kBlockRows <= columns; m += kBlockRows)
    add_values<Product, kBlockRows>(values + m, value_stride, weights, steps, decay,
                                    out + m * kTile);
  for (; m + 4 <= columns; m += 4)
    add_values<Product, 4>(values + m, value_stride, weights, steps, decay, out + m * kTile);
  for (; m < columns; ++m)
    add_values<Product, 1>(values + m, value_stride, weights, steps, decay, out + m * kTile);
}

template <class Product>
NOINLINE void value_block(const typename Product::Element* values, ptrdiff_t value_stride,
                          const typename Product::Element* weights, ptrdiff_t steps,
                          const Vectors* need, const float* decay, int64_t columns, float* out) {
  if (need)
    add_columns<Product>(values, value_stride, weights, NeededSteps<Product>{steps, need}, decay,
                         columns, out);
  else
    add_columns<Product>(values, value_stride, weights, WholeSteps{steps}, decay, columns, out);
}

}  // namespace
}  // namespace multihead
