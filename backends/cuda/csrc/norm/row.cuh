// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Rows spread over threads: which thread has which elements, sums over a row, runs of elements as floats.
//
// A row is read in vectors of 16 bytes. `lanes` threads share it: a power of two up to 32 (then several rows share a
// block), or a whole block. Thread t has vectors t, t + lanes, t + 2 lanes, ...: which elements meet in which order
// does not depend on other rows.
//
// *Whole* rows are those that are aligned in every operand and consist of whole vectors: kernels for them have no path
// for single elements.
#pragma once

#include "common/dtypes.h"
#include "common/reduce.cuh"
#include "common/scalar.cuh"

#include <cstdint>

namespace ted::norm {

constexpr int kMaxWarps = 32;

// Elements of one vector of x.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

// E elements as the words they are loaded in. Arrays of 16-bit elements would be taken apart into half registers.
template <class T, int E>
using Words = Vec<uint32_t, E * static_cast<int>(sizeof(T)) / 4>;

template <class T, int E>
__device__ __forceinline__ void widen(float (&out)[E], const Words<T, E>& v) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < E; ++i) out[i] = __uint_as_float(v.data[i]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < E; i += 2) {
      out[i] = __uint_as_float(v.data[i / 2] << 16);
      out[i + 1] = __uint_as_float(v.data[i / 2] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < E; i += 2) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&v.data[i / 2]));
      out[i] = pair.x, out[i + 1] = pair.y;
    }
  }
}

template <class T, int E>
__device__ __forceinline__ Words<T, E> narrow(const float (&x)[E]) {
  Words<T, E> v;
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (int i = 0; i < E; ++i) v.data[i] = __float_as_uint(x[i]);
  } else {
#pragma unroll
    for (int i = 0; i < E; i += 2) {
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[i], x[i + 1]);
        v.data[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __half2 pair = __floats2half2_rn(x[i], x[i + 1]);
        v.data[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  }
  return v;
}

// E elements as floats, zeros from `valid` on; one access (two for E floats of 32 bytes) where `aligned`.
template <class T, int E>
__device__ __forceinline__ void read(float (&out)[E], const T* source, int64_t valid, bool aligned) {
  if (aligned && valid >= E) {
    widen<T>(out, *reinterpret_cast<const Words<T, E>*>(source));
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i) out[i] = i < valid ? to_float(source[i]) : 0.0f;
  }
}

template <class T, int E>
__device__ __forceinline__ void write(T* target, const float (&x)[E], int64_t valid, bool aligned) {
  if (aligned && valid >= E) {
    *reinterpret_cast<Words<T, E>*>(target) = narrow<T>(x);
  } else {
#pragma unroll
    for (int i = 0; i < E; ++i)
      if (i < valid) target[i] = from_float<T>(x[i]);
  }
}

inline void require_dtype(const char* name, int dtype) {
  with_dtype(name, dtype, [](auto) {});
}

// An operand whose dtype is known at run time only; the branches on it are uniform.
struct Operand {
  const void* data;
  int dtype;
  bool aligned;  // to a vector of E elements, at every multiple of E
};

template <int E>
__device__ __forceinline__ void read(float (&out)[E], const Operand& from, int64_t index, int64_t valid) {
  switch (from.dtype) {
    case kFloat32: return read(out, static_cast<const float*>(from.data) + index, valid, from.aligned);
    case kBFloat16: return read(out, static_cast<const __nv_bfloat16*>(from.data) + index, valid, from.aligned);
    default: return read(out, static_cast<const __half*>(from.data) + index, valid, from.aligned);
  }
}

struct Result {
  void* data;
  int dtype;
  bool aligned;
};

template <int E>
__device__ __forceinline__ void write(const Result& to, int64_t index, const float (&x)[E], int64_t valid,
                                      bool aligned) {
  switch (to.dtype) {
    case kFloat32: return write(static_cast<float*>(to.data) + index, x, valid, aligned);
    case kBFloat16: return write(static_cast<__nv_bfloat16*>(to.data) + index, x, valid, aligned);
    default: return write(static_cast<__half*>(to.data) + index, x, valid, aligned);
  }
}

// Vectors t, t + lanes, ... of a whole row, zeros behind its end. The loads are issued back to back.
template <class T, int V>
__device__ __forceinline__ void load_row(Vec<uint32_t, 4> (&out)[V], const T* row, int columns, int t, int lanes) {
  constexpr int E = kVector<T>;
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int column = (v * lanes + t) * E;
    out[v] = {};
    if (column < columns) out[v] = *reinterpret_cast<const Vec<uint32_t, 4>*>(row + column);
  }
}

// Each warp's sum, in shared memory, to the sum of `warps` of them in every lane.
__device__ __forceinline__ float sum_of_warps(const float* shared, int warps) {
  const int width = warps <= 4 ? 4 : warps <= 16 ? 16 : 32, lane = threadIdx.x & (width - 1);
  float x = lane < warps ? shared[lane] : 0.0f;
  if (width > 4) {
    if (width > 16) x += __shfl_xor_sync(0xffffffffu, x, 16);
    x += __shfl_xor_sync(0xffffffffu, x, 8);
    x += __shfl_xor_sync(0xffffffffu, x, 4);
  }
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x + __shfl_xor_sync(0xffffffffu, x, 1);
}

// The sum over a row's threads, in each of them. `shared` has a float per warp and is this call's own: the next call
// takes another. Every thread of the block calls it.
__device__ __forceinline__ float row_sum(float x, int lanes, float* shared) {
  if (lanes < 32) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
  }
  x = warp_reduce(x, Sum{});
  if (lanes == 32) return x;
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_of_warps(shared, lanes / 32);
}

// Vectors of a row in registers. They stay packed: what is widened for one pass over them is widened again for the
// next, which costs an instruction an element and halves the registers.
template <class T, int V>
struct PackedRow {
  static constexpr int kElements = kVector<T>;
  using Values = float[kElements];
  Vec<uint32_t, 4> words[V];

  // Call between passes: hides from the compiler that it has widened these words before.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int v = 0; v < V; ++v)
#pragma unroll
      for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(words[v].data[i]));
  }

  // One chain of additions per vector.
  __device__ __forceinline__ float sum() const {
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      Values x;
      widen<T>(x, words[v]);
      float of_vector = x[0];
#pragma unroll
      for (int i = 1; i < kElements; ++i) of_vector += x[i];
      total += of_vector;
    }
    return total;
  }

  // Of (x - mean)^2, for vectors t, t + lanes, ... that begin before `columns`.
  __device__ __forceinline__ float sum_of_squares(float mean, int columns, int t, int lanes) const {
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if ((v * lanes + t) * kElements >= columns) continue;
      Values x;
      widen<T>(x, words[v]);
      float of_vector = 0.0f;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        x[i] = __fsub_rn(x[i], mean);
        of_vector = fmaf(x[i], x[i], of_vector);
      }
      total += of_vector;
    }
    return total;
  }
};

// (x - mean) rstd factor + shift. Written out, so that every kernel that recomputes y gets the same bits.
__device__ __forceinline__ float normalized(float deviation, float rstd, float factor, float shift) {
  return __fmaf_rn(__fmul_rn(deviation, rstd), factor, shift);
}

// Adding it leaves every number as it is, the sign of zero too: the shift where there is no beta.
constexpr float kNoShift = -0.0f;

}  // namespace ted::norm
