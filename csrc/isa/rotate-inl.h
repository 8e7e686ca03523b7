// Rotary positions: the first 2 `pairs` lanes of each row turned, lane i with lane i + pairs.
#pragma once

namespace multihead {
namespace {

// Pairs that one step takes through the buffers.
constexpr int kStrip = 64;

// One strip of a token's angles, read once for all heads.
struct Angles {
  alignas(64) float cos[kStrip], sin[kStrip];
};

// x and y turned in place. A product and a multiply-add each, rounded as torch's addcmul rounds.
INLINE void turn(const Angles& angles, int64_t n, const float* x, const float* y, float* to_x,
                 float* to_y) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec a = load(x + i), b = load(y + i);
    const Vec cos = load(angles.cos + i), sin = load(angles.sin + i);
    store(to_x + i, fma(b, -sin, a * cos));
    store(to_y + i, fma(a, sin, b * cos));
  }
}

// Lanes that do not turn keep their bits.
INLINE void copy_lanes(const RotateArgs& a, int64_t from, int64_t to) {
  const int64_t step = a.x.strides[3], to_step = a.out_strides[3];
  for (int64_t d = 2 * a.pairs; d < a.head_dim; ++d) {
    if (element_bytes(a.dtype) == 4)
      static_cast<uint32_t*>(a.out)[to + d * to_step] =
          static_cast<const uint32_t*>(a.x.data)[from + d * step];
    else
      static_cast<uint16_t*>(a.out)[to + d * to_step] =
          static_cast<const uint16_t*>(a.x.data)[from + d * step];
  }
}

// The tokens from `begin` to `end` of one batch row, in all heads.
void rotate(const RotateArgs& a, int64_t batch, int64_t begin, int64_t end) {
  const int64_t step = a.x.strides[3], to_step = a.out_strides[3];
  const bool in_place = a.dtype == Dtype::float32 && step == 1 && to_step == 1;
  Angles angles = {};
  alignas(64) float x[kStrip] = {}, y[kStrip] = {};
  for (int64_t token = begin; token < end; ++token) {
    const int64_t row = batch * a.angles_batch_stride + token * a.pairs;
    for (int64_t pair = 0; pair < a.pairs; pair += kStrip) {
      const int64_t n = a.pairs - pair < kStrip ? a.pairs - pair : kStrip;
      for (int64_t i = 0; i < n; ++i) angles.cos[i] = a.cos[row + pair + i];
      for (int64_t i = 0; i < n; ++i) angles.sin[i] = a.sin[row + pair + i];
      for (int64_t head = 0; head < a.heads; ++head) {
        const int64_t from = offset_of(a.x.strides, batch, head, token) + pair * step;
        const int64_t to = offset_of(a.out_strides, batch, head, token) + pair * to_step;
        const int64_t second = a.pairs * step, to_second = a.pairs * to_step;
        if (in_place && n % kLanes == 0) {
          const float* p = static_cast<const float*>(a.x.data) + from;
          float* q = static_cast<float*>(a.out) + to;
          turn(angles, n, p, p + second, q, q + to_second);
          continue;
        }
        read_floats(a.dtype, a.x.data, from, step, n, x);
        read_floats(a.dtype, a.x.data, from + second, step, n, y);
        turn(angles, n, x, y, x, y);
        write_floats(a.dtype, a.out, to, to_step, n, x);
        write_floats(a.dtype, a.out, to + to_second, to_step, n, y);
      }
    }
    if (2 * a.pairs < a.head_dim)
      for (int64_t head = 0; head < a.heads; ++head)
        copy_lanes(a, offset_of(a.x.strides, batch, head, token),
                   offset_of(a.out_strides, batch, head, token));
  }
}

}  // namespace
}  // namespace multihead
