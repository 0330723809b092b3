// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What follows an fp32 product where the library does not do it: bias, GELU, its gradient, accumulation, casts.
#include "common/reduce.cuh"
#include "gemm/elements.cuh"
#include "quantize/quantize.h"

#include <algorithm>

namespace ted::gemm {

namespace {

constexpr int kColumns = 128;  // of a block: 32 lanes of four
constexpr int kWarps = 8;      // each takes a row at a time

// te_dispatch's GELU is the tanh form: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
constexpr float kRoot = 0.7978845608028654f, kCubic = 0.044715f;

__device__ __forceinline__ float gelu(float x) {
  return 0.5f * x * (1.0f + tanhf(kRoot * (x + kCubic * x * x * x)));
}

__device__ __forceinline__ float gelu_derivative(float x) {
  // Beyond 16 tanh is 1 in fp32, and the derivative 0 or 1, to the bit; squares of larger values may be infinite.
  if (fabsf(x) > 16.0f) x = copysignf(16.0f, x);
  const float t = tanhf(kRoot * (x + kCubic * x * x * x));
  return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * kRoot * (1.0f + 3.0f * kCubic * x * x);
}

struct Lane {
  int64_t column, valid;
  float bias[4];
  float sums[4];
  float z_scale, out_scale, aux_scale, aux_in_scale;
  float out_amax, aux_amax;
};

__device__ __forceinline__ float amax_of(const float (&x)[4], int64_t valid, float so_far) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < valid) so_far = fmaxf(so_far, fabsf(x[i]));
  return so_far;
}

__device__ __forceinline__ void finish_row(const Finish& f, Lane& lane, int64_t row, bool aligned, bool z_aligned) {
  const int64_t index = row * f.n + lane.column;
  float x[4] = {0, 0, 0, 0};
  if (f.z != nullptr) load_four(f.z, kFloat32, row * f.z_stride + lane.column, lane.valid, z_aligned, x);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = x[i] * lane.z_scale + lane.bias[i];
  if (f.epilogue == 1) {
    if (f.aux_cast.cast != kNone) {
      lane.aux_amax = amax_of(x, lane.valid, lane.aux_amax);
      store_four_codes(f.aux_out, f.aux_cast.cast, lane.aux_scale, index, lane.valid, aligned, x);
    } else {
      store_four(f.aux_out, f.aux_out_type, index, lane.valid, aligned, x);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = gelu(x[i]);
  } else if (f.epilogue == 2) {
    float before[4];
    load_four(f.aux_in, f.aux_in_type, index, lane.valid, aligned, before);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] *= gelu_derivative(before[i] * lane.aux_in_scale);
      if (i < lane.valid) lane.sums[i] += x[i];
    }
  }
  if (f.accumulate) {
    float old[4];
    load_four(f.out, f.out_type, index, lane.valid, aligned, old);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += old[i];
  }
  if (f.out_cast.cast != kNone) {
    lane.out_amax = amax_of(x, lane.valid, lane.out_amax);
    store_four_codes(f.out, f.out_cast.cast, lane.out_scale, index, lane.valid, aligned, x);
  } else {
    store_four(f.out, f.out_type, index, lane.valid, aligned, x);
  }
}

__device__ __forceinline__ void record(const Cast& cast, float amax, float* shared) {
  if (cast.cast == kNone) return;
  amax = block_reduce<32 * kWarps>(amax, 0.0f, Max{}, shared);
  if (threadIdx.x == 0) {
    if (cast.amax != nullptr) atomic_max_nonnegative(cast.amax, amax);
    if (blockIdx.x == 0 && blockIdx.y == 0) *cast.scale_inv = __fdiv_rn(1.0f, *cast.scale);
  }
}

__global__ void __launch_bounds__(32 * kWarps) finish_kernel(Finish f, bool aligned, bool z_aligned) {
  __shared__ float columns[kWarps][kColumns];
  __shared__ float shared[kWarps];
  const int warp = threadIdx.x / 32;
  Lane lane{};
  lane.column = blockIdx.x * static_cast<int64_t>(kColumns) + threadIdx.x % 32 * 4;
  lane.valid = f.n - lane.column;
  lane.z_scale = (f.a_scale != nullptr ? *f.a_scale : 1.0f) * (f.b_scale != nullptr ? *f.b_scale : 1.0f);
  lane.out_scale = f.out_cast.cast != kNone ? *f.out_cast.scale : 1.0f;
  lane.aux_scale = f.aux_cast.cast != kNone ? *f.aux_cast.scale : 1.0f;
  lane.aux_in_scale = f.aux_in_scale != nullptr ? *f.aux_in_scale : 1.0f;
  if (lane.valid > 0) {
    if (f.bias_type != kNone) load_four(f.bias, f.bias_type, lane.column, lane.valid, false, lane.bias);
    const int64_t step = static_cast<int64_t>(gridDim.y) * kWarps;
    for (int64_t row = blockIdx.y * static_cast<int64_t>(kWarps) + warp; row < f.m; row += step)
      finish_row(f, lane, row, aligned, z_aligned);
  }
  record(f.out_cast, lane.out_amax, shared);
  record(f.aux_cast, lane.aux_amax, shared);
  if (f.dbias == nullptr) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) columns[warp][threadIdx.x % 32 * 4 + i] = lane.sums[i];
  __syncthreads();
  if (threadIdx.x < kColumns) {
    const int64_t column = blockIdx.x * static_cast<int64_t>(kColumns) + threadIdx.x;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += columns[w][threadIdx.x];
    if (column < f.n) f.partials[blockIdx.y * f.n + column] = sum;
  }
}

}  // namespace

int64_t row_chunks(const DeviceLimits& limits, int64_t m, int64_t n) {
  const int64_t strips = std::max<int64_t>(1, ceil_div(n, kColumns));
  const int64_t wanted = std::max<int64_t>(1, 8 * limits.multiprocessors / strips);
  return std::max<int64_t>(1, std::min({wanted, ceil_div(m, kWarps), int64_t{1024}}));
}

void finish(const Queue& queue, const Finish& f) {
  const int64_t chunks = row_chunks(queue.limits(), f.m, f.n);
  const dim3 grid(grid_x("n", std::max<int64_t>(1, ceil_div(f.n, kColumns))), static_cast<unsigned>(chunks));
  const auto fits = [&](const void* p, int type) {
    return p == nullptr || type == kNone || is_aligned(p, f.n * bytes_of(type), static_cast<int>(4 * bytes_of(type)));
  };
  const int out_type = f.out_cast.cast != kNone ? kCodes : f.out_type;
  const int aux_type = f.aux_cast.cast != kNone ? kCodes : f.aux_out_type;
  const bool aligned = fits(f.out, out_type) && fits(f.aux_out, aux_type) && fits(f.aux_in, f.aux_in_type);
  finish_kernel<<<grid, 32 * kWarps, 0, queue.stream()>>>(f, aligned, is_aligned(f.z, f.z_stride * 4));
  if (f.dbias != nullptr) launch_sums(queue, f.partials, chunks, f.n, f.dbias, f.dbias_type);
}

}  // namespace ted::gemm
