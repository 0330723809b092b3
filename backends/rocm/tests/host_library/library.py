# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""hipBLASLt through ctypes: what a program in C would write, for any library of that interface."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OP_N, OP_T = 111, 112
COMPUTE_32F, COMPUTE_TF32 = 2, 6
R_32F, R_16F, R_16BF, E4M3, E5M2, E4M3_FNUZ, E5M2_FNUZ = 0, 2, 14, 28, 29, 1000, 1001
DEFAULT, BIAS, GELU, GELU_BIAS, GELU_AUX, GELU_AUX_BIAS = 1, 4, 32, 36, 160, 164
DGELU, DGELU_BGRAD, BGRADA, BGRADB = 192, 208, 256, 512
SUCCESS, NOT_INITIALIZED, INVALID_VALUE, EXECUTION_FAILED, INTERNAL_ERROR, NOT_SUPPORTED = 0, 1, 3, 5, 6, 7
#: Attributes of a product's descriptor: number and C type.
ATTRIBUTES: dict[str, tuple[int, Any]] = {
    "transa": (0, c_int32),
    "transb": (1, c_int32),
    "epilogue": (2, c_uint32),
    "bias": (3, c_void_p),
    "bias_type": (4, c_int32),
    "a_scale": (5, c_void_p),
    "b_scale": (6, c_void_p),
    "c_scale": (7, c_void_p),
    "d_scale": (8, c_void_p),
    "aux_scale": (9, c_void_p),
    "aux": (10, c_void_p),
    "aux_ld": (11, c_int64),
    "aux_batch_stride": (12, c_int64),
    "pointer_mode": (13, c_int32),
    "amax_d": (14, c_void_p),
    "aux_type": (22, c_int32),
    "a_scale_mode": (31, c_int32),
    "b_scale_mode": (32, c_int32),
}


class Algorithm(ctypes.Structure):
    _fields_ = [("data", ctypes.c_uint8 * 16), ("max_workspace", c_size_t)]


class Result(ctypes.Structure):
    _fields_ = [
        ("algorithm", Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class Refused(Exception):
    """A status that is not success: `status`, and the function's name."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function}: status {status}")
        self.status = status


@dataclass
class Matrix:
    """A column-major matrix: type, rows, columns, address, and elements between columns."""

    type: int
    rows: int
    columns: int
    data: int
    ld: int = 0
    batch_count: int = 1
    batch_stride: int = 0


@dataclass
class Product:
    """D = op(A) op(B) and what follows it; `attributes` are `ATTRIBUTES`, by name."""

    a: Matrix
    b: Matrix
    d: Matrix
    attributes: dict[str, int] = field(default_factory=dict)
    alpha: float = 1.0
    beta: float = 0.0
    compute: int = COMPUTE_32F
    c: Matrix | None = None


class Library:
    """HIP's runtime and hipBLASLt, from their files."""

    def __init__(self, hip: Path, hipblaslt: Path) -> None:
        self.hip = ctypes.CDLL(str(hip), mode=ctypes.RTLD_GLOBAL)
        self.lt = ctypes.CDLL(str(hipblaslt))
        self.hip.hipGetErrorString.restype = ctypes.c_char_p
        self.hip.hipGetErrorName.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.lt, name)(*arguments)
        if status != SUCCESS:
            raise Refused(name, status)

    def handle(self) -> c_void_p:
        made = c_void_p()
        self.call("hipblasLtCreate", byref(made))
        return made

    def layout(self, x: Matrix) -> c_void_p:
        made = c_void_p()
        ld = c_int64(x.ld or x.rows)
        self.call("hipblasLtMatrixLayoutCreate", byref(made), x.type, c_uint64(x.rows), c_uint64(x.columns), ld)
        for number, value in ((0, c_int32(x.batch_count)), (1, c_int64(x.batch_stride))):
            self.call("hipblasLtMatrixLayoutSetAttribute", made, number, byref(value), c_size_t(ctypes.sizeof(value)))
        return made

    def desc(self, product: Product) -> c_void_p:
        made = c_void_p()
        self.call("hipblasLtMatmulDescCreate", byref(made), product.compute, R_32F)
        self.set(made, product.attributes)
        return made

    def set(self, desc: c_void_p, attributes: dict[str, int]) -> None:
        for name, given in attributes.items():
            number, kind = ATTRIBUTES[name]
            value = kind(given)
            self.call("hipblasLtMatmulDescSetAttribute", desc, number, byref(value), c_size_t(ctypes.sizeof(value)))

    def algorithms(
        self, handle: c_void_p, desc: c_void_p, layouts: list[c_void_p], workspace: int = 1 << 25, count: int = 8
    ) -> list[Result]:
        """What the heuristic answers, which may be nothing; `Refused` if its status is not success."""
        preference, limit = c_void_p(), c_uint64(workspace)
        self.call("hipblasLtMatmulPreferenceCreate", byref(preference))
        self.call("hipblasLtMatmulPreferenceSetAttribute", preference, 1, byref(limit), c_size_t(8))
        results, found = (Result * count)(), c_int(-1)
        try:
            self.call(
                "hipblasLtMatmulAlgoGetHeuristic", handle, desc, *layouts, preference, count, results, byref(found)
            )
        finally:
            self.call("hipblasLtMatmulPreferenceDestroy", preference)
        return list(results[: found.value])

    def workspace(self, size: int) -> Any:
        """Memory of `size` bytes for a product."""
        return (ctypes.c_uint8 * max(size, 1))()

    def run(self, product: Product, choice: int = 0) -> None:
        """Ask for algorithms and run the product on the one of this place, or on none where there are none."""
        handle, desc = self.handle(), self.desc(product)
        c = product.c or product.d
        layouts = [self.layout(x) for x in (product.a, product.b, c, product.d)]
        try:
            results = self.algorithms(handle, desc, layouts)
            result = results[choice] if results else Result()
            workspace = self.workspace(result.workspace)
            alpha, beta = c_float(product.alpha), c_float(product.beta)
            a, b, c_layout, d = layouts
            self.call(
                "hipblasLtMatmul", handle, desc, byref(alpha), c_void_p(product.a.data), a, c_void_p(product.b.data), b,
                byref(beta), c_void_p(c.data), c_layout, c_void_p(product.d.data), d,
                byref(result.algorithm) if results else None,
                workspace, c_size_t(result.workspace), None,
            )  # fmt: skip
        finally:
            for one in layouts:
                self.call("hipblasLtMatrixLayoutDestroy", one)
            self.call("hipblasLtMatmulDescDestroy", desc)
            self.call("hipblasLtDestroy", handle)
