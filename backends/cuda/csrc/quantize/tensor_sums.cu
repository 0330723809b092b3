// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The second stage of column sums.
#include "common/launch.cuh"
#include "common/scalar.cuh"
#include "quantize/quantize.h"

namespace ted {
namespace {

constexpr int kLanes = 8;  // threads that share a column

// A block takes 32 columns; thread (c, r) sums the partial rows r, r + 8, ..., then these sums are added in order.
template <class T>
__global__ void __launch_bounds__(32 * kLanes)
sum_columns(const float* partial, int64_t rows, int64_t columns, T* target) {
  __shared__ float shared[kLanes][32];
  const int64_t column = blockIdx.x * int64_t{32} + threadIdx.x;
  wait_for_previous();
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (int64_t row = threadIdx.y; row < rows; row += kLanes) sum += partial[row * columns + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
#pragma unroll
  for (int lane = 1; lane < kLanes; ++lane) sum += shared[lane][threadIdx.x];
  target[column] = from_float<T>(sum);
}

}  // namespace

void launch_sums(const Queue& queue, const float* partial, int64_t rows, int64_t columns, void* target, int dtype,
                 bool early) {
  if (columns == 0) return;
  with_dtype("dbias", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    require_pointer("dbias", target, columns, sizeof(T));
    launch(queue, early, sum_columns<T>, grid_x("columns", ceil_div(columns, 32)), dim3(32, kLanes), partial, rows,
           columns, static_cast<T*>(target));
  });
}

}  // namespace ted
