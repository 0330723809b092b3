// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Activations and their gradients as sources of a cast (cast/source.cuh). What is computed is a run-time switch, taken
// once per vector, so that an engine is instantiated per element type only: T is float, __nv_bfloat16, __half, or Code
// for x of a tensor-scaled record.
#pragma once

#include "activation/functions.cuh"
#include "cast/source.cuh"
#include "common/encode.cuh"

namespace ted {

// An 8-bit code of a tensor-scaled record.
struct Code {
  uint8_t byte;
};

// What turns elements of x into fp32: nothing for floats, RN32(decode(code) * scale_inv) for codes.
template <class T>
struct Reading {
  int encoding;
  const float* scale_inv;
  float scale;

  __device__ void begin() {
    if constexpr (std::is_same_v<T, Code>) scale = *scale_inv;
  }
  template <int N>
  __device__ __forceinline__ void read(const Vec<T, N>& raw, float (&out)[N]) const {
    if constexpr (!std::is_same_v<T, Code>) {
      widen(raw, out);
    } else {
uint32_t words[N / 4];  // taken apart here and not before, as widen() does
      memcpy(words, &raw, sizeof(words));
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        asm volatile("" : "+r"(words[i]));
        decode_four(words[i], out + 4 * i);
      }
    }
  }

 private:
  __device__ __forceinline__ void decode_four(uint32_t word, float* out) const {
#if __CUDA_ARCH__ >= 890
    if (encoding == kE4M3 || encoding == kE5M2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint16_t pair = static_cast<uint16_t>(word >> 16 * i);
        uint32_t halves;
        if (encoding == kE4M3)
          asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
        else
          asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
        const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&halves));
        out[2 * i] = two.x * scale;
        out[2 * i + 1] = two.y * scale;
      }
      return;
    }
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = decode_integer(word >> 8 * i & 0xff, encoding) * scale;
  }
};

// Whether a source is gated: known at compile time, or, for fewer instantiations, at run time.
enum Gate : int { kNotGated = 0, kIsGated = 1, kEither = 2 };

template <int G>
__host__ __device__ __forceinline__ bool is_gated(const Activation& a) {
  return G == kEither ? a.gated : G == kIsGated;
}

// The forward's result: `half` columns, from x of as many, or of twice as many where it is gated.
template <class T, int G = kEither>
struct ActivationSource {
  const T* x;
  int64_t m, half;
  Activation activation;
  Reading<T> reading;
  bool wide;

  template <int N>
  struct Raw {
    Vec<T, N> u, v;
  };

  __host__ __device__ int64_t rows() const { return m; }
  __host__ __device__ int64_t columns() const { return half; }
  __host__ __device__ bool aligned() const { return wide; }
  __device__ void begin() { reading.begin(); }
  __device__ int64_t interleaved(int64_t index, int64_t) const { return index; }

  __device__ __forceinline__ void prefetch(int64_t row, int64_t column) const {
    const T* at = x + (is_gated<G>(activation) ? 2 * row : row) * half + column;
    prefetch_line(at);
    if (is_gated<G>(activation)) prefetch_line(at + half);
  }
  template <int N, bool Full>
  __device__ __forceinline__ Raw<N> fetch(int64_t row, int64_t column, int64_t valid) const {
    Raw<N> raw;
    const T* at = x + (is_gated<G>(activation) ? 2 * row : row) * half + column;
    raw.u = fetch_vector<T, N, Full>(at, valid);
    if (is_gated<G>(activation))
      raw.v = fetch_vector<T, N, Full>(at + half, valid);
    else
      raw.v = Vec<T, N>{};
    return raw;
  }
  template <int N>
  __device__ __forceinline__ void values(const Raw<N>& raw, float (&out)[N]) const {
    float u[N], v[N];
    reading.read(raw.u, u);
    reading.read(raw.v, v);
    if (is_gated<G>(activation))
      activate<true>(activation, u, v, out);
    else
      activate<false>(activation, u, v, out);
  }
};

// dx, one column at a time: `half` columns, or, where it is gated, `half` of u's gradient and `half` of v's. Both
// halves read the same: an engine that can does better with GatedGradSource.
template <class T, class X, int G = kEither>
struct ActivationGradSource {
  const T* dy;
  const X* x;
  int64_t m, half;
  Activation activation;
  Reading<X> reading;
  bool wide;

  template <int N>
  struct Raw {
    Vec<T, N> dy;
    Vec<X, N> u, v;
    int of_u;  // so many elements are u's gradient, the rest v's
  };

  __host__ __device__ int64_t rows() const { return m; }
  __host__ __device__ int64_t columns() const { return is_gated<G>(activation) ? 2 * half : half; }
  __host__ __device__ bool aligned() const { return wide; }
  __device__ void begin() { reading.begin(); }
  // Strips of both halves take turns, so that the second may find what it reads in L2.
  __device__ int64_t interleaved(int64_t index, int64_t count) const {
    if (!is_gated<G>(activation)) return index;
    return index % 2 == 0 ? index / 2 : (count + 1) / 2 + index / 2;
  }

  __device__ __forceinline__ void prefetch(int64_t row, int64_t column) const {
    const bool gated = is_gated<G>(activation);
    const int64_t c = gated && column >= half ? column - half : column;
    const X* at = x + (gated ? 2 * row : row) * half + c;
    prefetch_line(dy + row * half + c);
    prefetch_line(at);
    if (gated) prefetch_line(at + half);
  }
  template <int N, bool Full>
  __device__ __forceinline__ Raw<N> fetch(int64_t row, int64_t column, int64_t valid) const {
    const bool gated = is_gated<G>(activation);
    Raw<N> raw;
    if constexpr (Full) {
      const bool second = gated && column >= half;
      raw.of_u = second ? 0 : N;
      const int64_t c = second ? column - half : column;
      const X* at = x + (gated ? 2 * row : row) * half + c;
      raw.dy = fetch_vector<T, N, true>(dy + row * half + c, N);
      raw.u = fetch_vector<X, N, true>(at, N);
      if (gated)
        raw.v = fetch_vector<X, N, true>(at + half, N);
      else
        raw.v = Vec<X, N>{};
    } else {
      raw.of_u = half - column < N ? static_cast<int>(half - column) : N;  // below 0 reads as 0
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const int64_t c = column + i >= half ? column + i - half : column + i;
        const X* at = x + (gated ? 2 * row : row) * half + c;
        raw.dy[i] = i < valid ? dy[row * half + c] : T{};
        raw.u[i] = i < valid ? *at : X{};
        raw.v[i] = i < valid && gated ? at[half] : X{};
      }
    }
    return raw;
  }
  template <int N>
  __device__ __forceinline__ void values(const Raw<N>& raw, float (&out)[N]) const {
    float d[N], u[N], v[N], second[N];
    widen(raw.dy, d);
    reading.read(raw.u, u);
    reading.read(raw.v, v);
    if (!is_gated<G>(activation)) return activate_backward<false>(activation, d, u, v, out, second);
    activate_backward<true>(activation, d, u, v, out, second);
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i >= raw.of_u) out[i] = second[i];
  }
};

// dx of a gated activation, both gradients of a column at a time: u's in column c, v's in column half + c. An engine
// walks over `half` columns and calls both() instead of values().
template <class T, class X>
struct GatedGradSource {
  static constexpr int kHalves = 2;
  const T* dy;
  const X* x;
  int64_t m, half;
  Activation activation;
  Reading<X> reading;
  bool wide;

  template <int N>
  struct Raw {
    Vec<T, N> dy;
    Vec<X, N> u, v;
  };

  __host__ __device__ int64_t rows() const { return m; }
  __host__ __device__ int64_t columns() const { return 2 * half; }
  __host__ __device__ bool aligned() const { return wide; }
  __device__ void begin() { reading.begin(); }

  template <int N, bool Full>
  __device__ __forceinline__ Raw<N> fetch(int64_t row, int64_t column, int64_t valid) const {
    const X* at = x + 2 * row * half + column;
    return {fetch_vector<T, N, Full>(dy + row * half + column, valid), fetch_vector<X, N, Full>(at, valid),
            fetch_vector<X, N, Full>(at + half, valid)};
  }
  template <int N>
  __device__ __forceinline__ void both(const Raw<N>& raw, float (&du)[N], float (&dv)[N]) const {
    float d[N], u[N], v[N];
    widen(raw.dy, d);
    reading.read(raw.u, u);
    reading.read(raw.v, v);
    activate_backward<true>(activation, d, u, v, du, dv);
  }
};

}  // namespace ted
