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
  bool two_d;  // kNVFP4: 16x16 values share a scale

  // Derived from these and the matrix by `derive`.
  Format format;
  int64_t row_pitch, column_pitch;       // bytes from one row of codes to the next
  bool row_wide, column_wide, out_wide;  // whole accesses are aligned
  Raster raster;

  __host__ __device__ void derive(int scaling, int64_t rows, int64_t columns) {
    const bool packed = scaling == kNVFP4, transposed = scaling != kMXFP8;
    format = format_of(cast);
    row_pitch = packed ? ceil_div(columns, 2) : columns;
    column_pitch = packed ? ceil_div(rows, 2) : transposed ? rows : columns;
    row_wide = row == nullptr || is_aligned(row, row_pitch, packed ? 4 : 8);
    column_wide = column == nullptr || is_aligned(column, column_pitch, transposed ? 16 : 8);
    out_wide = out == nullptr || is_aligned(out, columns * size_of(out_dtype));
    raster = Raster::over(rows, columns);
  }
};

}  // namespace ted
