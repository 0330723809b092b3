// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/prepared.h"
#include "quantize/block_cast.h"
#include "quantize/quantize.h"

namespace ted {
namespace {

// A copy's codes and scales: both or neither.
void require_copy(const char* codes_name, const void* codes, const char* scales_name, const void* scales, int64_t count,
                  int64_t scale_size) {
  if (codes == nullptr && scales == nullptr) return;
  require_pointer(codes_name, codes, count, 1);
  require_pointer(scales_name, scales, count, scale_size);
}

// Memory that a call works in, cut into pieces of whole 16 bytes.
struct Workspace {
  float* next;
  int64_t left;  // floats

  float* take(int64_t floats) {
    floats = ceil_div(floats, 4) * 4;
    if (floats > left)
      throw std::invalid_argument("workspace: got " + std::to_string(left) + " floats too few for " +
                                  std::to_string(floats));
    left -= floats;
    float* taken = next;
    next += floats;
    return taken;
  }
};

bool fuses(int form, int x_encoding, int scaling) {
  return form == kPlain || ((scaling == kBlock1D || scaling == kMXFP8) && x_encoding < 0);
}

// The values of a source, in fp32.
SourceArguments materialized(const Queue& queue, const SourceArguments& source, const float* noop, float* values) {
  CastArguments arguments{};
  arguments.cast.out = values;
  arguments.cast.noop = noop;
  check_cast(source, arguments);
  (source.form == kForward ? cast_forward : cast_backward)(queue, source, arguments);
  SourceArguments plain{};
  plain.rows = source.rows, plain.columns = plain.stride = source.columns;
  plain.x = reinterpret_cast<uintptr_t>(values);
  plain.x_encoding = -1;
  return plain;
}

void launch(const Queue& queue, const SourceArguments& source, int scaling, const BlockCast& cast, float* maxima) {
  if (source.form == kForward)
    forward_block_cast(queue, source, scaling, cast);
  else if (source.form == kBackward)
    backward_block_cast(queue, source, scaling, cast);
  else if (scaling == kBlock1D)
    block_1d_cast(queue, source, cast);
  else if (scaling == kBlock2D)
    block_2d_cast(queue, source, cast);
  else if (scaling == kMXFP8)
    mxfp8_cast(queue, source, cast);
  else
    nvfp4_cast(queue, source, cast, maxima);
}

void check_options(const SourceArguments& source, int scaling, int code, int out_dtype) {
  const int encoding = code & ~kCommon;
  if (source.form < kPlain || source.form > kBackward)
    throw std::invalid_argument("form: got " + std::to_string(source.form) + ", expected 0, 1 or 2");
  if (scaling < kBlock1D || scaling > kNVFP4)
    throw std::invalid_argument("scaling: got code " + std::to_string(scaling) + ", expected 1 to 4");
  if (scaling == kNVFP4 ? encoding != kE2M1 : encoding < kE4M3 || encoding > kE5M2FNUZ)
    throw std::invalid_argument("cast: got code " + std::to_string(code) + " with scaling " + std::to_string(scaling));
  if (out_dtype < kFloat32 || out_dtype > kFloat16)
    throw std::invalid_argument("out: got dtype code " + std::to_string(out_dtype) + ", expected 0, 1 or 2");
}

// (device, stream), a source (te_dispatch_cuda/sources.py), a cast (te_dispatch_cuda/blocks.py). Addresses may be 0.
// `workspace` has, each rounded up to 4 floats: kMaxima where nvfp4's amax is not given, sums_rows(rows) * columns
// where there is a dbias, rows * columns where the source does not fuse.
void block_cast(int device, uintptr_t stream, int form, int dtype, int64_t rows, int64_t columns, uintptr_t x,
                int64_t stride, uintptr_t dy, int kind, float limit, float alpha, int x_encoding, uintptr_t x_scale_inv,
                int scaling, int code, uintptr_t row, uintptr_t row_scale_inv, uintptr_t column,
                uintptr_t column_scale_inv, uintptr_t global_scale_inv, uintptr_t amax, uintptr_t noop, uintptr_t out,
                int out_dtype, float epsilon, bool power_of_two, bool two_d, uintptr_t dbias, int dbias_dtype,
                uintptr_t workspace, int64_t workspace_size) {
  const Queue queue(device, stream);
  SourceArguments source{form, dtype, rows, columns, x, stride, dy, kind, limit, alpha, x_encoding, x_scale_inv};
  const bool for_products = take_for_products(scaling);
  const int64_t count = require_count("x", rows, columns);
  check_options(source, scaling, code, out_dtype);

  BlockCast cast{};
  cast.row = pointer<uint8_t>(row), cast.column = pointer<uint8_t>(column);
  cast.row_scale_inv = pointer<void>(row_scale_inv), cast.column_scale_inv = pointer<void>(column_scale_inv);
  cast.noop = pointer<float>(noop);
  cast.out = pointer<void>(out), cast.out_dtype = out_dtype;
  cast.cast = code, cast.epsilon = epsilon, cast.power_of_two = power_of_two, cast.two_d = two_d;
  cast.for_products = for_products;
  const int64_t scale_size = scaling == kMXFP8 || scaling == kNVFP4 ? 1 : 4;
  require_copy("row_data", cast.row, "row_scale_inv", cast.row_scale_inv, count, scale_size);
  require_copy("col_data", cast.column, "col_scale_inv", cast.column_scale_inv, count, scale_size);
  require_pointer("noop_flag", cast.noop, 0, 4);
  require_pointer("out", cast.out, 0, size_of(out_dtype));
  require_pointer("workspace", pointer<void>(workspace), 0, 16);
  Workspace space{pointer<float>(workspace), workspace == 0 ? 0 : workspace_size};
  float* maxima = nullptr;
  if (scaling == kNVFP4) {
    cast.global_scale_inv = pointer<float>(global_scale_inv);
    require_pointer("global_scale_inv", cast.global_scale_inv, 1, 4);
    cast.maxima = pointer<float>(amax), cast.maxima_count = 1;
    require_pointer("amax", cast.maxima, 0, 4);
    if (amax == 0) maxima = space.take(kMaxima);
  }
  if (dbias != 0) cast.sums = space.take(sums_rows(rows) * columns);
  if (!fuses(form, x_encoding, scaling)) source = materialized(queue, source, cast.noop, space.take(count));
  launch(queue, source, scaling, cast, maxima);
  if (dbias != 0) launch_sums(queue, cast.sums, sums_rows(rows), columns, pointer<void>(dbias), dbias_dtype);
  queue.launched("block_cast");
}

}  // namespace

static Bindings block_casts(+[](pybind11::module_& m) { define<&block_cast>(m, "block_cast"); });

}  // namespace ted
