// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What the backward kernels share.
//
// With h = (x - mean) rstd and g = dy f: dx = rstd (g - h mean(g h) - mean(g)), dgamma = sum over rows of dy h,
// dbeta = sum over rows of dy; RMSNorm has neither mean. (Ba et al., 2016; Zhang and Sennrich, 2019.)
#pragma once

#include "norm/row.cuh"

namespace ted::norm {

struct Backward {
  Operand dy, gamma, add;          // add.data null for none
  const void* x;
  void* dx;                        // of x's dtype
  const float *mean, *rstd;        // mean null for RMSNorm
  float* partial;                  // (parts, 2 or 1, columns): dgamma's sums, then dbeta's
  int64_t rows, columns;
  float inverse_columns;
  int lanes;                       // threads that share a row
  int stages;                      // turns whose rows lie in shared memory, the one at work included
  bool adds_ahead;                 // add's rows too: it has x's dtype
  bool zero_centered;
  bool aligned;                    // x and dx, to 16 bytes
  bool aligned_partial;            // every row of partial, to 16 bytes
};

struct Weights {
  const float* partial;
  Result dgamma, dbeta;            // dbeta.data null for RMSNorm
  int64_t parts, columns;
};

template <int E>
__device__ __forceinline__ void load_factor(float (&factor)[E], const Backward& a, int64_t column, int64_t valid) {
  read(factor, a.gamma, column, valid);
  if (a.zero_centered) {
#pragma unroll
    for (int i = 0; i < E; ++i) factor[i] = __fadd_rn(1.0f, factor[i]);
  }
}

// dx of one vector; what lies beyond the row's end is not stored.
template <class T, bool Whole, int E>
__device__ __forceinline__ void store_dx(const Backward& a, int64_t index, float (&dx)[E], int64_t valid) {
  if (a.add.data != nullptr && !a.adds_ahead) {
    float add[E];
    read(add, a.add, index, valid);
#pragma unroll
    for (int i = 0; i < E; ++i) dx[i] += add[i];
  }
  write(static_cast<T*>(a.dx) + index, dx, Whole ? E : valid, Whole || a.aligned);
}

}  // namespace ted::norm
