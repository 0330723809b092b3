// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Four neighbouring elements of a type known at run time, as fp32. The switches are uniform over a launch.
#pragma once

#include "common/encode.cuh"
#include "common/scalar.cuh"
#include "gemm/steps.h"

namespace ted::gemm {

template <class T>
__device__ __forceinline__ void load_four_as(const void* source, int64_t index, int64_t valid, bool aligned, float (&x)[4]) {
  const Vec<T, 4> v = load_vector<T, 4>(static_cast<const T*>(source) + index, valid, aligned);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = to_float(v[i]);
}

// Elements from `valid` on are 0. aligned: the address and every row's start are multiples of four elements.
__device__ __forceinline__ void load_four(const void* source, int type, int64_t index, int64_t valid, bool aligned,
                                          float (&x)[4]) {
  if (type == kFloat32) return load_four_as<float>(source, index, valid, aligned, x);
  if (type == kBFloat16) return load_four_as<__nv_bfloat16>(source, index, valid, aligned, x);
  if (type == kFloat16) return load_four_as<__half>(source, index, valid, aligned, x);
  const Vec<uint8_t, 4> v = load_vector<uint8_t, 4>(static_cast<const uint8_t*>(source) + index, valid, aligned);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = decode_integer(v[i], type - kCodes);
}

template <class T>
__device__ __forceinline__ void store_four_as(void* target, int64_t index, int64_t valid, bool aligned, const float (&x)[4]) {
  Vec<T, 4> v;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = from_float<T>(x[i]);
  store_vector<T, 4>(static_cast<T*>(target) + index, v, valid, aligned);
}

__device__ __forceinline__ void store_four(void* target, int type, int64_t index, int64_t valid, bool aligned,
                                           const float (&x)[4]) {
  if (type == kFloat32) return store_four_as<float>(target, index, valid, aligned, x);
  if (type == kBFloat16) return store_four_as<__nv_bfloat16>(target, index, valid, aligned, x);
  return store_four_as<__half>(target, index, valid, aligned, x);
}

__device__ __forceinline__ void store_four_codes(void* target, int cast, float scale, int64_t index, int64_t valid,
                                                 bool aligned, const float (&x)[4]) {
  const Format f = format_of(cast);
  Vec<uint8_t, 4> v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float scaled = __fmul_rn(x[i], scale);
    v[i] = cast == kE4M3 ? encode<kHardE4M3>(scaled, f) : cast == kE5M2 ? encode<kHardE5M2>(scaled, f) : encode_integer(scaled, f);
  }
  store_vector<uint8_t, 4>(static_cast<uint8_t*>(target) + index, v, valid, aligned);
}

__device__ __forceinline__ void store_one(void* target, int type, int64_t index, float x) {
  if (type == kFloat32) static_cast<float*>(target)[index] = x;
  else if (type == kBFloat16) static_cast<__nv_bfloat16*>(target)[index] = from_float<__nv_bfloat16>(x);
  else static_cast<__half*>(target)[index] = from_float<__half>(x);
}

__device__ __forceinline__ float load_one(const void* source, int type, int64_t index) {
  if (type == kFloat32) return static_cast<const float*>(source)[index];
  if (type == kBFloat16) return to_float(static_cast<const __nv_bfloat16*>(source)[index]);
  return to_float(static_cast<const __half*>(source)[index]);
}

}  // namespace ted::gemm
