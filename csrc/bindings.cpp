// The Python module multihead._native: plain functions that take addresses, sizes and strides.
// Nothing is checked here; multihead/ops/backends/native.py describes valid calls only.

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <new>
#include <optional>
#include <vector>

#include "dispatch.h"

namespace nb = nanobind;

namespace {

using namespace multihead;

typedef std::array<int64_t, 4> Strides;
typedef std::array<int64_t, 5> View;        // address and four strides
typedef std::array<int64_t, 2> RowsView;    // address and batch stride
typedef std::array<int64_t, 2> Number;      // value, address or 0

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

Tensor4 tensor(int64_t address, const Strides& strides) {
  return {pointer<const void>(address), {strides[0], strides[1], strides[2], strides[3]}};
}
Tensor4 tensor(const View& view) {
  return tensor(view[0], {view[1], view[2], view[3], view[4]});
}
Tensor4 tensor(const std::optional<View>& view) { return view ? tensor(*view) : Tensor4{}; }
Rows rows(const std::optional<RowsView>& view) {
  return view ? Rows{pointer<const int32_t>((*view)[0]), (*view)[1]} : Rows{};
}
Integers integers(const Number& number) {
  return {pointer<const int32_t>(number[1]), static_cast<int32_t>(number[0])};
}
Integers integers(const std::optional<Number>& number) {
  return number ? integers(*number) : Integers{};
}

void construct_mask(Mask* self, const Number& start, const Number& first,
                    std::optional<Number> left, std::optional<Number> right,
                    const Number& keep_first, const Number& prefix, int64_t key_lengths,
                    int64_t query_lengths, std::optional<RowsView> key_visible,
                    std::optional<RowsView> query_ids, std::optional<RowsView> key_ids,
                    std::optional<RowsView> query_positions,
                    std::optional<RowsView> key_positions,
                    std::optional<std::array<int64_t, 4>> ranges, std::optional<View> dense) {
  Mask* mask = new (self) Mask{};
  mask->start = integers(start);
  mask->first = integers(first);
  mask->has_left = left.has_value();
  mask->left = integers(left);
  mask->has_right = right.has_value();
  mask->right = integers(right);
  mask->keep_first = integers(keep_first);
  mask->prefix = integers(prefix);
  mask->key_lengths = pointer<const int32_t>(key_lengths);
  mask->query_lengths = pointer<const int32_t>(query_lengths);
  if (key_visible) {
    mask->key_visible = pointer<const uint8_t>((*key_visible)[0]);
    mask->key_visible_batch_stride = (*key_visible)[1];
  }
  mask->query_ids = rows(query_ids);
  mask->key_ids = rows(key_ids);
  mask->query_positions = rows(query_positions);
  mask->key_positions = rows(key_positions);
  if (ranges) {
    mask->ranges = pointer<const int32_t>((*ranges)[0]);
    mask->range_count = (*ranges)[1];
    mask->ranges_batch_stride = (*ranges)[2];
    mask->ranges_head_stride = (*ranges)[3];
  }
  mask->dense = tensor(dense);
}

typedef std::array<int64_t, 4> ScalesView;  // address and three strides

Scales scales(const std::optional<ScalesView>& view) {
  if (!view) return {};
  return {pointer<const float>((*view)[0]), {(*view)[1], (*view)[2], (*view)[3]}};
}

void construct_held(Held* self, Dtype dtype, std::optional<std::array<int64_t, 3>> pages,
                    const std::optional<ScalesView>& key_scale,
                    const std::optional<ScalesView>& value_scale) {
  Held* held = new (self) Held{};
  held->dtype = dtype;
  if (pages) held->pages = {pointer<const int32_t>((*pages)[0]), (*pages)[1], (*pages)[2]};
  held->key_scale = scales(key_scale);
  held->value_scale = scales(value_scale);
}

void call(Dtype dtype, const std::array<int64_t, 7>& sizes, int64_t query,
          const Strides& query_strides, int64_t key, const Strides& key_strides, int64_t value,
          const Strides& value_strides, int64_t out, const Strides& out_strides, double scale,
          double softcap, int64_t sinks, int64_t slopes, const std::optional<View>& bias,
          Dtype bias_dtype, const Mask& mask, const std::array<int64_t, 9>& statistics,
          const std::array<int64_t, 3>& map, const Held* held, int threads) {
  ForwardArgs args{};
  args.dtype = dtype;
  args.held.dtype = dtype;
  if (held) args.held = *held;
  args.batch = sizes[0];
  args.heads = sizes[1];
  args.kv_heads = sizes[2];
  args.query_length = sizes[3];
  args.key_length = sizes[4];
  args.head_dim = sizes[5];
  args.value_dim = sizes[6];
  args.query = tensor(query, query_strides);
  args.key = tensor(key, key_strides);
  args.value = tensor(value, value_strides);
  args.out = pointer<void>(out);
  for (int i = 0; i < 4; ++i) args.out_strides[i] = out_strides[i];
  args.scale = scale;
  args.softcap = softcap;
  args.sinks = pointer<const float>(sinks);
  args.slopes = pointer<const float>(slopes);
  args.bias = tensor(bias);
  args.bias_dtype = bias_dtype;
  args.mask = mask;
  args.statistics = {
      pointer<float>(statistics[0]), pointer<float>(statistics[1]), pointer<float>(statistics[2]),
      pointer<float>(statistics[3]), pointer<float>(statistics[4]), pointer<float>(statistics[5]),
      pointer<float>(statistics[6]), pointer<float>(statistics[7]),
      pointer<int64_t>(statistics[8])};
  args.map = {map[0], map[1], pointer<float>(map[2])};
  nb::gil_scoped_release released;
  forward(args, threads);
}

void sweep_call(Dtype dtype, const std::array<int64_t, 6>& sizes, const View& query,
                const View& key, double scale, double softcap, int64_t slopes,
                std::optional<View> bias, Dtype bias_dtype, const Mask& mask, int64_t lse,
                const std::vector<int64_t>& edges, int64_t sums, int64_t peaks,
                const std::array<int64_t, 2>& mask_shape, int64_t viewers, int64_t seeing,
                int threads) {
  SweepArgs args{};
  args.call.dtype = dtype;
  args.call.batch = sizes[0];
  args.call.heads = sizes[1];
  args.call.kv_heads = sizes[2];
  args.call.query_length = sizes[3];
  args.call.key_length = sizes[4];
  args.call.head_dim = sizes[5];
  args.call.query = tensor(query);
  args.call.key = tensor(key);
  args.call.scale = scale;
  args.call.softcap = softcap;
  args.call.slopes = pointer<const float>(slopes);
  args.call.bias = tensor(bias);
  args.call.bias_dtype = bias_dtype;
  args.call.mask = mask;
  args.lse = pointer<const float>(lse);
  args.edges = edges.data();
  args.bins = static_cast<int64_t>(edges.size()) - 1;
  args.sums = pointer<float>(sums);
  args.peaks = pointer<float>(peaks);
  args.mask_batch = mask_shape[0];
  args.mask_heads = mask_shape[1];
  args.viewers = pointer<int64_t>(viewers);
  args.seeing = pointer<uint8_t>(seeing);
  nb::gil_scoped_release released;
  sweep(args, threads);
}

void rotate_call(Dtype dtype, const std::array<int64_t, 5>& sizes, int64_t x,
                 const Strides& x_strides, int64_t out, const Strides& out_strides, int64_t cos,
                 int64_t sin, int64_t angles_batch_stride, int threads) {
  RotateArgs args{};
  args.dtype = dtype;
  args.batch = sizes[0];
  args.heads = sizes[1];
  args.length = sizes[2];
  args.head_dim = sizes[3];
  args.pairs = sizes[4];
  args.x = tensor(x, x_strides);
  args.out = pointer<void>(out);
  for (int i = 0; i < 4; ++i) args.out_strides[i] = out_strides[i];
  args.cos = pointer<const float>(cos);
  args.sin = pointer<const float>(sin);
  args.angles_batch_stride = angles_batch_stride;
  nb::gil_scoped_release released;
  rotate(args, threads);
}

}  // namespace

NB_MODULE(_native, m) {
  using namespace nb::literals;
  nb::enum_<Dtype>(m, "Dtype")
      .value("float32", Dtype::float32)
      .value("bfloat16", Dtype::bfloat16)
      .value("float16", Dtype::float16)
      .value("float64", Dtype::float64)
      .value("int8", Dtype::int8);
  nb::class_<Mask>(m, "Mask")
      .def("__init__", construct_mask,
           nb::kw_only(), "start"_a, "first"_a, "left"_a.none(), "right"_a.none(), "keep_first"_a,
           "prefix"_a, "key_lengths"_a, "query_lengths"_a, "key_visible"_a.none(),
           "query_ids"_a.none(), "key_ids"_a.none(), "query_positions"_a.none(),
           "key_positions"_a.none(), "ranges"_a.none(), "dense"_a.none());
  nb::class_<Held>(m, "Held")
      .def("__init__", construct_held, nb::kw_only(), "dtype"_a, "pages"_a.none(),
           "key_scale"_a.none(), "value_scale"_a.none());
  m.def("forward", call, "dtype"_a, "sizes"_a, "query"_a, "query_strides"_a, "key"_a,
        "key_strides"_a, "value"_a, "value_strides"_a, "out"_a, "out_strides"_a, "scale"_a,
        "softcap"_a, "sinks"_a, "slopes"_a, "bias"_a.none(), "bias_dtype"_a, "mask"_a,
        "statistics"_a, "map"_a, "held"_a.none(), "threads"_a);
  m.def("sweep", sweep_call, nb::kw_only(), "dtype"_a, "sizes"_a, "query"_a, "key"_a, "scale"_a,
        "softcap"_a, "slopes"_a, "bias"_a.none(), "bias_dtype"_a, "mask"_a, "lse"_a, "edges"_a,
        "sums"_a, "peaks"_a, "mask_shape"_a, "viewers"_a, "seeing"_a, "threads"_a);
  m.def("rotate", rotate_call, "dtype"_a, "sizes"_a, "x"_a, "x_strides"_a, "out"_a,
        "out_strides"_a, "cos"_a, "sin"_a, "angles_batch_stride"_a, "threads"_a);
  m.def("instruction_sets", instruction_sets);
  m.def("use_instruction_set", use_instruction_set, "name"_a);
  m.def("decodes", decodes, "dtype"_a, "heads"_a, "kv_heads"_a, "query_length"_a);
  m.def("use_decoder", use_decoder, "on"_a);
  m.def("instruction_set_for", instruction_set_for, "dtype"_a);
  m.def("peak", peak, "kind"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
  m.attr("BUILD") = MULTIHEAD_BUILD;
  m.attr("SETS") = MULTIHEAD_SETS;
  m.attr("SETS_LEFT_OUT") = MULTIHEAD_SETS_LEFT_OUT;
}
