// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Scaled, masked softmax over rows of `columns` adjacent elements. Contracts: te_dispatch/ops/softmax.py.
#pragma once

#include <cstdint>

namespace ted {

// The rows are those of a contiguous (batch, heads, rows_each, columns) tensor. The mask (bytes, nonzero is masked out,
// 0 for none) has one stride per dimension, 0 where it is broadcast; that of the columns is 0 or 1. causal masks column
// j > i of row i.
void softmax_fwd(int device, uintptr_t stream, uintptr_t x, uintptr_t mask, uintptr_t y, int64_t batch, int64_t heads,
                 int64_t rows_each, int64_t columns, int64_t mask_batch, int64_t mask_head, int64_t mask_row,
                 int64_t mask_column, double scale, bool causal, int x_dtype, int y_dtype);

// dx = scale * y * (dy - sum(dy * y)), all (rows, columns), contiguous.
void softmax_bwd(int device, uintptr_t stream, uintptr_t dy, uintptr_t y, uintptr_t dx, int64_t rows, int64_t columns,
                 double scale, int dy_dtype, int y_dtype, int dx_dtype);

}  // namespace ted
