// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Sums of an operand over the contracted dimension (a bias gradient), in an order fixed by shape and chip.
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "gemm/elements.cuh"
#include "quantize/quantize.h"

#include <algorithm>

namespace ted::gemm {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kInFlight = 8;         // rows that a warp loads before it adds
constexpr int64_t kBlocksEach = 4;   // of a multiprocessor
constexpr int64_t kFewestRows = 64;  // of a block

// A block adds up rows of a strip of columns, 16 bytes of each a thread; its warps take turns. Whole: every vector is.
template <class T, bool Whole>
__global__ void __launch_bounds__(kThreads) sum_over_rows(const T* source, int64_t rows, int64_t columns, float* partials) {
  constexpr int kVector = 16 / sizeof(T), kStrip = 32 * kVector;
  using Row = Vec<T, kVector>;
  __shared__ float shared[kWarps][kStrip];
  let_next_start();
  const int warp = threadIdx.x / 32, place = threadIdx.x % 32 * kVector;
  const int64_t first = blockIdx.x * static_cast<int64_t>(kStrip);
  const int64_t valid = columns - first - place, step = static_cast<int64_t>(gridDim.y) * kWarps;
  const T* at = source + first + place;
  int64_t row = blockIdx.y * static_cast<int64_t>(kWarps) + warp;
  float sums[kVector] = {};
  const auto add = [&](const Row& v) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += to_float(v[i]);
  };
  if (valid > 0) {
    for (; row + (kInFlight - 1) * step < rows; row += kInFlight * step) {
      Row v[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) v[u] = load_part<Whole, kVector>(at + (row + u * step) * columns, valid);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) add(v[u]);
    }
    for (; row < rows; row += step) add(load_part<Whole, kVector>(at + row * columns, valid));
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) shared[warp][place + i] = sums[i];
  __syncthreads();
  for (int column = threadIdx.x; column < kStrip; column += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared[w][column];
    if (first + column < columns) partials[blockIdx.y * columns + first + column] = sum;
  }
}

int64_t strips_of(int type, int64_t columns) { return ceil_div(columns, 32 * 16 / bytes_of(type)); }

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

}  // namespace

int64_t sum_chunks(const DeviceLimits& limits, int type, int64_t rows, int64_t columns) {
  const int64_t wanted = kBlocksEach * limits.multiprocessors / std::max<int64_t>(1, strips_of(type, columns));
  return std::max<int64_t>(1, std::min({wanted, rows / kFewestRows, int64_t{1024}}));
}

void operand_sum(const Queue& queue, const OperandSum& s) {
  const int64_t element = bytes_of(s.type);
  if (!s.over_rows) {
    if (s.rows == 0) return;
    const bool aligned = is_aligned(s.source, s.columns * element, static_cast<int>(4 * element));
    sum_over_columns<<<grid_x("rows", ceil_div(s.rows, kWarps)), kThreads, 0, queue.stream()>>>(s, aligned);
    return;
  }
  if (s.columns == 0) return;
  const int64_t chunks = sum_chunks(queue.limits(), s.type, s.rows, s.columns);
  const dim3 grid(grid_x("columns", strips_of(s.type, s.columns)), static_cast<unsigned>(chunks));
  with_dtype("operand", s.type, [&](auto type) {
    with_flag(is_aligned(s.source, s.columns * element), [&](auto whole) {
      using T = typename decltype(type)::type;
      sum_over_rows<T, decltype(whole)::value>
          <<<grid, kThreads, 0, queue.stream()>>>(static_cast<const T*>(s.source), s.rows, s.columns, s.partials);
    });
  });
  launch_sums(queue, s.partials, chunks, s.columns, s.out, s.out_type, true);
}

}  // namespace ted::gemm
