// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Where the choices of a token went.
#pragma once

#include "common/any.cuh"
#include "common/errors.h"
#include "common/packed.cuh"
#include "common/queue.h"

namespace ted {

// C choices of a token from `first` on: the row of each, -1 where dropped, and its weight, 1 without probabilities.
template <int C>
struct Choices {
  int64_t row[C];
  float weight[C];

  __device__ __forceinline__ void read(const int32_t* row_map, const AnyPointer& probs, int64_t token, int64_t top_k,
                                       int64_t first) {
#pragma unroll
    for (int c = 0; c < C; ++c) row[c] = first + c < top_k ? row_map[token * top_k + first + c] : -1;
    // The weight of a dropped choice is never looked at: it may be anything.
#pragma unroll
    for (int c = 0; c < C; ++c)
      weight[c] = probs.base != nullptr && first + c < top_k ? probs.load(token * top_k + first + c) : 1.0f;
  }
};

}  // namespace ted
