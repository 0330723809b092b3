# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout with residual add, multi-tensor steps, mixture-of-experts. Contracts: `te_dispatch.ops.training`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import training as checks
from te_dispatch.ops.results import DropoutAddForward, MoePermute, MoeUnpermuteBackward
from te_dispatch_torch import dropout


def dropout_add_fwd(
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
) -> DropoutAddForward:
    """residual + dropout(x + bias), in fp32 with one rounding."""
    checks.dropout_add_fwd(x, residual, bias, dropout_p, rng_state)
    y = x.float()
    if bias is not None:
        y = y + bias
    mask = None
    if rng_state is not None and dropout_p > 0.0:
        keep = dropout.keep_mask(tuple(x.shape), dropout_p, rng_state)
        y = torch.where(keep, y * (1.0 / (1.0 - dropout_p)), 0.0)
        mask = keep.view(torch.uint8)
    if residual is not None:
        y = y + residual
    # The result never aliases the input, not even where nothing was to be done.
    return DropoutAddForward(x.clone() if y is x else y.to(x.dtype), mask)


def dropout_add_bwd(dy: torch.Tensor, mask: torch.Tensor | None = None, *, dropout_p: float = 0.0) -> torch.Tensor:
    """dy * mask / (1 - p)."""
    checks.dropout_add_bwd(dy, mask, dropout_p)
    if mask is None:
        return dy.clone()
    return torch.where(mask != 0, dy.float() * (1.0 / (1.0 - dropout_p)), 0.0).to(dy.dtype)


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
    """One step, tensor by tensor, so that temporaries stay as small as the largest parameter."""
    checks.multi_tensor_adam(
        params, grads, exp_avgs, exp_avg_sqs, lr, beta1, beta2, eps, step, weight_decay, master, noop_flag
    )
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    for i, p in enumerate(params):
        value = p.float() if master is None else master[i]
        grad = grads[i].float()
        if not adam_w and weight_decay:
            grad = grad + value * weight_decay
        average = torch.lerp(exp_avgs[i], grad, 1.0 - beta1)
        square = (exp_avg_sqs[i] * beta2).addcmul_(grad, grad, value=1.0 - beta2)
        update = average / correction1 / ((square / correction2).sqrt_().add_(eps))
        if adam_w and weight_decay:
            update = update.add_(value, alpha=weight_decay)
        new = value - lr * update
        _store(exp_avgs[i], average, noop_flag)
        _store(exp_avg_sqs[i], square, noop_flag)
        if master is not None:
            _store(master[i], new, noop_flag)
        _store(p, new, noop_flag)


def _store(target: torch.Tensor, new: torch.Tensor, noop_flag: torch.Tensor | None) -> None:
    # The flag has one dimension, which a tensor without any would get.
    target.copy_(new if noop_flag is None else torch.where(noop_flag.view(()) != 0, target.to(new.dtype), new))


def multi_tensor_l2norm(tensors: Sequence[torch.Tensor], *, per_tensor: bool = False) -> torch.Tensor:
    """Norms of norms: the square root of the sum of squares, in fp32."""
    checks.multi_tensor_l2norm(tensors)
    norms = torch.stack([_norm(t) for t in tensors])
    return norms if per_tensor else _norm(norms).view(1)


def _norm(x: torch.Tensor) -> torch.Tensor:
    """The square root of the sum of squares, whose squares neither overflow nor underflow: x is divided by the power of
    two below its largest magnitude.
    """
    if x.numel() == 0 or x.dtype == torch.float16:  # fp32 holds the squares of fp16
        return torch.linalg.vector_norm(x, dtype=torch.float32)
    largest = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
    power = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    power = torch.where((power > 0) & power.isfinite(), power, 1.0)
    return torch.linalg.vector_norm(x / power, dtype=torch.float32) * power


def multi_tensor_scale(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    scale: float,
    *,
    noop_flag: torch.Tensor | None = None,
) -> None:
    """outputs[i] = inputs[i] * scale; the flag is raised by any input that is not finite."""
    checks.multi_tensor_scale(inputs, outputs, scale, noop_flag)
    for source, target in zip(inputs, outputs, strict=True):
        if noop_flag is not None:
            noop_flag.copy_(torch.where(source.isfinite().all(), noop_flag, 1.0))
        target.copy_(source.float() * scale)


def moe_permute(
    x: torch.Tensor | Quantized,
    indices: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    capacity: int | None = None,
) -> MoePermute:
    """A stable sort of the choices by expert; nothing is read back."""
    checks.moe_permute(x, indices, probs, capacity)
    tokens, top_k = indices.shape
    choices = tokens * top_k
    rows = choices if capacity is None else capacity
    experts = indices.reshape(-1)
    # Dropped choices sort behind every expert.
    key = torch.where(experts < 0, torch.iinfo(experts.dtype).max, experts)
    order = torch.argsort(key, stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(choices, device=x.device))
    row_map = torch.where((experts < 0) | (place >= rows), -1, place).to(torch.int32).view(tokens, top_k)
    source = order[:rows]
    filled = experts[source] >= 0
    if rows > choices:
        source = torch.nn.functional.pad(source, (0, rows - choices))
        filled = torch.nn.functional.pad(filled, (0, rows - choices))
    permuted_probs = None if probs is None else _taken(probs.reshape(-1), source, filled)
    token = source // max(top_k, 1)
    if isinstance(x, Quantized):
        return MoePermute(_permute_quantized(x, token, filled), row_map, permuted_probs)
    return MoePermute(_taken(x, token, filled), row_map, permuted_probs)


def _taken(x: torch.Tensor, index: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """x[index] along the first dimension, 0 where nothing fills the place: everywhere, if x has no rows."""
    if x.shape[0] == 0:
        return x.new_zeros((*index.shape, *x.shape[1:]))
    return torch.where(filled.view(-1, *(1,) * (x.ndim - 1)), x[index], 0)


def _permute_quantized(x: Quantized, token: torch.Tensor, filled: torch.Tensor) -> Quantized:
    """Rows move with their scales; blocks that span rows cannot."""
    assert x.row_data is not None and x.row_scale_inv is not None  # checked
    scale = x.row_scale_inv if x.scaling == "tensor" else _taken(x.row_scale_inv, token, filled)
    return Quantized(
        _taken(x.row_data, token, filled), None, scale, None, x.encoding, x.scaling, x.scale_layout,
        (token.shape[0], x.shape[-1]), x.dtype, x.device, x.global_scale_inv,
    )  # fmt: skip


def _choices(x: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """(T, top_k, K) fp32: the row of each choice, 0 for dropped ones."""
    return torch.where((row_map >= 0).unsqueeze(-1), x[row_map.clamp_min(0)].float(), 0.0)


def moe_unpermute(x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None) -> torch.Tensor:
    """Gather and sum in fp32."""
    checks.moe_unpermute(x, row_map, probs)
    if x.shape[0] == 0:
        return x.new_zeros((row_map.shape[0], x.shape[-1]))
    found = _choices(x, row_map)
    if probs is not None:
        # A dropped choice counts nothing, whatever its probability: 0 times Inf would be NaN.
        found = found * torch.where(row_map >= 0, probs, 0).unsqueeze(-1)
    return found.sum(1).to(x.dtype)


def moe_unpermute_bwd(
    dy: torch.Tensor, x: torch.Tensor, row_map: torch.Tensor, *, probs: torch.Tensor | None = None
) -> MoeUnpermuteBackward:
    """Every row has one choice at most, so the scatter needs no sum."""
    checks.moe_unpermute_bwd(dy, x, row_map, probs)
    tokens, top_k = row_map.shape
    spread = dy.float().unsqueeze(1).expand(tokens, top_k, dy.shape[-1])
    weighted = spread if probs is None else spread * probs.unsqueeze(-1)
    # Dropped choices go to one row too many, which is cut off.
    target = torch.where(row_map < 0, x.shape[0], row_map).reshape(-1).long()
    dinput = torch.zeros((x.shape[0] + 1, x.shape[-1]), dtype=x.dtype, device=x.device)
    dinput = dinput.index_copy(0, target, weighted.reshape(-1, dy.shape[-1]).to(x.dtype))[:-1]
    if probs is None:
        return MoeUnpermuteBackward(dinput.contiguous(), None)
    if x.shape[0] == 0:
        return MoeUnpermuteBackward(dinput, torch.zeros_like(probs))
    dprobs = torch.where(row_map >= 0, (_choices(x, row_map) * spread).sum(-1), 0.0).to(probs.dtype)
    return MoeUnpermuteBackward(dinput.contiguous(), dprobs)
