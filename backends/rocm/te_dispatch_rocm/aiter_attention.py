# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention on AITER, where it is installed. Contract: `te_dispatch.ops.attention`.

Its diagonals end in the bottom right corner; its operands are (b, s, h, d), in rows that start at multiples of 16
bytes. What lies otherwise is copied; what else differs the manifest keeps away, or `require_same_diagonal`. AITER
allocates results and workspace itself, through PyTorch.
"""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward, empty_gradients
from te_dispatch.backend_kit.flash import batch_first, flash_options, require_same_diagonal
from te_dispatch.core.autograd import below_autograd
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_rocm import aiter

NAME = "aiter_attention"
FORMAT = "rocm.aiter_attention/1"


@attention_forward
@below_autograd
def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    inference: bool,
    with_max_logit: bool,
    s_quantizer: Quantizer | None,
    out_quantizer: Quantizer | None,
    out_dtype: torch.dtype | None,
) -> AttentionForward:
    """Dense layouts."""
    layout = spec.layout
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise Declined(f"{NAME} takes no dimension of 0")
    require_same_diagonal(spec, tensors, NAME)
    o = flash_options(spec, tensors, NAME)
    queries, keys, values = (batch_first(x, layout) for x in (q, k, v))
    if o.sees_nothing(queries.shape[1], keys.shape[1]):
        raise Declined(f"AITER does not say what rows that see no key get; {spec.mask} leaves some")
    out, lse = aiter.attend(queries, keys, values, o)
    out = out.transpose(0, 1).contiguous() if layout == "sbhd" else out
    if inference:
        return AttentionForward(out, None, None, None)
    return AttentionForward(out, lse, None, Saved(f"rocm.{NAME}", FORMAT))


@attention_backward
@below_autograd
def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    saved: Saved,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    s_quantizer: Quantizer | None,
    dp_quantizer: Quantizer | None,
    dqkv_quantizer: Quantizer | None,
    with_dbias: bool,
) -> AttentionBackward:
    """The forward's own backward, whose gradients have memory without gaps: it need not keep to strides."""
    layout = spec.layout
    o = flash_options(spec, tensors, NAME)
    gradients = empty_gradients(spec, spec.dtype)
    operands = [batch_first(x, layout) for x in (dout, q, k, v, out)]
    written = tuple(x.transpose(0, 1) if layout == "sbhd" else x for x in gradients)
    apart = all(x.is_contiguous() for x in written)
    targets = written if apart else tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in written)
    dq, dk, dv = targets
    aiter.attend_backward(*operands, lse.contiguous(), o, (dq, dk, dv))  # type: ignore[arg-type, call-arg]
    if not apart:
        for target, source in zip(written, targets):
            target.copy_(source)
    return AttentionBackward(*gradients, None, None)
