// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Elements of a type that is known at run time: a branch that all threads take alike, where a template for every
// combination of types would not pay.
#pragma once

#include "common/scalar.cuh"

namespace ted {

struct AnyPointer {
  void* base;
  int dtype;

  __device__ __forceinline__ float load(int64_t i) const {
    switch (dtype) {
      case kFloat32: return static_cast<const float*>(base)[i];
      case kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(base)[i]);
      default: return to_float(static_cast<const __half*>(base)[i]);
    }
  }

  __device__ __forceinline__ void store(int64_t i, float value) const {
    const float values[1] = {value};
    store<1>(i, values, 1, true);
  }

  // V values from element i on, those below `valid`; beyond, zeros are read and nothing is written.
  template <int V>
  __device__ __forceinline__ void load(int64_t i, float (&values)[V], int64_t valid, bool aligned) const {
    switch (dtype) {
      case kFloat32: return get<float, V>(i, values, valid, aligned);
      case kBFloat16: return get<__nv_bfloat16, V>(i, values, valid, aligned);
      default: return get<__half, V>(i, values, valid, aligned);
    }
  }
  template <int V>
  __device__ __forceinline__ void store(int64_t i, const float (&values)[V], int64_t valid, bool aligned) const {
    switch (dtype) {
      case kFloat32: return put<float, V>(i, values, valid, aligned);
      case kBFloat16: return put<__nv_bfloat16, V>(i, values, valid, aligned);
      default: return put<__half, V>(i, values, valid, aligned);
    }
  }

  template <bool Whole, int V>
  __device__ __forceinline__ void store_part(int64_t i, const float (&values)[V], int64_t valid) const {
    store<V>(i, values, Whole ? V : valid, Whole);
  }

  // Whether vectors of V elements may be moved from multiples of V on.
  bool takes_vectors(int v) const {
    const int64_t bytes = v * size_of(dtype);
    return is_aligned(base, 0, static_cast<int>(bytes < 16 ? bytes : 16));
  }

 private:
  template <class T, int V>
  __device__ __forceinline__ void get(int64_t i, float (&values)[V], int64_t valid, bool aligned) const {
    const Vec<T, V> v = load_vector<T, V>(static_cast<const T*>(base) + i, valid, aligned);
#pragma unroll
    for (int k = 0; k < V; ++k) values[k] = to_float(v[k]);
  }
  template <class T, int V>
  __device__ __forceinline__ void put(int64_t i, const float (&values)[V], int64_t valid, bool aligned) const {
    Vec<T, V> v;
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] = from_float<T>(values[k]);
    store_vector<T, V>(static_cast<T*>(base) + i, v, valid, aligned);
  }
};

}  // namespace ted
