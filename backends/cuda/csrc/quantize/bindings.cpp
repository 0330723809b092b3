// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "common/prepared.h"
#include "quantize/quantize.h"

#include <pybind11/stl.h>

namespace ted {
namespace {

// (device, stream), a source (te_dispatch_cuda/sources.py), a cast (te_dispatch_cuda/quantize.py). Addresses may be 0.
void cast_tensor(int device, uintptr_t stream, int form, int dtype, int64_t rows, int64_t columns, uintptr_t x,
                 int64_t stride, uintptr_t dy, int kind, float limit, float alpha, int x_encoding,
                 uintptr_t x_scale_inv, uintptr_t row, uintptr_t column, uintptr_t out, int out_dtype, int cast,
                 uintptr_t scale, bool find_amax, uintptr_t given_amax, float epsilon, bool power_of_two,
                 uintptr_t row_scale_inv, uintptr_t column_scale_inv, uintptr_t amax, uintptr_t noop, uintptr_t dbias,
                 int dbias_dtype, uintptr_t workspace) {
  const Queue queue(device, stream);
  const SourceArguments source{form, dtype, rows,  columns, x,          stride,
                               dy,   kind,  limit, alpha,   x_encoding, x_scale_inv};
  CastArguments arguments{};
  TensorCast& to = arguments.cast;
  to.row = pointer<uint8_t>(row);
  to.column = pointer<uint8_t>(column);
  to.out = pointer<void>(out);
  to.out_dtype = out_dtype;
  to.cast = cast;
  to.scale = pointer<const float>(scale);
  to.maxima = pointer<const float>(given_amax);
  to.epsilon = epsilon;
  to.power_of_two = power_of_two;
  to.row_scale_inv = pointer<float>(row_scale_inv);
  to.column_scale_inv = pointer<float>(column_scale_inv);
  to.amax = pointer<float>(amax);
  to.noop = pointer<const float>(noop);
  arguments.workspace = pointer<float>(workspace);
  arguments.find_amax = find_amax;
  arguments.dbias = pointer<void>(dbias);
  arguments.dbias_dtype = dbias_dtype;
  check_cast(source, arguments);
  if (form == kPlain)
    cast_plain(queue, source, arguments);
  else if (form == kForward)
    cast_forward(queue, source, arguments);
  else
    cast_backward(queue, source, arguments);
  queue.launched("cast_tensor");
}

Bindings quantize(+[](pybind11::module_& m) {
  m.attr("MAXIMA") = kMaxima;
  m.attr("TILE_ROWS") = kTileRows;
  define<&cast_tensor>(m, "cast_tensor");
  define<&compute_amax>(m, "compute_amax");
  m.def("update_delayed_scales", &update_delayed_scales);
  offer("update_delayed_scales", {"", &update_prepared_scales});
});

}  // namespace
}  // namespace ted
