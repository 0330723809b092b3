# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What optimizers do to lists of tensors.

The native flag is int32 (1,). As in Apex, where these functions come from, norms and scalings raise it where they meet
an Inf or a NaN, and Adam's step does not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, one_dtype, plain, require

_Lists = Sequence[Sequence[Any]]


def _lists(tensor_lists: _Lists, *counts: int) -> None:
    require(len(tensor_lists) in counts and len(tensor_lists[0]) > 0, f"{len(tensor_lists)} lists, or empty ones")
    for tensors in tensor_lists:
        floats(*tensors)
        one_dtype(tensors)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Any,
    tensor_lists: _Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    _lists(tensor_lists, 4, 5)
    grads, params, exp_avgs, exp_avg_sqs, *masters = tensor_lists
    for tensors in (exp_avgs, exp_avg_sqs, *masters):
        require(tensors[0].dtype == torch.float32, f"a moment or master of {tensors[0].dtype}")
    ops.multi_tensor_adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        weight_decay=weight_decay,
        adam_w=mode == 1,
        bias_correction=bias_correction == 1,
        master=masters[0] if masters else None,
    )


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Any, tensor_lists: _Lists, per_tensor: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of all tensors together, (1,), and of each, (n,), or (0,) where that is not asked for."""
    _lists(tensor_lists, 1)
    plain(noop_flag)
    (tensors,) = tensor_lists
    norm = ops.multi_tensor_l2norm(tensors)
    each = ops.multi_tensor_l2norm(tensors, per_tensor=True) if per_tensor else norm.new_empty(0)
    noop_flag.masked_fill_(~norm.isfinite(), 1)
    return norm, each


def multi_tensor_scale(chunk_size: int, noop_flag: Any, tensor_lists: _Lists, scale: float) -> None:
    _lists(tensor_lists, 2)
    plain(noop_flag)
    inputs, outputs = tensor_lists
    found = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
    ops.multi_tensor_scale(inputs, outputs, scale, noop_flag=found)
    noop_flag.masked_fill_(found != 0, 1)


ADAPTERS: dict[str, Callable[..., Any]] = {
    "multi_tensor_adam": multi_tensor_adam,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
}
