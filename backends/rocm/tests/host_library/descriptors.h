// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// What stands behind hipBLASLt's opaque pointers.
#pragma once

#include "amd.h"

#include <string>

namespace host {

// "Not given", of a bias's or an auxiliary matrix's type: then D's.
constexpr int32_t kTypeOfD = 255;

enum class ScaleKind { kNone, kScalar, kVector, kBlock32 };

struct Handle {
  int device;
  std::string arch;  // without what follows a colon
};

struct Layout {
  int32_t type;
  uint64_t rows, columns;
  int64_t ld;
  int32_t batch_count = 1;
  int64_t batch_stride = 0;
  int32_t order = HIPBLASLT_ORDER_COL;
};

struct Desc {
  int32_t compute, scale_type;
  int32_t op_a = HIPBLAS_OP_N, op_b = HIPBLAS_OP_N;
  int32_t epilogue = HIPBLASLT_EPILOGUE_DEFAULT;
  void* bias = nullptr;
  int32_t bias_type = kTypeOfD;
  void *a_scale = nullptr, *b_scale = nullptr, *c_scale = nullptr, *d_scale = nullptr, *aux_scale = nullptr;
  ScaleKind a_scale_kind = ScaleKind::kNone, b_scale_kind = ScaleKind::kNone;
  void* aux = nullptr;
  int64_t aux_ld = 0, aux_batch_stride = 0;
  int32_t aux_type = kTypeOfD;
  int32_t pointer_mode = HIPBLASLT_POINTER_MODE_HOST;
  void* amax_d = nullptr;
  int32_t compute_a = kTypeOfD, compute_b = kTypeOfD;
  float activation0 = 0, activation1 = 0;
};

struct Preference {
  uint32_t search_mode = 0;
  uint64_t max_workspace = 0;
};

inline Layout* of(hipblasLtMatrixLayout_t x) { return reinterpret_cast<Layout*>(x); }
inline Desc* of(hipblasLtMatmulDesc_t x) { return reinterpret_cast<Desc*>(x); }
inline Preference* of(hipblasLtMatmulPreference_t x) { return reinterpret_cast<Preference*>(x); }
inline Handle* handle_of(hipblasLtHandle_t x) { return static_cast<Handle*>(x); }

}  // namespace host
