// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Element i is kept where word i % 4 of Philox(seed; i / 4, offset) is at least p 2^32: a mask depends on rng_state and
// the element's place alone, not on dtype, alignment or launch.
#include "common/packed.cuh"
#include "common/queue.h"
#include "training/philox.cuh"
#include "training/training.h"

#include <algorithm>
#include <cmath>

namespace ted {

namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 2;  // vectors of 16 bytes per thread and operand, in flight together

struct Dropout {
  const void* x;
  const void* residual;
  const void* bias;
  const int64_t* rng_state;
  void* out;
  uint8_t* mask;
  int64_t n, columns;
  uint32_t threshold;
  float factor;
  int bias_dtype;
};

template <class T, bool Whole, int V>
__device__ __forceinline__ void add_bias_of(const void* bias, int64_t column, int64_t columns, float (&v)[V]) {
  const T* b = static_cast<const T*>(bias);
  if constexpr (Whole) {
    const Vec<T, V> found = *reinterpret_cast<const Vec<T, V>*>(b + column);
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] += to_float(found[k]);
  } else {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      v[k] += to_float(b[column]);
      if (++column == columns) column = 0;
    }
  }
}

template <bool Whole, int V>
__device__ __forceinline__ void add_bias(const Dropout& a, int64_t column, float (&v)[V]) {
  switch (a.bias_dtype) {
    case kFloat32: return add_bias_of<float, Whole>(a.bias, column, a.columns, v);
    case kBFloat16: return add_bias_of<__nv_bfloat16, Whole>(a.bias, column, a.columns, v);
    default: return add_bias_of<__half, Whole>(a.bias, column, a.columns, v);
  }
}

template <class T, bool Drops, bool Whole>
__global__ void __launch_bounds__(kThreads, Whole ? 4 : 2) dropout_forward(const __grid_constant__ Dropout a) {
  constexpr int V = 16 / sizeof(T);
  const T* x = static_cast<const T*>(a.x);
  const T* residual = static_cast<const T*>(a.residual);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kUnits * kThreads + threadIdx.x) * V;
  Packed<T, V> value[kUnits], other[kUnits] = {};
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int64_t i = first + u * kThreads * V;
    if (i < a.n) value[u] = load_packed<Whole, V>(x + i, a.n - i);
  }
  if (residual != nullptr) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t i = first + u * kThreads * V;
      if (i < a.n) other[u] = load_packed<Whole, V>(residual + i, a.n - i);
    }
  }
  // Words are drawn while the operands are on their way: bit u * V + k says that element k of vector u is kept.
  uint32_t keep = 0;
  if (Drops) {
    const uint64_t seed = a.rng_state[0], offset = a.rng_state[1];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
#pragma unroll
      for (int k = 0; k < V; k += 4) {
        const Words words = philox(seed, (first + u * kThreads * V + k) / 4, offset);
#pragma unroll
        for (int j = 0; j < 4; ++j) keep |= static_cast<uint32_t>(words.word[j] >= a.threshold) << (u * V + k + j);
      }
    }
  }
  int64_t column = 0, step = 0;
  if (a.bias != nullptr) column = first % a.columns, step = kThreads * V % a.columns;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int64_t i = first + u * kThreads * V;
    if (i >= a.n) break;
    float v[V];
#pragma unroll
    for (int k = 0; k < V; ++k) v[k] = value[u][k];
    if (a.bias != nullptr) {
      add_bias<Whole>(a, column, v);
      column += step;
      if (column >= a.columns) column -= a.columns;
    }
    if (Drops) {
      Vec<uint8_t, V> kept;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        kept[k] = keep >> (u * V + k) & 1;
        v[k] = kept[k] != 0 ? v[k] * a.factor : 0.0f;
      }
      store_part<Whole>(a.mask + i, kept, a.n - i);
    }
    Vec<T, V> out;
#pragma unroll
    for (int k = 0; k < V; ++k) out[k] = from_float<T>(residual != nullptr ? v[k] + other[u][k] : v[k]);
    store_part<Whole>(static_cast<T*>(a.out) + i, out, a.n - i);
  }
}

constexpr int kBackwardUnits = 4;

template <class T, bool Whole>
__global__ void __launch_bounds__(kThreads)
dropout_backward(const T* dy, const uint8_t* mask, T* dx, int64_t n, float factor) {
  constexpr int V = 16 / sizeof(T);
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kBackwardUnits * kThreads + threadIdx.x) * V;
  Vec<T, V> grad[kBackwardUnits];
  Vec<uint8_t, V> kept[kBackwardUnits];
#pragma unroll
  for (int u = 0; u < kBackwardUnits; ++u) {
    const int64_t i = first + u * kThreads * V;
    if (i < n) {
      grad[u] = load_part<Whole, V>(dy + i, n - i);
      if (mask != nullptr) kept[u] = load_part<Whole, V>(mask + i, n - i);
    }
  }
#pragma unroll
  for (int u = 0; u < kBackwardUnits; ++u) {
    const int64_t i = first + u * kThreads * V;
    if (i >= n) break;
    if (mask != nullptr) {
#pragma unroll
      for (int k = 0; k < V; ++k) grad[u][k] = from_float<T>(kept[u][k] != 0 ? to_float(grad[u][k]) * factor : 0.0f);
    }
    store_part<Whole>(dx + i, grad[u], n - i);
  }
}

void require_probability(double p) {
  if (!(p >= 0.0 && p < 1.0))
    throw std::invalid_argument("dropout_p: got " + std::to_string(p) + ", expected a probability below 1");
}

unsigned grid_of(int64_t n, int64_t each) { return grid_x("x", ceil_div(n, kThreads * each)); }

}  // namespace

void dropout_add_fwd(int device, uintptr_t stream, uintptr_t x, uintptr_t residual, uintptr_t bias, uintptr_t rng_state,
                     uintptr_t out, uintptr_t mask, int64_t n, int64_t columns, double dropout_p, int dtype,
                     int bias_dtype) {
  require_size("x", n);
  require_size("x", columns);
  require_probability(dropout_p);
  const bool drops = dropout_p > 0.0;
  require_pointer("x", pointer<void>(x), n, size_of(dtype));
  require_pointer("residual", pointer<void>(residual), 0, size_of(dtype));
  require_pointer("bias", pointer<void>(bias), 0, size_of(bias_dtype));
  require_pointer("out", pointer<void>(out), n, size_of(dtype));
  require_pointer("rng_state", pointer<void>(rng_state), drops ? 2 : 0, 8);
  require_pointer("mask", pointer<void>(mask), drops ? n : 0, 1);
  if (n == 0) return;
  Queue q(device, stream);
  with_dtype("x", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = 16 / sizeof(T);
    Dropout a{pointer<void>(x), pointer<void>(residual), pointer<void>(bias), pointer<int64_t>(rng_state),
              pointer<void>(out), pointer<uint8_t>(mask), n, columns, 0, 1.0f, bias_dtype};
    a.threshold = static_cast<uint32_t>(std::min(std::nearbyint(dropout_p * 4294967296.0), 4294967295.0));
    a.factor = static_cast<float>(1.0 / (1.0 - dropout_p));
    const bool whole = n % V == 0 && is_aligned(a.x, 0) && is_aligned(a.residual, 0) && is_aligned(a.out, 0) &&
                       is_aligned(a.mask, 0, V) && (bias == 0 || (columns % V == 0 && is_aligned(a.bias, 0)));
    with_flag(drops, [&](auto drop) {
      with_flag(whole, [&](auto flag) {
        dropout_forward<T, decltype(drop)::value, decltype(flag)::value>
            <<<grid_of(n, kUnits * V), kThreads, 0, q.stream()>>>(a);
      });
    });
  });
  q.launched("dropout_add_fwd");
}

void dropout_add_bwd(int device, uintptr_t stream, uintptr_t dy, uintptr_t mask, uintptr_t dx, int64_t n,
                     double dropout_p, int dtype) {
  require_size("dy", n);
  require_probability(dropout_p);
  require_pointer("dy", pointer<void>(dy), n, size_of(dtype));
  require_pointer("dx", pointer<void>(dx), n, size_of(dtype));
  if (n == 0) return;
  Queue q(device, stream);
  with_dtype("dy", dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = 16 / sizeof(T);
    const bool whole = n % V == 0 && is_aligned(pointer<void>(dy), 0) && is_aligned(pointer<void>(dx), 0) &&
                       is_aligned(pointer<void>(mask), 0, V);
    with_flag(whole, [&](auto flag) {
      dropout_backward<T, decltype(flag)::value><<<grid_of(n, kBackwardUnits * V), kThreads, 0, q.stream()>>>(
          pointer<T>(dy), pointer<uint8_t>(mask), pointer<T>(dx), n, static_cast<float>(1.0 / (1.0 - dropout_p)));
    });
  });
  q.launched("dropout_add_bwd");
}

}  // namespace ted
