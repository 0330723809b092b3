// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Partial sums of squares, one per chunk, then their sums: each in an order that the sizes fix.
#include "common/reduce.cuh"
#include "training/tables.cuh"
#include "training/training.h"

#include <algorithm>

namespace ted {

namespace {

constexpr int kThreads = 256;
constexpr int kWidth = 8;
constexpr int kUnits = 4;

// Adds the squares of vectors of kWidth elements below `count`, a multiple of kWidth.
template <bool Whole, class T>
__device__ void add_squares(const T* x, int64_t count, float (&sum)[kWidth]) {
  for (int64_t first = threadIdx.x * kWidth; first < count; first += kThreads * kWidth * kUnits) {
    Vec<T, kWidth> value[kUnits] = {};
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int64_t i = first + u * kThreads * kWidth;
      if (i < count) value[u] = load_part<Whole, kWidth>(x + i, kWidth);
    }
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int k = 0; k < kWidth; ++k) sum[k] = fmaf(to_float(value[u][k]), to_float(value[u][k]), sum[k]);
  }
}

template <class T>
__device__ float squares_of(const T* x, int64_t count) {
  float sum[kWidth] = {};
  const int64_t whole = count / kWidth * kWidth;
  if (reinterpret_cast<uintptr_t>(x) % 16 == 0)
    add_squares<true>(x, whole, sum);
  else
    add_squares<false>(x, whole, sum);
#pragma unroll
  for (int step = kWidth / 2; step > 0; step /= 2)
#pragma unroll
    for (int k = 0; k < step; ++k) sum[k] += sum[k + step];
  if (whole + threadIdx.x < count) {
    const float last = to_float(x[whole + threadIdx.x]);
    sum[0] = fmaf(last, last, sum[0]);
  }
  return sum[0];
}

template <int Capacity>
__global__ void __launch_bounds__(kThreads)
partial_norms(const __grid_constant__ Table<1, Capacity> table, float* partials) {
  __shared__ float shared[kThreads / 32];
  const Piece p = piece_of<kNormChunk>(table, blockIdx.x);
  const void* x = table.address[0][p.entry];
  float sum = 0.0f;
  switch (table.dtype[0][p.entry]) {
    case kFloat32: sum = squares_of(static_cast<const float*>(x) + p.begin, p.count); break;
    case kBFloat16: sum = squares_of(static_cast<const __nv_bfloat16*>(x) + p.begin, p.count); break;
    default: sum = squares_of(static_cast<const __half*>(x) + p.begin, p.count);
  }
  sum = block_reduce<kThreads>(sum, 0.0f, Sum{}, shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Where the partial sums of each norm begin; the last entry is where they end.
constexpr int kRanges = 4000;
struct Ranges {
  int64_t first[kRanges + 1];
};

template <int Threads, class F>
__device__ void finish(const float* partials, int64_t begin, int64_t end, F&& store) {
  __shared__ float shared[Threads / 32];
  float sum = 0.0f;
  for (int64_t i = begin + threadIdx.x; i < end; i += Threads) sum += partials[i];
  sum = block_reduce<Threads>(sum, 0.0f, Sum{}, shared);
  if (threadIdx.x == 0) store(sqrtf(sum));
}

__global__ void __launch_bounds__(1024) whole_norm(const float* partials, int64_t count, float* out) {
  finish<1024>(partials, 0, count, [&](float norm) { *out = norm; });
}

__global__ void __launch_bounds__(128)
tensor_norms(const __grid_constant__ Ranges ranges, const float* partials, float* out) {
  finish<128>(partials, ranges.first[blockIdx.x], ranges.first[blockIdx.x + 1],
              [&](float norm) { out[blockIdx.x] = norm; });
}

}  // namespace

void multi_tensor_l2norm(int device, uintptr_t stream, const Addresses& tensors, const Counts& counts,
                         const Dtypes& dtypes, uintptr_t partials, int64_t partial_count, uintptr_t out,
                         bool per_tensor) {
  require_list("tensors", tensors, counts, dtypes);
  std::vector<int64_t> first(1, 0);
  for (int64_t count : counts) first.push_back(first.back() + ceil_div(count, kNormChunk));
  if (partial_count < first.back())
    throw std::invalid_argument("partials: got " + std::to_string(partial_count) + " elements, expected " +
                                std::to_string(first.back()));
  require_pointer("partials", pointer<void>(partials), first.back(), 4);
  require_pointer("out", pointer<void>(out), 1, 4);
  Queue q(device, stream);
  float* sums = pointer<float>(partials);
  with_flag(counts.size() <= kFew, [&](auto few) {
    constexpr int kCapacity = decltype(few)::value ? kFew : 1280;
    int64_t done = 0;
    for_tables<kNormChunk, 1, kCapacity>({&tensors}, counts, {&dtypes}, [&](const auto& table) {
      partial_norms<kCapacity><<<table.blocks, kThreads, 0, q.stream()>>>(table, sums + done);
      done += table.blocks;
    });
  });
  if (!per_tensor) {
    whole_norm<<<1, 1024, 0, q.stream()>>>(sums, first.back(), pointer<float>(out));
  } else {
    for (size_t i = 0; i < counts.size(); i += kRanges) {
      Ranges ranges;
      const size_t n = std::min<size_t>(kRanges, counts.size() - i);
      std::copy_n(first.begin() + i, n + 1, ranges.first);
      tensor_norms<<<static_cast<unsigned>(n), 128, 0, q.stream()>>>(ranges, sums, pointer<float>(out) + i);
    }
  }
  q.launched("multi_tensor_l2norm");
}

}  // namespace ted
