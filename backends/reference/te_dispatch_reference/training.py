# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with residual add, multi-tensor steps, mixture-of-experts, in float64 with one rounding per result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import training as checks
from te_dispatch.ops.results import DropoutAddForward, MoePermute, MoeUnpermuteBackward
from te_dispatch_reference import host
from te_dispatch_reference.host import F64
from te_dispatch_reference.philox import keep_scale

Index = NDArray[np.int64]


def dropout_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> DropoutAddForward:
    """The draws are Philox's (`te_dispatch_reference.philox`), the linear index that of x's elements, row-major."""
    checks.dropout_add_fwd(x, residual, bias, dropout_p, rng_state)
    mask = None
    with np.errstate(all="ignore"):
        y = host.double(x)
        if bias is not None:
            y = y + host.double(bias)
        if dropout_p > 0:
            assert rng_state is not None  # checked
            seed, offset = host.array(rng_state).tolist()
            kept = keep_scale(dropout_p, seed, offset, np.arange(y.size).reshape(y.shape)) != 0
            y = np.where(kept, y / (1 - dropout_p), 0.0)  # not times 0: what is dropped may be Inf or NaN
            mask = host.result("mask", kept.astype(np.uint8), torch.uint8, x.device)
        if residual is not None:
            y = y + host.double(residual)
    return DropoutAddForward(host.result("out", y, x.dtype, x.device), mask)


def dropout_add_bwd(dy: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float = 0.0) -> torch.Tensor:
    checks.dropout_add_bwd(dy, mask, dropout_p)
    dx = host.double(dy)
    if mask is not None:
        dx = np.where(host.array(mask) != 0, dx / (1 - dropout_p), 0.0)
    return host.result("dx", dx, dy.dtype, dy.device)


def multi_tensor_adam(
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    step: int = 1,
    weight_decay: float = 0.0,
    adam_w: bool = True,
    bias_correction: bool = True,
    master: Sequence[torch.Tensor] | None = None,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """The step sees its own moments before they are rounded to float32. A rounded master is what params round."""
    checks.multi_tensor_adam(
        params, grads, exp_avgs, exp_avg_sqs, lr, beta1, beta2, eps, step, weight_decay, master, noop_flag
    )
    if noop_flag is not None and host.array(noop_flag).item() != 0:
        return
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for i, param in enumerate(params):
        weights = param if master is None else master[i]
        w, g = host.double(weights), host.double(grads[i])
        with np.errstate(all="ignore"):
            if not adam_w:
                g = g + weight_decay * w
            m = beta1 * host.double(exp_avgs[i]) + (1 - beta1) * g
            v = beta2 * host.double(exp_avg_sqs[i]) + (1 - beta2) * g**2
            update = (m / corrections[0]) / (np.sqrt(v / corrections[1]) + eps)
            if adam_w:
                update = update + weight_decay * w
            w = w - lr * update
        host.write(exp_avgs[i], m)
        host.write(exp_avg_sqs[i], v)
        host.write(weights, w)
        if master is not None:
            host.write(param, host.single(weights))


def multi_tensor_l2norm(tensors: Sequence[torch.Tensor], *, per_tensor: bool = False) -> torch.Tensor:
    """Squares and sums are float64, so that no norm that float32 can hold overflows or underflows on the way."""
    checks.multi_tensor_l2norm(tensors)
    with np.errstate(invalid="ignore"):
        squares = np.array([(host.double(t) ** 2).sum() for t in tensors])
        norms = np.sqrt(squares if per_tensor else squares.sum(keepdims=True))
    return host.result("norm", norms, torch.float32, tensors[0].device)


def multi_tensor_scale(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scale: float,
    *,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """The flag tells of the inputs; every output is written whatever it says."""
    checks.multi_tensor_scale(inputs, outputs, scale, noop_flag)
    for source, target in zip(inputs, outputs, strict=True):
        values = host.double(source)
        if noop_flag is not None and not np.isfinite(values).all():
            host.write(noop_flag, np.ones(1))
        with np.errstate(all="ignore"):
            host.write(target, values * scale)


def moe_permute(
    x: torch.Tensor | Quantized,
    indices: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    capacity: int | None = None,
) -> MoePermute:
    """Rows move as bytes, whatever they hold."""
    checks.moe_permute(x, indices, probs, capacity)
    tokens, top_k = indices.shape
    rows = tokens * top_k if capacity is None else capacity
    experts = host.array(indices).reshape(-1)
    kept = np.flatnonzero(experts >= 0)
    choices = kept[np.argsort(experts[kept], kind="stable")][:rows]  # the choice of each filled row
    row_map = np.full(tokens * top_k, -1, np.int32)
    row_map[choices] = np.arange(len(choices))
    token = choices // max(top_k, 1)
    carried = None
    if probs is not None:
        carried = _moved("probs", probs.reshape(-1, 1), choices, rows).view(rows)
    permuted: torch.Tensor | Quantized
    if isinstance(x, Quantized):
        permuted = _permuted_record(x, token, rows)
    else:
        permuted = _moved("permuted", x, token, rows)
    mapped = host.result("row_map", row_map.reshape(tokens, top_k), torch.int32, x.device)
    return MoePermute(permuted, mapped, carried)


def _moved(role: str, x: torch.Tensor, source: Index, rows: int) -> torch.Tensor:
    """(rows, K): row i is x's row `source[i]`, what lies behind those is 0."""
    data = host.raw(x)
    moved = np.zeros((rows, data.shape[1]), np.uint8)
    moved[: len(source)] = data[source]
    return host.from_raw(role, moved, (rows, x.shape[1]), x.dtype, x.device)


def _permuted_record(x: Quantized, token: Index, rows: int) -> Quantized:
    """The row-wise copy with its scales; one scale of the whole tensor stays where it is."""
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    scale = x.row_scale_inv
    if x.scaling != "tensor":
        scale = _moved("row_scale_inv", scale, token, rows)
    return Quantized(
        _moved("row_data", x.row_data, token, rows), None, scale, None, x.encoding, x.scaling, x.scale_layout,
        (rows, x.shape[1]), x.dtype, x.device, x.global_scale_inv,
    )  # fmt: skip


def _of_choices(values: F64, row_map: NDArray[np.int32]) -> F64:
    """(T, top_k, K): the row of every choice, 0 for dropped ones."""
    found = np.zeros((*row_map.shape, values.shape[1]))
    found[row_map >= 0] = values[row_map[row_map >= 0]]
    return found


def _weights(probs: torch.Tensor | None, row_map: NDArray[np.int32]) -> F64:
    """(T, top_k, 1): what every choice counts, 0 where dropped, whatever its probability."""
    given = np.ones(row_map.shape) if probs is None else host.double(probs)
    weights: F64 = np.where(row_map >= 0, given, 0.0)
    return weights[..., None]


def moe_unpermute(x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None) -> torch.Tensor:
    checks.moe_unpermute(x, row_map, probs)
    rows = host.array(row_map)
    with np.errstate(all="ignore"):
        out = (_weights(probs, rows) * _of_choices(host.double(x), rows)).sum(1)
    return host.result("out", out, x.dtype, x.device)


def moe_unpermute_bwd(
    dy: torch.Tensor, x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None
) -> MoeUnpermuteBackward:
    """dinput[row_map[t, c]] = probs[t, c] dy[t], and dprobs[t, c] = sum over k of x[row_map[t, c], k] dy[t, k]."""
    checks.moe_unpermute_bwd(dy, x, row_map, probs)
    rows = host.array(row_map)
    kept, grad = rows >= 0, host.double(dy)[:, None]
    dinput, dprobs = np.zeros(tuple(x.shape)), None
    with np.errstate(all="ignore"):
        dinput[rows[kept]] = (_weights(probs, rows) * grad)[kept]  # a row has one choice at most
        if probs is not None:
            products = (_of_choices(host.double(x), rows) * grad).sum(-1)
            dprobs = host.result("dprobs", np.where(kept, products, 0.0), probs.dtype, x.device)
    return MoeUnpermuteBackward(host.result("dinput", dinput, x.dtype, x.device), dprobs)
