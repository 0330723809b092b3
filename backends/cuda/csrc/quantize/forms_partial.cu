// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Shards of a flattened matrix: amaxes of its 128x128 tiles, and casts with their scales. A warp takes 128 columns of
// up to kStrip rows within one tile; each of its lanes four columns.
#include "common/reduce.cuh"
#include "quantize/forms.h"

namespace ted {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kSide = 128, kStrip = 16, kFour = 4;

// The shard's elements lie at x[r * width + c - start].
struct Grid {
  int64_t count, start, width, height;
  int64_t strips_across;        // 128 columns each
  int64_t first_strip, strips;  // of kStrip rows, that the shard touches
  int64_t tiles_across;         // 0: one amax or scale for everything
};

struct Strip {
  int64_t row, column, tile;
};

__device__ __forceinline__ bool strip_of(const Grid& g, Strip* s) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (index >= g.strips * g.strips_across) return false;
  const int64_t down = index / g.strips_across, across = index - down * g.strips_across;
  s->row = (g.first_strip + down) * kStrip;
  s->column = across * kSide;
  s->tile = g.tiles_across == 0 ? 0 : s->row / kSide * g.tiles_across + across;
  return true;
}

// f(index into the shard, values, valid as a mask of the four) for four rows at a time of this lane.
template <class T, class F>
__device__ __forceinline__ void for_strip(const T* x, const Grid& g, const Strip& s, bool wide, F&& f) {
  const int64_t column = s.column + threadIdx.x % 32 * kFour;
  if (column >= g.width) return;
  const int inside = static_cast<int>(min(g.width - column, int64_t{kFour}));
#pragma unroll 1
  for (int first = 0; first < kStrip; first += 4) {
    Vec<T, kFour> v[4];
    int64_t at[4];
    int mask[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = s.row + first + i;
      at[i] = row * g.width + column - g.start;
      mask[i] = 0;
#pragma unroll
      for (int j = 0; j < kFour; ++j)
        if (row < g.height && j < inside && at[i] + j >= 0 && at[i] + j < g.count) mask[i] |= 1 << j;
      if (wide && mask[i] == 0xF) {
        v[i] = *reinterpret_cast<const Vec<T, kFour>*>(x + at[i]);
      } else {
#pragma unroll
        for (int j = 0; j < kFour; ++j) v[i][j] = mask[i] >> j & 1 ? x[at[i] + j] : T{};
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) f(at[i], v[i], mask[i]);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) partial_amax_kernel(const T* x, Grid g, bool wide, float* amax) {
  Strip s;
  if (!strip_of(g, &s)) return;
  float found = 0.0f;
  bool any = false;
  for_strip(x, g, s, wide, [&](int64_t, const Vec<T, kFour>& v, int mask) {
    any = any || mask != 0;
#pragma unroll
    for (int j = 0; j < kFour; ++j) found = fmaxf(found, fabsf(to_float(v[j])));
  });
  found = warp_reduce(found, Max());
  // As integers: non-negative floats order alike, NaN stays, what was below zero gives way.
  if (__any_sync(0xffffffffu, any) && threadIdx.x % 32 == 0)
    atomicMax(reinterpret_cast<int*>(amax + s.tile), __float_as_int(found));
}

template <class T, int Mode>
__global__ void __launch_bounds__(kThreads)
    partial_cast_kernel(const T* x, Grid g, bool wide, bool wide_out, const float* scale, uint8_t* out, Format format) {
  Strip s;
  if (!strip_of(g, &s)) return;
  const float factor = scale[s.tile];
  for_strip(x, g, s, wide, [&](int64_t at, const Vec<T, kFour>& v, int mask) {
    Vec<uint8_t, kFour> codes;
#pragma unroll
    for (int j = 0; j < kFour; ++j) codes[j] = encode<Mode>(__fmul_rn(to_float(v[j]), factor), format);
    if (wide_out && mask == 0xF) {
      *reinterpret_cast<Vec<uint8_t, kFour>*>(out + at) = codes;
    } else {
#pragma unroll
      for (int j = 0; j < kFour; ++j)
        if (mask >> j & 1) out[at + j] = codes[j];
    }
  });
}

Grid grid_of(const Shard& shard) {
  Grid g{};
  g.count = shard.count;
  if (shard.block == 0) {  // rows of any length will do
    g.width = int64_t{kSide} * 32;
    g.height = ceil_div(shard.count, g.width);
  } else {
    g.start = shard.start, g.width = shard.width, g.height = shard.height;
    g.tiles_across = ceil_div(g.width, kSide);
  }
  g.strips_across = ceil_div(g.width, kSide);
  g.first_strip = g.start / g.width / kStrip;
  g.strips = (g.start + g.count - 1) / g.width / kStrip - g.first_strip + 1;
  return g;
}

// Groups of four elements start at multiples of four of a line that is aligned.
bool is_wide(const void* p, const Grid& g, int64_t size) {
  return (reinterpret_cast<uintptr_t>(p) - static_cast<uintptr_t>(g.start * size)) % (kFour * size) == 0 &&
         g.width % kFour == 0;
}

unsigned blocks_of(const Grid& g) {
  return grid_x("x", ceil_div(require_count("x", g.strips, g.strips_across), kWarps));
}

}  // namespace

void partial_amax(const Queue& queue, const Shard& shard, float* amax) {
  if (shard.count == 0) return;
  const Grid g = grid_of(shard);
  with_dtype("x", shard.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    partial_amax_kernel<T><<<blocks_of(g), kThreads, 0, queue.stream()>>>(static_cast<const T*>(shard.x), g,
                                                                          is_wide(shard.x, g, sizeof(T)), amax);
  });
}

void partial_cast(const Queue& queue, const Shard& shard, const float* scale, uint8_t* out, int cast) {
  if (shard.count == 0) return;
  const Grid g = grid_of(shard);
  with_dtype("x", shard.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_encode_mode(cast, [&](auto mode) {
      partial_cast_kernel<T, decltype(mode)::value><<<blocks_of(g), kThreads, 0, queue.stream()>>>(
          static_cast<const T*>(shard.x), g, is_wide(shard.x, g, sizeof(T)), is_wide(out, g, 1), scale, out,
          format_of(cast));
    });
  });
}

}  // namespace ted
