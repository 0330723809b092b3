// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// How a row is spread over threads: G threads hold E elements each in registers, as vectors (of 16 bytes of the input
// if rows allow it), vector n of thread t being the row's n * G + t. The shape depends on the columns and on alignment
// alone, so that a row's bits do not depend on the rows beside it.
#pragma once

#include "common/any.cuh"
#include "common/errors.h"
#include "common/queue.h"
#include "common/reduce.cuh"
#include "common/scalar.cuh"

namespace ted {

template <int G_, int E_>
struct Spread {
  static constexpr int G = G_, E = E_;
  static constexpr int kThreads = G > 32 ? G : E < 32 ? 128 : 64;  // measured: small blocks, but not of short rows
  static constexpr int kRows = kThreads / G;  // per block

  template <class Op>
  static __device__ __forceinline__ float reduce(float x, float identity, Op op, float* shared) {
    if constexpr (G <= 32)
      return warp_reduce<G>(x, op);
    else
      return block_reduce<G>(x, identity, op, shared);
  }
};

// Calls f(Spread<...>{}) for rows of up to Longest columns.
template <int64_t Longest, class F>
void with_spread(int64_t columns, F&& f) {
  if (columns <= 64) return f(Spread<8, 8>{});
  if (columns <= 128) return f(Spread<8, 16>{});
  if (columns <= 256) return f(Spread<8, 32>{});
  if (columns <= 512) return f(Spread<16, 32>{});
  if (columns <= 1024) return f(Spread<32, 32>{});
  if (columns <= 2048) return f(Spread<64, 32>{});
  if (columns <= 4096) return f(Spread<128, 32>{});
  if (Longest <= 8192 || columns <= 8192) return f(Spread<256, 32>{});
  if constexpr (Longest > 8192) return f(Spread<512, 32>{});
}

// Elements of one access: vectors where every row begins at a whole one, else one by one, neighbours by neighbours.
template <class T, bool Whole>
constexpr int kWidth = Whole ? 16 / static_cast<int>(sizeof(T)) : 1;

}  // namespace ted
