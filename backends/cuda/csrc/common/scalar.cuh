// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Exact widening to fp32, one rounding back; vectors of one access.
#pragma once

#include "common/dtypes.h"

#include <cstdint>

namespace ted {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }

// N elements that move in accesses as wide as their alignment allows (16 bytes at most for one instruction).
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Vec {
  T data[N];
  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

// N elements from `source`: one wide access where `aligned` (to the vector) and all are valid, else element by element;
// elements from `valid` on are zero.
template <class T, int N>
__device__ __forceinline__ Vec<T, N> load_vector(const T* source, int64_t valid, bool aligned) {
  Vec<T, N> v;
  if (aligned && valid >= N) {
    v = *reinterpret_cast<const Vec<T, N>*>(source);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = i < valid ? source[i] : T{};
  }
  return v;
}

template <class T, int N>
__device__ __forceinline__ void store_vector(T* target, const Vec<T, N>& v, int64_t valid, bool aligned) {
  if (aligned && valid >= N) {
    *reinterpret_cast<Vec<T, N>*>(target) = v;
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < valid) target[i] = v[i];
  }
}

// The same where it is known at compile time that all accesses are of whole vectors. Loads of 16-bit elements want
// that: where a wide load and element-wise ones join, the compiler takes the vector apart at once, and so waits for it.
template <bool Whole, int N, class T>
__device__ __forceinline__ Vec<T, N> load_part(const T* source, int64_t valid) {
  if constexpr (Whole)
    return *reinterpret_cast<const Vec<T, N>*>(source);
  else
    return load_vector<T, N>(source, valid, false);
}

template <bool Whole, class T, int N>
__device__ __forceinline__ void store_part(T* target, const Vec<T, N>& v, int64_t valid) {
  if constexpr (Whole)
    *reinterpret_cast<Vec<T, N>*>(target) = v;
  else
    store_vector<T, N>(target, v, valid, false);
}

__host__ __device__ inline bool is_aligned(const void* p, int64_t row_bytes, int bytes = 16) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 && row_bytes % bytes == 0;
}

}  // namespace ted
