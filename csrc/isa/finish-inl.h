// The end of a row: the learned sink joins, the output is divided, the statistics are written.
#pragma once

namespace multihead {
namespace {

INLINE float size_of_scale(const ForwardArgs& a) {
  return static_cast<float>(a.scale < 0 ? -a.scale : a.scale);
}

// Whether scores are turned into logits before the softmax: where a logit is more than a scaled
// product, and for scale 0, since a hidden key's -inf must not be multiplied with it.
INLINE bool makes_logits(const ForwardArgs& a) {
  return a.softcap > 0 || a.bias.data || a.slopes || size_of_scale(a) == 0;
}

// A score in natural logarithms.
INLINE double logit_of(const ForwardArgs& a, float score) {
  return makes_logits(a) ? score : score * static_cast<double>(size_of_scale(a));
}

// max(m, sink), and l with the sink's term; a row without keys has l = 0.
struct RowEnd {
  double max, sum;     // natural log units, sink included
  double key_share;    // e^(m_keys - max)
  double lse;
};

INLINE RowEnd end_row(const ForwardArgs& a, const RowState& state, int r, bool has_sink,
                      double sink) {
  const double l = state.sum[r];
  const bool empty = l == 0;
  double m = empty ? -__builtin_inf() : logit_of(a, state.max[r]);
  RowEnd end{m, l, 1.0, 0.0};
  if (has_sink && !(sink == -__builtin_inf() && empty)) {
    end.max = m > sink ? m : sink;
    end.key_share = empty ? 0.0 : __builtin_exp(m - end.max);
    end.sum = l * end.key_share + __builtin_exp(sink - end.max);
  }
  end.lse = end.sum == 0 ? -__builtin_inf() : end.max + __builtin_log(end.sum);
  return end;
}

INLINE void write_statistics(const ForwardArgs& a, int64_t index, const RowState& state, int r,
                             const RowEnd& end, bool has_sink, double sink) {
  const Statistics& to = a.statistics;
  const bool is_nan = end.sum != end.sum;
  const bool empty = state.sum[r] == 0;
  const double nan = __builtin_nan("");
  const double l = state.sum[r];
  const double m = logit_of(a, state.max[r]);
  const auto write = [index, is_nan, nan](float* p, double x) {
    if (p) p[index] = static_cast<float>(is_nan ? nan : x);
  };
  write(to.lse, end.lse);
  if (to.entropy) {
    double entropy = empty ? 0.0 : __builtin_log(l) - state.shifted[r] * kLn2 / l;
    if (has_sink && !empty) {
      // Of the whole softmax: the keys' share of it, and the sink as one more outcome.
      // Logits are taken from the largest outcome, not from lse, in which a large one drowns log l.
      const double log_sum = __builtin_log(end.sum);
      const double keys = end.key_share / end.sum;
      const double s = __builtin_exp(sink - end.max) / end.sum;
      entropy = -(s > 0 ? s * (sink - end.max - log_sum) : 0.0);
      if (keys > 0)
        entropy -= state.shifted[r] * kLn2 * keys + l * keys * (m - end.max - log_sum);
    }
    write(to.entropy, entropy > 0 ? entropy : 0.0);
  }
  write(to.max_logit, empty ? -__builtin_inf() : m);
  if (to.max_qk) {
    const double largest = makes_logits(a) ? state.max_product[r] * size_of_scale(a) : m;
    write(to.max_qk, empty ? -__builtin_inf() : largest);
  }
  write(to.max_weight, empty ? 0.0 : end.key_share / end.sum);
  write(to.mean_distance, empty ? 0.0 : state.distance[r] / l);
  write(to.sink_mass, empty ? 0.0 : state.first_key[r] / l);
  write(to.participation, empty ? 0.0 : l * l / state.squares[r]);
  if (to.argmax) to.argmax[index] = is_nan || empty ? -1 : state.argmax[r];
}

// strip[:] = factor * O[r, :] from O^T [Dv, tile], whose square blocks are turned in place first: a
// walk down a column for each row took 8 % of a causal 1024 call.
INLINE void turn_blocks(float* out, int64_t value_dim) {
  for (int64_t d = 0; d < value_dim; d += kLanes)
    UNROLL for (int j = 0; j < kTileVectors; ++j) {
      float* block = out + d * kTile + j * kLanes;
      Vec x[kLanes];
      UNROLL for (int i = 0; i < kLanes; ++i) x[i] = load(block + i * kTile);
      transpose(x);
      UNROLL for (int i = 0; i < kLanes; ++i) store(block + i * kTile, x[i]);
    }
}
INLINE void read_row(const float* out, int64_t value_dim, int r, float factor, float* strip) {
  const float* row = out + r % kLanes * kTile + r / kLanes * kLanes;
  for (int64_t d = 0; d < value_dim; d += kLanes)
    store(strip + d, load(row + d * kTile) * set1(factor));
}

// Writes the tile's rows; read(r, factor, strip) gives strip[:] = factor * O[r, :].
template <class Read>
INLINE void finish_rows(const ForwardArgs& a, int64_t b, const TileRows& rows,
                        const RowState& state, float* strip, Read read) {
  const Statistics& to = a.statistics;
  const bool wants = to.lse || to.entropy || to.max_logit || to.max_qk || to.max_weight ||
                     to.mean_distance || to.sink_mass || to.participation || to.argmax;
  const bool has_sink = a.sinks != nullptr;
  for (int r = 0; r < rows.count; ++r) {
    const int64_t h = rows.head[r], query = rows.query[r];
    float factor = state.sum[r] == 0 ? 0.0f : 1.0f / state.sum[r];
    if (has_sink || wants) {
      const double sink = has_sink ? a.sinks[h] : 0.0;
      const RowEnd end = end_row(a, state, r, has_sink, sink);
      if (has_sink) factor = end.sum == 0 ? 0.0f : static_cast<float>(end.key_share / end.sum);
      if (wants)
        write_statistics(a, (b * a.heads + h) * a.query_length + query, state, r, end, has_sink,
                         sink);
    }
    read(r, factor, strip);
    write_floats(a.dtype, a.out, offset_of(a.out_strides, b, h, query), a.out_strides[3],
                 a.value_dim, strip);
  }
}

}  // namespace
}  // namespace multihead
