# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of dropout, multi-tensor steps and mixture-of-experts. Contracts: `te_dispatch.ops.training`."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.checks import values as check
from te_dispatch.ops.checks.check_cache import cached_check
from te_dispatch.ops.checks.signatures import CONTENTS


def probability(dropout_p: Any) -> None:
    check.number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p: got {dropout_p}, expected a probability below 1")


@cached_check("dropout_add_fwd")
def dropout_add_fwd(x: Any, residual: Any, bias: Any, dropout_p: Any, rng_state: Any) -> None:
    check.matrix("x", x)
    if residual is not None:
        check.shaped("residual", residual, x.shape, (x.dtype,), x.device)
    if bias is not None:
        check.shaped("bias", bias, x.shape[-1:], check.FLOATS, x.device)
    probability(dropout_p)
    if rng_state is not None:
        check.rng(rng_state, x.device)
    elif dropout_p > 0.0:
        raise ValueError(f"rng_state: got None with dropout_p={dropout_p}, expected int64 (2,), (seed, offset)")


@cached_check("dropout_add_bwd")
def dropout_add_bwd(dy: Any, mask: Any, dropout_p: Any) -> None:
    check.tensor("dy", dy)
    probability(dropout_p)
    if mask is not None:
        check.shaped("mask", mask, dy.shape, check.U8, dy.device)
    elif dropout_p > 0.0:
        raise ValueError(f"mask: got None with dropout_p={dropout_p}, expected the forward's, uint8 {tuple(dy.shape)}")


def _tensors(name: str, found: Any, like: Any = None, dtypes: Any = check.FLOATS) -> None:
    """Tensors of one device (and as many, shaped alike, as those of `like`, given as (name, list))."""
    if like is None:
        check.sequence(name, found)
    else:
        check.sequence(name, found, len(like[1]), f"entry of {like[0]}")
    device = None
    for i, x in enumerate(found):
        check.tensor(f"{name}[{i}]", x, dtypes, device if like is None else like[1][i].device)
        device = x.device
        if like is not None:
            check.shape(f"{name}[{i}]", x, like[1][i].shape)


def _written(name: str, found: Any) -> None:
    for i, x in enumerate(found):
        check.writable(f"{name}[{i}]", x)


@cached_check("multi_tensor_adam")
def adam_tensors(params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, master: Any) -> None:
    """The lists by themselves: they look the same in every step, where the numbers change."""
    _tensors("params", params)
    _tensors("grads", grads, ("params", params))
    for name, found in (("params", params), ("grads", grads)):
        for i, x in enumerate(found):
            if x.dtype != found[0].dtype:
                raise ValueError(f"{name}[{i}]: got dtype {x.dtype}, expected {name}[0]'s, {found[0].dtype}")
    state = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs} | ({} if master is None else {"master": master})
    for name, found in state.items():
        _tensors(name, found, ("params", params), check.F32)
        _written(name, found)
    _written("params", params)


def multi_tensor_adam(
    params: Any,
    grads: Any,
    exp_avgs: Any,
    exp_avg_sqs: Any,
    lr: Any,
    beta1: Any,
    beta2: Any,
    eps: Any,
    step: Any,
    weight_decay: Any,
    master: Any,
    noop_flag: Any,
) -> None:
    adam_tensors(params, grads, exp_avgs, exp_avg_sqs, master)
    adam_numbers(lr, beta1, beta2, eps, step, weight_decay, noop_flag, params[0].device)


def adam_numbers(
    lr: Any, beta1: Any, beta2: Any, eps: Any, step: Any, weight_decay: Any, noop_flag: Any, device: torch.device
) -> None:
    """The arguments beside the lists, whose tensors are on `device`."""
    check.number("lr", lr)
    check.number("eps", eps, 0.0)
    check.number("weight_decay", weight_decay)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        check.number(name, beta)
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name}: got {beta}, expected at least 0 and below 1")
    check.integer("step", step, 1)
    if noop_flag is not None:
        check.scalar("noop_flag", noop_flag, device)


@cached_check("multi_tensor_l2norm")
def multi_tensor_l2norm(tensors: Any) -> None:
    _tensors("tensors", tensors)


@cached_check("multi_tensor_scale")
def scale_tensors(inputs: Any, outputs: Any) -> None:
    """The lists by themselves: they look the same in every step, where the number changes."""
    _tensors("inputs", inputs)
    _tensors("outputs", outputs, ("inputs", inputs))
    _written("outputs", outputs)


def multi_tensor_scale(inputs: Any, outputs: Any, scale: Any, noop_flag: Any) -> None:
    scale_tensors(inputs, outputs)
    scale_number(scale, noop_flag, inputs[0].device)


def scale_number(scale: Any, noop_flag: Any, device: torch.device) -> None:
    """The arguments beside the lists, whose tensors are on `device`."""
    check.number("scale", scale)
    if noop_flag is not None:
        check.scalar("noop_flag", noop_flag, device)


@cached_check("moe_permute")
def moe_permute(x: Any, indices: Any, probs: Any, capacity: Any) -> None:
    check.operand("x", x)
    shape = x.shape
    if len(shape) != 2:
        raise ValueError(f"x: got shape {tuple(shape)}, expected (T, K)")
    check.tensor("indices", indices, (torch.int32, torch.int64), x.device)
    if indices.ndim != 2 or indices.shape[0] != shape[0]:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}, expected ({shape[0]}, top_k)")
    if probs is not None:
        check.shaped("probs", probs, indices.shape, check.FLOATS, x.device)
    if capacity is not None:
        check.integer("capacity", capacity, 0)
    if not isinstance(x, Quantized):
        return
    if x.scaling in ("block_2d", "nvfp4_rht") or x.row_data is None:
        raise ValueError(
            f"x: got {x!r}, expected a row-wise copy without blocks that span rows (block_2d) or a rotated copy "
            "(nvfp4_rht)"
        )
    if x.scale_layout != CANONICAL_SCALES:
        raise ValueError(f"x: got {x.scale_layout} scales, expected {CANONICAL_SCALES} ones")


@cached_check("moe_unpermute", row_map=CONTENTS)
def moe_unpermute(x: Any, row_map: Any, probs: Any) -> None:
    check.tensor("x", x)
    if x.ndim != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected (rows, K)")
    check.tensor("row_map", row_map, check.I32, x.device)
    if row_map.ndim != 2:
        raise ValueError(f"row_map: got shape {tuple(row_map.shape)}, expected (T, top_k)")
    if check.readable(row_map) and row_map.numel() and int(row_map.max()) >= x.shape[0]:
        raise ValueError(f"row_map: got row {int(row_map.max())}, expected at most {x.shape[0] - 1}, x's last")
    if probs is not None:
        check.shaped("probs", probs, row_map.shape, check.FLOATS, x.device)


@cached_check("moe_unpermute_bwd", row_map=CONTENTS)
def moe_unpermute_bwd(dy: Any, x: Any, row_map: Any, probs: Any) -> None:
    moe_unpermute(x, row_map, probs)
    check.shaped("dy", dy, (row_map.shape[0], x.shape[-1]), check.FLOATS, x.device)
