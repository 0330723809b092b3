// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Gradients of norms whose rows are too long for registers: dx row by row, the sums over rows column by column.
#include "norm/backward.cuh"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

constexpr int kThreads = 512;

// h and dy of one vector of x.
template <class T, int E>
__device__ __forceinline__ void load_terms(float (&h)[E], float (&dy)[E], const Backward& a, int64_t index,
                                           int64_t valid, float mean, float rstd) {
  read(h, static_cast<const T*>(a.x) + index, valid, a.aligned);
  read(dy, a.dy, index, valid);
#pragma unroll
  for (int i = 0; i < E; ++i) h[i] = __fmul_rn(__fsub_rn(h[i], mean), rstd);
}

template <class T>
__global__ void __launch_bounds__(kThreads) backward_dx(const __grid_constant__ Backward a) {
  constexpr int E = kVector<T>;
  __shared__ float shared[2][kMaxWarps];
  const int64_t row = blockIdx.x, start = row * a.columns, first = static_cast<int64_t>(threadIdx.x) * E;
  const bool centered = a.mean != nullptr;
  const float mean = centered ? a.mean[row] : 0.0f, rstd = a.rstd[row];
  float h[E], g[E], factor[E], along_h = 0.0f, along_one = 0.0f;
  for (int64_t column = first; column < a.columns; column += kThreads * E) {
    load_terms<T>(h, g, a, start + column, a.columns - column, mean, rstd);
    load_factor(factor, a, column, a.columns - column);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      g[i] *= factor[i];
      along_h = fmaf(g[i], h[i], along_h);
      along_one += g[i];
    }
  }
  const float mean_h = row_sum(along_h, kThreads, shared[0]) * a.inverse_columns;
  const float mean_one = centered ? row_sum(along_one, kThreads, shared[1]) * a.inverse_columns : 0.0f;
  for (int64_t column = first; column < a.columns; column += kThreads * E) {
    load_terms<T>(h, g, a, start + column, a.columns - column, mean, rstd);
    load_factor(factor, a, column, a.columns - column);
#pragma unroll
    for (int i = 0; i < E; ++i) g[i] = (fmaf(-h[i], mean_h, g[i] * factor[i]) - mean_one) * rstd;
    store_dx<T, false>(a, start + column, g, a.columns - column);
  }
}

// Rows part, part + parts, ... of one vector of columns per thread.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_weights(const __grid_constant__ Backward a, int parts) {
  constexpr int E = kVector<T>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * E;
  const int64_t valid = a.columns - column;
  if (valid <= 0) return;
  const bool centered = a.mean != nullptr;
  Vec<float, E> dgamma = {}, dbeta = {};
#pragma unroll 2
  for (int64_t row = blockIdx.y; row < a.rows; row += parts) {
    float h[E], dy[E];
    load_terms<T>(h, dy, a, row * a.columns + column, valid, centered ? a.mean[row] : 0.0f, a.rstd[row]);
#pragma unroll
    for (int i = 0; i < E; ++i) {
      dgamma[i] = fmaf(dy[i], h[i], dgamma[i]);
      dbeta[i] += dy[i];
    }
  }
  float* partial = a.partial + static_cast<int64_t>(blockIdx.y) * (centered ? 2 : 1) * a.columns + column;
  store_vector(partial, dgamma, valid, a.aligned_partial);
  if (centered) store_vector(partial + a.columns, dbeta, valid, a.aligned_partial);
}

}  // namespace

int64_t parts_streaming(int64_t rows, int64_t columns, const DeviceLimits& limits) {
  // Some blocks per multiprocessor; a block of fewer than 16 rows would write about as much as it reads.
  const int64_t tiles = ceil_div(columns, kThreads * 8);
  return std::min(std::max<int64_t>(ceil_div(4 * limits.multiprocessors, tiles), 1), ceil_div(rows, 16));
}

void backward_streaming(const Queue& q, Backward a, int x_dtype, int64_t parts) {
  if (parts == 0) return;
  const unsigned rows = grid_x("x", a.rows);
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    backward_dx<T><<<rows, kThreads, 0, q.stream()>>>(a);
    const dim3 grid(grid_x("x", ceil_div(a.columns, kThreads * kVector<T>)), static_cast<unsigned>(parts));
    backward_weights<T><<<grid, kThreads, 0, q.stream()>>>(a, static_cast<int>(parts));
  });
}

}  // namespace ted::norm
