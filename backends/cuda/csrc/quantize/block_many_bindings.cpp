// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/bindings.h"
#include "quantize/block_many.h"

#include <pybind11/stl.h>

namespace ted {
namespace {

// (x, rows, columns, stride, row, row_scale_inv, column, column_scale_inv, global_scale_inv, scale, amax, cast,
// power_of_two, two_d, for_products); te_dispatch_cuda/quantize_many.py builds them.
using Entry = std::array<uintptr_t, 15>;

ManyCast cast_of(const Entry& e, float epsilon, int scaling, int dtype) {
  const ManyCast c{pointer<void>(e[0]),
                   static_cast<int64_t>(e[1]),
                   static_cast<int64_t>(e[2]),
                   static_cast<int64_t>(e[3]),
                   pointer<uint8_t>(e[4]),
                   pointer<uint8_t>(e[6]),
                   pointer<void>(e[5]),
                   pointer<void>(e[7]),
                   pointer<float>(e[8]),
                   pointer<float>(e[9]),
                   pointer<float>(e[10]),
                   epsilon,
                   static_cast<int>(e[11]),
                   e[12] != 0,
                   e[13] != 0,
                   e[14] != 0};
  const int64_t count = require_count("xs", c.rows, c.columns);
  const int64_t size = scaling == kMXFP8 || scaling == kNVFP4 ? 1 : 4;
  const int encoding = c.cast & ~kCommon;
  if (scaling == kNVFP4 ? encoding != kE2M1 : encoding < kE4M3 || encoding > kE5M2FNUZ)
    throw std::invalid_argument("quantizers: got cast code " + std::to_string(c.cast) + " with scaling " +
                                std::to_string(scaling));
  require_pointer("xs", c.x, count, size_of(dtype));
  require_pointer("row_data", c.row, c.row_scale_inv != nullptr ? count : 0, 1);
  require_pointer("row_scale_inv", c.row_scale_inv, c.row != nullptr && scaling != kTensor ? count : 0, size);
  require_pointer("col_data", c.column, 0, 1);
  require_pointer("col_scale_inv", c.column_scale_inv, c.column != nullptr && scaling != kTensor ? count : 0, size);
  require_pointer("global_scale_inv", c.global_scale_inv, scaling == kNVFP4 ? 1 : 0, 4);
  require_pointer("quantizers.scale", c.scale, 0, 4);
  require_pointer("quantizers.amax", c.amax, 0, 4);
  return c;
}

void cast_many(int device, uintptr_t stream, int scaling, int dtype, const std::vector<Entry>& entries,
               const std::vector<float>& epsilons, uintptr_t maxima) {
  const Queue queue(device, stream);
  if (scaling < kTensor || scaling > kNVFP4)
    throw std::invalid_argument("scaling: got code " + std::to_string(scaling) + ", expected 0 to 4");
  if (entries.size() != epsilons.size()) throw std::invalid_argument("epsilons: got another number than casts");
  ManyCasts many{dtype, {}, pointer<float>(maxima)};
  require_pointer("workspace", many.maxima, scaling == kNVFP4 ? 1 : 0, 4);
  many.casts.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    many.casts.push_back(cast_of(entries[i], epsilons[i], scaling, dtype));
    if (scaling == kTensor && many.casts.back().scale == nullptr) require_pointer("workspace", many.maxima, 1, 4);
  }
  void (*const casts[])(const Queue&, const ManyCasts&) = {many_tensor_casts, many_block_1d_casts, many_block_2d_casts,
                                                           many_mxfp8_casts, many_nvfp4_casts};
  casts[scaling](queue, many);
  queue.launched("cast_many");
}

Bindings many(+[](pybind11::module_& m) {
  m.attr("MANY_MAXIMA") = kManyMaxima;
  m.def("cast_many", &cast_many);
});

}  // namespace
}  // namespace ted
