// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The backward operators: which kernels a call takes.
#include "norm/arguments.h"
#include "norm/backward.cuh"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

Operand operand(const char* name, uintptr_t address, int dtype, int64_t count, int64_t row, int64_t vector) {
  require_dtype(name, dtype);
  const void* data = pointer<void>(address);
  const int64_t width = size_of(dtype);
  require_pointer(name, data, count, width);
  return {data, dtype, is_aligned(data, row * width, static_cast<int>(std::min<int64_t>(vector * width, 16)))};
}

}  // namespace

int64_t norm_backward_parts(int device, int64_t rows, int64_t columns, int x_dtype) {
  require_dtype("x", x_dtype);
  require_count("x", rows, columns);
  if (rows == 0 || columns == 0) return 0;
  const DeviceLimits& limits = limits_of(device);
  return backward_fits(columns, x_dtype, limits) ? parts_in_registers(rows, columns, limits)
                                                 : parts_streaming(rows, columns, limits);
}

void norm_backward(int device, uintptr_t stream, uintptr_t dy, int dy_dtype, uintptr_t x, int x_dtype, int64_t rows,
                   int64_t columns, uintptr_t gamma, int gamma_dtype, bool zero_centered, uintptr_t mean,
                   uintptr_t rstd, uintptr_t add, int add_dtype, uintptr_t dx, uintptr_t dgamma, uintptr_t dbeta,
                   uintptr_t workspace, int64_t parts) {
  require_dtype("x", x_dtype);
  const int64_t count = require_count("x", rows, columns);
  const int64_t width = size_of(x_dtype), vector = 16 / width, terms = dbeta != 0 ? 2 : 1;
  require_pointer("x", pointer<void>(x), count, width);
  require_pointer("dx", pointer<void>(dx), count, width);
  require_pointer("rstd", pointer<void>(rstd), rows, 4);
  // Empty tensors have no address: what tells LayerNorm is dbeta, which never is empty.
  require_pointer("mean", pointer<void>(mean), dbeta != 0 ? rows : 0, 4);
  require_pointer("dgamma", pointer<void>(dgamma), columns, size_of(gamma_dtype));
  require_pointer("dbeta", pointer<void>(dbeta), 0, size_of(gamma_dtype));
  require_size("parts", parts);
  require_pointer("workspace", pointer<void>(workspace), parts * terms * columns, 4);

  Backward a{};
  a.dy = operand("dy", dy, dy_dtype, count, columns, vector);
  a.gamma = operand("gamma", gamma, gamma_dtype, columns, 0, vector);
  if (add != 0) a.add = operand("add", add, add_dtype, count, columns, vector);
  a.x = pointer<void>(x), a.dx = pointer<void>(dx);
  a.mean = pointer<float>(mean), a.rstd = pointer<float>(rstd), a.partial = pointer<float>(workspace);
  a.rows = rows, a.columns = columns, a.zero_centered = zero_centered;
  a.inverse_columns = static_cast<float>(1.0 / static_cast<double>(std::max<int64_t>(columns, 1)));
  a.aligned = is_aligned(a.x, columns * width) && is_aligned(a.dx, 0);
  a.aligned_partial = is_aligned(a.partial, columns * 4);
  Queue q(device, stream);
  if (columns == 0) return;
  if (backward_fits(columns, x_dtype, q.limits()))
    backward_in_registers(q, a, x_dtype, parts);
  else
    backward_streaming(q, a, x_dtype, parts);
  sum_weights(q, {a.partial, {pointer<void>(dgamma), gamma_dtype, false},
                  {pointer<void>(dbeta), gamma_dtype, false}, parts, columns});
  q.launched("norm_backward");
}

}  // namespace ted::norm
