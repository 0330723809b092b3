# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention through the whole score matrix in float64, sequence by sequence.

Dropout draws from `te_dispatch_reference.philox`. In FP8 attention, `s_quantizer` casts what multiplies v (p after
dropout), `dp_quantizer` what multiplies k and q in the backward (the gradient of z): the operands that matrix units
would read. Each is cast per tensor, over every sequence and head of the call together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_reference import ATTENTION_FORMAT, casts, host
from te_dispatch_reference.host import F64
from te_dispatch_reference.scores import Call, Scores, call_of, cast_values, operands, scores_of


def _lse_rows(call: Call, lse: F64, n: int) -> F64:
    """The (h, rows) view of sequence n in an lse array of the spec's `lse_shape`."""
    return lse[call.query.tokens[n]].T if call.spec.layout == "thd" else lse[n]


@attention_forward
def attention_fwd(
    q: torch.Tensor | Quantized,
    k: torch.Tensor | Quantized,
    v: torch.Tensor | Quantized,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    inference: bool,
    with_max_logit: bool,
    s_quantizer: Quantizer | None,
    out_quantizer: Quantizer | None,
    out_dtype: torch.dtype | None,
) -> AttentionForward:
    """Always deterministic; `packing` changes nothing in the forward."""
    call = call_of(q, k, spec, tensors, {"s_quantizer": s_quantizer})
    queries, keys, values = operands(call, q, k, v)
    scores = [scores_of(call, n, qs, ks) for n, (qs, ks) in enumerate(zip(queries, keys, strict=True))]
    weights = cast_values([s.p * s.keep for s in scores], s_quantizer)
    out = np.zeros(spec.out_shape)
    lse = np.full(spec.lse_shape, -np.inf)
    top = np.full(q.shape[-2], -np.inf)
    for n, (s, w, vs) in enumerate(zip(scores, weights, values, strict=True)):
        out[call.query.tokens[n]] = np.einsum("hij,jhd->ihd", w, vs)
        _lse_rows(call, lse, n)[:] = s.lse
        top = np.maximum(top, s.z.max((1, 2), initial=-np.inf))
    dtype, device = out_dtype or q.dtype, q.device
    made: torch.Tensor | Quantized
    if out_quantizer is not None:
        made = casts.quantized(out.astype(np.float32), out.shape, out_quantizer, "row", dtype, device)
    else:
        made = host.result("out", out, dtype, device)
    max_logit = host.result("max_logit", top, torch.float32, device) if with_max_logit else None
    if inference:
        return AttentionForward(made, None, max_logit, None)
    saved = Saved("reference.attention_fwd", ATTENTION_FORMAT)
    return AttentionForward(made, host.result("lse", lse, torch.float32, device), max_logit, saved)


@attention_backward
def attention_bwd(
    dout: torch.Tensor | Quantized,
    q: torch.Tensor | Quantized,
    k: torch.Tensor | Quantized,
    v: torch.Tensor | Quantized,
    out: torch.Tensor | Quantized,
    lse: torch.Tensor,
    saved: Saved,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    s_quantizer: Quantizer | None,
    dp_quantizer: Quantizer | None,
    dqkv_quantizer: Quantizer | None,
    with_dbias: bool,
) -> AttentionBackward:
    """Recomputes the scores from q and k, so that `out` and `lse`, which are rounded, are not read."""
    quantizers = {"s_quantizer": s_quantizer, "dp_quantizer": dp_quantizer, "dqkv_quantizer": dqkv_quantizer}
    call = call_of(q, k, spec, tensors, quantizers)
    queries, keys, values = operands(call, q, k, v)
    grads = casts.values_of(dout, "dout")
    scores = [scores_of(call, n, qs, ks) for n, (qs, ks) in enumerate(zip(queries, keys, strict=True))]
    rows = [_seeing(s, part) for s, part in zip(scores, [grads[index] for index in call.query.tokens], strict=True)]
    weights = cast_values([s.p * s.keep for s in scores], s_quantizer)
    dz = [_score_gradient(s, do, vs) for s, do, vs in zip(scores, rows, values, strict=True)]
    dproduct = cast_values([_through_bias_and_cap(call, s, d) for s, d in zip(scores, dz, strict=True)], dp_quantizer)

    # Per query head first; heads of one group then add up to the group's gradient.
    dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
    groups, share = k.shape[-2], call.heads // max(k.shape[-2], 1)
    for n, (qs, ks, do) in enumerate(zip(queries, keys, rows, strict=True)):
        dq[call.query.tokens[n]] = spec.scale * np.einsum("hij,jhd->ihd", dproduct[n], ks)
        dk_heads = spec.scale * np.einsum("hij,ihd->jhd", dproduct[n], qs)
        dv_heads = np.einsum("hij,ihd->jhd", weights[n], do)
        for total, heads in ((dk, dk_heads), (dv, dv_heads)):
            total[call.keys.tokens[n]] = heads.reshape(len(ks), groups, share, heads.shape[-1]).sum(2)
    device = q.device
    dbias = None
    if with_dbias and tensors.bias is not None:
        dbias = host.result("dbias", _bias_gradient(call, scores, dz), tensors.bias.dtype, device)
    doffset = None
    if spec.softmax_type == "learnable":
        doffset = host.result("dsoftmax_offset", _offset_gradient(call, scores, rows, values), torch.float32, device)
    results = _packed([dq, dk, dv], [q, k, v], spec.packing, dqkv_quantizer)
    return AttentionBackward(results[0], results[1], results[2], dbias, doffset)


def _seeing(s: Scores, do: F64) -> F64:
    """The output's gradient (rows, h, d), 0 in rows that see nothing: it may be NaN there, and 0 times NaN would
    spread."""
    blind = (s.z == -np.inf).all(-1).T
    return np.where(blind[..., None], 0.0, do)


def _probability_gradient(s: Scores, do: F64, vs: F64) -> F64:
    """Of p: through dropout from o = sum_j drop(p_ij) v_j."""
    grad: F64 = s.keep * np.einsum("ihd,jhd->hij", do, vs)
    return grad


def _score_gradient(s: Scores, do: F64, vs: F64) -> F64:
    """Of z: p_ij (dp_ij - sum_j p_ij dp_ij); the offset of the denominator does not depend on z."""
    dp = _probability_gradient(s, do, vs)
    return s.p * (dp - (s.p * dp).sum(-1, keepdims=True))


def _through_bias_and_cap(call: Call, s: Scores, dz: F64) -> F64:
    """Of c q.k (plus c bias for pre_scale): through the cap, tanh' = 1 - tanh^2."""
    return dz * (1 - s.capped_tanh**2) if call.spec.softcap > 0 else dz


def _bias_gradient(call: Call, scores: list[Scores], dz: list[F64]) -> F64:
    assert call.bias is not None  # whose gradient is asked for
    total = np.zeros(call.bias.shape)
    for n, (s, grad) in enumerate(zip(scores, dz, strict=True)):
        if call.spec.bias_type == "pre_scale":
            grad = call.spec.scale * _through_bias_and_cap(call, s, grad)
        if call.bias.shape[1] == 1:
            grad = grad.sum(0, keepdims=True)
        total[n if call.bias.shape[0] > 1 else 0, :, : grad.shape[1], : grad.shape[2]] += grad
    return total


def _offset_gradient(call: Call, scores: list[Scores], rows: list[F64], values: list[F64]) -> F64:
    """The offset's own share of each row is p_0 = exp(offset) / denominator: d = -p_0 sum_j p_ij dp_ij, over rows."""
    total = np.zeros(call.heads)
    for s, do, vs in zip(scores, rows, values, strict=True):
        total -= (s.p_offset * (s.p * _probability_gradient(s, do, vs)).sum(-1)).sum(-1)
    return total


#: packing -> (how many tensors are packed, which axis from the end of the packed tensor they are stacked on).
_STACKING = {"3hd": (3, -3), "h3d": (3, -2), "2hd": (2, -3), "h2d": (2, -2)}


def _packed(
    grads: list[F64], operands: list[torch.Tensor | Quantized], packing: str | None, quantizer: Quantizer | None
) -> list[Any]:
    """Results in the memory layout that `packing` promises: views of one tensor for those that are packed."""
    device = operands[0].device
    count, axis = _STACKING[packing] if packing is not None else (0, 0)
    first = 3 - count  # the packed ones come last: all three, or k and v
    if quantizer is None:
        rounded = [host.rounded(g, x.dtype) for g, x in zip(grads, operands, strict=True)]
        alone = [
            host.write_tensor(role, x, device) for role, x in zip(("dq", "dk", "dv"), rounded[:first], strict=False)
        ]
        return alone + (_stacked(rounded[first:], axis, device) if count else [])
    made = [
        casts.quantized(
            g.astype(np.float32), g.shape, quantizer, "row", x.dtype, device, intermediate=count > 0 and place >= first
        )
        for place, (g, x) in enumerate(zip(grads, operands, strict=True))
    ]
    if count:
        codes = [record.row_data for record in made[first:] if record.row_data is not None]
        for record, data in zip(made[first:], _stacked(codes, axis, device), strict=True):
            assert record.row_scale_inv is not None
            record.row_data = data
            record.row_scale_inv = host.write_tensor("row_scale_inv", record.row_scale_inv, device)
    return made


def _stacked(parts: list[torch.Tensor], axis: int, device: torch.device) -> list[torch.Tensor]:
    whole = host.write_tensor("dqkv" if len(parts) == 3 else "dkv", torch.stack(parts, axis), device)
    return list(whole.unbind(axis))
