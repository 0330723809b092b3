// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "cast/blocks.h"
#include "common/prepared.h"
#include "norm/arguments.h"

namespace py = pybind11;

namespace {

using ted::norm::CastArguments;
using ted::norm::ForwardArguments;

// device, stream, ForwardArguments member by member.
void norm_forward(int device, uintptr_t stream, uintptr_t x, int x_dtype, int64_t rows, int64_t columns,
                  uintptr_t residual, uintptr_t residual_out, uintptr_t gamma, int gamma_dtype, uintptr_t beta,
                  int beta_dtype, bool zero_centered, float eps, uintptr_t mean, uintptr_t rstd, uintptr_t y,
                  int y_dtype) {
  const ForwardArguments f{x, x_dtype, rows, columns, residual, residual_out, gamma, gamma_dtype, beta, beta_dtype,
                           zero_centered, eps, mean, rstd, y, y_dtype};
  ted::norm::norm_forward(device, stream, f, CastArguments{}, 0);
}

// The same, then the workspace and CastArguments member by member.
void norm_forward_cast(int device, uintptr_t stream, uintptr_t x, int x_dtype, int64_t rows, int64_t columns,
                       uintptr_t residual, uintptr_t residual_out, uintptr_t gamma, int gamma_dtype, uintptr_t beta,
                       int beta_dtype, bool zero_centered, float eps, uintptr_t mean, uintptr_t rstd, uintptr_t y,
                       int y_dtype, uintptr_t workspace, int scaling, uintptr_t row, uintptr_t column, int cast,
                       uintptr_t scale, uintptr_t amax, uintptr_t row_scale_inv, uintptr_t column_scale_inv,
                       uintptr_t global_scale_inv, float epsilon, bool power_of_two, bool two_d) {
  const ForwardArguments f{x, x_dtype, rows, columns, residual, residual_out, gamma, gamma_dtype, beta, beta_dtype,
                           zero_centered, eps, mean, rstd, y, y_dtype};
  int of_blocks = scaling - ted::norm::kOfBlocks;
  const bool for_products = ted::take_for_products(of_blocks);
  const CastArguments c{of_blocks + ted::norm::kOfBlocks, row, column, cast, scale, amax, row_scale_inv, column_scale_inv,
                        global_scale_inv, epsilon, power_of_two, two_d, for_products};
  ted::norm::norm_forward(device, stream, f, c, workspace);
}

}  // namespace

static ted::Bindings norm(+[](py::module_& m) {
  ted::define<&norm_forward>(m, "norm_forward");
  ted::define<&norm_forward_cast>(m, "norm_forward_cast");
  ted::define<&ted::norm::norm_backward>(m, "norm_backward");
  m.def("norm_backward_parts", &ted::norm::norm_backward_parts);
});
