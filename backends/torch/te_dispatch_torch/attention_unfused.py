# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention through the whole score matrix in fp32: every option, any device. Contract: `te_dispatch.ops.attention`.

thd is spread to (b, h, max_seqlen, d), so that nothing but an absent max_seqlen is read back from the device.
"""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward
from te_dispatch.core.autograd import below_autograd
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_torch.quantize import cast
from te_dispatch_torch.scores import scores_of, setting_of, through
from te_dispatch_torch.sequences import as_float, pack, scatter

Operand = torch.Tensor | Quantized

FORMAT = "torch.unfused/1"


@below_autograd
@attention_forward
def attention_fwd(
    q: Operand,
    k: Operand,
    v: Operand,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    inference: bool,
    with_max_logit: bool,
    s_quantizer: Quantizer | None,
    out_quantizer: Quantizer | None,
    out_dtype: torch.dtype | None,
) -> AttentionForward:
    """Every option; dropout as `te_dispatch_torch.dropout` documents; `packing` changes nothing here."""
    s = setting_of(q, k, v, spec, tensors)
    scores = scores_of(s)
    weights = scores.p if scores.keep is None else scores.p * scores.keep
    out = s.to_layout(_weighted(through(weights, s_quantizer), s.v))
    dtype = out_dtype or q.dtype
    result = out.to(dtype) if out_quantizer is None else cast(out, out_quantizer, "row", dtype)
    max_logit = None
    if with_max_logit:
        max_logit = scores.z.amax((0, 2, 3)) if scores.z.numel() else scores.z.new_full((q.shape[-2],), float("-inf"))
    if inference:
        return AttentionForward(result, None, max_logit, None)
    lse = scores.lse
    if s.index_q is not None:
        lse = scatter(lse, s.index_q, q.shape[0], float("-inf"))
    # The manifest offers this function twice: lengths that must be read back make it another implementation.
    reads_back = spec.layout == "thd" and (spec.max_seqlen_q is None or spec.max_seqlen_kv is None)
    name = "torch.varlen_attention" if reads_back else "torch.unfused_attention"
    return AttentionForward(result, lse, max_logit, Saved(name, FORMAT))


@below_autograd
@attention_backward
def attention_bwd(
    dout: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: torch.Tensor,
    saved: Saved,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    s_quantizer: Quantizer | None,
    dp_quantizer: Quantizer | None,
    dqkv_quantizer: Quantizer | None,
    with_dbias: bool,
) -> AttentionBackward:
    """Recomputes the scores; `out` and `lse`, which are rounded, are not read."""
    s = setting_of(q, k, v, spec, tensors)
    scores = scores_of(s)
    do = s.queries_of(as_float(dout))
    if s.hidden is not None:
        # Whatever a row that sees nothing is given, NaN too, must not reach a sum: its output is a constant.
        do = torch.where(scores.empty, 0.0, do)
    weights = scores.p if scores.keep is None else scores.p * scores.keep
    dv = _shared(_transposed(through(weights, s_quantizer), do), s.v)
    dp = _scores_like(do, s.v)
    if scores.keep is not None:
        dp = dp * scores.keep
    row = (scores.p * dp).sum(-1, keepdim=True)
    dz = scores.p * (dp - row)
    doffset = None
    if spec.softmax_type == "learnable" and s.sink is not None:
        share = torch.where(scores.empty, 0.0, torch.exp(s.sink - scores.lse.unsqueeze(-1)))
        doffset = -(share * row).sum((0, 2, 3))
    ds = dz if scores.capped is None else dz * (1.0 - scores.capped.square())
    dbias = None
    if with_dbias and tensors.bias is not None:
        dbias = _bias_gradient(ds * s.scale if spec.bias_type == "pre_scale" else dz, tensors.bias)
    ds = through(ds, dp_quantizer)
    dq = _weighted(ds, s.k) * s.scale
    dk = _shared(_transposed(ds, s.q), s.k) * s.scale
    grads = [s.to_layout(dq), s.to_layout(dk, keys=True), s.to_layout(dv, keys=True)]
    results = _results(grads, (q, k, v), spec.packing, dqkv_quantizer)
    return AttentionBackward(results[0], results[1], results[2], dbias, doffset)


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(b, h, s, n) -> (b, g, r, s, n): the heads of a group beside each other."""
    return x.unflatten(1, (groups, x.shape[1] // groups))


def _weighted(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_j p_ij v_j of each head with its group's v: (b, h, i, d)."""
    if p.shape[1] == v.shape[1]:
        return p @ v
    return (_by_group(p, v.shape[1]) @ v.unsqueeze(2)).flatten(1, 2)


def _scores_like(do: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return _weighted(do, v.transpose(-1, -2))


def _transposed(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """sum_i p_ij x_i: (b, h, j, d)."""
    return p.transpose(-1, -2) @ x


def _shared(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sum over the heads that share a group."""
    return x if x.shape[1] == like.shape[1] else _by_group(x, like.shape[1]).sum(2)


def _bias_gradient(grad: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    over = [axis for axis in (0, 1) if bias.shape[axis] == 1 and grad.shape[axis] != 1]
    return (grad.sum(over, keepdim=True) if over else grad).to(bias.dtype)


def _results(
    grads: list[torch.Tensor], operands: tuple[Operand, ...], packing: str | None, quantizer: Quantizer | None
) -> list[torch.Tensor] | list[Quantized]:
    if quantizer is None:
        return pack([g.to(x.dtype) for g, x in zip(grads, operands, strict=True)], packing)
    made = [cast(g, quantizer, "row", x.dtype) for g, x in zip(grads, operands, strict=True)]
    data = pack([m.row_data for m in made], packing)
    for record, codes in zip(made, data, strict=True):
        record.row_data = codes
    return made
