// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The part of hipBLASLt's C interface that this backend calls, declared here so that building needs no ROCm. Names and
// values: AMD's hipBLASLt API reference, hipblas-common and HIP's data types; they are part of the ABI and equal in
// releases 0.10 to 1.2. Tests compare them with AMD's headers where these are installed.
#pragma once

#include "common/hip_api.h"

#include <cstddef>

namespace ted_rocm::lt {

using Status = int;
using Handle = void*;
using MatmulDesc = void*;
using MatrixLayout = void*;
using Preference = void*;

// Opaque; the same release of the library finds the algorithm again by `data`, whose first number is its index.
struct Algorithm {
  uint8_t data[16];
  size_t max_workspace;
};

struct HeuristicResult {
  Algorithm algorithm;
  size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

enum : Status { kSuccess = 0, kNotSupported = 7 };
enum DataType : int32_t {
  kR32F = 0,
  kR16F = 2,
  kR16BF = 14,
  kR8E4M3 = 28,
  kR8E5M2 = 29,
  kR8E4M3Fnuz = 1000,
  kR8E5M2Fnuz = 1001,
};
enum ComputeType : int32_t { kCompute32F = 2, kCompute32FFastTF32 = 6 };
enum Operation : int32_t { kOpN = 111, kOpT = 112 };

enum DescAttribute : int32_t {
  kTransA = 0,
  kTransB = 1,
  kEpilogue = 2,
  kBiasPointer = 3,
  kBiasDataType = 4,
  kAScalePointer = 5,
  kBScalePointer = 6,
  kAuxPointer = 10,
  kAuxLd = 11,
  kAuxDataType = 22,
  kAScaleMode = 31,
  kBScaleMode = 32,
};

enum ScaleMode : int32_t { kScalar32F = 0, kVec32UE8M0 = 2 };

// The library takes any number for an epilogue and multiplies without one where it does not know it, so nothing but
// these is ever set.
enum EpilogueKind : uint32_t {
  kEpilogueDefault = 1,
  kEpilogueBias = 4,
  kEpilogueGeluAux = 160,
  kEpilogueGeluAuxBias = 164,
  kEpilogueDGeluBgrad = 208,
  kEpilogueBgradA = 256,
  kEpilogueBgradB = 512,
};

enum PreferenceAttribute : int32_t { kMaxWorkspaceBytes = 1 };

// Every function of the library that is used: (member, name, parameters).
#define TED_HIPBLASLT_FUNCTIONS(X)                                                                                      \
  X(create, hipblasLtCreate, (Handle*))                                                                                 \
  X(version, hipblasLtGetVersion, (Handle, int*))                                                                       \
  X(desc_create, hipblasLtMatmulDescCreate, (MatmulDesc*, int32_t compute, int32_t scale))                              \
  X(desc_destroy, hipblasLtMatmulDescDestroy, (MatmulDesc))                                                             \
  X(desc_set, hipblasLtMatmulDescSetAttribute, (MatmulDesc, int32_t attribute, const void*, size_t))                    \
  X(layout_create, hipblasLtMatrixLayoutCreate, (MatrixLayout*, int32_t type, uint64_t rows, uint64_t columns, int64_t)) \
  X(layout_destroy, hipblasLtMatrixLayoutDestroy, (MatrixLayout))                                                       \
  X(preference_create, hipblasLtMatmulPreferenceCreate, (Preference*))                                                  \
  X(preference_destroy, hipblasLtMatmulPreferenceDestroy, (Preference))                                                 \
  X(preference_set, hipblasLtMatmulPreferenceSetAttribute, (Preference, int32_t attribute, const void*, size_t))        \
  X(heuristic, hipblasLtMatmulAlgoGetHeuristic,                                                                         \
    (Handle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout, Preference, int, HeuristicResult*, int*)) \
  X(matmul, hipblasLtMatmul,                                                                                            \
    (Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout, const void* beta, \
     const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm*, void* workspace, size_t, hip::Stream))

struct Api {
#define TED_DECLARE(member, name, parameters) Status(*member) parameters = nullptr;
  TED_HIPBLASLT_FUNCTIONS(TED_DECLARE)
#undef TED_DECLARE
};

// Opens the file, unless it is open already. Throws std::runtime_error with the linker's message, or naming the
// function that the library lacks.
void open(const char* path);
// The open library; throws std::runtime_error before `open`.
const Api& api();
// One per device, made when first asked for; the device must be current. Devices are counted first: the library ends
// the process where there is none.
Handle handle_of(int device);
// What the library calls its status codes.
const char* status_name(Status status);

// What the library answered when it refused: becomes te_dispatch's Declined.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};
void check(Status status, const char* operation);

}  // namespace ted_rocm::lt
