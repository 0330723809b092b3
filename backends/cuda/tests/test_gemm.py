# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What can be said of matrix products without a GPU: the library's interface as declared, choices."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from te_dispatch_cuda import libraries

API = Path(__file__).resolve().parents[1] / "csrc" / "gemm" / "cublaslt_api.h"
#: Our name -> NVIDIA's, where theirs is not ours with a prefix.
NAMES = {
    "kSuccess": "CUBLAS_STATUS_SUCCESS", "kNotSupported": "CUBLAS_STATUS_NOT_SUPPORTED",
    "kR32F": "CUDA_R_32F", "kR16F": "CUDA_R_16F", "kR16BF": "CUDA_R_16BF", "kR8E4M3": "CUDA_R_8F_E4M3",
    "kR8E5M2": "CUDA_R_8F_E5M2", "kR4E2M1": "CUDA_R_4F_E2M1",
    "kCompute32F": "CUBLAS_COMPUTE_32F", "kCompute32FFastTF32": "CUBLAS_COMPUTE_32F_FAST_TF32",
    "kOpN": "CUBLAS_OP_N", "kOpT": "CUBLAS_OP_T",
    "kTransA": "CUBLASLT_MATMUL_DESC_TRANSA", "kTransB": "CUBLASLT_MATMUL_DESC_TRANSB",
    "kEpilogue": "CUBLASLT_MATMUL_DESC_EPILOGUE", "kBiasPointer": "CUBLASLT_MATMUL_DESC_BIAS_POINTER",
    "kAScalePointer": "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER", "kBScalePointer": "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER",
    "kDScalePointer": "CUBLASLT_MATMUL_DESC_D_SCALE_POINTER", "kAmaxDPointer": "CUBLASLT_MATMUL_DESC_AMAX_D_POINTER",
    "kFastAccum": "CUBLASLT_MATMUL_DESC_FAST_ACCUM", "kBiasDataType": "CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE",
    "kAScaleMode": "CUBLASLT_MATMUL_DESC_A_SCALE_MODE", "kBScaleMode": "CUBLASLT_MATMUL_DESC_B_SCALE_MODE",
    "kScalar32F": "CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F", "kVec16UE4M3": "CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3",
    "kVec32UE8M0": "CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0", "kVec128": "CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F",
    "kBlock128x128": "CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F",
    "kEpilogueDefault": "CUBLASLT_EPILOGUE_DEFAULT", "kEpilogueBias": "CUBLASLT_EPILOGUE_BIAS",
    "kEpilogueBgradA": "CUBLASLT_EPILOGUE_BGRADA", "kEpilogueBgradB": "CUBLASLT_EPILOGUE_BGRADB",
    "kMaxWorkspaceBytes": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
    "kReductionSchemeMask": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
    "kMinAlignmentA": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES",
    "kMinAlignmentB": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES",
    "kMinAlignmentC": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES",
    "kMinAlignmentD": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES",
    "kReduceNone": "CUBLASLT_REDUCTION_SCHEME_NONE", "kReduceInPlace": "CUBLASLT_REDUCTION_SCHEME_INPLACE",
    "kReduceComputeType": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
    "kReduceOutputType": "CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE",
    "kConfigId": "CUBLASLT_ALGO_CONFIG_ID", "kConfigTile": "CUBLASLT_ALGO_CONFIG_TILE_ID",
    "kConfigSplitK": "CUBLASLT_ALGO_CONFIG_SPLITK_NUM", "kConfigReduction": "CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME",
    "kConfigStages": "CUBLASLT_ALGO_CONFIG_STAGES_ID",
}  # fmt: skip


def declared() -> list[str]:
    """Every constant of our header's enumerations."""
    enums = re.findall(r"^enum[^{;]*\{(.*?)\};", API.read_text(), re.MULTILINE | re.DOTALL)
    return re.findall(r"\b(k\w+) = ", "".join(enums))


def headers() -> list[Path]:
    folders = [Path(lib).parent / "include" for lib in libraries.package_directories(libraries.CUBLASLT)]
    folders += [Path(os.environ.get(name, "/nowhere")) / "include" for name in ("CUDA_HOME", "CUDA_PATH")]
    folders += [Path(path) for path in os.environ.get("CPATH", "").split(":") if path]
    folders += [Path("/usr/local/cuda/include")]
    return [folder for folder in folders if (folder / "cublasLt.h").is_file()]


def test_every_constant_has_nvidia_s_name():
    assert sorted(declared()) == sorted(NAMES)


def test_our_declarations_are_the_library_s(tmp_path):
    if not headers() or shutil.which("g++") is None:
        pytest.skip("needs a real cublasLt.h and g++")
    runtime = [
        folder for folder in [headers()[0], Path("/usr/local/cuda/include")] if (folder / "cuda_runtime.h").is_file()
    ]
    text = "".join(file.read_text(errors="replace") for file in headers()[0].glob("cublas*.h"))
    text += "".join(file.read_text(errors="replace") for folder in runtime for file in folder.glob("library_types.h"))
    # Older releases lack what newer ones added; what they have, they have with the same value.
    known = {ours: theirs for ours, theirs in NAMES.items() if re.search(rf"\b{theirs}\b", text)}
    assert len(known) > len(NAMES) - 6
    checks = "".join(f"static_assert(int({theirs}) == int(ted::lt::{ours}));\n" for ours, theirs in known.items())
    functions = re.findall(r"^  X\(\w+, (\w+),", API.read_text(), re.MULTILINE)
    assert len(functions) > 10
    arguments = "template <class R, class... A> constexpr int count(R (*)(A...)) { return sizeof...(A); }\n"
    ours = re.findall(r"X\((\w+), (cublasLt\w+)", API.read_text())
    checks += arguments + "".join(
        f"static_assert(count(&{name}) == count(decltype(ted::lt::Api::{member})(nullptr)));\n" for member, name in ours
    )
    (tmp_path / "check.cpp").write_text(
        '#include <cublasLt.h>\n#include "gemm/cublaslt_api.h"\n'
        + checks
        + "static_assert(sizeof(ted::lt::Algorithm) == sizeof(cublasLtMatmulAlgo_t));\n"
        + "static_assert(sizeof(ted::lt::HeuristicResult) == sizeof(cublasLtMatmulHeuristicResult_t));\n"
    )
    includes = [f"-I{folder}" for folder in (headers()[0], *runtime, API.parents[1])]
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", *includes, str(tmp_path / "check.cpp")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
