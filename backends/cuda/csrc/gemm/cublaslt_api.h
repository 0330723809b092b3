// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The part of cuBLASLt's C interface that this backend calls, declared here so that building needs no copy of the
// library. Names and values: NVIDIA's cuBLAS manual, "Using the cuBLASLt API"; they are part of its ABI and equal in
// releases 12 and 13. tests/test_cublaslt_api.py compares them with a real header where one is installed.
#pragma once

#include "common/errors.h"

#include <cstddef>

namespace ted::lt {

using Status = int;
using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

// Opaque; may be kept and restored for the same release of the library.
struct Algorithm {
  uint64_t data[8];
};

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

enum : Status { kSuccess = 0, kNotSupported = 15 };
enum DataType : int32_t { kR32F = 0, kR16F = 2, kR16BF = 14, kR8E4M3 = 28, kR8E5M2 = 29, kR4E2M1 = 33 };
enum ComputeType : int32_t { kCompute32F = 68, kCompute32FFastTF32 = 77 };
enum Operation : int32_t { kOpN = 0, kOpT = 1 };

enum DescAttribute : int32_t {
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kAScalePointer = 17,
  kBScalePointer = 18,
  kDScalePointer = 20,
  kAmaxDPointer = 21,
  kFastAccum = 25,
  kBiasDataType = 26,
  kAScaleMode = 31,
  kBScaleMode = 32,
};

enum ScaleMode : int32_t {
  kScalar32F = 0,
  kVec16UE4M3 = 1,
  kVec32UE8M0 = 2,
  kVec128 = 4,
  kBlock128x128 = 5,
};

enum EpilogueKind : int32_t {
  kEpilogueDefault = 1,
  kEpilogueBias = 4,
  kEpilogueBgradA = 256,
  kEpilogueBgradB = 512,
};

enum PreferenceAttribute : int32_t {
  kMaxWorkspaceBytes = 1,
  kReductionSchemeMask = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8,
};

enum ReductionScheme : uint32_t { kReduceNone = 0, kReduceInPlace = 1, kReduceComputeType = 2, kReduceOutputType = 4 };

enum ConfigAttribute : int32_t { kConfigId = 0, kConfigTile = 1, kConfigSplitK = 2, kConfigReduction = 3, kConfigStages = 6 };

// Every function of the library that is used: (member, name, parameters).
#define TED_CUBLASLT_FUNCTIONS(X)                                                                                     \
  X(create, cublasLtCreate, (Handle*))                                                                                \
  X(desc_create, cublasLtMatmulDescCreate, (MatmulDesc*, int32_t compute, int32_t scale))                             \
  X(desc_destroy, cublasLtMatmulDescDestroy, (MatmulDesc))                                                            \
  X(desc_set, cublasLtMatmulDescSetAttribute, (MatmulDesc, int32_t attribute, const void*, size_t))                   \
  X(layout_create, cublasLtMatrixLayoutCreate, (MatrixLayout*, int32_t type, uint64_t rows, uint64_t columns, int64_t)) \
  X(layout_destroy, cublasLtMatrixLayoutDestroy, (MatrixLayout))                                                      \
  X(preference_create, cublasLtMatmulPreferenceCreate, (Preference*))                                                 \
  X(preference_destroy, cublasLtMatmulPreferenceDestroy, (Preference))                                                \
  X(preference_set, cublasLtMatmulPreferenceSetAttribute, (Preference, int32_t attribute, const void*, size_t))       \
  X(heuristic, cublasLtMatmulAlgoGetHeuristic,                                                                        \
    (Handle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, Preference, int, HeuristicResult*, int*)) \
  X(algorithm_check, cublasLtMatmulAlgoCheck,                                                                         \
    (Handle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, const Algorithm*, HeuristicResult*)) \
  X(algorithm_get, cublasLtMatmulAlgoConfigGetAttribute, (const Algorithm*, int32_t attribute, void*, size_t, size_t*)) \
  X(matmul, cublasLtMatmul,                                                                                           \
    (Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout, const void* beta, \
     const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm*, void* workspace, size_t, cudaStream_t))

struct Api {
#define TED_DECLARE(member, name, parameters) Status(*member) parameters = nullptr;
  TED_CUBLASLT_FUNCTIONS(TED_DECLARE)
#undef TED_DECLARE
  size_t (*version)() = nullptr;
  const char* (*status_text)(Status) = nullptr;
};

// Opens the file, unless it is open already. Throws std::runtime_error with the linker's message, or naming the
// function that the library lacks.
void open(const char* path);
// The open library; throws std::runtime_error before `open`.
const Api& api();
// One per device, made when first asked for; the device must be current.
Handle handle_of(int device);

// What the library answered when it refused: becomes te_dispatch's Declined.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void check(Status status, const char* operation);

}  // namespace ted::lt
