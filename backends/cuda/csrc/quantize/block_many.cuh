// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The engine of cast/blocks.cuh over a table of matrices. A block finds its matrix by its number.
#pragma once

#include "cast/blocks.cuh"
#include "quantize/block_many.h"

#include <algorithm>

namespace ted {
namespace block_cast {

struct ManyTable {
  ManyCast casts[kManyCasts];
  uint32_t first_block[kManyCasts];
  int count;
  float* maxima;  // kManyMaxima for each
};
static_assert(sizeof(ManyTable) <= 4096, "kernel parameters");

// The last entry that starts at or before this block.
__device__ __forceinline__ int entry_of(const ManyTable& table) {
  int low = 0, high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.first_block[middle] <= blockIdx.x)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Partial maxima of a matrix of so many tiles.
__host__ __device__ inline uint32_t many_maxima(uint32_t tiles) { return tiles < kManyMaxima ? tiles : kManyMaxima; }

template <class T>
__device__ __forceinline__ PlainSource<T> source_of(const ManyCast& c) {
  const T* x = static_cast<const T*>(c.x);
  return {x, c.rows, c.columns, c.stride, is_aligned(x, c.stride * static_cast<int64_t>(sizeof(T)))};
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) many_maxima_kernel(const __grid_constant__ ManyTable table) {
  __shared__ float shared[kThreads / 32];
  const int entry = entry_of(table);
  const PlainSource<T> source = source_of<T>(table.casts[entry]);
  const Raster raster = Raster::over(source.rows(), source.columns());
  const Lanes at = Layout<kBlock1D>::lanes();
  const uint32_t first = blockIdx.x - table.first_block[entry], tiles = raster.rows * raster.columns;
  float found = 0.0f;
  for (uint32_t tile = first; tile < tiles; tile += many_maxima(tiles)) {
    int64_t tile_row, tile_column;
    raster.tile(tile, &tile_row, &tile_column);
    const int64_t row = tile_row * kTile + at.row, column = tile_column * kTile + at.column;
    const int64_t rows_left = source.rows() - row, columns_left = source.columns() - column;
    Patch<PlainSource<T>> patch;
    patch.template load<false>(source, row, column, static_cast<int>(max(min(rows_left, int64_t{kPatch}), int64_t{0})),
                               static_cast<int>(max(min(columns_left, int64_t{kPatch}), int64_t{0})));
    float amax[kPatch];
    patch.fold_columns(Masks<16>{}, amax);
#pragma unroll
    for (int i = 0; i < Masks<16>::kLeft; ++i) found = fmaxf(found, amax[i]);
  }
  found = block_reduce<kThreads>(found, 0.0f, Max(), shared);
  if (threadIdx.x == 0) table.maxima[entry * kManyMaxima + first] = found;
}

template <int S, class T>
__global__ void __launch_bounds__(kThreads, 2) many_casts_kernel(const __grid_constant__ ManyTable table) {
  __shared__ TileShared<S> shared;
  const int entry = entry_of(table);
  const ManyCast& c = table.casts[entry];
  const PlainSource<T> source = source_of<T>(c);
  BlockCast cast{};
  cast.row = c.row, cast.column = c.column;
  cast.row_scale_inv = c.row_scale_inv, cast.column_scale_inv = c.column_scale_inv;
  cast.global_scale_inv = c.global_scale_inv;
  cast.scale = c.scale, cast.amax = c.amax;
  cast.epsilon = c.epsilon, cast.power_of_two = c.power_of_two, cast.two_d = c.two_d;
  cast.for_products = c.for_products;
  cast.cast = c.cast;
  cast.derive(S, c.rows, c.columns);
  cast.maxima = table.maxima + entry * kManyMaxima;
  cast.maxima_count = many_maxima(cast.raster.rows * cast.raster.columns);
  if (c.rows == 0 || c.columns == 0) {
    const float scale = whole_scale<S>(cast, shared.scaling.warps);
    if ((S == kTensor || S == kNVFP4) && threadIdx.x == 0) write_whole_scale<S>(cast, scale);
    return;
  }
  cast_tile_of<S>(source, cast, blockIdx.x - table.first_block[entry], takes_full<S>(source, cast), shared);
}

// Launches for entries first .. last of `many`.
template <int S, class T>
void launch_many(const Queue& queue, const ManyCasts& many, size_t first, size_t last) {
  ManyTable table;
  table.count = static_cast<int>(last - first);
  table.maxima = many.maxima == nullptr ? nullptr : many.maxima + first * kManyMaxima;
  const auto fill = [&](auto blocks_of) {
    int64_t blocks = 0;
    for (int i = 0; i < table.count; ++i) {
      table.casts[i] = many.casts[first + i];
      table.first_block[i] = grid_x("xs", blocks);
      blocks += blocks_of(Raster::tiles_of(table.casts[i].rows, table.casts[i].columns));
    }
    return grid_x("xs", blocks);
  };
  if (many.maxima != nullptr) {
    const unsigned grid = fill([](int64_t tiles) { return std::min<int64_t>(tiles, kManyMaxima); });
    if (grid > 0) many_maxima_kernel<T><<<grid, kThreads, 0, queue.stream()>>>(table);
  }
  // An empty matrix takes a block too: it may have a scale.
  const unsigned grid = fill([](int64_t tiles) { return std::max<int64_t>(tiles, 1); });
  many_casts_kernel<S, T><<<grid, kThreads, 0, queue.stream()>>>(table);
}

}  // namespace block_cast

template <int S>
void many_casts(const Queue& queue, const ManyCasts& many) {
  with_dtype("xs", many.dtype, [&](auto type) {
    for (size_t first = 0; first < many.casts.size(); first += kManyCasts)
      block_cast::launch_many<S, typename decltype(type)::type>(queue, many, first,
                                                                std::min(first + kManyCasts, many.casts.size()));
  });
}

}  // namespace ted
