# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations taken apart: activation, then cast and bias gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from te_dispatch.core.facts import CallFacts, Derived
from te_dispatch.core.operator import Piece, decomposes
from te_dispatch.ops.composites.quantize import PLAIN_CAST
from te_dispatch.ops.results import ActivationBackward, ActivationForward


def _plain_forward(call: CallFacts) -> CallFacts:
    return Derived(
        call,
        {
            "quantizer": None, "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row",
            "with_out": True, "out_dtype": "fp32",
        },
        inherit=True,
    )  # fmt: skip


def _plain_backward(call: CallFacts) -> CallFacts:
    return Derived(
        call,
        {
            "quantizer": None, "quantizer.encoding": None, "quantizer.scaling": None, "usage": "row",
            "with_dx": True, "with_dbias": False, "dy.dtype": "fp32",
        },
        inherit=True,
    )  # fmt: skip


def _cast(call: CallFacts) -> CallFacts:
    return Derived(call, {**PLAIN_CAST, "x.dtype": "fp32"}, inherit=True)


def _forward_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
    if call.get("quantizer") is None:
        return None
    return {"activation_fwd": Piece("activation_fwd", _plain_forward), "quantize": Piece("quantize", _cast)}


def _backward_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
    if call.get("quantizer") is None and not call.get("with_dbias"):
        return None
    pieces = {"activation_bwd": Piece("activation_bwd", _plain_backward)}
    if call.get("quantizer") is not None:
        pieces["quantize"] = Piece("quantize", _cast)
    return pieces


@decomposes("activation_fwd", pieces=_forward_pieces, simplifies=True)
def activation_then_quantize(activation_fwd: Any, quantize: Any) -> Any:
    def composed(x, *, kind, params=None, quantizer=None, usage="row", with_out=False, out_dtype=None):  # type: ignore[no-untyped-def]
        import torch

        dtype = out_dtype or x.dtype
        out = activation_fwd(x, kind, params, None, "row", True, torch.float32).out
        quantized = quantize(out, quantizer, usage, None, None, None, None)
        quantized.dtype = dtype
        return ActivationForward(out.to(dtype) if with_out else None, quantized)

    return composed


@decomposes("activation_bwd", pieces=_backward_pieces, simplifies=True)
def activation_grad_then_quantize(activation_bwd: Any, quantize: Any = None) -> Any:
    def composed(dy, x, *, kind, params=None, quantizer=None, usage="row", with_dx=False, with_dbias=False):  # type: ignore[no-untyped-def]
        import torch

        dtype = dy.dtype
        dx = activation_bwd(dy.float(), x, kind, params, None, "row", True, False).dx
        dbias = dx.reshape(-1, dx.shape[-1]).sum(0, dtype=torch.float32).to(dtype) if with_dbias else None
        if quantizer is None:
            return ActivationBackward(dx.to(dtype), None, dbias)
        quantized = quantize(dx, quantizer, usage, None, None, None, None)
        quantized.dtype = dtype
        return ActivationBackward(dx.to(dtype) if with_dx else None, quantized, dbias)

    return composed
