// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Softmax of rows. Weights are 2^((v - max v) * |scale| * log2 e), v being x, or -x where scale is negative: the
// difference is taken first, so that nothing overflows before it.
#include "common/packed.cuh"
#include "softmax/rows.cuh"
#include "softmax/softmax.h"

#include <cmath>
#include <limits>

namespace ted {

namespace {

struct Forward {
  const void* x;
  const uint8_t* mask;
  AnyPointer y;
  int64_t rows, columns, rows_each, heads;
  int64_t mask_batch, mask_head, mask_row;
  bool mask_per_column, causal;
  float exponent;  // |scale| * log2 e
  uint32_t flip;   // the sign bits of a word of x where scale is negative
};

// What of a row counts: the columns below `limit` that the mask's bytes (null: none) leave.
struct Live {
  int64_t limit;
  const uint8_t* mask;
};

__device__ __forceinline__ Live live_part(const Forward& a, int64_t row) {
  Live live{a.columns, nullptr};
  if (a.mask == nullptr && !a.causal) return live;
  const int64_t matrix = row / a.rows_each, i = row - matrix * a.rows_each;
  if (a.causal && i + 1 < live.limit) live.limit = i + 1;
  if (a.mask != nullptr) {
    const int64_t batch = matrix / a.heads, head = matrix - batch * a.heads;
    const uint8_t* mask = a.mask + batch * a.mask_batch + head * a.mask_head + i * a.mask_row;
    if (a.mask_per_column)
      live.mask = mask;
    else if (*mask != 0)
      live.limit = 0;
  }
  return live;
}

// Below the smallest normal number: 0.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// v of one vector, of which `left` entries count: -Inf for the others.
template <class T, int V>
__device__ __forceinline__ void take(float (&v)[V], Packed<T, V> x, int64_t left, uint32_t flip) {
#pragma unroll
  for (uint32_t& word : x.word) word ^= flip;
#pragma unroll
  for (int i = 0; i < V; ++i) v[i] = x[i];
  if (left >= V) return;
#pragma unroll
  for (int i = 0; i < V; ++i)
    if (i >= left) v[i] = -INFINITY;
}

// Bit i: column i of the vector is masked.
template <int V>
__device__ __forceinline__ uint32_t hidden_of(const Vec<uint8_t, V>& masked) {
  uint32_t hidden = 0;
#pragma unroll
  for (int i = 0; i < V; ++i) hidden |= static_cast<uint32_t>(masked[i] != 0) << i;
  return hidden;
}

template <int V>
__device__ __forceinline__ void hide(float (&v)[V], uint32_t hidden) {
#pragma unroll
  for (int i = 0; i < V; ++i)
    if ((hidden >> i & 1) != 0) v[i] = -INFINITY;
}

// Rows in registers, read once. Vectors behind a row's limit cost nothing but zeros.
template <class T, class S, bool Whole>
__global__ void __launch_bounds__(S::kThreads) softmax_forward(const __grid_constant__ Forward a) {
  constexpr int V = kWidth<T, Whole>, N = S::E / V;
  __shared__ float shared[32];
  const int lane = threadIdx.x % S::G;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.x / S::G;
  Live live{0, nullptr};
  if (row < a.rows) live = live_part(a, row);
  const int columns = row < a.rows ? static_cast<int>(a.columns) : 0, limit = static_cast<int>(live.limit);
  const T* x = static_cast<const T*>(a.x) + row * a.columns;

  Packed<T, V> raw[N];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
    if (column < limit) raw[n] = load_packed<true, V>(x + column, V);
  }
  uint32_t hidden = 0;  // V bits a vector
  static_assert(S::E <= 32, "a bit an element");
  if (live.mask != nullptr) {
    Vec<uint8_t, V> masked[N] = {};
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int column = (lane + n * S::G) * V;
      if (column < limit) masked[n] = load_part<true, V>(live.mask + column, V);
    }
#pragma unroll
    for (int n = 0; n < N; ++n) hidden |= hidden_of(masked[n]) << n * V;
  }
  float v[N][V];
  float top = -INFINITY;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
    if (column >= limit) continue;
    take(v[n], raw[n], limit - column, a.flip);
    if (live.mask != nullptr) hide(v[n], hidden >> n * V);
#pragma unroll
    for (int i = 0; i < V; ++i) top = fmaxf(top, v[n][i]);
  }
  top = S::reduce(top, -INFINITY, Max{}, shared);
  if (top == -INFINITY) top = 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if ((lane + n * S::G) * V >= limit) {
#pragma unroll
      for (int i = 0; i < V; ++i) v[n][i] = 0.0f;
      continue;
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      v[n][i] = power_of_two((v[n][i] - top) * a.exponent);
      sum += v[n][i];
    }
  }
  sum = S::reduce(sum, 0.0f, Sum{}, shared);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
#pragma unroll
    for (int i = 0; i < V; ++i) v[n][i] *= factor;
    if (column < columns) a.y.store_part<true, V>(row * a.columns + column, v[n], V);
  }
}

// Longer rows, a block each, read three times: for the largest, the sum, and the result. The second and third time they
// come from a cache.
constexpr int64_t kLongest = 8192;  // columns that registers hold
constexpr int kLongThreads = 512, kLongUnits = 4;

template <class T, bool Whole>
__global__ void __launch_bounds__(kLongThreads, 2) softmax_forward_long(const __grid_constant__ Forward a) {
  constexpr int V = kWidth<T, Whole>;
  constexpr int64_t kStep = kLongThreads * V;
  __shared__ float shared[kLongThreads / 32];
  const int64_t row = blockIdx.x;
  const Live live = live_part(a, row);
  const T* x = static_cast<const T*>(a.x) + row * a.columns;

  // Calls use(column, v of V columns) for vectors below `end`, several of them loaded together.
  auto each = [&](int64_t end, auto&& use) {
    for (int64_t first = threadIdx.x * V; first < end; first += kLongUnits * kStep) {
      Packed<T, V> raw[kLongUnits] = {};
#pragma unroll
      for (int u = 0; u < kLongUnits; ++u)
        if (first + u * kStep < live.limit) raw[u] = load_packed<true, V>(x + first + u * kStep, V);
#pragma unroll
      for (int u = 0; u < kLongUnits; ++u) {
        const int64_t column = first + u * kStep;
        float v[V];
        take(v, raw[u], live.limit - column, a.flip);
        if (live.mask != nullptr && column < live.limit)
          hide(v, hidden_of(load_part<true, V>(live.mask + column, V)));
        use(column, v);
      }
    }
  };
  float top = -INFINITY;
  each(live.limit, [&](int64_t, const float(&v)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) top = fmaxf(top, v[i]);
  });
  top = block_reduce<kLongThreads>(top, -INFINITY, Max{}, shared);
  if (top == -INFINITY) top = 0.0f;
  float sum = 0.0f;
  each(live.limit, [&](int64_t, const float(&v)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum += power_of_two((v[i] - top) * a.exponent);
  });
  sum = block_reduce<kLongThreads>(sum, 0.0f, Sum{}, shared);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  each(a.columns, [&](int64_t column, float(&v)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) v[i] = power_of_two((v[i] - top) * a.exponent) * factor;
    if (column < a.columns) a.y.store_part<true, V>(row * a.columns + column, v, V);
  });
}

// A scale of 0 makes all differences 0, but not those of masked entries.
float exponent_of(double scale) {
  const float exponent = static_cast<float>(std::abs(scale) * 1.4426950408889634);
  return exponent == 0.0f ? std::numeric_limits<float>::denorm_min() : exponent;
}

}  // namespace

void softmax_fwd(int device, uintptr_t stream, uintptr_t x, uintptr_t mask, uintptr_t y, int64_t batch, int64_t heads,
                 int64_t rows_each, int64_t columns, int64_t mask_batch, int64_t mask_head, int64_t mask_row,
                 int64_t mask_column, double scale, bool causal, int x_dtype, int y_dtype) {
  const int64_t rows = require_count("x", require_count("x", batch, heads), rows_each);
  const int64_t count = require_count("x", rows, columns);
  require_pointer("x", pointer<void>(x), count, size_of(x_dtype));
  require_pointer("out", pointer<void>(y), count, size_of(y_dtype));
  if (mask_column != 0 && mask_column != 1)
    throw std::invalid_argument("mask: got stride " + std::to_string(mask_column) +
                                " between columns, expected 0 or 1");
  if (count == 0) return;
  Queue q(device, stream);
  with_dtype("x", x_dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    constexpr int V = 16 / sizeof(T);
    Forward a{};
    a.x = pointer<void>(x);
    a.mask = pointer<uint8_t>(mask);
    a.y = {pointer<void>(y), y_dtype};
    a.rows = rows, a.columns = columns, a.rows_each = rows_each, a.heads = heads;
    a.mask_batch = mask_batch, a.mask_head = mask_head, a.mask_row = mask_row;
    a.mask_per_column = mask_column == 1;
    a.causal = causal;
    a.exponent = exponent_of(scale);
    a.flip = scale < 0 ? (sizeof(T) == 4 ? 0x80000000u : 0x80008000u) : 0;
    const bool mask_aligned = is_aligned(a.mask, mask_batch, V) && mask_head % V == 0 && mask_row % V == 0;
    const bool whole = columns % V == 0 && is_aligned(a.x, 0) && a.y.takes_vectors(V) &&
                       (mask_column == 0 || mask_aligned);
    with_flag(whole, [&](auto flag) {
      constexpr bool kWhole = decltype(flag)::value;
      if (columns > kLongest) {
        softmax_forward_long<T, kWhole><<<grid_x("x", rows), kLongThreads, 0, q.stream()>>>(a);
        return;
      }
      with_spread<kLongest>(columns, [&](auto spread) {
        using S = decltype(spread);
        const unsigned grid = grid_x("x", ceil_div(rows, S::kRows));
        softmax_forward<T, S, kWhole><<<grid, S::kThreads, 0, q.stream()>>>(a);
      });
    });
  });
  q.launched("softmax_fwd");
}

}  // namespace ted
