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

template <int M>
struct RegisterBlock {
  Vec at[M][kTileVectors];
};

// A(m, k) = a[m * row + k * step]; one of row and step is the constant 1 in each of the two uses.
template <class Product, int M>
INLINE RegisterBlock<M> multiply(const typename Product::Element* a, ptrdiff_t row,
                                 ptrdiff_t step, const typename Product::Element* b,
                                 ptrdiff_t steps) {
  RegisterBlock<M> c;
  UNROLL for (int m = 0; m < M; ++m)
    UNROLL for (int j = 0; j < kTileVectors; ++j) c.at[m][j] = set1(0.0f);
  for (ptrdiff_t k = 0; k < steps; ++k) {
    decltype(Product::load_row(b)) b_row[kTileVectors];
    UNROLL for (int j = 0; j < kTileVectors; ++j) b_row[j] = Product::load_row(b + j * kLanes);
    UNROLL for (int m = 0; m < M; ++m) {
      const auto x = Product::broadcast_element(a + m * row);
      UNROLL for (int j = 0; j < kTileVectors; ++j) {
        c.at[m][j] = Product::multiply_add(x, b_row[j], c.at[m][j]);
      }
    }
    a += step;
    b += kTile;
  }
  return c;
}

// scores[m, :] (+)= sum_k keys[m, k] query[k, :] for M keys.
template <class Product, int M, bool kAdd>
INLINE void score_keys(const typename Product::Element* keys, ptrdiff_t key_stride,
                       const typename Product::Element* query, ptrdiff_t steps, float* scores) {
  const RegisterBlock<M> c = multiply<Product, M>(keys, key_stride, 1, query, steps);
  UNROLL for (int m = 0; m < M; ++m)
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      float* s = scores + m * kTile + j * kLanes;
      store(s, kAdd ? load(s) + c.at[m][j] : c.at[m][j]);
    }
}

// out[m, :] = decay[:] * out[m, :] + sum_k weights[k, :] values[k, m] for M columns of V.
// The sum starts from zero and joins `out` once: a chain through all key blocks would lose digits.
template <class Product, int M>
INLINE void add_values(const typename Product::Element* values, ptrdiff_t value_stride,
                       const typename Product::Element* weights, ptrdiff_t steps,
                       const float* decay, float* out) {
  const RegisterBlock<M> c = multiply<Product, M>(values, 1, value_stride, weights, steps);
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    const Vec d = load(decay + j * kLanes);
    UNROLL for (int m = 0; m < M; ++m) {
      float* o = out + m * kTile + j * kLanes;
      store(o, fma(d, load(o), c.at[m][j]));
    }
  }
}

template <class Product, bool kAdd>
NOINLINE void score_part(const typename Product::Element* keys, ptrdiff_t key_stride,
                         const typename Product::Element* query, ptrdiff_t steps, int count,
                         float* scores) {
  int k = 0;
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
                        float* scores) {
  constexpr ptrdiff_t kMost = kChain / Product::terms;
  ptrdiff_t part = steps < kMost ? steps : kMost;
  score_part<Product, false>(keys, key_stride, query, part, count, scores);
  for (ptrdiff_t done = part; done < steps; done += part) {
    part = steps - done < kMost ? steps - done : kMost;
    score_part<Product, true>(keys + done, key_stride, query + done * kTile, part, count, scores);
  }
}

template <class Product>
NOINLINE void value_block(const typename Product::Element* values, ptrdiff_t value_stride,
                          const typename Product::Element* weights, ptrdiff_t steps,
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

}  // namespace
}  // namespace multihead
