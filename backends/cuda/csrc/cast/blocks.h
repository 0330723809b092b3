// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What a cast with a scale per block writes, and how. The engine: cast/blocks.cuh.
#pragma once

#include "common/encode.cuh"
#include "common/queue.h"
#include "common/scalar.cuh"

#include <cstdint>

namespace ted {

// kTensor serves casts of many tensors at once (quantize/many.cu); alone, cast/tensor.cuh is for them.
enum Scaling : int { kTensor = 0, kBlock1D = 1, kBlock2D = 2, kMXFP8 = 3, kNVFP4 = 4 };

// In a scaling's code: scales lie in gemm_1d or gemm_2d (te_dispatch.ops.relayout_scales).
constexpr int kForProducts = 8;

// Takes that off a code.
inline bool take_for_products(int& scaling) {
  const bool found = scaling == kBlock1D + kForProducts || scaling == kBlock2D + kForProducts;
  if (found) scaling -= kForProducts;
  return found;
}

constexpr int kBlockTile = 128;  // rows and columns of a tile

// The order of tiles: down `group` tile rows, then on to the next tile column, so that what runs at a time reads and
// writes runs of whole lines in both directions.
struct Raster {
  uint32_t rows, columns;  // of tiles
  uint32_t group;
  uint32_t group_tiles;  // group * columns

  // Of a matrix with at most 2^31 - 1 tiles.
  __host__ __device__ static Raster over(int64_t rows, int64_t columns) {
    const int64_t down = ceil_div(rows, kBlockTile), across = ceil_div(columns, kBlockTile);
    const int64_t group = down >= 8 ? 8 : 1;
    return {static_cast<uint32_t>(down), static_cast<uint32_t>(across), static_cast<uint32_t>(group),
            static_cast<uint32_t>(group * across)};
  }
  static int64_t tiles_of(int64_t rows, int64_t columns) {
    return require_count("x", ceil_div(rows, kBlockTile), ceil_div(columns, kBlockTile));
  }
  __device__ __forceinline__ void tile(uint32_t index, int64_t* row, int64_t* column) const {
    const uint32_t g = index / group_tiles, within = index - g * group_tiles, first = g * group;
    const uint32_t height = rows - first < group ? rows - first : group, c = within / height;
    *column = c;
    *row = first + within - c * height;
  }
};

// Where the float scales of a copy lie: of `lines` that are not contracted (rows of values, or of tiles), by blocks.
struct ScaleGrid {
  int64_t lines, blocks;          // that are written, padding with zeros included
  int64_t line_step, block_step;  // elements

  __host__ __device__ static ScaleGrid of(int64_t lines, int64_t blocks, bool two_d, bool for_products) {
    const auto padded = [](int64_t size) { return (size + 3) / 4 * 4; };
    if (!for_products) return {lines, blocks, blocks, 1};
    if (two_d) return {lines, padded(blocks), padded(blocks), 1};
    return {padded(lines), blocks, 1, padded(lines)};
  }
  __device__ __forceinline__ int64_t at(int64_t line, int64_t block) const {
    return line * line_step + block * block_step;
  }
};

// Every pointer may be null, and then what it names is not made.
struct BlockCast {
  uint8_t *row, *column;                   // codes: of rows; of columns (transposed but for kMXFP8)
  void *row_scale_inv, *column_scale_inv;  // float; uint8_t for kMXFP8 and kNVFP4; one float for kTensor
  float* global_scale_inv;                 // kNVFP4: (1,)
  const float* scale;                      // kTensor: the scale in force; null to compute it from the maxima
  const float* maxima;                     // kNVFP4, kTensor: the tensor's amax is the largest of these
  int64_t maxima_count;
  float* amax;        // kTensor: max-accumulated with max |value|
  const float* noop;  // where *noop != 0, nothing at all is written
  float* sums;        // partial column sums, (ceil(rows / 128), columns)
  void* out;          // (rows, columns) values of out_dtype, rounded once
  int out_dtype;
  int cast;  // the encoding, and kCommon
  float epsilon;
  bool power_of_two;
  bool two_d;         // kNVFP4: 16x16 values share a scale
  bool for_products;  // kBlock1D: scales lie in gemm_1d; kBlock2D: in gemm_2d

  // Derived from these and the matrix by `derive`.
  Format format;
  int64_t row_pitch, column_pitch;       // bytes from one row of codes to the next
  bool row_wide, column_wide, out_wide;  // whole accesses are aligned
  Raster raster;
  ScaleGrid row_scales, column_scales;  // kBlock1D, kBlock2D

  __host__ __device__ void derive(int scaling, int64_t rows, int64_t columns) {
    const bool packed = scaling == kNVFP4, transposed = scaling != kMXFP8;
    format = format_of(cast);
    row_pitch = packed ? ceil_div(columns, 2) : columns;
    column_pitch = packed ? ceil_div(rows, 2) : transposed ? rows : columns;
    row_wide = row == nullptr || is_aligned(row, row_pitch, packed ? 4 : 8);
    column_wide = column == nullptr || is_aligned(column, column_pitch, transposed ? 16 : 8);
    out_wide = out == nullptr || is_aligned(out, columns * size_of(out_dtype));
    raster = Raster::over(rows, columns);
    if (scaling == kBlock1D || scaling == kBlock2D) {
      const bool two_d = scaling == kBlock2D;
      row_scales = ScaleGrid::of(two_d ? raster.rows : rows, raster.columns, two_d, for_products);
      column_scales = ScaleGrid::of(two_d ? raster.columns : columns, raster.rows, two_d, for_products);
    }
  }
};

}  // namespace ted
