// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Operands and scales as the library wants them, and the state of a cast that the library did.
#include "common/reduce.cuh"
#include "gemm/steps.h"

#include <algorithm>

namespace ted::gemm {

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) pad_copy_kernel(PadCopy p, int64_t vectors_per_row, bool aligned) {
  for (int64_t row = blockIdx.y; row < p.target_rows; row += gridDim.y) {
    const uint8_t* source = p.source + row * p.source_stride;
    uint4* target = reinterpret_cast<uint4*>(p.target + row * p.target_stride);
    for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < vectors_per_row;
         i += static_cast<int64_t>(gridDim.x) * kThreads) {
      const int64_t valid = row < p.rows ? p.row_bytes - i * 16 : 0;
      uint4 v = make_uint4(0, 0, 0, 0);
      if (aligned && valid >= 16) {
        v = *reinterpret_cast<const uint4*>(source + i * 16);
      } else {
        uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
        for (int j = 0; j < 16; ++j)
          if (j < valid) words[j / 4] |= static_cast<uint32_t>(source[i * 16 + j]) << (j % 4 * 8);
        v = make_uint4(words[0], words[1], words[2], words[3]);
      }
      target[i] = v;
    }
  }
}

// Neighbouring threads take neighbouring addresses of the target; the source is small enough to stay in the cache.
__device__ void lay_out(const ScaleJob& job, int64_t start, int64_t step) {
  const bool rows_inner = job.row_stride == 1;
  const int64_t inner = rows_inner ? job.target_rows : job.target_columns;
  const int64_t total = job.target_rows * job.target_columns;
  for (int64_t i = start; i < total; i += step) {
    const int64_t outer_index = i / inner, inner_index = i % inner;
    const int64_t r = rows_inner ? inner_index : outer_index, c = rows_inner ? outer_index : inner_index;
    float scale = 0.0f;
    if (r < job.rows && c < job.columns)
      scale = job.source[r / job.spread * job.source_row_stride + c * job.source_column_stride];
    job.target[r * job.row_stride + c * job.column_stride] = scale;
  }
}

__global__ void __launch_bounds__(kThreads) lay_out_scales_kernel(ScaleJob first, ScaleJob second) {
  const int64_t start = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  // Two calls and not one of a chosen job: a parameter whose address is taken moves to slow memory.
  if (blockIdx.y == 0 && first.target != nullptr) lay_out(first, start, step);
  if (blockIdx.y == 1 && second.target != nullptr) lay_out(second, start, step);
}

__global__ void record_cast_kernel(Cast cast, const float* measured) {
  *cast.scale_inv = __fdiv_rn(1.0f, *cast.scale);
  if (cast.amax != nullptr) atomic_max_nonnegative(cast.amax, *measured);
}

}  // namespace

void pad_copy(const Queue& queue, const PadCopy& p) {
  const int64_t vectors = p.target_stride / 16;
  if (p.target_rows == 0 || vectors == 0) return;
  const bool aligned = reinterpret_cast<uintptr_t>(p.source) % 16 == 0 && p.source_stride % 16 == 0;
  const dim3 grid(grid_x("padding", std::min<int64_t>(ceil_div(vectors, kThreads), 4096)),
                  static_cast<unsigned>(std::min<int64_t>(p.target_rows, 16384)));
  pad_copy_kernel<<<grid, kThreads, 0, queue.stream()>>>(p, vectors, aligned);
}

void lay_out_scales(const Queue& queue, const ScaleJob& first, const ScaleJob& second) {
  const int64_t most = std::max(first.target == nullptr ? 0 : first.target_rows * first.target_columns,
                                second.target == nullptr ? 0 : second.target_rows * second.target_columns);
  if (most == 0) return;
  const dim3 grid(grid_x("scales", std::min<int64_t>(ceil_div(most, kThreads), 1024)), 2);
  lay_out_scales_kernel<<<grid, kThreads, 0, queue.stream()>>>(first, second);
}

void record_cast(const Queue& queue, const Cast& cast, const float* measured) {
  record_cast_kernel<<<1, 1, 0, queue.stream()>>>(cast, measured);
}

}  // namespace ted::gemm
