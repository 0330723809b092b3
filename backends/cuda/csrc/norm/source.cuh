// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Norms as a source of casts (cast/source.cuh): y again, from x and the row's statistics, with the same bits as in the
// kernel that took them.
#pragma once

#include "cast/source.cuh"
#include "common/launch.cuh"
#include "norm/norm.h"
#include "norm/row.cuh"

namespace ted::norm {

template <class T>
struct NormSource {
  const T* x;
  const float *mean, *rstd;      // mean null for RMSNorm
  const float *factor, *shift;   // as floats, padded: gamma or 1 + gamma; beta or kNoShift
  int64_t m, n;
  bool wide;

  // The weights are left to values(): they are the same for all rows and come from the nearest cache, where registers
  // for them would keep x of other rows from being on its way.
  template <int N>
  struct Raw {
    Vec<T, N> x;
    float mean, rstd;
    int64_t column;
  };

  __host__ __device__ int64_t rows() const { return m; }
  __host__ __device__ int64_t columns() const { return n; }
  __host__ __device__ bool aligned() const { return wide; }
  // The kernel before a cast makes mean and rstd, and may still run (common/launch.cuh).
  __device__ void begin() { wait_for_previous(); }
  __device__ int64_t interleaved(int64_t index, int64_t) const { return index; }

  template <int N, bool Full>
  __device__ __forceinline__ Raw<N> fetch(int64_t row, int64_t column, int64_t valid) const {
    Raw<N> raw;
    raw.x = fetch_vector<T, N, Full>(x + row * n + column, valid);
    const bool inside = Full || valid > 0;
    raw.mean = inside && mean != nullptr ? mean[row] : 0.0f;
    raw.rstd = inside ? rstd[row] : 0.0f;
    raw.column = inside ? column : 0;
    return raw;
  }

  template <int N>
  __device__ __forceinline__ void values(const Raw<N>& raw, float (&out)[N]) const {
    float x[N], weights[2][N];
    widen(raw.x, x);
    read(factor + raw.column, weights[0]);
    read(shift + raw.column, weights[1]);
#pragma unroll
    for (int i = 0; i < N; ++i)
      out[i] = normalized(__fsub_rn(x[i], raw.mean), raw.rstd, weights[0][i], weights[1][i]);
  }

 private:
  template <int N>
  __device__ __forceinline__ void read(const float* from, float (&to)[N]) const {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(from + i));
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  }
};

// Calls f(source) for x's element type.
template <class F>
void with_source(const Normalized& a, int x_dtype, F&& f) {
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool wide = is_aligned(a.x, a.columns * static_cast<int64_t>(sizeof(T)));
    f(NormSource<T>{static_cast<const T*>(a.x), a.mean, a.rstd, a.factor, a.shift, a.rows, a.columns, wide});
  });
}

}  // namespace ted::norm
