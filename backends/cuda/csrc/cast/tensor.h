// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What a cast with one scale per tensor writes, and where its scale comes from. The engine: cast/tensor.cuh.
#pragma once

#include "common/encode.cuh"
#include "common/errors.h"

#include <cstdint>

namespace ted {

// Every pointer may be null, and then what it names is not made.
struct TensorCast {
  uint8_t* row;     // (rows, columns) codes
  uint8_t* column;  // (columns, rows) codes
  void* out;        // (rows, columns) values of out_dtype, rounded once
  int out_dtype;
  int cast;  // the encoding, and kCommon
  // The scale: *scale, or that of an amax: *maxima, or where maxima_count > 0 the largest of so many, left by the kernel
  // before this one.
  const float* scale;
  const float* maxima;
  int64_t maxima_count;
  float epsilon;
  bool power_of_two;
  float* row_scale_inv;
  float* column_scale_inv;
  float* amax;        // max-accumulated with max |value|
  const float* noop;  // where *noop != 0, nothing at all is written
  float* sums;        // partial column sums, (sums_rows, columns)
};

// Rows that one partial sum covers.
constexpr int64_t kTileRows = 128;
inline int64_t sums_rows(int64_t rows) { return (rows + kTileRows - 1) / kTileRows; }

// The most partial maxima that a pass leaves: one a block.
constexpr int64_t kMaxima = 1024;

}  // namespace ted
