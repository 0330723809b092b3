// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Reductions within a warp and a block, in a fixed order. amax ignores NaN (fmaxf does) and keeps Inf.
#pragma once

#include <cstdint>

namespace ted {

struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// The result in every lane of a group of `Width` lanes.
template <int Width = 32, class Op>
__device__ __forceinline__ float warp_reduce(float x, Op op) {
#pragma unroll
  for (int offset = Width / 2; offset > 0; offset /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// The result in every thread of a block of `Threads`; `shared` has Threads / 32 floats and may be reused after the call.
template <int Threads, class Op>
__device__ __forceinline__ float block_reduce(float x, float identity, Op op, float* shared) {
  x = warp_reduce(x, op);
  if constexpr (Threads > 32) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (lane == 0) shared[warp] = x;
    __syncthreads();
    x = warp_reduce(lane < Threads / 32 ? shared[lane] : identity, op);
    __syncthreads();
  }
  return x;
}

// *target = max(*target, value) for value >= 0: non-negative floats order as their bits do. The result does not depend
// on the order of arrival. A negative or NaN value leaves the target alone.
__device__ __forceinline__ void atomic_max_nonnegative(float* target, float value) {
  if (value > 0.0f) atomicMax(reinterpret_cast<int*>(target), __float_as_int(value));
}

}  // namespace ted
