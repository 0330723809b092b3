# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of what works row by row: norms, activations, softmax, rotary embedding. Contracts: the operators'."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from te_dispatch.ops.activation import GATED, KINDS
from te_dispatch.ops.checks import values as check
from te_dispatch.ops.checks.check_cache import cached_check
from te_dispatch.ops.checks.signatures import CONTENTS, OFTEN, OFTEN_QUANTIZER
from te_dispatch.ops.shapes import USAGES

_ROPE_LAYOUTS = ("sbhd", "bshd", "thd")


def _normalized(x: Any, gamma: Any, beta: Any = None) -> None:
    check.tensor("x", x)
    shape = x.shape
    if not shape or shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(shape)}, expected (..., N) with N > 0")
    _weight("gamma", gamma, x, shape[-1:])
    if beta is not None:
        _weight("beta", beta, x, shape[-1:])


def _cast(x: Any, quantizer: Any, usage: Any) -> None:
    """The optional quantizer of a result with the shape of x."""
    if quantizer is None:
        check.one_of("usage", usage, USAGES)
        return
    check.cast("quantizer", quantizer, usage, x.device)
    if quantizer.kind == "nvfp4_rht":
        check.rotatable("x", x.shape, quantizer, usage)


def _weight(name: str, weight: Any, x: torch.Tensor, shape: torch.Size) -> None:
    check.shaped(name, weight, shape, check.FLOATS, x.device)
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name}: got dtype {weight.dtype}, expected x's, {x.dtype}, or float32")


@cached_check("layernorm_fwd", beta=OFTEN, quantizer=OFTEN_QUANTIZER)
def norm_fwd(
    x: Any, gamma: Any, beta: Any, eps: Any, residual: Any, quantizer: Any, usage: Any, out_dtype: Any
) -> None:
    """Of `layernorm_fwd`, and with beta None of `rmsnorm_fwd`."""
    _normalized(x, gamma, beta)
    check.number("eps", eps, 0.0)
    if residual is not None:
        check.shaped("residual", residual, x.shape, check.FLOATS, x.device)
        if residual.dtype != x.dtype:
            raise ValueError(f"residual: got dtype {residual.dtype}, expected x's, {x.dtype}")
    _cast(x, quantizer, usage)
    check.dtype("out_dtype", out_dtype)


@cached_check("layernorm_bwd", mean=OFTEN, add=OFTEN)
def norm_bwd(dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any, add: Any, centered: bool) -> None:
    """Of `layernorm_bwd`, and not centered of `rmsnorm_bwd`, which has no mean."""
    _normalized(x, gamma)
    check.shaped("dy", dy, x.shape, check.FLOATS, x.device)
    if centered:
        check.shaped("mean", mean, x.shape[:-1], check.F32, x.device)
    check.shaped("rstd", rstd, x.shape[:-1], check.F32, x.device)
    if add is not None:
        check.shaped("add", add, x.shape, check.FLOATS, x.device)


def _activated(x: Any, kind: Any, params: Any) -> None:
    check.one_of("kind", kind, KINDS)
    check.operand("x", x)
    if kind in GATED and x.shape[-1] % 2:
        raise ValueError(f"x: got a last dimension of {x.shape[-1]}, expected an even one for {kind}")
    if params is None:
        return
    if kind != "clamped_swiglu":
        raise ValueError(f"params: given for {kind}, got {params!r}, expected for clamped_swiglu only")
    if not isinstance(params, tuple) or len(params) != 2:
        raise check.kind_error("params", params, "(limit, alpha), a tuple of two numbers")
    for i, value in enumerate(params):
        check.number(f"params[{i}]", value)


@cached_check("activation_fwd", quantizer=OFTEN_QUANTIZER)
def activation_fwd(x: Any, kind: Any, params: Any, quantizer: Any, usage: Any, out_dtype: Any) -> None:
    _activated(x, kind, params)
    _cast(x, quantizer, usage)
    check.dtype("out_dtype", out_dtype)


@cached_check("activation_bwd", quantizer=OFTEN_QUANTIZER)
def activation_bwd(dy: Any, x: Any, kind: Any, params: Any, quantizer: Any, usage: Any) -> None:
    _activated(x, kind, params)
    *rows, columns = x.shape
    check.shaped("dy", dy, (*rows, columns // 2 if kind in GATED else columns), check.FLOATS, x.device)
    _cast(x, quantizer, usage)


@cached_check("softmax_fwd")
def softmax_fwd(x: Any, mask: Any, scale: Any, out_dtype: Any) -> None:
    check.tensor("x", x)
    if x.ndim < 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (..., s_q, s_kv)")
    if mask is not None:
        check.tensor("mask", mask, check.BOOL, x.device)
        check.broadcasts("mask", mask, x.shape)
    check.number("scale", scale)
    check.dtype("out_dtype", out_dtype)


@cached_check("softmax_bwd")
def softmax_bwd(dy: Any, y: Any, scale: Any, out_dtype: Any) -> None:
    check.tensor("y", y)
    if y.ndim < 2:
        raise ValueError(f"y: got shape {tuple(y.shape)}, expected (..., s_q, s_kv)")
    check.shaped("dy", dy, y.shape, check.FLOATS, y.device)
    check.number("scale", scale)
    check.dtype("out_dtype", out_dtype)


@cached_check("rope_fwd", cu_seqlens=CONTENTS, offsets=CONTENTS)
def rope(name: str, x: Any, freqs: Any, layout: Any, cu_seqlens: Any, offsets: Any) -> None:
    """Of `rope_fwd`, whose first argument is x, and of `rope_bwd`, whose is dy."""
    check.one_of("layout", layout, _ROPE_LAYOUTS)
    check.tensor(name, x)
    shape = x.shape
    if len(shape) != len(layout):
        raise ValueError(f"{name}: got shape {tuple(shape)}, expected {', '.join(layout)}")
    check.tensor("freqs", freqs, check.F32, x.device)
    angles = freqs.shape
    if len(angles) != 4 or angles[1:3] != (1, 1) or angles[3] > shape[-1] or angles[3] % 2:
        raise ValueError(f"freqs: got shape {tuple(angles)}, expected (s_max, 1, 1, r), r even and at most {shape[-1]}")
    if layout == "thd":
        if cu_seqlens is None:
            raise ValueError("cu_seqlens: not given, expected int32 (b + 1,) for layout thd")
        bounds("cu_seqlens", cu_seqlens, None, shape[0], x.device)
        batch, length = cu_seqlens.shape[0] - 1, None
    else:
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens: given for layout {layout}, expected for thd only")
        batch, length = (shape[1], shape[0]) if layout == "sbhd" else (shape[0], shape[1])
    if offsets is not None:
        check.shaped("offsets", offsets, (batch,), check.I32, x.device)
    _positions(angles[0], length, cu_seqlens, offsets)


def _positions(available: int, length: int | None, cu_seqlens: Any, offsets: Any) -> None:
    """Every position has its angles, as far as that can be seen without synchronizing."""
    first = [0]
    if offsets is not None:
        if not check.readable(offsets):
            return
        first = offsets.tolist()
    if length is None:
        if not check.readable(cu_seqlens):
            return
        lengths = cu_seqlens.diff().tolist()
    else:
        lengths = [length] * len(first)
    if length is None and offsets is None:
        first = [0] * len(lengths)
    for start, count in zip(first, lengths):
        if count and (start < 0 or start + count > available):
            raise ValueError(f"freqs: got {available} positions, expected positions {start} to {start + count - 1}")


def bounds(name: str, cu_seqlens: Any, batch: int | None, tokens: int | None, device: torch.device) -> None:
    """Cumulative lengths, int32 (b + 1,), rising from 0 to at most `tokens` where they can be read for free."""
    check.tensor(name, cu_seqlens, check.I32, device)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or (batch is not None and cu_seqlens.shape[0] != batch + 1):
        expected = "(b + 1,)" if batch is None else f"({batch + 1},)"
        raise ValueError(f"{name}: got shape {tuple(cu_seqlens.shape)}, expected {expected}")
    if not check.readable(cu_seqlens):
        return
    found = cu_seqlens.tolist()
    rises = found[0] == 0 and all(a <= b for a, b in itertools.pairwise(found))
    if not rises or (tokens is not None and found[-1] > tokens):
        limit = "" if tokens is None else f" to at most {tokens}"
        raise ValueError(f"{name}: got {found}, expected to rise from 0{limit}")
