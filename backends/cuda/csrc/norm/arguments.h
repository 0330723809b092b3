// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The norms as Python calls them: addresses (0 for an absent tensor), sizes in elements, codes (common/dtypes.h).
#pragma once

#include <cstdint>

namespace ted::norm {

// LayerNorm where mean is given, RMSNorm where it is 0.
struct ForwardArguments {
  uintptr_t x;  // (rows, columns) of x_dtype, dense
  int x_dtype;
  int64_t rows, columns;
  uintptr_t residual, residual_out;  // as x; the norm is of x alone where residual is 0
  uintptr_t gamma;                   // (columns,)
  int gamma_dtype;
  uintptr_t beta;                    // (columns,), 0 for no shift
  int beta_dtype;
  bool zero_centered;
  float eps;
  uintptr_t mean, rstd;              // fp32 (rows,)
  uintptr_t y;                       // (rows, columns) of y_dtype, 0 if it is not wanted
  int y_dtype;
};

// How y is cast. A block scaling is kOfBlocks plus its code in cast/blocks.h, without kForProducts.
enum CastScaling : int { kNoCast = 0, kDelayed = 1, kCurrent = 2, kOfBlocks = 2 };

struct CastArguments {
  int scaling;
  uintptr_t row, column;                      // codes; either may be 0
  int cast;                                   // encoding, and kCommon
  uintptr_t scale, amax;                      // kDelayed: fp32 (1,); amax is max-accumulated, or 0
  uintptr_t row_scale_inv, column_scale_inv;  // one scale per tensor: row_scale_inv alone
  uintptr_t global_scale_inv;                 // nvfp4
  float epsilon;
  bool power_of_two, two_d, for_products;
};

// Floats of workspace that any cast but a delayed one by rows alone needs, at a multiple of 16 bytes: an amax, then
// gamma and beta as floats, each padded.
constexpr int64_t kPreparedMultiple = 16;

void norm_forward(int device, uintptr_t stream, const ForwardArguments& f, const CastArguments& c,
                  uintptr_t workspace);

// How many partial sums of (2 or 1, columns) floats norm_backward needs as workspace.
int64_t norm_backward_parts(int device, int64_t rows, int64_t columns, int x_dtype);

// Gradients. LayerNorm where dbeta and mean are given, RMSNorm where they are 0. dy, x, add, dx: dense (rows, columns);
// add may be 0; dx of x's dtype; dgamma, dbeta: (columns,) of gamma's dtype; workspace: parts x (2 or 1) x columns
// floats.
void norm_backward(int device, uintptr_t stream, uintptr_t dy, int dy_dtype, uintptr_t x, int x_dtype, int64_t rows,
                   int64_t columns, uintptr_t gamma, int gamma_dtype, bool zero_centered, uintptr_t mean,
                   uintptr_t rstd, uintptr_t add, int add_dtype, uintptr_t dx, uintptr_t dgamma, uintptr_t dbeta,
                   uintptr_t workspace, int64_t parts);

}  // namespace ted::norm
