// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// libhipblaslt for a machine without AMD's hardware: handles, descriptors and their attributes. Status codes are those of
// AMD's library, to which test_transcript.py compares them, call by call.
#include "descriptors.h"
#include "settings.h"

#include <cstdio>
#include <cstring>

#ifndef HOST_LIBRARY_AMD_HEADERS
extern "C" {
hipError_t hipGetDevice(int*);
hipError_t hipGetDeviceCount(int*);
hipError_t hipGetDeviceProperties(hipDeviceProp_t*, int);
}
#endif

using host::Desc;
using host::Layout;
using host::Preference;
using host::ScaleKind;

namespace {

// Copies an attribute that the caller gave; more bytes than needed are taken, fewer are not.
template <class T>
hipblasStatus_t take(T& field, const void* value, size_t bytes) {
  if (bytes < sizeof(T)) return HIPBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&field, value, sizeof(T));
  return HIPBLAS_STATUS_SUCCESS;
}

template <class T>
hipblasStatus_t give(const T& field, void* value, size_t bytes, size_t* written) {
  if (written) *written = sizeof(T);
  if (bytes < sizeof(T)) return HIPBLAS_STATUS_INVALID_VALUE;
  std::memcpy(value, &field, sizeof(T));
  return HIPBLAS_STATUS_SUCCESS;
}

hipblasStatus_t take_scale(void*& field, ScaleKind& kind, const void* value, size_t bytes) {
  if (kind == ScaleKind::kNone) kind = ScaleKind::kScalar;
  return take(field, value, bytes);
}

hipblasStatus_t give_scale_mode(ScaleKind kind, void* value, size_t bytes, size_t* written) {
  int32_t mode = HIPBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  if (kind == ScaleKind::kBlock32) mode = HIPBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
  if (kind == ScaleKind::kVector) mode = HIPBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
  if (kind == ScaleKind::kNone) {  // neither a mode nor a scale was set
    if (written) *written = sizeof(mode);
    return HIPBLAS_STATUS_INVALID_VALUE;
  }
  return give(mode, value, bytes, written);
}

hipblasStatus_t take_scale_mode(ScaleKind& kind, const void* value, size_t bytes) {
  int32_t mode = 0;
  if (take(mode, value, bytes) != HIPBLAS_STATUS_SUCCESS) return HIPBLAS_STATUS_INVALID_VALUE;
  switch (mode) {
    case HIPBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F: kind = ScaleKind::kScalar; break;
    case HIPBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0: kind = ScaleKind::kBlock32; break;
    case HIPBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: kind = ScaleKind::kVector; break;
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
  return HIPBLAS_STATUS_SUCCESS;
}

// What both setters answer before they look at the attribute.
hipblasStatus_t check_set(const void* of, const void* value, size_t bytes) {
  if (!of) return HIPBLAS_STATUS_NOT_INITIALIZED;
  return value && bytes ? HIPBLAS_STATUS_SUCCESS : HIPBLAS_STATUS_INVALID_VALUE;
}

hipblasStatus_t check_get(const void* of, const void* value, size_t bytes, const size_t* written) {
  if (!of) return HIPBLAS_STATUS_NOT_INITIALIZED;
  return (bytes == 0 && !written) || (bytes != 0 && !value) ? HIPBLAS_STATUS_INVALID_VALUE : HIPBLAS_STATUS_SUCCESS;
}

bool is_compute(int32_t type) {
  switch (type) {
    case HIPBLAS_COMPUTE_16F:
    case HIPBLAS_COMPUTE_32F:
    case HIPBLAS_COMPUTE_32F_FAST_16F:
    case HIPBLAS_COMPUTE_32F_FAST_16BF:
    case HIPBLAS_COMPUTE_32F_FAST_TF32:
    case HIPBLAS_COMPUTE_64F:
    case HIPBLAS_COMPUTE_32I: return true;
    default: return false;
  }
}

}  // namespace

HOST_EXPORT hipblasStatus_t hipblasLtCreate(hipblasLtHandle_t* handle) {
  int count = 0;
  if (hipGetDeviceCount(&count) != hipSuccess || count == 0) {
    std::fprintf(stderr, "host hipBLASLt: no device; as the real library, this ends the process\n");
    std::exit(1);
  }
  if (!handle) return HIPBLAS_STATUS_INVALID_VALUE;
  int device = 0;
  hipDeviceProp_t properties;
  if (hipGetDevice(&device) != hipSuccess || hipGetDeviceProperties(&properties, device) != hipSuccess) return HIPBLAS_STATUS_INTERNAL_ERROR;
  const std::string arch = properties.gcnArchName;
  *handle = new host::Handle{device, arch.substr(0, arch.find(':'))};
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtDestroy(const hipblasLtHandle_t handle) {
  if (!handle) return HIPBLAS_STATUS_INVALID_VALUE;
  delete host::handle_of(handle);
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtGetVersion(hipblasLtHandle_t handle, int* version) {
  if (!handle) return HIPBLAS_STATUS_NOT_INITIALIZED;
  if (!version) return HIPBLAS_STATUS_INVALID_VALUE;
  *version = std::atoi(host::setting("HOST_HIPBLASLT_VERSION", "100202").c_str());
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatrixLayoutCreate(hipblasLtMatrixLayout_t* made, hipDataType type, uint64_t rows, uint64_t columns, int64_t ld) {
  if (!made) return HIPBLAS_STATUS_INVALID_VALUE;
  *made = reinterpret_cast<hipblasLtMatrixLayout_t>(new Layout{static_cast<int32_t>(type), rows, columns, ld});
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatrixLayoutDestroy(const hipblasLtMatrixLayout_t layout) {
  if (!layout) return HIPBLAS_STATUS_INVALID_VALUE;
  delete host::of(layout);
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatrixLayoutSetAttribute(hipblasLtMatrixLayout_t layout, hipblasLtMatrixLayoutAttribute_t attribute,
                                                              const void* value, size_t bytes) {
  const hipblasStatus_t status = check_set(layout, value, bytes);
  if (status != HIPBLAS_STATUS_SUCCESS) return status;
  Layout& x = *host::of(layout);
  switch (static_cast<int>(attribute)) {
    case HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return take(x.batch_count, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return take(x.batch_stride, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_TYPE: return take(x.type, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_ORDER: return take(x.order, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_ROWS: return take(x.rows, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_COLS: return take(x.columns, value, bytes);
    case HIPBLASLT_MATRIX_LAYOUT_LD: return take(x.ld, value, bytes);
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
}

HOST_EXPORT hipblasStatus_t hipblasLtMatrixLayoutGetAttribute(hipblasLtMatrixLayout_t layout, hipblasLtMatrixLayoutAttribute_t attribute,
                                                              void* value, size_t bytes, size_t* written) {
  const hipblasStatus_t status = check_get(layout, value, bytes, written);
  if (status != HIPBLAS_STATUS_SUCCESS) return status;
  const Layout& x = *host::of(layout);
  switch (static_cast<int>(attribute)) {  // AMD's library knows no others here
    case HIPBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return give(x.batch_count, value, bytes, written);
    case HIPBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return give(x.batch_stride, value, bytes, written);
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulDescCreate(hipblasLtMatmulDesc_t* made, hipblasComputeType_t compute, hipDataType scale) {
  if (!made) return HIPBLAS_STATUS_INVALID_VALUE;
  *made = nullptr;
  const bool is_scale = scale == HIP_R_32F || scale == HIP_R_64F || scale == HIP_R_32I;
  if (!is_compute(static_cast<int>(compute)) || !is_scale) return HIPBLAS_STATUS_INVALID_VALUE;
  *made = reinterpret_cast<hipblasLtMatmulDesc_t>(new Desc{static_cast<int32_t>(compute), static_cast<int32_t>(scale)});
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulDescDestroy(const hipblasLtMatmulDesc_t desc) {
  if (!desc) return HIPBLAS_STATUS_INVALID_VALUE;
  delete host::of(desc);
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulDescSetAttribute(hipblasLtMatmulDesc_t desc, hipblasLtMatmulDescAttributes_t attribute,
                                                            const void* value, size_t bytes) {
  const hipblasStatus_t status = check_set(desc, value, bytes);
  if (status != HIPBLAS_STATUS_SUCCESS) return status;
  Desc& x = *host::of(desc);
  switch (static_cast<int>(attribute)) {
    case HIPBLASLT_MATMUL_DESC_TRANSA: return take(x.op_a, value, bytes);
    case HIPBLASLT_MATMUL_DESC_TRANSB: return take(x.op_b, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE: return take(x.epilogue, value, bytes);
    case HIPBLASLT_MATMUL_DESC_BIAS_POINTER: return take(x.bias, value, bytes);
    case HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return take(x.bias_type, value, bytes);
    case HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER: return take_scale(x.a_scale, x.a_scale_kind, value, bytes);
    case HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER: return take_scale(x.b_scale, x.b_scale_kind, value, bytes);
    case HIPBLASLT_MATMUL_DESC_C_SCALE_POINTER: return take(x.c_scale, value, bytes);
    case HIPBLASLT_MATMUL_DESC_D_SCALE_POINTER: return take(x.d_scale, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER: return take(x.aux_scale, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return take(x.aux, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return take(x.aux_ld, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE: return take(x.aux_batch_stride, value, bytes);
    case HIPBLASLT_MATMUL_DESC_POINTER_MODE: return take(x.pointer_mode, value, bytes);
    case HIPBLASLT_MATMUL_DESC_AMAX_D_POINTER: return take(x.amax_d, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return take(x.aux_type, value, bytes);
    case HIPBLASLT_MATMUL_DESC_A_SCALE_MODE: return take_scale_mode(x.a_scale_kind, value, bytes);
    case HIPBLASLT_MATMUL_DESC_B_SCALE_MODE: return take_scale_mode(x.b_scale_kind, value, bytes);
    case HIPBLASLT_MATMUL_DESC_COMPUTE_INPUT_TYPE_A_EXT: return take(x.compute_a, value, bytes);
    case HIPBLASLT_MATMUL_DESC_COMPUTE_INPUT_TYPE_B_EXT: return take(x.compute_b, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_ACT_ARG0_EXT: return take(x.activation0, value, bytes);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_ACT_ARG1_EXT: return take(x.activation1, value, bytes);
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulDescGetAttribute(hipblasLtMatmulDesc_t desc, hipblasLtMatmulDescAttributes_t attribute,
                                                            void* value, size_t bytes, size_t* written) {
  const hipblasStatus_t status = check_get(desc, value, bytes, written);
  if (status != HIPBLAS_STATUS_SUCCESS) return status;
  const Desc& x = *host::of(desc);
  switch (static_cast<int>(attribute)) {  // AMD's library lets no others be read
    case HIPBLASLT_MATMUL_DESC_TRANSA: return give(x.op_a, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_TRANSB: return give(x.op_b, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE: return give(x.epilogue, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_BIAS_POINTER: return give(x.bias, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return give(x.bias_type, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER: return give(x.a_scale, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER: return give(x.b_scale, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_POINTER_MODE: return give(x.pointer_mode, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_AMAX_D_POINTER: return give(x.amax_d, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE: return give(x.aux_type, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_A_SCALE_MODE: return give_scale_mode(x.a_scale_kind, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_B_SCALE_MODE: return give_scale_mode(x.b_scale_kind, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_COMPUTE_INPUT_TYPE_A_EXT: return give(x.compute_a, value, bytes, written);
    case HIPBLASLT_MATMUL_DESC_COMPUTE_INPUT_TYPE_B_EXT: return give(x.compute_b, value, bytes, written);
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceCreate(hipblasLtMatmulPreference_t* made) {
  if (!made) return HIPBLAS_STATUS_NOT_INITIALIZED;
  *made = reinterpret_cast<hipblasLtMatmulPreference_t>(new Preference);
  return HIPBLAS_STATUS_SUCCESS;
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceDestroy(const hipblasLtMatmulPreference_t preference) {
  if (!preference) return HIPBLAS_STATUS_INVALID_VALUE;
  delete host::of(preference);
  return HIPBLAS_STATUS_SUCCESS;
}

// AMD's library does not look at the sizes of these two and reads beyond a value that is too short; this one refuses it.
HOST_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceSetAttribute(hipblasLtMatmulPreference_t preference,
                                                                  hipblasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t bytes) {
  if (!preference || !value || !bytes) return HIPBLAS_STATUS_INVALID_VALUE;
  Preference& x = *host::of(preference);
  switch (static_cast<int>(attribute)) {
    case HIPBLASLT_MATMUL_PREF_SEARCH_MODE: return take(x.search_mode, value, bytes);
    case HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return take(x.max_workspace, value, bytes);
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
}

HOST_EXPORT hipblasStatus_t hipblasLtMatmulPreferenceGetAttribute(hipblasLtMatmulPreference_t preference,
                                                                  hipblasLtMatmulPreferenceAttributes_t attribute, void* value, size_t bytes,
                                                                  size_t* written) {
  if (!preference || !value || !bytes) return HIPBLAS_STATUS_INVALID_VALUE;
  const Preference& x = *host::of(preference);
  switch (static_cast<int>(attribute)) {
    case HIPBLASLT_MATMUL_PREF_SEARCH_MODE: return give(x.search_mode, value, bytes, written);
    case HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return give(x.max_workspace, value, bytes, written);
    default: return HIPBLAS_STATUS_INVALID_VALUE;
  }
}
