# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with residual add, multi-tensor steps, mixture-of-experts: csrc/training.

Contracts: `te_dispatch.ops.training`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch

from te_dispatch.backend_kit.call_plans import Planned, planned
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import training as checks
from te_dispatch.ops.results import DropoutAddForward, MoePermute, MoeUnpermuteBackward
from te_dispatch_cuda.codes import DTYPES
from te_dispatch_cuda.known_lists import Lists
from te_dispatch_cuda.memory import address, all_dense, dense, dense_or_none, empty, stream_of
from te_dispatch_cuda.native import load
from te_dispatch_cuda.prepared import Given, Made, launch

_native = load()
_ADAM, _NORMS, _SCALES = Lists(), Lists(), Lists()
_Tensors = Sequence[torch.Tensor]


@planned()
def dropout_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> DropoutAddForward | Planned:
    """residual + dropout(x + bias), in fp32 with one rounding; the mask comes from Philox 4x32-10."""
    checks.dropout_add_fwd(x, residual, bias, dropout_p, rng_state)
    if not all_dense(x, residual, bias, rng_state):
        return dropout_add_fwd(
            dense(x), dense_or_none(residual), bias=dense_or_none(bias), dropout_p=dropout_p,
            rng_state=dense_or_none(rng_state),
        )  # fmt: skip
    out = Made("out", x.shape, x.dtype)
    mask = Made("mask", x.shape, torch.uint8) if dropout_p > 0.0 else None
    arguments = (
        Given(0), Given(1), Given(2), Given(3), out, 0 if mask is None else mask, x.numel(), x.shape[-1], dropout_p,
        DTYPES[x.dtype], 0 if bias is None else DTYPES[bias.dtype],
    )  # fmt: skip
    result = DropoutAddForward(out, mask)  # type: ignore[arg-type]
    state = rng_state if dropout_p > 0.0 else None
    return launch("dropout_add_fwd", x.device, arguments, result, (x, residual, bias, state))


@planned()
def dropout_add_bwd(
    dy: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float = 0.0
) -> torch.Tensor | Planned:
    """dy * mask / (1 - p)."""
    checks.dropout_add_bwd(dy, mask, dropout_p)
    if not all_dense(dy, mask):
        return dropout_add_bwd(dense(dy), dense_or_none(mask), dropout_p=dropout_p)
    dx = Made("result", dy.shape, dy.dtype)
    arguments = (Given(0), Given(1), dx, dy.numel(), dropout_p, DTYPES[dy.dtype])
    return launch("dropout_add_bwd", dy.device, arguments, dx, (dy, mask))


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
    """One step of all tensors, in place, in fp32: a launch for every 576 of them."""
    given = (params, grads, exp_avgs, exp_avg_sqs, master)
    options = (lr, beta1, beta2, eps, step, weight_decay, adam_w, bias_correction, noop_flag)
    for known, device in _ADAM.like(given):
        if _native.multi_tensor_adam_of(known, given, *_launched_on(device), *_adam_numbers(device, *options)):
            return
    checks.adam_tensors(*given)
    device = params[0].device
    numbers = _adam_numbers(device, *options)
    lists = [params, grads, exp_avgs, exp_avg_sqs, master or ()]
    held = [_contiguous(tensors) for tensors in lists]
    _native.multi_tensor_adam(
        *_launched_on(device), *map(_addresses, held), list(map(torch.Tensor.numel, params)), *numbers,
        DTYPES[params[0].dtype], DTYPES[grads[0].dtype],
    )  # fmt: skip
    for place in (0, 2, 3, 4):
        _returned(lists[place], held[place])
    if all(map(is_, lists, held)):
        _ADAM.keep(given)


def _adam_numbers(
    device: torch.device, lr: float, beta1: float, beta2: float, eps: float, step: int, weight_decay: float,
    adam_w: bool, bias_correction: bool, noop_flag: torch.Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Adam's arguments beside the lists, checked, as native code takes them."""
    checks.adam_numbers(lr, beta1, beta2, eps, step, weight_decay, noop_flag, device)
    corrections = (1.0 - beta1**step, 1.0 - beta2**step) if bias_correction else (1.0, 1.0)
    return address(noop_flag), lr, beta1, beta2, eps, *corrections, weight_decay, adam_w


def _launched_on(device: torch.device) -> tuple[int, int]:
    """Device and stream as native code takes them."""
    return device.index, stream_of(device.index)


def _contiguous(tensors: _Tensors) -> _Tensors:
    """The list itself, or one with dense copies of those that are not."""
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return tensors
    return [dense(x) for x in tensors]


def _returned(targets: _Tensors, sources: _Tensors) -> None:
    """Write results back to where dense copies stood in for them."""
    if targets is not sources:
        for target, source in zip(targets, sources):
            if target is not source:
                target.copy_(source)


def _addresses(tensors: _Tensors) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def multi_tensor_l2norm(tensors: Sequence[torch.Tensor], *, per_tensor: bool = False) -> torch.Tensor:
    """The square root of sums of squares, in fp32: of chunks, then of these."""
    given = (tensors,)
    out: torch.Tensor | None = None
    for known, device in _NORMS.like(given):
        out, partials = _room_for_norms(len(tensors), known.elements, per_tensor, device, out)
        where = (partials.data_ptr(), partials.shape[0], out.data_ptr(), per_tensor)
        if _native.multi_tensor_l2norm_of(known, given, *_launched_on(device), *where):
            return out
    checks.multi_tensor_l2norm(tensors)
    device, held = tensors[0].device, _contiguous(tensors)
    counts = list(map(torch.Tensor.numel, held))
    out, partials = _room_for_norms(len(counts), sum(counts), per_tensor, device, out)
    _native.multi_tensor_l2norm(
        *_launched_on(device), _addresses(held), counts, [DTYPES[x.dtype] for x in held], partials.data_ptr(),
        partials.shape[0], out.data_ptr(), per_tensor,
    )  # fmt: skip
    if held is tensors:
        _NORMS.keep(given)
    return out


def _room_for_norms(
    count: int, elements: int, per_tensor: bool, device: torch.device, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, where there is none yet, and workspace for at least as many sums as there are chunks of so many
    tensors."""
    if out is None:
        out = empty("result", (count if per_tensor else 1,), torch.float32, device)
    return out, empty("workspace", (elements // _native.NORM_CHUNK + count,), torch.float32, device)


def multi_tensor_scale(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scale: float,
    *,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """outputs[i] = inputs[i] * scale; the flag is raised by any input that is not finite."""
    given = (inputs, outputs)
    for known, device in _SCALES.like(given):
        checks.scale_number(scale, noop_flag, device)
        if _native.multi_tensor_scale_of(known, given, *_launched_on(device), scale, address(noop_flag)):
            return
    checks.multi_tensor_scale(inputs, outputs, scale, noop_flag)
    sources, targets = _contiguous(inputs), _contiguous(outputs)
    _native.multi_tensor_scale(
        *_launched_on(inputs[0].device), _addresses(sources), _addresses(targets),
        list(map(torch.Tensor.numel, inputs)), [DTYPES[x.dtype] for x in inputs], [DTYPES[x.dtype] for x in outputs],
        scale, address(noop_flag),
    )  # fmt: skip
    _returned(outputs, targets)
    if sources is inputs and targets is outputs:
        _SCALES.keep(given)


def moe_permute(
    x: torch.Tensor | Quantized,
    indices: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    capacity: int | None = None,
) -> MoePermute:
    """A stable counting sort of the choices by expert, then rows move as bytes; nothing is read back."""
    checks.moe_permute(x, indices, probs, capacity)
    tokens, top_k = indices.shape
    choices = tokens * top_k
    rows = choices if capacity is None else capacity
    device, where = indices.get_device(), indices.device
    # Everything that moves is dense before the sort, because moving begins while the sort still runs.
    indices, probs = dense(indices), None if probs is None else dense(probs)
    if isinstance(x, Quantized):
        assert x.row_data is not None and x.row_scale_inv is not None  # checked
        moving = [("row_data", dense(x.row_data))]
        if x.scaling != "tensor":
            moving.append(("row_scale_inv", dense(x.row_scale_inv)))
    else:
        moving = [("permuted", dense(x))]
    moved = [empty(role, (rows, source.shape[1]), source.dtype, where) for role, source in moving]
    row_map = empty("row_map", (tokens, top_k), torch.int32, where)
    sorted_probs = None if probs is None else empty("probs", (rows,), probs.dtype, where)
    workspace = empty("workspace", (_native.moe_sort_workspace(choices),), torch.uint8, where)
    stream, places, filled = stream_of(device), row_map.data_ptr(), workspace.data_ptr()
    _native.moe_sort(
        device, stream, indices.data_ptr(), address(probs), places, address(sorted_probs), filled, choices, rows,
        indices.dtype is torch.int64, 0 if probs is None else DTYPES[probs.dtype],
    )  # fmt: skip
    for (_, source), target in zip(moving, moved):
        row_bytes = source.shape[1] * source.element_size()
        _native.moe_spread(
            device, stream, source.data_ptr(), places, filled, target.data_ptr(), tokens, top_k, rows, row_bytes
        )
    if not isinstance(x, Quantized):
        return MoePermute(moved[0], row_map, sorted_probs)
    permuted = Quantized(
        moved[0], None, x.row_scale_inv if x.scaling == "tensor" else moved[1], None, x.encoding, x.scaling,
        x.scale_layout, (rows, x.shape[-1]), x.dtype, x.device, x.global_scale_inv,
    )  # fmt: skip
    return MoePermute(permuted, row_map, sorted_probs)


def moe_unpermute(x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Gather and sum in fp32, in the order of the choices."""
    checks.moe_unpermute(x, row_map, probs)
    (rows, columns), (tokens, top_k), device = x.shape, row_map.shape, x.get_device()
    x, row_map, probs = dense(x), dense(row_map), None if probs is None else dense(probs)
    out = empty("result", (tokens, columns), x.dtype, x.device)
    _native.moe_unpermute(
        device, stream_of(device), x.data_ptr(), row_map.data_ptr(), address(probs), out.data_ptr(), tokens, top_k,
        rows, columns, DTYPES[x.dtype], 0 if probs is None else DTYPES[probs.dtype],
    )  # fmt: skip
    return out


def moe_unpermute_bwd(
    dy: torch.Tensor, x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None
) -> MoeUnpermuteBackward:
    """dinput's rows are written once each, as every row has one choice at most; dprobs are sums over features."""
    checks.moe_unpermute_bwd(dy, x, row_map, probs)
    (rows, columns), (tokens, top_k), device, where = x.shape, row_map.shape, x.get_device(), x.device
    dy, x, row_map = dense(dy), dense(x), dense(row_map)
    dinput, dprobs = empty("dinput", (rows, columns), x.dtype, where), None
    if probs is not None:
        probs, dprobs = dense(probs), empty("dprobs", (tokens, top_k), probs.dtype, where)
    filled = empty("workspace", (rows,), torch.uint8, where)
    _native.moe_unpermute_bwd(
        device, stream_of(device), dy.data_ptr(), x.data_ptr(), row_map.data_ptr(), address(probs), dinput.data_ptr(),
        address(dprobs), filled.data_ptr(), tokens, top_k, rows, columns, DTYPES[dy.dtype], DTYPES[x.dtype],
        0 if probs is None else DTYPES[probs.dtype],
    )  # fmt: skip
    return MoeUnpermuteBackward(dinput, dprobs)
