// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The forward operators: which kernels a call takes.
//
// One pass over x where every result follows from its own row: no cast, and delayed casts. Else a pass that leaves
// statistics (and the amax of y, where scales need it), then a cast that makes y again from x.
#include "cast/blocks.h"
#include "cast/tensor.h"
#include "norm/arguments.h"
#include "norm/forward.cuh"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

// The workspace: an amax, then gamma and beta as floats (Normalized).
constexpr int64_t kAmaxFloats = 4;
int64_t padded(int64_t columns) { return ceil_div(columns, kPreparedMultiple) * kPreparedMultiple; }

int vector_bytes(int64_t elements, int dtype) {
  return static_cast<int>(std::min<int64_t>(elements * size_of(dtype), 16));
}

Operand weight(const char* name, uintptr_t address, int dtype, int64_t columns, int64_t vector) {
  require_dtype(name, dtype);
  const void* data = pointer<void>(address);
  require_pointer(name, data, columns, size_of(dtype));
  return {data, dtype, is_aligned(data, 0, vector_bytes(vector, dtype))};
}

Forward forward_of(const ForwardArguments& f) {
  require_dtype("x", f.x_dtype);
  require_dtype("y", f.y_dtype);
  const int64_t count = require_count("x", f.rows, f.columns);
  const int64_t width = size_of(f.x_dtype), vector = 16 / width;
  require_pointer("x", pointer<void>(f.x), count, width);
  require_pointer("residual", pointer<void>(f.residual), 0, width);
  require_pointer("residual_out", pointer<void>(f.residual_out), f.residual != 0 ? count : 0, width);
  require_pointer("mean", pointer<void>(f.mean), 0, 4);
  require_pointer("rstd", pointer<void>(f.rstd), f.rows, 4);
  require_pointer("y", pointer<void>(f.y), 0, size_of(f.y_dtype));
  Forward a{};
  a.x = pointer<void>(f.x), a.residual = pointer<void>(f.residual), a.residual_out = pointer<void>(f.residual_out);
  a.mean = pointer<float>(f.mean), a.rstd = pointer<float>(f.rstd);
  a.affine.gamma = weight("gamma", f.gamma, f.gamma_dtype, f.columns, vector);
  if (f.beta != 0) a.affine.beta = weight("beta", f.beta, f.beta_dtype, f.columns, vector);
  a.affine.zero_centered = f.zero_centered;
  a.y = {pointer<void>(f.y), f.y_dtype,
         is_aligned(pointer<void>(f.y), f.columns * size_of(f.y_dtype), vector_bytes(vector, f.y_dtype))};
  a.rows = f.rows, a.columns = f.columns, a.eps = f.eps;
  a.inverse_columns = static_cast<float>(1.0 / static_cast<double>(std::max<int64_t>(f.columns, 1)));
  a.aligned = is_aligned(a.x, f.columns * width) && is_aligned(a.residual, 0) && is_aligned(a.residual_out, 0);
  return a;
}

void one_pass(const Queue& q, const Forward& a, int x_dtype) {
  if (a.columns * size_of(x_dtype) <= kForwardBytes && a.whole())
    forward_in_registers(q, a, x_dtype);
  else
    forward_streaming(q, a, x_dtype);
}

// What is left to cast after `statistics`.
Normalized normalized_of(const Forward& a, uintptr_t workspace) {
  const float* factor = pointer<float>(workspace) + kAmaxFloats;
  const void* x = a.residual != nullptr ? a.residual_out : a.x;
  return {x, a.mean, a.rstd, factor, factor + padded(a.columns), a.rows, a.columns};
}

// The statistics, and max |y| in the workspace's first float where that is wanted.
Normalized statistics(const Queue& q, Forward a, int x_dtype, uintptr_t workspace, bool with_amax) {
  float* floats = pointer<float>(workspace);
  a.y.data = nullptr;
  a.cast = {};
  a.prepared = {floats + kAmaxFloats, floats + kAmaxFloats + padded(a.columns)};
  if (with_amax) {
    check(cudaMemsetAsync(floats, 0, sizeof(float), q.stream()), "norm_forward");
    a.cast.amax = floats;
  }
  if (statistics_fit(a, x_dtype))
    forward_statistics(q, a, x_dtype);
  else
    one_pass(q, a, x_dtype);
  return normalized_of(a, workspace);
}

void require_cast(const CastArguments& c, uintptr_t workspace, const Forward& a) {
  if (c.scaling < kNoCast || c.scaling > kOfBlocks + kNVFP4)
    throw std::invalid_argument("scaling: got code " + std::to_string(c.scaling) + ", expected 0 to 6");
  if (c.row == 0 && c.column == 0 && a.rows * a.columns > 0)
    throw std::invalid_argument("row_data: got null, and col_data too, expected at least one of them");
  const bool blocks = c.scaling > kOfBlocks, floats = c.scaling <= kOfBlocks + kBlock2D;
  require_pointer("scale_inv", pointer<void>(c.row_scale_inv), blocks ? 0 : 1, floats ? 4 : 1);
  require_pointer("scale_inv", pointer<void>(c.column_scale_inv), 0, floats ? 4 : 1);
  require_pointer("scale", pointer<void>(c.scale), c.scaling == kDelayed ? 1 : 0, 4);
  require_pointer("amax", pointer<void>(c.amax), 0, 4);
  require_pointer("global_scale_inv", pointer<void>(c.global_scale_inv), c.scaling == kOfBlocks + kNVFP4 ? 1 : 0, 4);
  require_pointer("workspace", pointer<void>(workspace), c.scaling == kDelayed && c.column == 0 ? 0 : 1, 16);
}

// A cast whose scale is known when it begins: one pass, but for columns that forward_tiles does not serve. Where the
// statistics are known too, nothing is left that wants whole rows, and the tiles of other casts are faster.
void cast_known(const Queue& q, Forward a, int x_dtype, const CastArguments& c, uintptr_t workspace) {
  a.cast.codes = pointer<uint8_t>(c.row), a.cast.transposed = pointer<uint8_t>(c.column);
  a.cast.scale_inv = pointer<float>(c.row_scale_inv);
  a.cast.format = format_of(c.cast), a.cast.mode = encode_mode(c.cast);
  a.cast.aligned = is_aligned(a.cast.codes, a.columns, static_cast<int>(16 / size_of(x_dtype)));
  if (c.column == 0) return one_pass(q, a, x_dtype);
  if (!a.known && tiles_fit(a, x_dtype, q.limits())) return forward_tiles(q, a, x_dtype);
  TensorCast cast{};
  cast.row = a.cast.codes, cast.column = a.cast.transposed, cast.out = a.y.data, cast.out_dtype = a.y.dtype;
  cast.cast = c.cast, cast.scale = a.cast.scale, cast.maxima = a.cast.maximum, cast.maxima_count = 1;
  cast.epsilon = c.epsilon, cast.power_of_two = c.power_of_two;
  cast.amax = a.cast.amax, cast.row_scale_inv = a.cast.scale_inv;
  const Normalized made = a.known ? normalized_of(a, workspace) : statistics(q, a, x_dtype, workspace, false);
  cast_tensor(q, made, x_dtype, cast);
}

void delayed(const Queue& q, Forward a, int x_dtype, const CastArguments& c, uintptr_t workspace) {
  a.cast.scale = pointer<float>(c.scale), a.cast.amax = pointer<float>(c.amax);
  cast_known(q, a, x_dtype, c, workspace);
}

// The amax of y first; then x again with the statistics of the first pass, so that y has the same bits.
void current(const Queue& q, Forward a, int x_dtype, const CastArguments& c, uintptr_t workspace) {
  const Normalized first = statistics(q, a, x_dtype, workspace, true);
  a.x = first.x, a.residual = nullptr, a.residual_out = nullptr;
  a.known = true, a.backwards = true;
  a.cast.maximum = pointer<float>(workspace), a.cast.epsilon = c.epsilon, a.cast.power_of_two = c.power_of_two;
  cast_known(q, a, x_dtype, c, workspace);
}

void blocks(const Queue& q, const Forward& a, int x_dtype, const CastArguments& c, uintptr_t workspace) {
  const bool fp4 = c.scaling == kOfBlocks + kNVFP4;
  BlockCast cast{};
  cast.row = pointer<uint8_t>(c.row), cast.column = pointer<uint8_t>(c.column);
  cast.row_scale_inv = pointer<void>(c.row_scale_inv), cast.column_scale_inv = pointer<void>(c.column_scale_inv);
  cast.out = a.y.data, cast.out_dtype = a.y.dtype, cast.cast = c.cast;
  cast.epsilon = c.epsilon, cast.power_of_two = c.power_of_two, cast.two_d = c.two_d;
  cast.for_products = c.for_products;
  if (fp4) {
    cast.global_scale_inv = pointer<float>(c.global_scale_inv);
    cast.maxima = pointer<float>(workspace), cast.maxima_count = 1;
  }
  cast_blocks(q, statistics(q, a, x_dtype, workspace, fp4), x_dtype, c.scaling - kOfBlocks, cast);
}

}  // namespace

void norm_forward(int device, uintptr_t stream, const ForwardArguments& f, const CastArguments& c,
                  uintptr_t workspace) {
  const Forward a = forward_of(f);
  if (c.scaling == kNoCast)
    require_pointer("y", a.y.data, a.rows * a.columns, 1);
  else
    require_cast(c, workspace, a);
  Queue q(device, stream);
  if (a.columns == 0) return;
  if (c.scaling == kNoCast) {
    if (a.rows > 0) one_pass(q, a, f.x_dtype);
  } else if (c.scaling == kDelayed) {
    delayed(q, a, f.x_dtype, c, workspace);
  } else if (c.scaling == kCurrent) {
    current(q, a, f.x_dtype, c, workspace);
  } else {
    blocks(q, a, f.x_dtype, c, workspace);
  }
  q.launched("norm_forward");
}

}  // namespace ted::norm
