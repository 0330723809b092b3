// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Sums of an operand over the contracted dimension (a bias gradient), in an order fixed by shape and chip.
#include "common/reduce.cuh"
#include "gemm/elements.cuh"

#include <algorithm>

namespace ted::gemm {

namespace {

constexpr int kColumns = 128;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

__global__ void __launch_bounds__(kThreads) sum_over_rows(OperandSum s, bool aligned) {
  __shared__ float columns[kWarps][kColumns];
  const int warp = threadIdx.x / 32;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kColumns) + threadIdx.x % 32 * 4;
  const int64_t valid = s.columns - first;
  float sums[4] = {0, 0, 0, 0};
  const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
  if (valid > 0) {
#pragma unroll 2
    for (int64_t row = blockIdx.y * static_cast<int64_t>(kWarps) + warp; row < s.rows; row += step) {
      float x[4];
      load_four(s.source, s.type, row * s.columns + first, valid, aligned, x);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += x[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) columns[warp][threadIdx.x % 32 * 4 + i] = sums[i];
  __syncthreads();
  if (threadIdx.x < kColumns) {
    const int64_t column = blockIdx.x * static_cast<int64_t>(kColumns) + threadIdx.x;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += columns[w][threadIdx.x];
    if (column < s.columns) s.partials[blockIdx.y * s.columns + column] = sum;
  }
}

// A warp per row.
__global__ void __launch_bounds__(kThreads) sum_over_columns(OperandSum s, bool aligned) {
  const int64_t row = blockIdx.x * static_cast<int64_t>(kWarps) + threadIdx.x / 32;
  if (row >= s.rows) return;
  const int64_t scale_row = s.scaling == kBlock2d ? row / 128 : row;
  const bool blocks = s.scaling == kBlock1d || s.scaling == kBlock2d;
  float sum = 0.0f;
#pragma unroll 4
  for (int64_t column = threadIdx.x % 32 * 4; column < s.columns; column += 128) {
    float x[4];
    load_four(s.source, s.type, row * s.columns + column, s.columns - column, aligned, x);
    const float scale = blocks ? s.scale[scale_row * s.scale_row_stride + column / 128 * s.scale_column_stride] : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += __fmul_rn(x[i], scale);
  }
  sum = warp_reduce(sum, Sum{});
  if (threadIdx.x % 32 == 0) {
    if (s.scaling == kTensor) sum *= *s.scale;
    store_one(s.out, s.out_type, row, sum);
  }
}

__global__ void __launch_bounds__(kThreads) sum_partials_kernel(const float* partials, int64_t chunks, int64_t n,
                                                                void* out, int out_type) {
  const int64_t column = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  if (column >= n) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * n + column];
  store_one(out, out_type, column, sum);
}

}  // namespace

void sum_partials(const Queue& queue, const float* partials, int64_t chunks, int64_t n, void* out, int out_type) {
  if (n == 0) return;
  sum_partials_kernel<<<grid_x("n", ceil_div(n, kThreads)), kThreads, 0, queue.stream()>>>(partials, chunks, n, out, out_type);
}

void operand_sum(const Queue& queue, const OperandSum& s) {
  const int64_t element = bytes_of(s.type);
  const bool aligned = is_aligned(s.source, s.columns * element, static_cast<int>(4 * element));
  if (!s.over_rows) {
    if (s.rows == 0) return;
    sum_over_columns<<<grid_x("rows", ceil_div(s.rows, kWarps)), kThreads, 0, queue.stream()>>>(s, aligned);
    return;
  }
  if (s.columns == 0) return;
  const int64_t chunks = row_chunks(queue.limits(), s.rows, s.columns);
  const dim3 grid(grid_x("columns", ceil_div(s.columns, kColumns)), static_cast<unsigned>(chunks));
  sum_over_rows<<<grid, kThreads, 0, queue.stream()>>>(s, aligned);
  sum_partials(queue, s.partials, chunks, s.columns, s.out, s.out_type);
}

}  // namespace ted::gemm
