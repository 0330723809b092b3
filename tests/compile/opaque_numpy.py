# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations that dynamo cannot trace: they compute in NumPy. Just enough of each operator for the tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops import alloc
from te_dispatch.ops.results import AttentionForward, Gemm, NormForward, Saved
from te_dispatch.pytorch.compile import make_opaque

FP8 = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}

#: How often each implementation ran, so that a test can tell that the graph called it.
calls: dict[str, int] = {}


def _count(name: str) -> None:
    calls[name] = calls.get(name, 0) + 1


def _fill(role: str, values: np.ndarray) -> torch.Tensor:
    found = torch.from_numpy(np.ascontiguousarray(values))
    out = alloc.empty(role, tuple(found.shape), found.dtype, found.device)
    out.copy_(found)
    return out


def quantize(x, quantizer, usage, out, noop_flag, amax, rng_state):
    """Delayed scaling, float32 in, positional as a twin is."""
    _count("quantize")
    values = x.detach().numpy().reshape(-1, x.shape[-1])
    scale = quantizer.scale.numpy()
    if quantizer.amax is not None:
        np.maximum(quantizer.amax.numpy(), np.abs(values).max(), out=quantizer.amax.numpy())
    codes = np.clip(values * scale, -quantizer.max_value, quantizer.max_value).astype(FP8[quantizer.encoding])
    codes = codes.view(np.uint8)
    scale_inv = _fill("row_scale_inv", np.float32(1) / scale)
    if out is not None:
        out.row_data.copy_(torch.from_numpy(codes).view(x.shape))
        out.row_scale_inv.copy_(scale_inv)
        return out
    return Quantized(
        _fill("row_data", codes.reshape(tuple(x.shape))) if usage != "column" else None,
        _fill("col_data", codes.T) if usage != "row" else None,
        scale_inv if usage != "column" else None,
        scale_inv if usage != "row" else None,
        quantizer.encoding,
        "tensor",
        CANONICAL_SCALES,
        tuple(x.shape),
        x.dtype,
        x.device,
    )


def _decode(data, scale_inv, encoding):
    return data.numpy().view(FP8[encoding]).astype(np.float32) * scale_inv.numpy()


def gemm(
    a, b, layout, alpha, out, accumulate, bias, epilogue, aux, aux_quantizer, out_dtype, out_quantizer,
    split_accumulator,
):  # fmt: skip
    """Quantized operands; does not use `alloc`, so that its result has to be copied."""
    _count("gemm")
    left = a.row_data if layout[0] == "N" else a.col_data
    right = b.row_data if layout[1] == "T" else b.col_data
    left = _decode(
        left.reshape(-1, left.shape[-1]), a.row_scale_inv if layout[0] == "N" else a.col_scale_inv, a.encoding
    )
    right = _decode(right, b.row_scale_inv if layout[1] == "T" else b.col_scale_inv, b.encoding)
    product = torch.from_numpy(left @ right.T * np.float32(alpha))
    if layout != "TN":
        product = product.reshape(*a.shape[:-1], -1)
    if bias is not None:
        product = product + bias.detach()
    if out is not None:
        out.copy_(out + product if accumulate else product)
        return Gemm(out, None, None)
    return Gemm(product, None, None)


def rmsnorm_fwd(x, gamma, *, eps=1e-5, zero_centered_gamma=False, residual=None):
    """An older signature: without quantizer, usage, with_y and out_dtype, and with keywords."""
    _count("rmsnorm_fwd")
    values = x.detach().numpy()
    rstd = 1 / np.sqrt((values**2).mean(-1) + np.float32(eps))
    y = values * rstd[..., None] * (gamma.detach().numpy() + np.float32(zero_centered_gamma))
    # Allocated in the other order than the result names them; square shapes make the roles ambiguous.
    return NormForward(_fill("y", y), None, None, None, _fill("rstd", rstd))


def swapped(dy, x, gamma, mean, rstd, zero_centered_gamma, add):
    """layernorm_bwd of a kind: dgamma and dbeta have one shape and are allocated in the wrong order."""
    _count("swapped")
    dbeta = _fill("dbeta", np.full(gamma.shape[0], 2, np.float32))
    dgamma = _fill("dgamma", np.full(gamma.shape[0], 1, np.float32))
    return _fill("dx", dy.numpy() * 3), dgamma, dbeta


def attention_fwd(q, k, v, *, layout="sbhd", inference=False):
    """Leaves a tensor and an option in `saved`."""
    _count("attention_fwd")
    out = _fill("out", q.detach().numpy() + v.detach().numpy())
    batch, length = q.shape[1], q.shape[0]
    lse = _fill("lse", np.zeros((batch, q.shape[2], length), np.float32))
    return AttentionForward(
        out, lse, None, Saved("fake.attention", "fake1", (_fill("saved", np.arange(4.0)),), ("x", 3))
    )


def attention_shape(q, k, v, *, layout="sbhd", **rest):
    found = OPERATORS["attention_fwd"].shape(q, k, v, layout=layout, **rest)
    saved = Saved("", "", (torch.empty(4, dtype=torch.float64),), ("x", 3))
    return AttentionForward(found.out, found.lse, None, saved)


def update_delayed_scales(histories, scales, max_values, algorithm, margin):
    _count("update_delayed_scales")
    for history, scale, maxima in zip(histories, scales, max_values, strict=True):
        table = history.numpy()
        seen = table[0] != 0
        scale.numpy()[:] = np.where(seen, np.float32(maxima) / np.where(seen, table.max(0), 1), scale.numpy())
        rolled = np.roll(table, -1, 0)
        rolled[0] = 0
        table[:] = np.where(seen, rolled, table)


for function in (quantize, gemm, rmsnorm_fwd, update_delayed_scales):
    make_opaque(function, OPERATORS[function.__name__], f"fake.{function.__name__}", "7")
make_opaque(swapped, OPERATORS["layernorm_bwd"], "fake.swapped")
make_opaque(attention_fwd, OPERATORS["attention_fwd"], "fake.attention", "1", "fake1", attention_shape)
