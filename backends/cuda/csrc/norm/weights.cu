// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The second stage of dgamma and dbeta: partial sums of blocks, added in the order of the blocks' numbers.
#include "common/overlap.cuh"
#include "norm/backward.cuh"
#include "norm/norm.h"

namespace ted::norm {

namespace {

constexpr int kColumns = 32, kSlices = 16;

// A slice of threads takes parts slice, slice + kSlices, ...; then the slices are added in order.
__global__ void __launch_bounds__(kColumns* kSlices) sum_parts(const __grid_constant__ Weights a) {
  __shared__ float shared[kSlices][kColumns];
  const int lane = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  const bool centered = a.dbeta.data != nullptr;
  float sum = 0.0f;
  wait_for_previous();
  if (column < a.columns) {
    const int64_t stride = (centered ? 2 : 1) * a.columns;
    const float* source = a.partial + blockIdx.y * a.columns + column;
#pragma unroll 4
    for (int64_t part = slice; part < a.parts; part += kSlices) sum += source[part * stride];
  }
  shared[slice][lane] = sum;
  __syncthreads();
  if (slice > 0 || column >= a.columns) return;
  float total[1] = {0.0f};
#pragma unroll
  for (int i = 0; i < kSlices; ++i) total[0] += shared[i][lane];
  const Result& to = blockIdx.y == 0 ? a.dgamma : a.dbeta;
  if (to.dtype == kFloat32)
    static_cast<float*>(to.data)[column] = total[0];
  else if (to.dtype == kBFloat16)
    static_cast<__nv_bfloat16*>(to.data)[column] = from_float<__nv_bfloat16>(total[0]);
  else
    static_cast<__half*>(to.data)[column] = from_float<__half>(total[0]);
}

}  // namespace

void sum_weights(const Queue& q, const Weights& a) {
  const dim3 grid(grid_x("gamma", ceil_div(a.columns, kColumns)), a.dbeta.data != nullptr ? 2 : 1);
  launch_overlapping(q, sum_parts, grid, kColumns * kSlices, a);
}

}  // namespace ted::norm
