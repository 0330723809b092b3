# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Plans of matrix products: made once for each problem, and kept by the compiled module.

Making a plan asks hipBLASLt's heuristics; a call that finds its plan only launches. An algorithm that was tuned ahead
(`te_dispatch_rocm.tuning`) is looked up when a plan is made, never later.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit import caches
from te_dispatch.core.errors import Declined
from te_dispatch.ops.gemm import gemm_sizes
from te_dispatch_rocm import devices, tuning
from te_dispatch_rocm.archs import ARCHS
from te_dispatch_rocm.codes import DTYPES, EPILOGUES, NONE, SCALINGS, type_code
from te_dispatch_rocm.native import load_with_libraries

_native = load_with_libraries()

_MIB = 1 << 20
#: Bytes of workspace that an algorithm may ask for: what AMD's own frameworks give a handle on these chips.
WORKSPACE = {"gfx942": 64 * _MIB, "gfx950": 64 * _MIB}
_WORKSPACE = 32 * _MIB


class Problem(NamedTuple):
    """What a plan is made for, in the codes of csrc/gemm/plan.h, where each is explained."""

    device: int
    m: int
    n: int
    k: int
    a_turned: bool
    b_turned: bool
    lda: int
    ldb: int
    a_type: int
    b_type: int
    scaling: int
    out_type: int
    accumulate: bool
    bias_type: int
    epilogue: int
    aux_type: int
    tf32: bool
    workspace_limit: int


class Operand(NamedTuple):
    """One operand of a product in memory.

    Attributes:
        data, scale: contiguous tensors; no scale of plain dtypes.
        kind: the dtype, or the encoding of codes.
        turned: whether it is stored transposed: a as (k, m), b as (n, k).
    """

    data: torch.Tensor
    scale: torch.Tensor | None
    kind: torch.dtype | str
    turned: bool


@functools.cache
def arch_of(device: int) -> str:
    """The chip of HIP's device."""
    known = devices.found().devices
    return known[device].arch if device < len(known) else "unknown"


def problem_of(
    a: Operand,
    b: Operand,
    sizes: tuple[int, int, int],
    scaling: str,
    device: int,
    dtype: torch.dtype,
    accumulate: bool = False,
    bias: torch.dtype | None = None,
    epilogue: str | None = None,
    aux: torch.dtype | None = None,
    tf32: bool = False,
) -> Problem:
    """The problem of a call.

    Args:
        sizes: (m, n, k).
        dtype, bias, aux: dtypes of the output, of the bias or its gradient, and of aux.
    """
    arch = arch_of(device)
    for name, side in (("a", a), ("b", b)):
        if isinstance(side.kind, str) and side.kind not in (encodings := encodings_of(arch)):
            has = f"multiplies {' and '.join(encodings)}" if encodings else "has no FP8 units"
            raise Declined(f"{name} is {side.kind}, {arch} {has}")
    # Kernels of gfx950 that round fp32 to TF32 drop alpha where they accumulate.
    tf32 = tf32 and not (accumulate and arch == "gfx950")
    return Problem(
        device, *sizes, a.turned, b.turned, a.data.shape[-1], b.data.shape[-1], type_code(a.kind), type_code(b.kind),
        SCALINGS[scaling], DTYPES[dtype], accumulate, NONE if bias is None else DTYPES[bias], EPILOGUES[epilogue],
        NONE if aux is None else DTYPES[aux], tf32, WORKSPACE.get(arch, _WORKSPACE),
    )  # fmt: skip


def encodings_of(arch: str) -> tuple[str, ...]:
    """The FP8 encodings that a chip multiplies; none of one that is not known."""
    row = ARCHS["amd"].get(arch)
    return row.encodings if row is not None else ()


def plan_of(problem: Problem) -> Any:
    """The plan of a problem, with ``workspace``, the bytes that a run of it takes.

    Raises:
        Declined: hipBLASLt has no algorithm; the reason is its status.
    """
    try:
        return _native.gemm_plan(tuple(problem), functools.partial(tuning.algorithm_for, problem))
    except _native.GemmRefused as error:
        raise Declined(str(error)) from None


def plain_operands(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[Operand, Operand, tuple[int, int, int]]:
    """The sides of a product of contiguous tensors, and (m, n, k)."""
    sides = Operand(a, None, a.dtype, layout[0] == "T"), Operand(b, None, b.dtype, layout[1] == "T")
    return (*sides, gemm_sizes(a, b, layout))


class _Plans:
    """The cache of the compiled module, for `te_dispatch.backend_kit.caches`."""

    clear = staticmethod(_native.forget_gemm_plans)

    def statistics(self) -> caches.CacheStatistics:
        return caches.CacheStatistics(*_native.gemm_statistics())


caches.register("te_dispatch_rocm.gemm_plans.plan_of", _Plans())
