# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""AITER's functions (https://github.com/ROCm/aiter) behind one interface. The package is imported when first called.

Names and parameters: ``aiter/ops/mha.py`` and ``aiter/ops/gemm_op_a8w8.py`` of releases 0.1. AITER chooses between
kernels of Composable Kernel and its own in assembly, and compiles what is not prebuilt when it is first called.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.backend_kit.flash import FlashOptions
from te_dispatch.core.errors import Declined

_log = logging.getLogger("te_dispatch.rocm")

#: Variables of Transformer Engine for ROCm -> the parameter of AITER's backward that each sets, and its values.
BACKWARD_VARIABLES: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "NVTE_CK_IS_V3_ATOMIC_FP32": ("is_v3_atomic_fp32", {"0": False, "1": True}),
    "NVTE_CK_HOW_V3_BF16_CVT": ("how_v3_bf16_cvt", {"0": 0, "1": 1, "2": 2}),
}


@functools.cache
def _library() -> Any:
    """Raises:
    Declined: AITER cannot be imported, or lacks a function.
    """
    try:
        import aiter
        from aiter.ops import mha
    except Exception as error:  # importing it queries the GPU and the compilers, and may fail in any way
        raise Declined(f"aiter cannot be imported: {type(error).__name__}: {error}") from error
    return _Library(aiter, mha)


class _Library:
    def __init__(self, aiter: Any, mha: Any) -> None:
        self.multiply = _function(aiter, "gemm_a8w8_blockscale")
        self.attend = _function(aiter, "flash_attn_func")
        self.attend_backward = _function(mha, "_flash_attn_backward")
        self.backward_options = _unasked(self.attend_backward, _BACKWARD)
        self.backward_takes = frozenset(inspect.signature(self.attend_backward).parameters)


def _function(module: Any, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if found is None:
        raise Declined(f"{module.__name__} has no {name}: releases 0.1 of AITER have it")
    return found  # type: ignore[no-any-return]


#: What is given to the backward by name.
_BACKWARD = (
    "dout", "q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv", "dropout_p", "softmax_scale", "causal",
    "window_size_left", "window_size_right", "alibi_slopes", "deterministic", "rng_state",
)  # fmt: skip


def _unasked(function: Callable[..., Any], given: tuple[str, ...]) -> dict[str, Any]:
    """What a function has to be given besides, None for each: later releases take a bias and its gradient.

    Raises:
        Declined: it does not take what is given.
    """
    parameters = inspect.signature(function).parameters
    if unknown := [name for name in given if name not in parameters]:
        raise Declined(f"AITER's {function.__name__} takes no {', '.join(unknown)}: releases 0.1 of AITER do")
    return {
        name: None for name, of in parameters.items() if name not in given and of.default is inspect.Parameter.empty
    }


def _asked(takes: frozenset[str]) -> dict[str, int]:
    """What `BACKWARD_VARIABLES` ask for, of the parameters that a backward takes.

    Raises:
        ValueError: a variable has another value; names it.
    """
    found = {}
    for variable, (parameter, values) in BACKWARD_VARIABLES.items():
        value = os.environ.get(variable, "").strip()
        if not value:
            continue
        if value not in values:
            raise ValueError(f"{variable}={value}: expected {' or '.join(values)}")
        if parameter in takes:
            found[parameter] = values[value]
        else:
            _warn_of_missing(variable, parameter)
    return found


@functools.cache
def _warn_of_missing(variable: str, parameter: str) -> None:
    _log.warning("%s has no effect: this release of AITER has no %s", variable, parameter)


def multiply_blocks(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The product of codes a (m, k) with the transpose of codes b (n, k), (m, n).

    Args:
        a_scale: float32 (m, k / 128), of rows of 128 values. b_scale: float32 (n / 128, k / 128), of squares.
        dtype: of the result: bfloat16 or float16.
    """
    return _library().multiply(a, b, a_scale, b_scale, dtype)  # type: ignore[no-any-return]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: FlashOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (b, s, h, d) and the log-sum-exp, float32 (b, h, s), of dense operands (b, s, h, d)."""
    out, lse = _library().attend(
        q, k, v, dropout_p=0.0, softmax_scale=o.scale, causal=o.causal, window_size=(o.left, o.right),
        deterministic=o.deterministic, return_lse=True,
    )[:2]  # fmt: skip
    return out, lse


def attend_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    o: FlashOptions, gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:  # fmt: skip
    """Writes dq, dk and dv."""
    library = _library()
    dq, dk, dv = gradients
    values = (
        dout, q, k, v, out, lse, dq, dk, dv, 0.0, o.scale, o.causal, o.left, o.right, None, o.deterministic, None
    )  # fmt: skip
    options = {**library.backward_options, **_asked(library.backward_takes)}
    library.attend_backward(**dict(zip(_BACKWARD, values, strict=True)), **options)
