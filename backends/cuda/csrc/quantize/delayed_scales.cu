// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The end of a step of delayed scaling: new scales, histories rolled; all tensors in one launch, or as few as hold the
// table of them in kernel parameters.
#include "common/reduce.cuh"
#include "quantize/quantize.h"

namespace ted {
namespace {

struct Entry {
  float* history;  // the first of the run's columns
  float* scale;
  float* amax;       // or null
  int64_t length;    // of the history
  int64_t stride;    // columns of the history
  int32_t columns;   // of the run
  int32_t block;     // the first block that serves the run
  float numerator;   // the largest value * 2^-margin
};

// Most calls have a few entries: a launch takes longer with the larger parameters.
constexpr int kEntries = 60, kFew = 4;
template <int N>
struct Table {
  int32_t count;
  bool most_recent;
  Entry entries[N];
};
static_assert(sizeof(Table<kEntries>) <= 4000, "kernel parameters hold 4 KB");

constexpr int kColumns = 8, kLanes = 128;  // of a block: threads side by side take columns, lanes take rows
constexpr int kRows = 8;                   // that a lane holds
constexpr int kThreads = kColumns * kLanes, kWarps = kThreads / 32;
constexpr int64_t kStretch = int64_t{kLanes} * kRows;

// The largest of what the lanes of a column found.
__device__ float column_max(float found) {
  __shared__ float of_warps[kColumns][kWarps + 1], of_columns[kColumns];
  const int thread = threadIdx.y * kColumns + threadIdx.x, warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int offset = kColumns; offset < 32; offset *= 2) found = fmaxf(found, __shfl_xor_sync(0xffffffffu, found, offset));
  if (lane < kColumns) of_warps[lane][warp] = found;
  __syncthreads();
  if (warp < kColumns) {
    static_assert(kWarps == 32 && kColumns <= kWarps, "a warp takes a column");
    const float all = warp_reduce(of_warps[warp][lane], Max{});
    if (lane == 0) of_columns[warp] = all;
  }
  __syncthreads();
  return of_columns[threadIdx.x];
}

// A stretch of a column that is to be rolled: row i takes row i + 1, the last takes `first`, then row 0 is 0.
struct Stretch {
  float next[kRows];

  __device__ __forceinline__ void load(const float* column, int64_t start, int64_t length, int64_t stride, float first,
                                       bool mine) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = start + i * kLanes + threadIdx.y;
      next[i] = mine && row + 1 < length ? column[(row + 1) * stride] : first;
    }
  }
  __device__ __forceinline__ void store(float* column, int64_t start, int64_t length, int64_t stride) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = start + i * kLanes + threadIdx.y;
      if (row < length) column[row * stride] = row == 0 ? 0.0f : next[i];
    }
  }
};

template <int N>
__global__ void __launch_bounds__(kThreads) update(const Table<N> table) {
  int which = table.count - 1;
  while (static_cast<int32_t>(blockIdx.x) < table.entries[which].block) --which;
  const Entry& entry = table.entries[which];
  const int64_t column = (static_cast<int64_t>(blockIdx.x) - entry.block) * kColumns + threadIdx.x;
  const bool mine = column < entry.columns;
  float* history = entry.history + column;
  const float first = mine ? history[0] : 0.0f;
  // All but the first row are read as what moves up; most histories are one stretch.
  Stretch stretch;
  stretch.load(history, 0, entry.length, entry.stride, first, mine);
  float amax = first;
  if (!table.most_recent) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) amax = fmaxf(amax, stretch.next[i]);
    if (mine) {
#pragma unroll 4
      for (int64_t row = kStretch + threadIdx.y; row < entry.length; row += kLanes)
        amax = fmaxf(amax, history[row * entry.stride]);
    }
    amax = column_max(amax);
  }
  const bool cast_happened = mine && first != 0.0f;
  if (cast_happened && threadIdx.y == 0 && amax > 0.0f && !isinf(amax)) {
    const float scale = __fdiv_rn(entry.numerator, amax);
    entry.scale[column] = isinf(scale) ? 3.402823466e+38f : scale;
    if (entry.amax != nullptr) entry.amax[column] = amax;
  }
  for (int64_t start = 0; start < entry.length; start += kStretch) {
    if (start > 0) stretch.load(history, start, entry.length, entry.stride, first, mine);
    __syncthreads();  // all have read it before any writes
    if (cast_happened) stretch.store(history, start, entry.length, entry.stride);
    __syncthreads();
  }
}

}  // namespace

namespace {

// entry(i): the i-th of `count`, an array. numerator(i): its number.
template <int N, class EntryAt, class NumeratorAt>
void update_runs(const Queue& queue, size_t count, bool most_recent, EntryAt entry, NumeratorAt numerator) {
  Table<N> table{0, most_recent, {}};
  int64_t blocks = 0;
  const auto launch = [&] {
    if (blocks > 0) update<N><<<grid_x("histories", blocks), dim3(kColumns, kLanes), 0, queue.stream()>>>(table);
    table.count = 0;
    blocks = 0;
  };
  for (size_t i = 0; i < count; ++i) {
    const std::array<uintptr_t, 7> run = entry(i);
    const auto& [history, scale, amax, length, stride, first, columns] = run;
    const int64_t elements = require_count("histories", static_cast<int64_t>(length), static_cast<int64_t>(stride));
    require_pointer("histories", pointer<void>(history), elements, 4);
    require_pointer("scales", pointer<void>(scale), static_cast<int64_t>(columns), 4);
    require_pointer("amaxes", pointer<void>(amax), 0, 4);
    if (static_cast<int64_t>(first) < 0 || static_cast<int64_t>(columns) < 0 || first + columns > stride ||
        columns > 0x7fffffff)
      throw std::invalid_argument("histories: got columns " + std::to_string(first) + " + " + std::to_string(columns) +
                                  " of " + std::to_string(stride));
    if (columns == 0) continue;
    table.entries[table.count++] = {pointer<float>(history) + first,
                                    pointer<float>(scale) + first,
                                    amax ? pointer<float>(amax) + first : nullptr,
                                    static_cast<int64_t>(length),
                                    static_cast<int64_t>(stride),
                                    static_cast<int32_t>(columns),
                                    static_cast<int32_t>(blocks),
                                    numerator(i)};
    blocks += ceil_div(static_cast<int64_t>(columns), kColumns);
    if (table.count == N) launch();
  }
  launch();
  queue.launched("update_delayed_scales");
}

}  // namespace

void update_delayed_scales(int device, uintptr_t stream, const std::vector<std::array<uintptr_t, 7>>& entries,
                           const std::vector<float>& numerators, bool most_recent) {
  const Queue queue(device, stream);
  if (numerators.size() != entries.size())
    throw std::invalid_argument("numerators: got " + std::to_string(numerators.size()) + ", expected " +
                                std::to_string(entries.size()) + ", one an entry");
  update_runs<kEntries>(
      queue, entries.size(), most_recent, [&](size_t i) { return entries[i]; }, [&](size_t i) { return numerators[i]; });
}

void update_prepared_scales(const Word* words, size_t count) {
  constexpr size_t kHead = 3, kEach = 8;
  if (count < kHead || (count - kHead) % kEach != 0)
    throw std::invalid_argument("entries: got " + std::to_string(count) + " words, expected 3 and 8 an entry");
  const Queue queue(static_cast<int>(words[0].integer), static_cast<uintptr_t>(words[1].integer));
  const auto entry = [&](size_t i) {
    std::array<uintptr_t, 7> found;
    for (size_t j = 0; j < 7; ++j) found[j] = static_cast<uintptr_t>(words[kHead + i * kEach + j].integer);
    return found;
  };
  const auto numerator = [&](size_t i) { return static_cast<float>(words[kHead + i * kEach + 7].real); };
  const size_t runs = (count - kHead) / kEach;
  if (runs <= kFew)
    update_runs<kFew>(queue, runs, words[2].integer != 0, entry, numerator);
  else
    update_runs<kEntries>(queue, runs, words[2].integer != 0, entry, numerator);
}

}  // namespace ted
