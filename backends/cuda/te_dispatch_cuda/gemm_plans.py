# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Plans of matrix products, made once for each kind of call and kept.

Making a plan asks cuBLASLt's heuristics, some ten microseconds; a call that finds its plan only launches. An algorithm
that was tuned ahead (`te_dispatch_cuda.tuning`) is looked up when a plan is made, never later.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.core.errors import Declined
from te_dispatch_cuda import libraries
from te_dispatch_cuda.codes import DTYPES, ENCODINGS
from te_dispatch_cuda.native import load

_native = load()
_library = libraries.cublaslt()
if isinstance(_library, str):
    raise ImportError(_library)
_native.open_cublaslt(_library.path)

NONE = -1
_CODES = 16
LAYOUTS = {"NT": 0, "NN": 1, "TN": 2}
SCALINGS = {"none": 0, "tensor": 1, "block_1d": 2, "block_2d": 3, "mxfp8": 4, "nvfp4": 5}
EPILOGUES = {None: 0, "gelu": 1, "dgelu": 2, "bgrad_a": 3, "bgrad_b": 4}
#: Flags of an operand's block scales: the latter where their address is no multiple of `SCALES` bytes.
LAID_OUT, UNALIGNED = 1, 2
SCALES = 16

#: Plans kept. A model makes some tens of kinds of calls; ragged batches make a new kind for every number of rows.
CAPACITY = 4096
#: Key -> (plan, bytes of workspace). Keys belong to whoever asks; they start with a word of their own.
PLANS: BoundedDict[Hashable, tuple[Any, int]] = BoundedDict(CAPACITY)


class Problem(NamedTuple):
    """What a plan is made for, in the codes of csrc/gemm/plan.h, where each is explained."""

    device: int
    layout: int
    m: int
    n: int
    k: int
    a_type: int
    a_scaling: int
    a_scales: int
    a_alignment: int
    a_stride: int
    b_type: int
    b_scaling: int
    b_scales: int
    b_alignment: int
    b_stride: int
    out_type: int
    out_cast: int
    out_alignment: int
    accumulate: bool
    bias_type: int
    bias_alignment: int
    epilogue: int
    aux_type: int
    aux_cast: int
    tf32: bool
    fast: bool


def type_code(kind: torch.dtype | str) -> int:
    """Of a dtype, or of an encoding's name."""
    return _CODES + ENCODINGS[kind] if isinstance(kind, str) else DTYPES[kind]


def alignment(low_bits: int) -> int:
    """Bytes, a power of two up to 256, that addresses with these low bits are multiples of."""
    return low_bits & -low_bits if low_bits & 255 else 256


def make(key: Hashable, problem: Problem) -> tuple[Any, int]:
    """A plan and its workspace, from now on found under `key`.

    Raises:
        Declined: cuBLASLt has no algorithm; the reason is its status.
    """
    from te_dispatch_cuda import tuning

    try:
        plan = _native.gemm_plan(*problem, tuning.algorithm_for(problem))
    except _native.GemmRefused as error:
        raise Declined(str(error)) from None
    made = PLANS[key] = plan, plan.workspace
    return made
