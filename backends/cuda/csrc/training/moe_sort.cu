// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// A counting sort of choices by expert, stable, without knowing how many experts there are: segments of the choices are
// counted, then every segment's block adds up what comes before its own. Experts from kExperts on (nobody has as many)
// are ranked by comparing with all choices, which is right and slow.
#include "common/dtypes.h"
#include "common/errors.h"
#include "common/overlap.cuh"
#include "training/training.h"

#include <algorithm>
#include <climits>

namespace ted {

namespace {

constexpr int kExperts = 1024;
constexpr int kMostSegments = 128;
constexpr int64_t kLeastSegment = 256;
constexpr int kCountThreads = 256;
constexpr int kRankThreads = 1024;
constexpr int kCells = 8192;  // of the table warps x experts in shared memory

// How choices are cut, and the workspace: how many rows are filled, per segment its largest expert, its counts.
struct Segments {
  int64_t choices, length;
  int count;
  int64_t* filled;
  int32_t* largest;
  int32_t* counts;
};

Segments segments_of(int64_t choices, void* workspace) {
  Segments s{};
  s.choices = choices;
  s.count = static_cast<int>(std::clamp<int64_t>(ceil_div(choices, kLeastSegment), 1, kMostSegments));
  s.length = std::max<int64_t>(ceil_div(choices, s.count), 1);
  s.filled = static_cast<int64_t*>(workspace);
  s.largest = reinterpret_cast<int32_t*>(s.filled + 1);
  s.counts = s.largest + kMostSegments;
  return s;
}

template <class Index>
__global__ void __launch_bounds__(kCountThreads) count_experts(const Index* indices, Segments s) {
  __shared__ int32_t counts[kExperts];
  __shared__ int32_t largest;
  let_next_begin();
  for (int e = threadIdx.x; e < kExperts; e += kCountThreads) counts[e] = 0;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * s.length;
  const int64_t end = begin + s.length < s.choices ? begin + s.length : s.choices;
  int32_t own = 0;
  for (int64_t c = begin + threadIdx.x; c < end; c += kCountThreads) {
    const Index e = indices[c];
    if (e < 0) continue;
    if (e < kExperts) atomicAdd(&counts[e], 1);
    const int32_t clamped = e < kExperts ? static_cast<int32_t>(e) : kExperts;
    own = clamped > own ? clamped : own;
  }
  own = __reduce_max_sync(0xffffffffu, own);
  if (threadIdx.x % 32 == 0) atomicMax(&largest, own);
  __syncthreads();
  for (int e = threadIdx.x; e < kExperts; e += kCountThreads) s.counts[blockIdx.x * kExperts + e] = counts[e];
  if (threadIdx.x == 0) s.largest[blockIdx.x] = largest;
}

// The sum of what lower threads of the block hold, and of all.
__device__ int exclusive_sum(int value, int* shared, int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) shared[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
  for (int w = 0; w < kRankThreads / 32; ++w) {
    const int of_warp = shared[w];
    if (w < warp) before += of_warp;
    total += of_warp;
  }
  return before + sum - value;
}

struct Sorted {
  int32_t* row_map;
  const void* probs;
  void* sorted_probs;
  int64_t rows;
  bool wide_probs;

  __device__ __forceinline__ void place(int64_t choice, int64_t at) const {
    const bool fits = at < rows;
    row_map[choice] = fits ? static_cast<int32_t>(at) : -1;
    if (!fits || sorted_probs == nullptr) return;
    if (wide_probs)
      static_cast<uint32_t*>(sorted_probs)[at] = static_cast<const uint32_t*>(probs)[choice];
    else
      static_cast<uint16_t*>(sorted_probs)[at] = static_cast<const uint16_t*>(probs)[choice];
  }
};

// Ranks by comparing; returns how many choices are kept.
template <class Index>
__device__ int64_t rank_by_comparing(const Index* indices, const Segments& s, const Sorted& out, int64_t begin,
                                     int64_t end) {
  int64_t kept = 0;
  for (int64_t c = begin + threadIdx.x; c < end || c == begin + threadIdx.x; c += kRankThreads) {
    const Index own = c < end ? indices[c] : -1;
    int64_t before = 0;
    kept = 0;
    for (int64_t other = 0; other < s.choices; ++other) {
      const Index e = indices[other];
      kept += e >= 0;
      before += e >= 0 && (e < own || (e == own && other < c));
    }
    if (c < end) own < 0 ? static_cast<void>(out.row_map[c] = -1) : out.place(c, before);
  }
  return kept;
}

template <class Index>
__global__ void __launch_bounds__(kRankThreads, 1)
rank_choices(const Index* indices, const __grid_constant__ Segments s, const __grid_constant__ Sorted out) {
  __shared__ int32_t cells[kCells];                       // (warps, experts)
  __shared__ int32_t totals[kExperts], befores[kExperts];  // of all segments, of those before this one
  __shared__ int sums[kRankThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int64_t begin = blockIdx.x * s.length;
  const int64_t end = begin + s.length < s.choices ? begin + s.length : s.choices;

  let_next_begin();
  totals[thread] = befores[thread] = 0;
  wait_for_previous();
  const int largest = thread < s.count ? s.largest[thread] : 0;
  int experts = 32;  // a power of two above the largest
  while (experts < kExperts && __syncthreads_or(largest >= experts)) experts *= 2;
  int64_t kept;
  if (__syncthreads_or(largest >= kExperts)) {
    kept = rank_by_comparing(indices, s, out, begin, end);
  } else {
    // Threads of one expert share the segments.
    const int expert = thread & (experts - 1), parts = kRankThreads / experts;
    int total = 0, before = 0;
#pragma unroll 4
    for (int segment = thread / experts; segment < s.count; segment += parts) {
      const int count = s.counts[segment * kExperts + expert];
      total += count;
      if (segment < blockIdx.x) before += count;
    }
    atomicAdd(&totals[expert], total);
    atomicAdd(&befores[expert], before);
    const int64_t needed = ceil_div(s.length, 32);
    int warps = kCells / experts < kRankThreads / 32 ? kCells / experts : kRankThreads / 32;
    if (needed < warps) warps = static_cast<int>(needed);
    for (int i = thread; i < warps * experts; i += kRankThreads) cells[i] = 0;
    __syncthreads();
    int all;
    const int first = exclusive_sum(totals[thread], sums, all) + befores[thread];
    kept = all;

    // Each warp counts its part of the segment, learns where its choices begin, and places them.
    const int64_t part = ceil_div(ceil_div(s.length, warps), 32) * 32;
    const int64_t part_begin = begin + warp * part, part_end = part_begin + part < end ? part_begin + part : end;
    int32_t* own = cells + warp * experts;
    if (warp < warps)
      for (int64_t c = part_begin + lane; c < part_end; c += 32)
        if (indices[c] >= 0) atomicAdd(&own[indices[c]], 1);
    __syncthreads();
    if (thread < experts) {
      int running = first;
      for (int w = 0; w < warps; ++w) {
        const int count = cells[w * experts + thread];
        cells[w * experts + thread] = running;
        running += count;
      }
    }
    __syncthreads();
    if (warp < warps) {
      for (int64_t base = part_begin; base < part_end; base += 32) {
        const int64_t c = base + lane;
        const int e = c < part_end ? static_cast<int>(indices[c] < 0 ? -1 : indices[c]) : -1;
        const unsigned alike = __match_any_sync(0xffffffffu, e);
        const int rank = __popc(alike & ((1u << lane) - 1));
        const int at = e >= 0 ? own[e] + rank : -1;
        __syncwarp();
        if (e >= 0 && rank == 0) own[e] += __popc(alike);
        __syncwarp();
        if (c < part_end) e < 0 ? static_cast<void>(out.row_map[c] = -1) : out.place(c, at);
      }
    }
  }
  const int64_t filled = kept < out.rows ? kept : out.rows;
  if (blockIdx.x == 0 && thread == 0) *s.filled = filled;
  if (out.sorted_probs == nullptr) return;
  for (int64_t row = filled + blockIdx.x * kRankThreads + thread; row < out.rows; row += gridDim.x * kRankThreads) {
    if (out.wide_probs)
      static_cast<uint32_t*>(out.sorted_probs)[row] = 0;
    else
      static_cast<uint16_t*>(out.sorted_probs)[row] = 0;
  }
}

}  // namespace

int64_t moe_sort_workspace(int64_t choices) {
  require_size("choices", choices);
  return 8 + 4 * kMostSegments + 4 * kExperts * static_cast<int64_t>(segments_of(choices, nullptr).count);
}

void moe_sort(int device, uintptr_t stream, uintptr_t indices, uintptr_t probs, uintptr_t row_map,
              uintptr_t sorted_probs, uintptr_t workspace, int64_t choices, int64_t rows, bool wide_indices,
              int probs_dtype) {
  require_size("indices", choices);
  require_size("capacity", rows);
  if (choices > INT_MAX)
    throw std::invalid_argument("indices: got " + std::to_string(choices) +
                                " choices, more than row_map's int32 numbers");
  require_pointer("indices", pointer<void>(indices), choices, wide_indices ? 8 : 4);
  require_pointer("probs", pointer<void>(probs), sorted_probs != 0 ? choices : 0, size_of(probs_dtype));
  require_pointer("row_map", pointer<void>(row_map), choices, 4);
  require_pointer("workspace", pointer<void>(workspace), 1, 8);
  Queue q(device, stream);
  const Segments s = segments_of(choices, pointer<void>(workspace));
  const Sorted out{pointer<int32_t>(row_map), pointer<void>(probs), pointer<void>(sorted_probs), rows,
                   size_of(probs_dtype) == 4};
  auto launch = [&](auto* from) {
    using Index = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
    count_experts<Index><<<s.count, kCountThreads, 0, q.stream()>>>(from, s);
    launch_overlapping(q, rank_choices<Index>, s.count, kRankThreads, from, s, out);
  };
  if (wide_indices)
    launch(pointer<int64_t>(indices));
  else
    launch(pointer<int32_t>(indices));
  q.launched("moe_permute");
}

}  // namespace ted
