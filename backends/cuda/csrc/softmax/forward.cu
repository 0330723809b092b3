// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "softmax/rows.cuh"
#include "softmax/softmax.h"

namespace ted {

namespace {

struct Forward {
  const void* x;
  const uint8_t* mask;
  AnyPointer y;
  int64_t rows, columns, rows_each, heads;
  int64_t mask_batch, mask_head, mask_row;
  bool mask_per_column, causal;
  float scale;
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

// Rows in registers, read once. Masked entries are -Inf: exp makes them 0, and a row of nothing else sums to 0.
template <class T, class S, bool Whole>
__global__ void __launch_bounds__(S::kThreads) softmax_forward(const __grid_constant__ Forward a) {
  constexpr int V = kWidth<T, Whole>, N = S::E / V;
  __shared__ float shared[32];
  const int lane = threadIdx.x % S::G;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.x / S::G;
  Live live{0, nullptr};
  if (row < a.rows) live = live_part(a, row);
  const int columns = static_cast<int>(a.columns), limit = static_cast<int>(live.limit);
  const T* x = static_cast<const T*>(a.x) + row * a.columns;

  Vec<T, V> raw[N];
  Vec<uint8_t, V> masked[N] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
    if (column < limit) raw[n] = load_part<true, V>(x + column, V);
  }
  if (live.mask != nullptr) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int column = (lane + n * S::G) * V;
      if (column < limit) masked[n] = load_part<true, V>(live.mask + column, V);
    }
  }
  float z[N][V];
  float top = -INFINITY;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const bool counts = (lane + n * S::G) * V + i < limit && masked[n][i] == 0;
      z[n][i] = counts ? to_float(raw[n][i]) * a.scale : -INFINITY;
      top = fmaxf(top, z[n][i]);
    }
  }
  top = S::reduce(top, -INFINITY, Max{}, shared);
  if (top == -INFINITY) top = 0.0f;
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      z[n][i] = expf(z[n][i] - top);
      sum += z[n][i];
    }
  }
  sum = S::reduce(sum, 0.0f, Sum{}, shared);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
#pragma unroll
    for (int i = 0; i < V; ++i) z[n][i] *= factor;
    if (row < a.rows && column < columns)
      a.y.store_part<true, V>(row * a.columns + column, z[n], V);
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

  // Calls use(column, z of V columns) for vectors below `end`, several of them loaded together.
  auto each = [&](int64_t end, auto&& use) {
    for (int64_t first = threadIdx.x * V; first < end; first += kLongUnits * kStep) {
      Vec<T, V> raw[kLongUnits];
      uint32_t masked[kLongUnits] = {};  // bit i: column i of the vector
#pragma unroll
      for (int u = 0; u < kLongUnits; ++u)
        if (first + u * kStep < live.limit) raw[u] = load_part<true, V>(x + first + u * kStep, V);
      if (live.mask != nullptr) {
#pragma unroll
        for (int u = 0; u < kLongUnits; ++u) {
          if (first + u * kStep >= live.limit) continue;
          const Vec<uint8_t, V> bytes = load_part<true, V>(live.mask + first + u * kStep, V);
#pragma unroll
          for (int i = 0; i < V; ++i) masked[u] |= static_cast<uint32_t>(bytes[i] != 0) << i;
        }
      }
#pragma unroll
      for (int u = 0; u < kLongUnits; ++u) {
        const int64_t column = first + u * kStep;
        float z[V];
#pragma unroll
        for (int i = 0; i < V; ++i)
          z[i] = column + i < live.limit && (masked[u] >> i & 1) == 0 ? to_float(raw[u][i]) * a.scale : -INFINITY;
        use(column, z);
      }
    }
  };
  float top = -INFINITY;
  each(live.limit, [&](int64_t, const float(&z)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) top = fmaxf(top, z[i]);
  });
  top = block_reduce<kLongThreads>(top, -INFINITY, Max{}, shared);
  if (top == -INFINITY) top = 0.0f;
  float sum = 0.0f;
  each(live.limit, [&](int64_t, const float(&z)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum += expf(z[i] - top);
  });
  sum = block_reduce<kLongThreads>(sum, 0.0f, Sum{}, shared);
  const float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
  each(a.columns, [&](int64_t column, float(&z)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) z[i] = expf(z[i] - top) * factor;
    if (column < a.columns) a.y.store_part<true, V>(row * a.columns + column, z, V);
  });
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
    a.scale = static_cast<float>(scale);
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
