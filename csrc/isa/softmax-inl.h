// The online softmax of a tile: scores of one key block in, weights out, running state updated.
#pragma once

namespace multihead {
namespace {

// Running state of the tile's rows. A score s is a product q.k, or a whole logit where softcap or
// bias make it one; `per_bit` turns a difference of scores into a power of two, so that
// e^(logit - largest logit) is 2^(per_bit (s - max)).
struct RowState {
  alignas(64) float max[kTile];       // m: largest score so far
  float decay[kTile];                 // e^(old m - m) of the newest block
  float sum[kTile];                   // l = sum e^(s - m)
  float shifted[kTile];               // h = sum (s - m) e^(s - m), in bits
  float squares[kTile];               // c = sum e^2(s - m)
  float distance[kTile];              // t = sum |p - pos| e^(s - m)
  float first_key[kTile];             // z: the weight of the row's first column
  float max_product[kTile];           // largest score before softcap and bias
  int64_t argmax[kTile];
};

INLINE void begin_rows(RowState& state) {
  for (int r = 0; r < kTile; ++r) {
    state.max[r] = state.max_product[r] = kNoMaximum;
    state.sum[r] = state.shifted[r] = state.squares[r] = state.distance[r] = 0.0f;
    state.first_key[r] = 0.0f;
    state.argmax[r] = -1;
  }
}

// x[k, :] = f(x[k, :], k, vector index) for the keys [begin, end) of a block.
template <class Function>
INLINE void for_scores(float* scores, int begin, int end, Function f) {
  for (int k = begin; k < end; ++k)
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      float* s = scores + k * kTile + j * kLanes;
      store(s, f(load(s), k, j));
    }
}

INLINE void scale_scores(float* scores, int begin, int end, float factor) {
  for_scores(scores, begin, end, [factor](Vec s, int, int) { return s * set1(factor); });
}

INLINE void cap_scores(float* scores, int begin, int end, float scale, float softcap) {
  const Vec in = set1(scale / softcap), out = set1(softcap);
  for_scores(scores, begin, end, [in, out](Vec s, int, int) { return out * tanh(in * s); });
}

INLINE void add_bias(float* scores, int begin, int end, const float* bias) {
  for_scores(scores, begin, end, [bias](Vec s, int k, int j) {
    const Vec sum = max(set1(kLowestScore), s + load(bias + k * kTile + j * kLanes));
    return select(equal(s, set1(kHidden)), s, sum);  // a product of -inf stays
  });
}

// ALiBi: a score falls by slope for each position between query and key.
INLINE void add_slope(float* scores, int begin, int end, const float* slope,
                      const float* row_offset, const float* key_offset) {
  for_scores(scores, begin, end, [=](Vec s, int k, int j) {
    const Vec away = abs(load(row_offset + j * kLanes) - set1(key_offset[k]));
    return s - load(slope + j * kLanes) * away;
  });
}

INLINE void hide_scores(float* scores, int begin, int end, const RowBits* bits) {
  for_scores(scores, begin, end, [bits](Vec s, int k, int j) {
    return select(lanes_of(bits[k] >> (j * kLanes)), s, set1(kHidden));
  });
}

INLINE void raise_maximum(const float* scores, int begin, int end, RowState& state) {
  Vec top[2][kTileVectors];  // of even and odd keys: one chain would wait for itself
  UNROLL for (int j = 0; j < kTileVectors; ++j) top[0][j] = top[1][j] =
      load(state.max + j * kLanes);
  const auto raise = [&](int k, int part) INLINE_LAMBDA {
    UNROLL for (int j = 0; j < kTileVectors; ++j) top[part][j] =
        max(top[part][j], load(scores + k * kTile + j * kLanes));
  };
  int k = begin;
  for (; k + 2 <= end; k += 2) {
    raise(k, 0);
    raise(k + 1, 1);
  }
  if (k < end) raise(k, 0);
  UNROLL for (int j = 0; j < kTileVectors; ++j)
    store(state.max + j * kLanes, max(top[0][j], top[1][j]));
}

// The largest q.k that a row sees; `scores` are not hidden yet.
INLINE void raise_visible_maximum(const float* scores, int begin, int end, const RowBits* bits,
                                  float* maximum) {
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    Vec top = load(maximum + j * kLanes);
    for (int k = begin; k < end; ++k) {
      const Vec s = load(scores + k * kTile + j * kLanes);
      const Vec seen = bits ? select(lanes_of(bits[k] >> (j * kLanes)), s, set1(kHidden)) : s;
      top = max(top, seen);
    }
    store(maximum + j * kLanes, top);
  }
}

// Rows whose maximum this block raised take the first key that has it.
NOINLINE void find_maximum(const float* scores, int begin, int end, int64_t first_key,
                           const float* old_max, RowState& state) {
  for (int j = 0; j < kTileVectors; ++j) {
    const Vec top = load(state.max + j * kLanes);
    const uint32_t raised = bits_of(greater(top, load(old_max + j * kLanes)));
    if (!raised) continue;
    // From the last key to the first, so that the lowest of equal ones stays.
    Vec lowest = set1(0.0f), index = set1(static_cast<float>(end - 1));
    for (int k = end - 1; k >= begin; --k) {
      lowest = select(equal(load(scores + k * kTile + j * kLanes), top), index, lowest);
      index = index - set1(1.0f);
    }
    float key[kLanes];
    store(key, lowest);
    for (int i = 0; i < kLanes; ++i)
      if (raised >> i & 1) state.argmax[j * kLanes + i] = first_key + static_cast<int64_t>(key[i]);
  }
}

// The state follows a maximum that rose from old_max: l <- a l, h <- a (h + (old m - m) l), ...
INLINE void decay_state(const float* old_max, float per_bit, RowState& state) {
  for (int j = 0; j < kTileVectors; ++j) {
    const int r = j * kLanes;
    const Vec below = load(old_max + r) - load(state.max + r);
    const Vec a = exp2(below, set1(per_bit));
    const Vec fall = max(set1(-200.0f), below * set1(per_bit));
    store(state.decay + r, a);
    store(state.shifted + r, a * fma(fall, load(state.sum + r), load(state.shifted + r)));
    store(state.sum + r, a * load(state.sum + r));
    store(state.squares + r, a * a * load(state.squares + r));
    store(state.distance + r, a * load(state.distance + r));
    store(state.first_key + r, a * load(state.first_key + r));
  }
}

// The state of later keys joins: `state.decay` is what becomes of the sums so far, and share[:] of
// the part's.
NOINLINE void join_states(const RowState& part, float per_bit, RowState& state, float* share) {
  float old_max[kTile];
  __builtin_memcpy(old_max, state.max, sizeof old_max);
  for (int j = 0; j < kTileVectors; ++j) {
    float* m = state.max + j * kLanes;
    store(m, max(load(m), load(part.max + j * kLanes)));
    float* q = state.max_product + j * kLanes;
    store(q, max(load(q), load(part.max_product + j * kLanes)));
  }
  decay_state(old_max, per_bit, state);
  for (int j = 0; j < kTileVectors; ++j) {
    const int r = j * kLanes;
    const Vec below = load(part.max + r) - load(state.max + r);
    const Vec b = exp2(below, set1(per_bit));
    const Vec fall = max(set1(-200.0f), below * set1(per_bit));
    store(share + r, b);
    const auto add = [r](float* sum, Vec x) INLINE_LAMBDA { store(sum + r, load(sum + r) + x); };
    add(state.shifted, b * fma(fall, load(part.sum + r), load(part.shifted + r)));
    add(state.sum, b * load(part.sum + r));
    add(state.squares, b * b * load(part.squares + r));
    add(state.distance, b * load(part.distance + r));
    add(state.first_key, b * load(part.first_key + r));
  }
  for (int r = 0; r < kTile; ++r)
    if (part.max[r] > old_max[r]) state.argmax[r] = part.argmax[r];
}

// Scores become weights; their sum, and with kEntropy the sum of exponent times weight, joins the
// state. Scores are subtracted before they are scaled: the largest weighs exactly 1, and nothing
// is lost where logits are large. Two partial sums, by the parity of the key, hide the latency of
// the addition.
template <bool kEntropy>
NOINLINE void weigh(float* scores, int begin, int end, float per_bit, RowState& state) {
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    const Vec top = load(state.max + j * kLanes);
    Vec sum[2] = {set1(0.0f), set1(0.0f)}, shifted[2] = {set1(0.0f), set1(0.0f)};
    const auto weight = [&](int k, int part) INLINE_LAMBDA {
      float* s = scores + k * kTile + j * kLanes;
      const Vec y = load(s) - top;
      const Vec e = exp2(y, set1(per_bit));
      store(s, e);
      sum[part] = sum[part] + e;
      // A hidden key's y is -inf; max bounds it, and keeps a NaN.
      if (kEntropy) shifted[part] = fma(e, max(set1(-200.0f), y * set1(per_bit)), shifted[part]);
    };
    int k = begin;
    for (; k + 2 <= end; k += 2) {
      weight(k, 0);
      weight(k + 1, 1);
    }
    if (k < end) weight(k, 0);
    store(state.sum + j * kLanes, load(state.sum + j * kLanes) + (sum[0] + sum[1]));
    if (kEntropy)
      store(state.shifted + j * kLanes,
            load(state.shifted + j * kLanes) + (shifted[0] + shifted[1]));
  }
}

// total[:] += sum over the keys of w * term(w, k, j), in two partial sums as above.
template <class Term>
INLINE void add_terms(const float* weights, int begin, int end, float* total, Term term) {
  UNROLL for (int j = 0; j < kTileVectors; ++j) {
    Vec sum[2] = {set1(0.0f), set1(0.0f)};
    const float* w = weights + j * kLanes;
    int k = begin;
    for (; k + 2 <= end; k += 2) {
      sum[0] = fma(load(w + k * kTile), term(load(w + k * kTile), k, j), sum[0]);
      sum[1] = fma(load(w + (k + 1) * kTile), term(load(w + (k + 1) * kTile), k + 1, j), sum[1]);
    }
    if (k < end) sum[0] = fma(load(w + k * kTile), term(load(w + k * kTile), k, j), sum[0]);
    store(total + j * kLanes, load(total + j * kLanes) + (sum[0] + sum[1]));
  }
}

INLINE void add_squares(const float* weights, int begin, int end, RowState& state) {
  add_terms(weights, begin, end, state.squares, [](Vec w, int, int) { return w; });
}

INLINE void add_distances(const float* weights, int begin, int end, const float* row_offset,
                          const float* key_offset, RowState& state) {
  add_terms(weights, begin, end, state.distance, [=](Vec, int k, int j) {
    return abs(load(row_offset + j * kLanes) - set1(key_offset[k]));
  });
}

}  // namespace
}  // namespace multihead
