# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Norms taken apart: residual add, norm, cast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import CallFacts, Derived, fact
from te_dispatch.core.operator import Piece, decomposes
from te_dispatch.ops.composites.quantize import PLAIN_CAST
from te_dispatch.ops.results import NormForward

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantizers import Quantizer


def _plain_norm(call: CallFacts) -> CallFacts:
    return Derived(
        call,
        {
            "quantizer": None, "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row", "with_y": True,
            "out_dtype": "fp32", "residual": False, "residual.dtype": None,
        },
        inherit=True,
    )  # fmt: skip


def _cast_of_norm(call: CallFacts) -> CallFacts:
    return Derived(call, {**PLAIN_CAST, "x.dtype": "fp32", "k": fact("hidden")}, inherit=True)


def _norm_pieces(norm: str) -> Any:
    def pieces(call: CallFacts) -> Mapping[str, Piece] | None:
        if call.get("quantizer") is None and not call.get("residual"):
            return None
        found = {"norm": Piece(norm, _plain_norm)}
        if call.get("quantizer") is not None:
            found["quantize"] = Piece("quantize", _cast_of_norm)
        return found

    return pieces


def _finish(
    plain: NormForward,
    x: torch.Tensor,
    residual_out: torch.Tensor | None,
    quantize: Any,
    quantizer: Quantizer | None,
    usage: str,
    with_y: bool,
    out_dtype: torch.dtype | None,
) -> NormForward:
    y = plain.y
    assert y is not None  # a plain norm always returns it
    quantized = None
    dtype = out_dtype or x.dtype
    if quantizer is not None:
        quantized = quantize(y, quantizer, usage, None, None, None, None)
        quantized.dtype = dtype
    rounded = y.to(dtype) if quantizer is None or with_y else None
    return NormForward(rounded, quantized, residual_out, plain.mean, plain.rstd)


@decomposes("layernorm_fwd", pieces=_norm_pieces("layernorm_fwd"), simplifies=True)
def layernorm_then_quantize(norm: Any, quantize: Any = None) -> Any:
    """Add, norm to fp32, cast: the same roundings as a fused implementation."""

    def layernorm_fwd(  # type: ignore[no-untyped-def]
        x, gamma, beta, *, eps=1e-5, zero_centered_gamma=False, residual=None, quantizer=None, usage="row",
        with_y=False, out_dtype=None,
    ):  # fmt: skip
        import torch

        if residual is not None:
            x = x + residual
        plain = norm(x, gamma, beta, eps, zero_centered_gamma, None, None, "row", True, torch.float32)
        return _finish(plain, x, None if residual is None else x, quantize, quantizer, usage, with_y, out_dtype)

    return layernorm_fwd


@decomposes("rmsnorm_fwd", pieces=_norm_pieces("rmsnorm_fwd"), simplifies=True)
def rmsnorm_then_quantize(norm: Any, quantize: Any = None) -> Any:
    """Add, norm to fp32, cast: the same roundings as a fused implementation."""

    def rmsnorm_fwd(  # type: ignore[no-untyped-def]
        x, gamma, *, eps=1e-5, zero_centered_gamma=False, residual=None, quantizer=None, usage="row", with_y=False,
        out_dtype=None,
    ):  # fmt: skip
        import torch

        if residual is not None:
            x = x + residual
        plain = norm(x, gamma, eps, zero_centered_gamma, None, None, "row", True, torch.float32)
        return _finish(plain, x, None if residual is None else x, quantize, quantizer, usage, with_y, out_dtype)

    return rmsnorm_fwd
