// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Norms of whole rows (row.cuh) that fit the registers of one block: read once, variance in two passes over registers.
// One file for each product keeps compilation apart.
#pragma once

#include "norm/forward.cuh"
#include "norm/norm.h"

namespace ted::norm {

// Threads that share a row at most, and how many such blocks registers shall suffice for.
template <int V>
constexpr int kThreads = V == kMaxRowVectors ? 512 : V == 8 ? 256 : 128;
template <int V, int Product>
constexpr int kBlocks = V == kMaxRowVectors ? 1 : V == 8 ? 3 : Product == kOnlyY ? 10 : 8;

// V vectors of a row per thread.
template <class T, int V, int Product>
__global__ void __launch_bounds__(kThreads<V>, kBlocks<V, Product>) forward_rows(const __grid_constant__ Forward a) {
  constexpr int E = kVector<T>;
  __shared__ float shared[2][kMaxWarps];
  const int lanes = a.lanes;
  const bool packed = lanes <= 32;
  const int t = packed ? threadIdx.x & (lanes - 1) : threadIdx.x;
  const unsigned block = a.backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t row = packed ? static_cast<int64_t>(block) * (blockDim.x / lanes) + threadIdx.x / lanes : block;
  const bool present = row < a.rows;
  const int64_t start = present ? row * a.columns : 0;
  const int columns = present ? static_cast<int>(a.columns) : 0;

  float scale = 0.0f, known = 0.0f;
  if constexpr (Product != kOnlyY) {
    scale = scale_of(a.cast);
    if (a.cast.amax != nullptr) known = *static_cast<volatile const float*>(a.cast.amax);
  }

  PackedRow<T, V> x;
  load_row(x.words, static_cast<const T*>(a.x) + start, columns, t, lanes);
  if (a.residual != nullptr) add_residual<4>(x, a, start, columns, t);

  float mean = 0.0f, rstd = 0.0f;
  if (a.known) {
    if (present) mean = a.mean != nullptr ? a.mean[row] : 0.0f, rstd = a.rstd[row];
  } else {
    if (a.mean != nullptr) {
      mean = row_sum(x.sum(), lanes, shared[0]) * a.inverse_columns;
      if (t == 0 && present) a.mean[row] = mean;
      x.forget();
    }
    rstd = rstd_of(row_sum(x.sum_of_squares(mean, columns, t, lanes), lanes, shared[1]), a);
    if (t == 0 && present) a.rstd[row] = rstd;
    x.forget();
  }

  float amax = 0.0f;
  if (wants_y(a)) {
    with_weight_type<T>(a, [&](auto weight) {
      with_y_type<Product>(a, [&](auto type) {
        using W = typename decltype(weight)::type;
        using Y = typename decltype(type)::type;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const int column = (v * lanes + t) * E;
          if (column >= columns) continue;
          float y[E];
          make_y<Product, T, W, Y>(y, a, start, column, x.words[v], mean, rstd, amax);
          if constexpr (Product == kOnlyY) continue;
          if (Product == kOnlyE4M3 || a.cast.codes != nullptr)
            *reinterpret_cast<Codes<E>*>(a.cast.codes + start + column) = encode_row<Product>(y, scale, a.cast);
        }
      });
    });
  }
  if constexpr (Product != kOnlyY) finish_cast(a.cast, scale, amax, known);
  prepare<E>(a);
}

template <class T, int Product>
void launch_vectors(const Queue& q, const Forward& a, int vectors, unsigned blocks, int threads) {
  switch (vectors) {
    case 1: return forward_rows<T, 1, Product><<<blocks, threads, 0, q.stream()>>>(a);
    case 4: return forward_rows<T, 4, Product><<<blocks, threads, 0, q.stream()>>>(a);
    case 8: return forward_rows<T, 8, Product><<<blocks, threads, 0, q.stream()>>>(a);
    default: return forward_rows<T, 16, Product><<<blocks, threads, 0, q.stream()>>>(a);
  }
}

template <int Product>
void launch_rows(const Queue& q, const Forward& a, int x_dtype, int vectors, unsigned blocks, int threads) {
  with_dtype("x", x_dtype, [&](auto type) {
    launch_vectors<typename decltype(type)::type, Product>(q, a, vectors, blocks, threads);
  });
}

}  // namespace ted::norm
