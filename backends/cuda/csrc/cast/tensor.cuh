// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts with one scale per tensor, of any source (cast/source.cuh): row-wise codes from a flat kernel, column-wise ones
// and column sums from a kernel of tiles, the amax that current scaling needs from a pass of its own.
//
//   launch_cast(queue, source, cast)       all that `cast` names, in one launch
//   launch_maxima(queue, source, ...)      partial maxima of |value|, which a following launch_cast reduces itself
//   launch_sums(queue, partial, ...)       column sums from the partial ones of launch_cast (quantize/tensor_sums.cu)
#pragma once

#include "cast/source.cuh"
#include "cast/tensor.h"
#include "common/encode.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"

namespace ted {
namespace tensor_cast {

constexpr int kThreads = 256;
constexpr int kVector = 8;    // elements of one access: 16 bytes of bf16
constexpr int kInFlight = 4;  // accesses that a thread issues before it uses the first

using Values = float[kVector];

// The columns that an engine walks over: all, or one of the halves that a source yields together.
template <class Source>
__host__ __device__ int64_t span_of(const Source& source) {
  return source.columns() / HalvesOf<Source>::value;
}

template <class Source, class Raw>
__device__ __forceinline__ void evaluate(const Source& source, const Raw& raw, Values (&v)[HalvesOf<Source>::value]) {
  if constexpr (HalvesOf<Source>::value == 2)
    source.template both<kVector>(raw, v[0], v[1]);
  else
    source.template values<kVector>(raw, v[0]);
}

// Eight codes as two words, the first element in the lowest byte.
struct Codes {
  uint32_t low, high;
};

template <int Mode>
__device__ __forceinline__ Codes encode_eight(const Values& v, float scale, const Format& format) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = encode_pair<Mode>(v[2 * i] * scale, v[2 * i + 1] * scale, format);
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// The encoding is a run-time switch, once per eight: a third of the instantiations for two instructions.
struct Encoder {
  int mode;
  Format format;
  float scale;

  __device__ __forceinline__ Codes operator()(const Values& v) const {
#if __CUDA_ARCH__ >= 890  // below, every mode goes through integers
    if (mode == kHardE4M3) return encode_eight<kHardE4M3>(v, scale, format);
    if (mode == kHardE5M2) return encode_eight<kHardE5M2>(v, scale, format);
#endif
    return encode_eight<kSoft>(v, scale, format);
  }
};

// Every thread of the block calls this.
__device__ __forceinline__ float scale_of(const TensorCast& cast, float max_value, float* shared) {
  if (cast.scale != nullptr) return *cast.scale;
  float amax;
  if (cast.maxima_count == 0) {
    amax = *cast.maxima;  // given by the caller, NaN perhaps
  } else {
    wait_for_previous();
    amax = 0.0f;
    for (int64_t i = threadIdx.x; i < cast.maxima_count; i += kThreads) amax = fmaxf(amax, cast.maxima[i]);
    amax = block_reduce<kThreads>(amax, 0.0f, Max{}, shared);
  }
  return scale_from_amax(amax, max_value, cast.epsilon, cast.power_of_two);
}

__device__ __forceinline__ bool casts(const TensorCast& cast) {
  return cast.scale != nullptr || cast.maxima != nullptr;
}

__device__ __forceinline__ Encoder encoder_of(const TensorCast& cast, float* shared) {
  Encoder encoder;
  encoder.format = format_of(cast.cast);
  encoder.mode = cast.cast == kE4M3 ? kHardE4M3 : cast.cast == kE5M2 ? kHardE5M2 : kSoft;
  encoder.scale = 1.0f;
  if (!casts(cast)) return encoder;
  encoder.scale = scale_of(cast, encoder.format.max_value, shared);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const float inverse = __frcp_rn(encoder.scale);
    if (cast.row_scale_inv != nullptr) *cast.row_scale_inv = inverse;
    if (cast.column_scale_inv != nullptr) *cast.column_scale_inv = inverse;
  }
  return encoder;
}

// Which piece of the matrix a block takes. What the pass for the amax read last is still in L2: start there.
__device__ __forceinline__ uint32_t visit(const TensorCast& cast) {
  return cast.maxima_count > 0 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
}

template <bool Full>
__device__ __forceinline__ void store_codes(uint8_t* target, const Codes& codes, int64_t valid) {
  if constexpr (Full) {
    *reinterpret_cast<uint2*>(target) = make_uint2(codes.low, codes.high);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
      if (i < valid) target[i] = static_cast<uint8_t>((i < 4 ? codes.low : codes.high) >> 8 * (i % 4));
  }
}

template <class T, bool Full>
__device__ __forceinline__ void store_as(void* out, int64_t at, const Values& v, int64_t valid) {
  Vec<T, kVector> rounded;
#pragma unroll
  for (int i = 0; i < kVector; ++i) rounded[i] = from_float<T>(v[i]);
  T* target = static_cast<T*>(out) + at;
  if constexpr (Full && sizeof(T) == 2) {
    // As words: kernels of tiles stored elements of 16 bits one by one, and took twice as long.
    uint4 words;
    memcpy(&words, &rounded, sizeof(words));
    *reinterpret_cast<uint4*>(target) = words;
  } else {
    store_vector(target, rounded, valid, Full);
  }
}

template <bool Full>
__device__ __forceinline__ void store_values(void* out, int dtype, int64_t at, const Values& v, int64_t valid) {
  if (dtype == kFloat32)
    store_as<float, Full>(out, at, v, valid);
  else if (dtype == kBFloat16)
    store_as<__nv_bfloat16, Full>(out, at, v, valid);
  else
    store_as<__half, Full>(out, at, v, valid);
}

// What a source made of the zeros beyond the edge counts for nothing.
__device__ __forceinline__ void clear_invalid(Values& v, int64_t valid) {
#pragma unroll
  for (int i = 0; i < kVector; ++i)
    if (i >= valid) v[i] = 0.0f;
}

__device__ __forceinline__ float max_magnitude(float so_far, const Values& v) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) so_far = fmaxf(so_far, fabsf(v[i]));
  return so_far;
}

__device__ __forceinline__ void record_amax(float* amax, float found, float* shared) {
  if (amax == nullptr) return;
  found = block_reduce<kThreads>(found, 0.0f, Max{}, shared);
  if (threadIdx.x == 0) atomic_max_nonnegative(amax, found);
}

}  // namespace tensor_cast
}  // namespace ted

#include "cast/tensor_rows.cuh"
#include "cast/tensor_tiles.cuh"

namespace ted {

// One block serves an empty matrix: it writes scale_inv. early (common/launch.cuh): the kernel before this one is
// launch_maxima's, and wrote nothing that the source reads. Without Sums there are no kernels for cast.sums.
template <bool Sums = true, class Source>
void launch_cast(const Queue& queue, const Source& source, const TensorCast& cast, bool early = false) {
  if (cast.column != nullptr || (Sums && cast.sums != nullptr))
    tensor_cast::launch_tiles<Sums>(queue, source, cast, early);
  else
    tensor_cast::launch_rows(queue, source, cast, early);
}

// Partial maxima of |value| for a launch_cast that follows at once, and must be told how many: the result.
template <class Source>
int64_t launch_maxima(const Queue& queue, const Source& source, float* maxima, const float* noop) {
  return tensor_cast::launch_maxima(queue, source, maxima, nullptr, noop);
}

// *amax = max(*amax, |values|).
template <class Source>
void launch_amax(const Queue& queue, const Source& source, float* amax) {
  tensor_cast::launch_maxima(queue, source, nullptr, amax, nullptr);
}

}  // namespace ted
