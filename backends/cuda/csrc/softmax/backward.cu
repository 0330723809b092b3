// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
#include "softmax/rows.cuh"
#include "softmax/softmax.h"

namespace ted {

namespace {

struct Backward {
  AnyPointer dy, y, dx;
  int64_t rows, columns;
  float scale;
};

// dy and y of one type, rows in registers.
template <class T, class S, bool Whole>
__global__ void __launch_bounds__(S::kThreads) softmax_backward(const __grid_constant__ Backward a) {
  constexpr int V = kWidth<T, Whole>, N = S::E / V;
  __shared__ float shared[32];
  const int lane = threadIdx.x % S::G;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * S::kRows + threadIdx.x / S::G;
  const int columns = row < a.rows ? static_cast<int>(a.columns) : 0;
  const T* dy = static_cast<const T*>(a.dy.base) + row * a.columns;
  const T* y = static_cast<const T*>(a.y.base) + row * a.columns;

  Vec<T, V> grad[N] = {}, value[N] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
    if (column < columns) {
      grad[n] = load_part<true, V>(dy + column, V);
      value[n] = load_part<true, V>(y + column, V);
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum = fmaf(to_float(grad[n][i]), to_float(value[n][i]), sum);
  }
  sum = S::reduce(sum, 0.0f, Sum{}, shared);
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int column = (lane + n * S::G) * V;
    float out[V];
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = a.scale * (to_float(value[n][i]) * (to_float(grad[n][i]) - sum));
    if (column < columns) a.dx.store_part<true, V>(row * a.columns + column, out, V);
  }
}

// Longer rows, a block each, read twice.
constexpr int64_t kLongest = 16384;  // columns that registers hold
constexpr int kLongThreads = 512, kLongUnits = 2;

template <class T, bool Whole>
__global__ void __launch_bounds__(kLongThreads, 2) softmax_backward_long(const __grid_constant__ Backward a) {
  constexpr int V = kWidth<T, Whole>;
  constexpr int64_t kStep = kLongThreads * V;
  __shared__ float shared[kLongThreads / 32];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * a.columns;
  const T* dy = static_cast<const T*>(a.dy.base) + row;
  const T* y = static_cast<const T*>(a.y.base) + row;

  // Calls use(column, V gradients, V values) for all vectors, several of them loaded together.
  auto each = [&](auto&& use) {
    for (int64_t first = threadIdx.x * V; first < a.columns; first += kLongUnits * kStep) {
      Vec<T, V> grad[kLongUnits], value[kLongUnits];
#pragma unroll
      for (int u = 0; u < kLongUnits; ++u) {
        if (first + u * kStep >= a.columns) continue;
        grad[u] = load_part<true, V>(dy + first + u * kStep, V);
        value[u] = load_part<true, V>(y + first + u * kStep, V);
      }
#pragma unroll
      for (int u = 0; u < kLongUnits; ++u)
        if (first + u * kStep < a.columns) use(first + u * kStep, grad[u], value[u]);
    }
  };
  float sum = 0.0f;
  each([&](int64_t, const Vec<T, V>& grad, const Vec<T, V>& value) {
#pragma unroll
    for (int i = 0; i < V; ++i) sum = fmaf(to_float(grad[i]), to_float(value[i]), sum);
  });
  sum = block_reduce<kLongThreads>(sum, 0.0f, Sum{}, shared);
  each([&](int64_t column, const Vec<T, V>& grad, const Vec<T, V>& value) {
    float out[V];
#pragma unroll
    for (int i = 0; i < V; ++i) out[i] = a.scale * (to_float(value[i]) * (to_float(grad[i]) - sum));
    a.dx.store_part<true, V>(row + column, out, V);
  });
}

// Types that differ: a block per row, element by element.
template <int Threads>
__global__ void __launch_bounds__(Threads) softmax_backward_any(const __grid_constant__ Backward a) {
  __shared__ float shared[32];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * a.columns;
  float sum = 0.0f;
  for (int64_t column = threadIdx.x; column < a.columns; column += Threads)
    sum = fmaf(a.dy.load(first + column), a.y.load(first + column), sum);
  sum = block_reduce<Threads>(sum, 0.0f, Sum{}, shared);
  for (int64_t column = threadIdx.x; column < a.columns; column += Threads)
    a.dx.store(first + column, a.scale * (a.y.load(first + column) * (a.dy.load(first + column) - sum)));
}

}  // namespace

void softmax_bwd(int device, uintptr_t stream, uintptr_t dy, uintptr_t y, uintptr_t dx, int64_t rows, int64_t columns,
                 double scale, int dy_dtype, int y_dtype, int dx_dtype) {
  const int64_t count = require_count("y", rows, columns);
  require_pointer("dy", pointer<void>(dy), count, size_of(dy_dtype));
  require_pointer("y", pointer<void>(y), count, size_of(y_dtype));
  require_pointer("dx", pointer<void>(dx), count, size_of(dx_dtype));
  if (count == 0) return;
  Queue q(device, stream);
  Backward a{{pointer<void>(dy), dy_dtype}, {pointer<void>(y), y_dtype}, {pointer<void>(dx), dx_dtype},
             rows, columns, static_cast<float>(scale)};
  if (dy_dtype != y_dtype) {
    const unsigned grid = grid_x("y", rows);
    if (columns <= 1024)
      softmax_backward_any<128><<<grid, 128, 0, q.stream()>>>(a);
    else
      softmax_backward_any<512><<<grid, 512, 0, q.stream()>>>(a);
  } else {
    with_dtype("y", y_dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      constexpr int V = 16 / sizeof(T);
      const bool whole =
          columns % V == 0 && is_aligned(a.dy.base, 0) && is_aligned(a.y.base, 0) && a.dx.takes_vectors(V);
      with_flag(whole, [&](auto flag) {
        constexpr bool kWhole = decltype(flag)::value;
        if (columns > kLongest) {
          softmax_backward_long<T, kWhole><<<grid_x("y", rows), kLongThreads, 0, q.stream()>>>(a);
          return;
        }
        with_spread<kLongest>(columns, [&](auto spread) {
          using S = decltype(spread);
          const unsigned grid = grid_x("y", ceil_div(rows, S::kRows));
          softmax_backward<T, S, kWhole><<<grid, S::kThreads, 0, q.stream()>>>(a);
        });
      });
    });
  }
  q.launched("softmax_bwd");
}

}  // namespace ted
