// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// LayerNorm and RMSNorm: launchers. Contracts: te_dispatch.ops.norm.
#pragma once

#include "common/queue.h"

namespace ted {
struct TensorCast;
struct BlockCast;
}

namespace ted::norm {

struct Forward;
struct Backward;
struct Weights;

// Rows of at most this many bytes stay with one block: a forward's in its registers, where they are whole.
constexpr int64_t kForwardBytes = 512 * 16 * 16, kBackwardColumns = 512 * 32;

void forward_in_registers(const Queue& q, Forward a, int x_dtype);
// Rows of any length and alignment, read three times.
void forward_streaming(const Queue& q, Forward a, int x_dtype);

// Statistics alone, and amax where Forward::cast names one: whether that pass serves a call, and the pass.
bool statistics_fit(const Forward& a, int x_dtype);
void forward_statistics(const Queue& q, const Forward& a, int x_dtype);

// A delayed cast by columns, and by rows, in the same pass: whether it serves a call, and the pass.
bool tiles_fit(const Forward& a, int x_dtype, const DeviceLimits& limits);
void forward_tiles(const Queue& q, Forward a, int x_dtype);

// What a forward leaves for casts that recompute y from it.
struct Normalized {
  const void* x;                // residual_out where there was a residual
  const float *mean, *rstd;     // mean null for RMSNorm
  const float *factor, *shift;  // (columns,) each, readable up to a multiple of kPreparedMultiple
  int64_t rows, columns;
};
void cast_tensor(const Queue& q, const Normalized& a, int x_dtype, const TensorCast& cast);
void cast_blocks(const Queue& q, const Normalized& a, int x_dtype, int scaling, const BlockCast& cast);

// Whether backward_in_registers serves rows of this length on a chip.
bool backward_fits(int64_t columns, int x_dtype, const DeviceLimits& limits);
// Partial sums per column that a backward leaves.
int64_t parts_in_registers(int64_t rows, int64_t columns, const DeviceLimits& limits);
int64_t parts_streaming(int64_t rows, int64_t columns, const DeviceLimits& limits);
void backward_in_registers(const Queue& q, Backward a, int x_dtype, int64_t parts);
// Rows of any length, read twice for dx and once for the weights.
void backward_streaming(const Queue& q, Backward a, int x_dtype, int64_t parts);
void sum_weights(const Queue& q, const Weights& a);

}  // namespace ted::norm
