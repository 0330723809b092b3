# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention with AITER's interface: (b, s, h, d), windows with -1 for no bound, diagonals at the bottom right."""

from __future__ import annotations

import torch


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, left: int, right: int) -> torch.Tensor:
    """Scaled logits (b, h, s_q, s_k) in float32, -Inf where a key is not seen."""
    for x in (q, k):
        assert x.dim() == 4 and x.dtype in (torch.float16, torch.bfloat16) and x.stride(-1) == 1
        assert not x.data_ptr() % 16 and not x.shape[-1] % 8 and x.shape[-1] <= 256
    heads, groups = q.shape[2], k.shape[2]
    keys = k.float().permute(0, 2, 1, 3).repeat_interleave(heads // groups, 1)
    logits = q.float().permute(0, 2, 1, 3) @ keys.transpose(-1, -2) * scale
    rows, columns = (torch.arange(x.shape[1], device=q.device) for x in (q, k))
    distance = columns - rows[:, None] - (k.shape[1] - q.shape[1])
    seen = (distance <= right if right >= 0 else True) & (distance >= -left if left >= 0 else distance == distance)
    return logits.masked_fill(~seen.to(logits.device), -torch.inf)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = True,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> tuple[torch.Tensor, ...]:
    assert dropout_p == 0 and softmax_scale is not None and bias is alibi_slopes is None and not return_attn_probs
    assert not torch.is_grad_enabled(), "an operator records no gradients"
    left, right = window_size
    logits = _scores(q, k, softmax_scale, left, 0 if causal else right)
    lse = logits.logsumexp(-1)
    values = v.float().permute(0, 2, 1, 3).repeat_interleave(q.shape[2] // v.shape[2], 1)
    out = (logits - lse[..., None]).exp() @ values
    result = out.permute(0, 2, 1, 3).to(q.dtype).contiguous()
    return (result, lse) if return_lse else (result,)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dbias: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    is_v3_atomic_fp32: bool | None = True,
    how_v3_bf16_cvt: int | None = 1,
) -> torch.Tensor:
    assert dropout_p == 0 and bias is alibi_slopes is dbias is rng_state is None
    assert dq is not None and dk is not None and dv is not None and all(x.is_contiguous() for x in (dq, dk, dv))
    assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1]) and softmax_lse.dtype == torch.float32
    logits = _scores(q, k, softmax_scale, window_size_left, 0 if causal else window_size_right)
    p = (logits - softmax_lse[..., None]).exp()
    heads, groups = q.shape[2], k.shape[2]
    grad, result = (x.float().permute(0, 2, 1, 3) for x in (dout, out))
    keys, values = (x.float().permute(0, 2, 1, 3).repeat_interleave(heads // groups, 1) for x in (k, v))
    delta = (grad * result).sum(-1)
    ds = p * (grad @ values.transpose(-1, -2) - delta[..., None]) * softmax_scale
    of_keys = ds.transpose(-1, -2) @ q.float().permute(0, 2, 1, 3)
    of_values = p.transpose(-1, -2) @ grad
    dq.copy_((ds @ keys).permute(0, 2, 1, 3))
    for target, source in ((dk, of_keys), (dv, of_values)):
        target.copy_(source.unflatten(1, (groups, -1)).sum(2).permute(0, 2, 1, 3))
    return delta
