// Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
// The binding's own declarations against AMD's headers: compiled by test_interface.py, never run. Each name that the
// binding declares stands here beside AMD's; the test sees to it that none is left out, and compares the values with
// hip-python's, too.
#include <hip/hip_runtime_api.h>
#include <hipblaslt/hipblaslt.h>

#include "common/hip_api.h"
#include "gemm/hipblaslt_api.h"

#include <type_traits>

#define SAME(ours, amds) static_assert(static_cast<long>(ted_rocm::ours) == static_cast<long>(amds), #ours " is not " #amds)

SAME(hip::kSuccess, hipSuccess);
SAME(hip::kNoDevice, hipErrorNoDevice);
SAME(hip::kNotCapturing, hipStreamCaptureStatusNone);

SAME(lt::kSuccess, HIPBLAS_STATUS_SUCCESS);
SAME(lt::kNotSupported, HIPBLAS_STATUS_NOT_SUPPORTED);

SAME(lt::kR32F, HIP_R_32F);
SAME(lt::kR16F, HIP_R_16F);
SAME(lt::kR16BF, HIP_R_16BF);
SAME(lt::kR8E4M3, HIP_R_8F_E4M3);
SAME(lt::kR8E5M2, HIP_R_8F_E5M2);
SAME(lt::kR8E4M3Fnuz, HIP_R_8F_E4M3_FNUZ);
SAME(lt::kR8E5M2Fnuz, HIP_R_8F_E5M2_FNUZ);

SAME(lt::kCompute32F, HIPBLAS_COMPUTE_32F);
SAME(lt::kCompute32FFastTF32, HIPBLAS_COMPUTE_32F_FAST_TF32);
SAME(lt::kOpN, HIPBLAS_OP_N);
SAME(lt::kOpT, HIPBLAS_OP_T);

SAME(lt::kTransA, HIPBLASLT_MATMUL_DESC_TRANSA);
SAME(lt::kTransB, HIPBLASLT_MATMUL_DESC_TRANSB);
SAME(lt::kEpilogue, HIPBLASLT_MATMUL_DESC_EPILOGUE);
SAME(lt::kBiasPointer, HIPBLASLT_MATMUL_DESC_BIAS_POINTER);
SAME(lt::kBiasDataType, HIPBLASLT_MATMUL_DESC_BIAS_DATA_TYPE);
SAME(lt::kAScalePointer, HIPBLASLT_MATMUL_DESC_A_SCALE_POINTER);
SAME(lt::kBScalePointer, HIPBLASLT_MATMUL_DESC_B_SCALE_POINTER);
SAME(lt::kAuxPointer, HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER);
SAME(lt::kAuxLd, HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD);
SAME(lt::kAuxDataType, HIPBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE);
SAME(lt::kAScaleMode, HIPBLASLT_MATMUL_DESC_A_SCALE_MODE);
SAME(lt::kBScaleMode, HIPBLASLT_MATMUL_DESC_B_SCALE_MODE);

SAME(lt::kScalar32F, HIPBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F);
SAME(lt::kVec32UE8M0, HIPBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);

SAME(lt::kEpilogueDefault, HIPBLASLT_EPILOGUE_DEFAULT);
SAME(lt::kEpilogueBias, HIPBLASLT_EPILOGUE_BIAS);
SAME(lt::kEpilogueGeluAux, HIPBLASLT_EPILOGUE_GELU_AUX);
SAME(lt::kEpilogueGeluAuxBias, HIPBLASLT_EPILOGUE_GELU_AUX_BIAS);
SAME(lt::kEpilogueDGeluBgrad, HIPBLASLT_EPILOGUE_DGELU_BGRAD);
SAME(lt::kEpilogueBgradA, HIPBLASLT_EPILOGUE_BGRADA);
SAME(lt::kEpilogueBgradB, HIPBLASLT_EPILOGUE_BGRADB);

SAME(lt::kMaxWorkspaceBytes, HIPBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);

namespace {

// Whether a value of one type is passed as one of the other is: both pointers, or integers of one size.
template <class Ours, class Amds>
constexpr bool passes() {
  if (std::is_pointer_v<Amds>) return std::is_pointer_v<Ours>;
  const bool integer = std::is_enum_v<Amds> || std::is_integral_v<Amds>;
  return integer && std::is_integral_v<Ours> && sizeof(Ours) == sizeof(Amds);
}

template <class Ours, class Amds>
struct Callable : std::false_type {};
template <class OurResult, class... Ours, class Result, class... Amds>
struct Callable<OurResult (*)(Ours...), Result (*)(Amds...)> {
  static constexpr bool all() {
    if constexpr (sizeof...(Ours) != sizeof...(Amds)) return false;
    else return passes<OurResult, Result>() && (passes<Ours, Amds>() && ...);
  }
  static constexpr bool value = all();
};

// Functions that AMD overloads are taken with the types of the C interface.
#define CALLABLE(member, name, parameters) \
  static_assert(Callable<decltype(Api::member), decltype(&::name)>::value, #name " is declared otherwise");

namespace of_hip {
using ted_rocm::hip::Api;
TED_HIP_FUNCTIONS(CALLABLE)
static_assert(Callable<decltype(Api::error_name), decltype(&::hipGetErrorName)>::value, "hipGetErrorName");
static_assert(Callable<decltype(Api::error_text), decltype(&::hipGetErrorString)>::value, "hipGetErrorString");
}  // namespace of_hip

namespace of_lt {
using ted_rocm::lt::Api;
TED_HIPBLASLT_FUNCTIONS(CALLABLE)
}  // namespace of_lt

// What crosses the interface by address.
using Algorithm = ted_rocm::lt::Algorithm;
using Result = ted_rocm::lt::HeuristicResult;
static_assert(sizeof(Algorithm) == sizeof(hipblasLtMatmulAlgo_t));
static_assert(offsetof(Algorithm, data) == offsetof(hipblasLtMatmulAlgo_t, data));
static_assert(offsetof(Algorithm, max_workspace) == offsetof(hipblasLtMatmulAlgo_t, max_workspace_bytes));
static_assert(sizeof(Result) == sizeof(hipblasLtMatmulHeuristicResult_t));
static_assert(offsetof(Result, workspace) == offsetof(hipblasLtMatmulHeuristicResult_t, workspaceSize));
static_assert(offsetof(Result, state) == offsetof(hipblasLtMatmulHeuristicResult_t, state));
static_assert(offsetof(Result, waves) == offsetof(hipblasLtMatmulHeuristicResult_t, wavesCount));

}  // namespace

int main() { return 0; }
