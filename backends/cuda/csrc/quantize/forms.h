// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Quantized data in other forms: kernels that move bytes, or read them as numbers. Operators: dequantize,
// transpose_quantized, relayout_scales, convert_encoding, pad_rows, unpad_rows, partial_amax, partial_cast.
#pragma once

#include "cast/blocks.h"

#include <vector>

namespace ted {

// Scales of a copy in memory. Scale (r, b) is that of the r-th stored row (or tile row), of the b-th block along the
// contracted dimension. It lies at r * row_stride + b * block_stride, or, swizzled, in 128x4 tiles of 32x4x4,
// row-major, `tiles` to a row of tiles.
struct ScaleView {
  const void* scale;
  int64_t row_stride, block_stride;
  int64_t tiles;  // 0: not swizzled

  __host__ __device__ __forceinline__ int64_t offset(int64_t r, int64_t b) const {
    if (tiles == 0) return r * row_stride + b * block_stride;
    return (r / 128 * tiles + b / 4) * 512 + ((r % 32) * 4 + r % 128 / 32) * 4 + b % 4;
  }
};

// Rows, scales and values of one copy, as they lie in memory: `rows` stored rows of `columns` codes.
struct StoredCopy {
  const uint8_t* codes;
  ScaleView scales;
  const float* global_scale_inv;  // kNVFP4
  int scaling, encoding;
  bool transposed;  // rows are the logical columns
  bool down;        // kMXFP8's column-wise copy: blocks of 32 rows, scale (column, row / 32)
  int64_t rows, columns;
};

void dequantize(const Queue& queue, const StoredCopy& from, void* to, int dtype);

// (rows, columns) bytes to (columns, rows), and, where there are any, a scale for each 128x128 tile.
void transpose_bytes(const Queue& queue, const uint8_t* from, uint8_t* to, int64_t rows, int64_t columns,
                     const float* scale, float* transposed_scale);

// One copy's scales from a layout to another: `rows` by `blocks` of them, the rest of the target's `padded_rows` by
// `padded_blocks` zero.
struct Relayout {
  ScaleView from, to;
  int64_t rows, blocks, padded_rows, padded_blocks;
};
void relayout(const Queue& queue, const Relayout (&copies)[2], int size);

// Codes and scales of a record, rewritten between OCP and FNUZ.
struct Conversion {
  const uint8_t* from[2];  // codes of both copies, null where there is none
  uint8_t* to[2];
  int64_t count[2];
  const float* scale[2];
  float* converted[2];
  int64_t scale_count[2];
  int source;       // encoding
  int64_t* beyond;  // incremented by how many codes of the first copy saturate; null: not counted
};
void convert(const Queue& queue, const Conversion& conversion);
// *beyond = how many codes do not convert.
void count_beyond(const Queue& queue, const uint8_t* codes, int64_t count, int source, int64_t* beyond);

// Parts of a matrix of `pitch` bytes a row: part i has copied[i] rows in both, and then zeros to written[i] rows in the
// target, or rows to skip to read[i] in the source.
void copy_parts(const Queue& queue, const uint8_t* from, uint8_t* to, int64_t pitch, const std::vector<int64_t>& copied,
                const std::vector<int64_t>& read, const std::vector<int64_t>& written);

// Elements start .. start + count of a row-major (height, width) matrix, in tiles of 128x128, or as one for block 0.
struct Shard {
  const void* x;
  int dtype;
  int64_t count, start, height, width;
  int block;
};
void partial_amax(const Queue& queue, const Shard& shard, float* amax);
void partial_cast(const Queue& queue, const Shard& shard, const float* scale, uint8_t* out, int cast);

}  // namespace ted
