// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The pass that leaves mean and rstd of whole rows (row.cuh), and the largest |y| where that is wanted, to casts that
// make y again.
//
// As many blocks as a chip holds go over rows, and the next row is on its way while one is at work: what counts is how
// many bytes are, so registers go to blocks before they go to unpacked values.
#include "common/launch.cuh"
#include "norm/forward.cuh"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

constexpr int kVectors = 2;  // of a row per thread

// Threads of a multiprocessor, all of which may share a row: weights in registers that are wider than x take more.
template <class T, class W>
constexpr int kResident = sizeof(W) > sizeof(T) ? 768 : 1024;

// The sum over a row's threads, in each of them. `shared` is this call's own, and zero where no warp writes.
__device__ __forceinline__ float sum_over_row(float x, int lanes, float* shared) {
  if (lanes <= 32) return row_sum(x, lanes, shared);
  x = warp_reduce(x, Sum{});
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
  for (int w = 0; w < lanes / 32; w += 4) {
    const float4 part = *reinterpret_cast<const float4*>(shared + w);
    total += (part.x + part.y) + (part.z + part.w);
  }
  return total;
}

template <class W, int E>
__device__ __forceinline__ void forget(Words<W, E>& words) {
#pragma unroll
  for (uint32_t& word : words.data) asm volatile("" : "+r"(word));
}

// The largest of a block's values to `target`. `shared` has a float per warp.
__device__ __forceinline__ void record(float* target, float amax, float* shared) {
  amax = warp_reduce(amax, Max{});
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  amax = warp_reduce(threadIdx.x < blockDim.x / 32 ? shared[threadIdx.x] : 0.0f, Max{});
  if (threadIdx.x == 0) atomic_max_nonnegative(target, amax);
}

template <class T, class W, bool Centered>
__global__ void __launch_bounds__(kResident<T, W>, 1) forward_statistics_kernel(const __grid_constant__ Forward a) {
  constexpr int E = kVector<T>, V = kVectors;
  __shared__ alignas(16) float shared[2][2][kMaxWarps];
  let_next_start();
  const int lanes = a.lanes;
  const bool packed = lanes <= 32;
  const int t = packed ? threadIdx.x & (lanes - 1) : threadIdx.x;
  const int each = packed ? blockDim.x / lanes : 1, mine = packed ? threadIdx.x / lanes : 0;
  const int64_t step = static_cast<int64_t>(gridDim.x) * each;
  const int columns = static_cast<int>(a.columns);
  int64_t row = static_cast<int64_t>(blockIdx.x) * each + mine;

  PackedRow<T, V> next;
  const auto load = [&](int64_t of) {
    const bool present = of < a.rows;
    load_row(next.words, static_cast<const T*>(a.x) + (present ? of * a.columns : 0), present ? columns : 0, t, lanes);
  };
  load(row);
  prepare<E>(a);
  Words<W, E> gamma[V] = {}, beta[V] = {};
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = (v * lanes + t) * E;
    if (column >= columns) continue;
    gamma[v] = *reinterpret_cast<const Words<W, E>*>(static_cast<const W*>(a.affine.gamma.data) + column);
    if (Centered && a.affine.beta.data != nullptr)
      beta[v] = *reinterpret_cast<const Words<W, E>*>(static_cast<const W*>(a.affine.beta.data) + column);
  }
  if (threadIdx.x < kMaxWarps) {
#pragma unroll
    for (int i = 0; i < 4; ++i) shared[i / 2][i % 2][threadIdx.x] = 0.0f;
  }
  __syncthreads();

  float amax = 0.0f;
  for (int turn = 0; row - mine < a.rows; row += step, turn ^= 1) {
    const bool present = row < a.rows;
    PackedRow<T, V> x = next;
    load(row + step);
    if (a.residual != nullptr) add_residual<1>(x, a, present ? row * a.columns : 0, present ? columns : 0, t);
    float mean = 0.0f;
    if constexpr (Centered) {
      mean = sum_over_row(x.sum(), lanes, shared[turn][0]) * a.inverse_columns;
      if (t == 0 && present) a.mean[row] = mean;
      x.forget();
    }
    const float squares = x.sum_of_squares(mean, columns, t, lanes);
    const float rstd = rstd_of(sum_over_row(squares, lanes, shared[turn][1]), a);
    if (t == 0 && present) a.rstd[row] = rstd;
    if (a.cast.amax == nullptr || !present) continue;
    x.forget();
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if ((v * lanes + t) * E >= columns) continue;
      forget<W, E>(gamma[v]);
      float y[E], factor[E], shift[E] = {};  // the sign of zero does not matter here
      widen<T>(y, x.words[v]);
      widen<W>(factor, gamma[v]);
      if constexpr (Centered) {
        forget<W, E>(beta[v]);
        widen<W>(shift, beta[v]);
      }
#pragma unroll
      for (int i = 0; i < E; ++i) {
        if (a.affine.zero_centered) factor[i] = __fadd_rn(1.0f, factor[i]);
        amax = max_magnitude(amax, normalized(__fsub_rn(y[i], mean), rstd, factor[i], shift[i]));
      }
    }
  }
  if (a.cast.amax == nullptr) return;
  __syncthreads();
  record(a.cast.amax, amax, shared[0][0]);
}

template <class T, class W>
void launch_statistics(const Queue& q, Forward a, int64_t vectors) {
  a.lanes = 1;
  if (vectors > 32 * kVectors)
    a.lanes = static_cast<int>(ceil_div(vectors, 32 * kVectors)) * 32;
  else
    while (a.lanes * kVectors < vectors) a.lanes *= 2;
  const int threads = a.lanes > 32 ? a.lanes : 256;
  const int64_t at_a_time = a.lanes > 32 ? 1 : threads / a.lanes;
  const int64_t resident = int64_t{q.limits().multiprocessors} * (kResident<T, W> / threads);
  const unsigned grid = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(a.rows, at_a_time), 1, resident));
  with_flag(a.mean != nullptr, [&](auto centered) {
    forward_statistics_kernel<T, W, decltype(centered)::value><<<grid, threads, 0, q.stream()>>>(a);
  });
}

int64_t vectors_of(const Forward& a, int x_dtype) { return ceil_div(a.columns * size_of(x_dtype), 16); }

}  // namespace

bool statistics_fit(const Forward& a, int x_dtype) {
  const bool wider = size_of(a.affine.gamma.dtype) > size_of(x_dtype);
  const int64_t most = kVectors * (wider ? kResident<__half, float> : kResident<float, float>);
  return a.whole() && (a.affine.gamma.dtype == x_dtype || a.affine.gamma.dtype == kFloat32) &&
         (a.mean != nullptr || a.affine.beta.data == nullptr) && vectors_of(a, x_dtype) <= most;
}

void forward_statistics(const Queue& q, const Forward& a, int x_dtype) {
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (a.affine.gamma.dtype == x_dtype)
      launch_statistics<T, T>(q, a, vectors_of(a, x_dtype));
    else
      launch_statistics<T, float>(q, a, vectors_of(a, x_dtype));
  });
}

}  // namespace ted::norm
