// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Norms of rows of any length and alignment: a block reads its row once for the mean, once for the variance, once
// to normalize. Two of the three readings are served by the caches.
#include "norm/forward.cuh"
#include "norm/norm.h"

#include <algorithm>

namespace ted::norm {

namespace {

constexpr int kThreads = 512;

// y of one vector, and all that is made of it. The row's end and alignments are looked up.
template <int E>
__device__ __forceinline__ void emit(const Forward& a, int64_t row, int64_t column, const float (&deviation)[E],
                                     float rstd, float scale, float& amax) {
  const int64_t valid = a.columns - column, index = row * a.columns + column;
  float y[E], shift[E];
  load_affine(y, shift, a.affine, column, valid);
#pragma unroll
  for (int i = 0; i < E; ++i) y[i] = normalized(deviation[i], rstd, y[i], shift[i]);
  if (a.y.data != nullptr) write(a.y, index, y, valid, a.y.aligned);
#pragma unroll
  for (int i = 0; i < E; ++i)
    if (i < valid) amax = max_magnitude(amax, y[i]);
  if (a.cast.codes == nullptr) return;
  const Codes<E> codes = encode_vector(y, scale, a.cast);
  if (a.cast.aligned && valid >= E) {
    *reinterpret_cast<Codes<E>*>(a.cast.codes + index) = codes;
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i)
      if (i < valid) a.cast.codes[index + i] = static_cast<uint8_t>(codes.pair[i / 2] >> (i % 2 * 8));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) forward_streaming_kernel(const __grid_constant__ Forward a) {
  constexpr int E = kVector<T>;
  __shared__ float shared[2][kMaxWarps];
  const int64_t row = a.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t start = row * a.columns, columns = row < a.rows ? a.columns : 0;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * E;
  const int64_t step = static_cast<int64_t>(a.lanes) * E;
  const T* source = static_cast<const T*>(a.residual == nullptr ? a.x : a.residual_out) + start;

  const float scale = scale_of(a.cast);
  const float known = a.cast.amax != nullptr ? *static_cast<volatile const float*>(a.cast.amax) : 0.0f;
  // A thread reads back only what it wrote itself.
  if (a.residual != nullptr) {
    for (int64_t column = first; column < columns; column += step) {
      const int64_t index = start + column, valid = columns - column;
      float sum[E], other[E];
      read(sum, static_cast<const T*>(a.x) + index, valid, a.aligned);
      read(other, static_cast<const T*>(a.residual) + index, valid, a.aligned);
#pragma unroll
      for (int i = 0; i < E; ++i) sum[i] = __fadd_rn(sum[i], other[i]);
      write(static_cast<T*>(a.residual_out) + index, sum, valid, a.aligned);
    }
  }

  float mean = 0.0f, rstd = 0.0f;
  if (a.known) {
    if (columns > 0) mean = a.mean != nullptr ? a.mean[row] : 0.0f, rstd = a.rstd[row];
  } else {
    if (a.mean != nullptr) {
      float sum = 0.0f;
      for (int64_t column = first; column < columns; column += step) {
        float x[E];
        read(x, source + column, columns - column, a.aligned);
#pragma unroll
        for (int i = 0; i < E; ++i) sum += x[i];
      }
      mean = row_sum(sum, a.lanes, shared[0]) * a.inverse_columns;
      if (threadIdx.x == 0 && columns > 0) a.mean[row] = mean;
    }
    float squares = 0.0f;
    for (int64_t column = first; column < columns; column += step) {
      float x[E];
      read(x, source + column, columns - column, a.aligned);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float deviation = column + i < columns ? __fsub_rn(x[i], mean) : 0.0f;
        squares = fmaf(deviation, deviation, squares);
      }
    }
    rstd = rstd_of(row_sum(squares, a.lanes, shared[1]), a);
    if (threadIdx.x == 0 && columns > 0) a.rstd[row] = rstd;
  }

  float amax = 0.0f;
  for (int64_t column = wants_y(a) ? first : columns; column < columns; column += step) {
    float x[E];
    read(x, source + column, columns - column, a.aligned);
    float deviation[E];
#pragma unroll
    for (int i = 0; i < E; ++i) deviation[i] = __fsub_rn(x[i], mean);
    emit(a, row, column, deviation, rstd, scale, amax);
  }
  finish_cast(a.cast, scale, amax, known);
  prepare<E>(a);
}

}  // namespace

void forward_streaming(const Queue& q, Forward a, int x_dtype) {
  a.lanes = static_cast<int>(std::min<int64_t>(ceil_div(a.columns, 32 * 8) * 32, kThreads));
  const unsigned grid = grid_x("x", a.rows > 0 ? a.rows : 1);
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    forward_streaming_kernel<T><<<grid, a.lanes, 0, q.stream()>>>(a);
  });
}

}  // namespace ted::norm
