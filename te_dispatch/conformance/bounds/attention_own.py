# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch's own error: attention written with its plain operations in the operands' dtype, and automatic derivatives.

The operator's contract allows twice what this errs by, row by row, where that is more than `te_dispatch.conformance.
bounds.attention` allows: with 16-bit operands it rounds the logits to 16 bits, and so may others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.conformance.spread import Spread


class Own(NamedTuple):
    """float64; None without `dout`. NaN where PyTorch overflows."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


def own(call: Spread, dtype: torch.dtype, dout: torch.Tensor | None = None) -> Own:
    """Attention without dropout in `dtype`; laid out as in `Spread`."""
    q, k, v = (x.to(dtype) for x in (call.q, call.k, call.v))
    if dout is not None:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    z = (q @ call.per_head(k).transpose(-1, -2)) * call.scale
    bias = None if call.bias is None else call.bias.to(dtype)
    if bias is not None and call.early:
        z = z + bias * call.scale
    if call.cap > 0:
        z = call.cap * torch.tanh(z / call.cap)
    if bias is not None and not call.early:
        z = z + bias
    hidden = call.hidden.expand(z.shape)
    z = z.masked_fill(hidden, -torch.inf)
    columns = z if call.sink is None else torch.cat((z, call.sink.to(dtype).expand(*z.shape[:-1], 1)), -1)
    # A row without a column is one of zeros, so that no NaN comes of it.
    empty = hidden.all(-1, keepdim=True)
    columns = columns.masked_fill(empty, 0.0)
    p = torch.softmax(columns, -1)[..., : z.shape[-1]].masked_fill(empty, 0.0)
    out = p @ call.per_head(v)
    lse = torch.logsumexp(columns.detach().float(), -1, keepdim=True).masked_fill(empty, 0.0)
    if dout is None:
        return Own(out.double(), lse.double(), None, None, None)
    grads = torch.autograd.grad(out, (q, k, v), dout.to(dtype))
    return Own(out.detach().double(), lse.double(), *(grad.double() for grad in grads))


def twice(found: torch.Tensor | None, exact: torch.Tensor) -> torch.Tensor:
    """Twice the largest error of each row, (..., 1). Where PyTorch overflows it says nothing."""
    if found is None or not exact.shape[-1]:
        return exact.new_zeros((*exact.shape[:-1], 1))
    return 2 * (found - exact).abs().nan_to_num(0.0, 0.0).amax(-1, keepdim=True)
