// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Where a cast's values come from. A *Source* yields the fp32 values of a logical (rows, columns) matrix, so that the
// cast engines (tensor.cuh, blocks.cuh) fuse with whatever makes the values:
//
//   int64_t rows() const, columns() const;             // host and device
//   bool aligned() const;                              // host and device: Full fetches are allowed
//   void begin();                                      // device, once per thread on its copy: reads scalars
//   template <int N> struct Raw;                       // (as Source::template Raw<N>) N elements as they lie in memory
//   template <int N, bool Full> Raw<N> fetch(int64_t row, int64_t column, int64_t valid) const;  // loads only
//   template <int N> void values(const Raw<N>&, float (&)[N]) const;                             // arithmetic only
//   int64_t interleaved(int64_t index, int64_t count) const;   // the index-th of `count` strips of columns to visit
//   void prefetch(int64_t row, int64_t column) const;          // optional: what fetch will read there, to L2
//
// A source with kHalves = 2 yields two columns at once: both(raw, first, second) are the values of `column` and of
// columns() / 2 + column, and fetch() takes columns of the first half. Only tensor.cuh serves such.
//
// N is 4, 8 or 16; `column` is a multiple of N, and elements from `valid` (<= N) on read as zeros before arithmetic:
// ignore what values() makes of them. A Full fetch promises aligned() and valid == N and has no branch, so that a
// kernel can issue several fetches before the first values(). Engines choose between the two once per tile.
// Sources are kernel parameters: plain structs. Activations: activation/source.cuh; the norms have their own. On the
// host, cast/source_arguments.h turns Python's integers into a source.
#pragma once

#include "common/scalar.cuh"

#include <cstdint>
#include <cstring>

namespace ted {

__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Elements `valid` and up are zero; no branch where Full.
template <class T, int N, bool Full>
__device__ __forceinline__ Vec<T, N> fetch_vector(const T* source, int64_t valid) {
  if constexpr (Full) {
    return *reinterpret_cast<const Vec<T, N>*>(source);
  } else {
    Vec<T, N> v;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = i < valid ? source[i] : T{};
    return v;
  }
}

// Vectors to fp32, exactly. Words of bf16 are taken apart here and not before: 16-bit registers are 32-bit ones, and
// the vectors in flight would take twice as many.
template <class T, int N>
__device__ __forceinline__ void widen(const Vec<T, N>& v, float (&out)[N]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    uint32_t words[N / 2];
    memcpy(words, &v, sizeof(words));
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      asm volatile("" : "+r"(words[i]));
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(v[i]);
  }
}

template <class Source, class = void>
struct HalvesOf : std::integral_constant<int, 1> {};
template <class Source>
struct HalvesOf<Source, std::void_t<decltype(Source::kHalves)>> : std::integral_constant<int, Source::kHalves> {};

// A matrix in memory, whose rows lie `stride` elements apart.
template <class T>
struct PlainSource {
  const T* x;
  int64_t m, n, stride;
  bool wide;

  template <int N>
  using Raw = Vec<T, N>;

  __host__ __device__ int64_t rows() const { return m; }
  __host__ __device__ int64_t columns() const { return n; }
  __host__ __device__ bool aligned() const { return wide; }
  __device__ void begin() {}
  __device__ int64_t interleaved(int64_t index, int64_t) const { return index; }

  template <int N, bool Full>
  __device__ __forceinline__ Raw<N> fetch(int64_t row, int64_t column, int64_t valid) const {
    return fetch_vector<T, N, Full>(x + row * stride + column, valid);
  }
  template <int N>
  __device__ __forceinline__ void values(const Raw<N>& raw, float (&out)[N]) const {
    widen(raw, out);
  }
};

template <class T>
PlainSource<T> plain_source(const void* x, int64_t rows, int64_t columns, int64_t stride) {
  return {static_cast<const T*>(x), rows, columns, stride, is_aligned(x, stride * static_cast<int64_t>(sizeof(T)))};
}

}  // namespace ted
