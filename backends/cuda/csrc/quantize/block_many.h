// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// Casts of many matrices of one element type, scaling and encoding in one launch (two where amaxes have to be found),
// for up to kManyCasts of them. Operators: split_quantize, multi_tensor_quantize.
#pragma once

#include "cast/blocks.h"

#include <vector>

namespace ted {

struct ManyCast {
  const void* x;
  int64_t rows, columns, stride;  // stride: elements between rows of x
  uint8_t *row, *column;
  void *row_scale_inv, *column_scale_inv;
  float* global_scale_inv;  // kNVFP4
  const float* scale;       // kTensor: in force; null: from the amax
  float* amax;              // kTensor: max-accumulated
  float epsilon;
  int cast;
  bool power_of_two, two_d, for_products;
};

constexpr int kManyCasts = 32;    // in a launch: what kernel parameters hold
constexpr int kManyMaxima = 256;  // partial maxima of each matrix

struct ManyCasts {
  int dtype;
  std::vector<ManyCast> casts;
  float* maxima;  // kManyMaxima for each cast; null where no amax has to be found
};

void many_tensor_casts(const Queue& queue, const ManyCasts& many);
void many_block_1d_casts(const Queue& queue, const ManyCasts& many);
void many_block_2d_casts(const Queue& queue, const ManyCasts& many);
void many_mxfp8_casts(const Queue& queue, const ManyCasts& many);
void many_nvfp4_casts(const Queue& queue, const ManyCasts& many);

}  // namespace ted
