// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The kernels around a library product, for what the library does not do itself: padded copies of operands, scales in
// the library's layout, the epilogue of an fp32 product, sums of an operand, the state of a cast.
#pragma once

#include "common/queue.h"

namespace ted::gemm {

// An element type: a code of dtypes.h, or kCodes + an encoding's. None: -1.
constexpr int kNone = -1;
constexpr int kCodes = 16;
inline bool is_codes(int type) { return type >= kCodes; }
inline int64_t bytes_of(int type) { return type == kNone ? 0 : is_codes(type) ? 1 : type == 0 ? 4 : 2; }

// How an operand is scaled.
enum Scaling : int { kUnscaled = 0, kTensor = 1, kBlock1d = 2, kBlock2d = 3, kMxfp8 = 4, kNvfp4 = 5 };

// (rows, row_bytes) to (target_rows, target_stride), zeros beyond.
struct PadCopy {
  const uint8_t* source;
  uint8_t* target;
  int64_t rows, row_bytes, source_stride;
  int64_t target_rows, target_stride;  // bytes; the stride is a multiple of 16
};
void pad_copy(const Queue& queue, const PadCopy& copy);

// target[r * row_stride + c * column_stride] = source[(r / spread) * source_row_stride + c * source_column_stride],
// zero where r >= rows or c >= columns. No target: nothing to do.
struct ScaleJob {
  const float* source;
  float* target;
  int64_t spread, rows, columns, source_row_stride, source_column_stride;
  int64_t target_rows, target_columns, row_stride, column_stride;
};
void lay_out_scales(const Queue& queue, const ScaleJob& first, const ScaleJob& second);

// One side of a delayed cast: codes are encode(value * *scale), *scale_inv becomes 1 / *scale, *amax the maximum of
// itself and of max |value|. cast: a code of dtypes.h; kNone: no cast.
struct Cast {
  int cast = kNone;
  const float* scale = nullptr;
  float* scale_inv = nullptr;
  float* amax = nullptr;
};

// out = epilogue(z *a_scale *b_scale + bias) (+ out), rounded once; alpha is in z already. Rows of out and aux lie n elements apart.
struct Finish {
  const float* z = nullptr;  // (m, n) with rows z_stride apart; null: zeros
  int64_t m = 0, n = 0, z_stride = 0;
  const float* a_scale = nullptr;  // multiplied into z, where given
  const float* b_scale = nullptr;
  const void* bias = nullptr;
  int bias_type = kNone;
  int epilogue = 0;  // 0 none, 1 gelu, 2 dgelu
  bool accumulate = false;
  void* out = nullptr;
  int out_type = 0;
  Cast out_cast;
  void* aux_out = nullptr;
  int aux_out_type = kNone;
  Cast aux_cast;
  const void* aux_in = nullptr;
  int aux_in_type = kNone;
  const float* aux_in_scale = nullptr;
  void* dbias = nullptr;  // of out_type's nominal dtype
  int dbias_type = kNone;
  float* partials = nullptr;  // (row_chunks(m, n), n), where there is a dbias
};
int64_t row_chunks(const DeviceLimits& limits, int64_t m, int64_t n);
void finish(const Queue& queue, const Finish& f);

// out = sums of a (rows, columns) matrix over its rows, or over its columns (`along_rows` false: out has `rows`).
struct OperandSum {
  const void* source = nullptr;
  int type = 0;
  int64_t rows = 0, columns = 0;
  bool over_rows = true;
  int scaling = kUnscaled;  // codes are summed over their columns only, scales of blocks canonical
  const float* scale = nullptr;
  int64_t scale_row_stride = 0, scale_column_stride = 0;
  void* out = nullptr;
  int out_type = 0;
  float* partials = nullptr;  // (sum_chunks(type, rows, columns), columns), where sums are over rows
};
int64_t sum_chunks(const DeviceLimits& limits, int type, int64_t rows, int64_t columns);
void operand_sum(const Queue& queue, const OperandSum& s);

// After a product whose cast the library did: its amax is in `measured`.
void record_cast(const Queue& queue, const Cast& cast, const float* measured);

}  // namespace ted::gemm
