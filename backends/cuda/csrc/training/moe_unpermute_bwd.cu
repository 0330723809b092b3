// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// A warp per token scatters its gradient to the rows of its choices, and dots it with them. Every row has one choice at
// most, so nothing is summed across tokens; rows that no choice led to are found by what the others marked.
#include "common/reduce.cuh"
#include "training/choices.cuh"
#include "training/training.h"

namespace ted {

namespace {

constexpr int kThreads = 256;

struct UnpermuteBackward {
  AnyPointer dy;
  const void* x;
  const int32_t* row_map;
  AnyPointer probs, dprobs;  // null for none
  void* dinput;
  uint8_t* filled;
  int64_t tokens, top_k, rows, columns;
};

// Rows of C choices, U vectors of each, are in flight together. Weighs: there are probabilities. Like: dy is of x's
// type.
template <class T, int C, int U, bool Weighs, bool Like, bool Whole>
__global__ void __launch_bounds__(kThreads, 2) unpermute_backward(const __grid_constant__ UnpermuteBackward a) {
  constexpr int V = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (token >= a.tokens) return;
  const T* x = static_cast<const T*>(a.x);
  const T* dy = static_cast<const T*>(a.dy.base) + token * a.columns;  // where Like
  T* dinput = static_cast<T*>(a.dinput);
  for (int64_t first = 0; first < a.top_k; first += C) {
    Choices<C> choices;
    choices.read(a.row_map, a.probs, token, a.top_k, first);
    float dot[C] = {};
    for (int64_t column = lane * V; column < a.columns; column += 32 * V * U) {
      Packed<T, V> grad[U], value[U][C];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = column + u * 32 * V;
        if (i >= a.columns) continue;
        if (Like) grad[u] = load_packed<Whole, V>(dy + i, a.columns - i);
        if (Weighs) {
#pragma unroll
          for (int c = 0; c < C; ++c)
            if (choices.row[c] >= 0)
              value[u][c] = load_packed<Whole, V>(x + choices.row[c] * a.columns + i, a.columns - i);
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = column + u * 32 * V;
        if (i >= a.columns) break;
        float g[V];
        if (Like) {
#pragma unroll
          for (int k = 0; k < V; ++k) g[k] = grad[u][k];
        } else {
          a.dy.load<V>(token * a.columns + i, g, a.columns - i, Whole);
        }
#pragma unroll
        for (int c = 0; c < C; ++c) {
          if (choices.row[c] < 0) continue;
          Vec<T, V> out;
#pragma unroll
          for (int k = 0; k < V; ++k) out[k] = from_float<T>(g[k] * choices.weight[c]);
          store_part<Whole>(dinput + choices.row[c] * a.columns + i, out, a.columns - i);
          if (Weighs) {
#pragma unroll
            for (int k = 0; k < V; ++k) dot[c] = fmaf(g[k], value[u][c][k], dot[c]);
          }
        }
      }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      if (first + c >= a.top_k) break;
      const float sum = warp_reduce(dot[c], Sum{});
      if (lane != 0) continue;
      if (Weighs) a.dprobs.store(token * a.top_k + first + c, sum);
      if (choices.row[c] >= 0) a.filled[choices.row[c]] = 1;
    }
  }
}

// Zeros in rows that are not marked: a warp looks at 32 of them.
template <class Word>
__global__ void __launch_bounds__(kThreads)
zero_rows(const uint8_t* filled, Word* target, int64_t rows, int64_t words) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32 * 32;
  unsigned empty = __ballot_sync(0xffffffffu, first + lane < rows && filled[first + lane] == 0);
  for (; empty != 0; empty &= empty - 1) {
    Word* row = target + (first + __ffs(empty) - 1) * words;
    for (int64_t i = lane; i < words; i += 32) row[i] = Word{};
  }
}

template <class T, bool Weighs, bool Like, bool Whole>
void launch(const Queue& q, const UnpermuteBackward& a) {
  if (a.rows > 0) check(cudaMemsetAsync(a.filled, 0, a.rows, q.stream()), "moe_unpermute_bwd");
  if (a.tokens > 0) {
    const unsigned grid = grid_x("row_map", ceil_div(a.tokens, kThreads / 32));
    if (Like && Whole && a.top_k <= 2)
      unpermute_backward<T, 2, 4, Weighs, true, true><<<grid, kThreads, 0, q.stream()>>>(a);
    else
      unpermute_backward<T, 4, 1, Weighs, Like, Whole><<<grid, kThreads, 0, q.stream()>>>(a);
  }
  if (a.rows == 0 || a.columns == 0) return;
  const unsigned grid = grid_x("x", ceil_div(a.rows, kThreads));
  if (Whole)
    zero_rows<<<grid, kThreads, 0, q.stream()>>>(a.filled, static_cast<uint4*>(a.dinput), a.rows,
                                                 a.columns * static_cast<int64_t>(sizeof(T)) / 16);
  else
    zero_rows<<<grid, kThreads, 0, q.stream()>>>(a.filled, static_cast<T*>(a.dinput), a.rows, a.columns);
}

}  // namespace

void moe_unpermute_bwd(int device, uintptr_t stream, uintptr_t dy, uintptr_t x, uintptr_t row_map, uintptr_t probs,
                       uintptr_t dinput, uintptr_t dprobs, uintptr_t filled, int64_t tokens, int64_t top_k,
                       int64_t rows, int64_t columns, int dy_dtype, int dtype, int probs_dtype) {
  const int64_t choices = require_count("row_map", tokens, top_k), count = require_count("x", rows, columns);
  require_pointer("dy", pointer<void>(dy), require_count("dy", tokens, columns), size_of(dy_dtype));
  require_pointer("x", pointer<void>(x), count, size_of(dtype));
  require_pointer("row_map", pointer<void>(row_map), choices, 4);
  require_pointer("probs", pointer<void>(probs), dprobs != 0 ? choices : 0, size_of(probs_dtype));
  require_pointer("dinput", pointer<void>(dinput), count, size_of(dtype));
  require_pointer("dprobs", pointer<void>(dprobs), probs != 0 ? choices : 0, size_of(probs_dtype));
  require_pointer("workspace", pointer<void>(filled), rows, 1);
  Queue q(device, stream);
  const UnpermuteBackward a{{pointer<void>(dy), dy_dtype}, pointer<void>(x), pointer<int32_t>(row_map),
                            {pointer<void>(probs), probs_dtype}, {pointer<void>(dprobs), probs_dtype},
                            pointer<void>(dinput), pointer<uint8_t>(filled), tokens, top_k, rows, columns};
  with_dtype("x", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = 16 / sizeof(T);
    const bool whole = columns % V == 0 && is_aligned(a.x, 0) && is_aligned(a.dinput, 0) && a.dy.takes_vectors(V);
    with_flag(dy_dtype == dtype, [&](auto like) {
      with_flag(whole, [&](auto flag) {
        if (dprobs != 0)
          launch<T, true, decltype(like)::value, decltype(flag)::value>(q, a);
        else
          launch<T, false, decltype(like)::value, decltype(flag)::value>(q, a);
      });
    });
  });
  q.launched("moe_unpermute_bwd");
}

}  // namespace ted
