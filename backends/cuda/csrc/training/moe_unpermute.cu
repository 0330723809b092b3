// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Choices are summed in their order, in fp32: a token's result does not depend on the other tokens.
#include "training/choices.cuh"
#include "training/training.h"

#include <algorithm>

namespace ted {

namespace {

constexpr int kThreads = 256;

struct Unpermute {
  const void* x;
  const int32_t* row_map;
  AnyPointer probs;  // null for none
  void* out;
  int64_t tokens, top_k, columns;
  int log_group;  // threads of one token
};

// Rows of C choices, U vectors of each, are in flight together. Only with Loop are there more than C choices.
template <class T, int C, int U, bool Loop, bool Whole>
__global__ void __launch_bounds__(kThreads, 3) unpermute(const __grid_constant__ Unpermute a) {
  constexpr int V = 16 / sizeof(T);
  const int group = 1 << a.log_group, lane = threadIdx.x & (group - 1);
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads >> a.log_group) + (threadIdx.x >> a.log_group);
  if (token >= a.tokens) return;
  const T* x = static_cast<const T*>(a.x);
  T* out = static_cast<T*>(a.out) + token * a.columns;
  Choices<C> choices;
  if (!Loop) choices.read(a.row_map, a.probs, token, a.top_k, 0);
  for (int64_t column = lane * V; column < a.columns; column += group * V * U) {
    float sum[U][V] = {};
    for (int64_t first = 0; first < (Loop ? a.top_k : 1); first += C) {
      if (Loop) choices.read(a.row_map, a.probs, token, a.top_k, first);
      Packed<T, V> value[U][C];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = column + u * group * V;
#pragma unroll
        for (int c = 0; c < C; ++c)
          if (choices.row[c] >= 0 && i < a.columns)
            value[u][c] = load_packed<Whole, V>(x + choices.row[c] * a.columns + i, a.columns - i);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int64_t i = column + u * group * V;
#pragma unroll
        for (int c = 0; c < C; ++c) {
          if (choices.row[c] < 0) continue;
#pragma unroll
          for (int k = 0; k < V; ++k) sum[u][k] = fmaf(value[u][c][k], choices.weight[c], sum[u][k]);
        }
        if ((Loop && first + C < a.top_k) || i >= a.columns) continue;
        Vec<T, V> result;
#pragma unroll
        for (int k = 0; k < V; ++k) result[k] = from_float<T>(sum[u][k]);
        store_part<Whole>(out + i, result, a.columns - i);
      }
    }
    if (Loop && a.top_k == 0)
      for (int u = 0; u < U; ++u)
        if (column + u * group * V < a.columns)
          store_part<Whole>(out + column + u * group * V, Vec<T, V>{}, a.columns - column - u * group * V);
  }
}

template <class T, int C, int U, bool Loop, bool Whole>
void launch(const Queue& q, Unpermute a) {
  constexpr int V = 16 / sizeof(T);
  for (a.log_group = 5; a.log_group < 8 && (V * U << a.log_group) < a.columns;) ++a.log_group;
  const unsigned grid = grid_x("row_map", ceil_div(a.tokens, kThreads >> a.log_group));
  unpermute<T, C, U, Loop, Whole><<<grid, kThreads, 0, q.stream()>>>(a);
}

}  // namespace

void moe_unpermute(int device, uintptr_t stream, uintptr_t x, uintptr_t row_map, uintptr_t probs, uintptr_t out,
                   int64_t tokens, int64_t top_k, int64_t rows, int64_t columns, int dtype, int probs_dtype) {
  const int64_t choices = require_count("row_map", tokens, top_k);
  require_pointer("x", pointer<void>(x), require_count("x", rows, columns), size_of(dtype));
  require_pointer("row_map", pointer<void>(row_map), choices, 4);
  require_pointer("probs", pointer<void>(probs), 0, size_of(probs_dtype));
  require_pointer("out", pointer<void>(out), require_count("out", tokens, columns), size_of(dtype));
  if (tokens == 0 || columns == 0) return;
  Queue q(device, stream);
  const Unpermute a{pointer<void>(x), pointer<int32_t>(row_map), {pointer<void>(probs), probs_dtype},
                    pointer<void>(out), tokens, top_k, columns, 0};
  with_dtype("x", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = 16 / sizeof(T);
    if (columns % V != 0 || !is_aligned(a.x, 0) || !is_aligned(a.out, 0))
      launch<T, 4, 1, true, false>(q, a);
    else if (top_k <= 2)
      launch<T, 2, 4, false, true>(q, a);
    else
      launch<T, 8, 1, true, true>(q, a);
  });
  q.launched("moe_unpermute");
}

}  // namespace ted
