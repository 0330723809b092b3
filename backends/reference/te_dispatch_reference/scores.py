# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention's score matrices and probabilities, and its arguments on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch_reference import casts, host
from te_dispatch_reference.host import F64, Array
from te_dispatch_reference.philox import keep_scale
from te_dispatch_reference.sequences import Side, dense_side, from_pages, hidden_mask, packed_side, paged_side


class Call(NamedTuple):
    """A checked call, what the formulas need of its tensors on the host. slopes: (1 or b, h), None without ALiBi."""

    spec: AttentionSpec
    query: Side
    keys: Side
    heads: int
    hidden: Array | None
    page_table: Array | None
    bias: F64 | None
    slopes: F64 | None
    softmax_offset: F64 | None
    rng: tuple[int, int]


class Scores(NamedTuple):
    """One sequence's: z and p (h, rows, columns), rows of the memory layout, invalid ones masked.

    Attributes:
        z: logits, -Inf where masked.
        capped_tanh: tanh(z / softcap) before the bias; zeros without a cap.
        p: probabilities, 0 where masked.
        p_offset: (h, rows), the share of the softmax offset; 0 for vanilla and for fully masked rows.
        lse: (h, rows), -Inf for fully masked rows.
        keep: dropout's factors, all 1 without dropout.
    """

    z: F64
    capped_tanh: F64
    p: F64
    p_offset: F64
    lse: F64
    keep: F64


def alibi_slopes_of(heads: int) -> F64:
    """The paper's: a geometric sequence from 2^(-8/n) for n heads, n a power of two; for other counts those of the
    next smaller power, then every other one of the next larger power (Press et al. 2022, appendix). Float32 values.
    """
    power = 1 << max(heads.bit_length() - 1, 0)
    slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    more = 2.0 ** (-8.0 * np.arange(1, 2 * power + 1, 2) / (2 * power))
    return np.concatenate([slopes, more])[:heads].astype(np.float32).astype(np.float64)


def _sides(q: Any, k: Any, spec: AttentionSpec, t: AttentionTensors) -> tuple[Side, Side]:
    padding = spec.mask.startswith("padding")
    if spec.layout == "thd":
        query = packed_side("q", q, t.cu_seqlens_q, t.cu_seqlens_q_padded, spec.max_seqlen_q)
    else:
        query = dense_side("q", q, spec.layout, padding, t.cu_seqlens_q)
    if t.page_table is not None:
        keys = paged_side(k, t.page_table, t.cu_seqlens_kv)
    elif spec.layout == "thd":
        keys = packed_side("kv", k, t.cu_seqlens_kv, t.cu_seqlens_kv_padded, spec.max_seqlen_kv)
    else:
        keys = dense_side("kv", k, spec.layout, padding, t.cu_seqlens_kv)
    if len(keys.length) != len(query.length):
        name = "cu_seqlens_kv" if t.page_table is None else "page_table"
        raise ValueError(f"{name}: got {len(keys.length)} sequences, expected q's {len(query.length)}")
    return query, keys


def _on_host(x: torch.Tensor | None) -> F64 | None:
    return None if x is None else host.double(x)


def call_of(
    q: Any, k: Any, spec: AttentionSpec, tensors: AttentionTensors, quantizers: dict[str, Quantizer | None]
) -> Call:
    """Bring what the formulas need to the host, of arguments that `te_dispatch.ops.checks` has passed."""
    query, keys = _sides(q, k, spec, tensors)
    heads = q.shape[-2]
    hidden = slopes = None
    if tensors.attn_mask is not None:
        hidden = np.broadcast_to(host.array(tensors.attn_mask), (len(query.length), heads, query.extent, keys.extent))
    if spec.bias_type == "alibi":
        given = _on_host(tensors.alibi_slopes)
        slopes = alibi_slopes_of(heads)[None] if given is None else given.reshape(-1, heads)
    rng = (0, 0)
    if spec.dropout_p > 0:
        assert tensors.rng_state is not None  # checked
        rng = (int(tensors.rng_state[0]), int(tensors.rng_state[1]))
    for name, quantizer in quantizers.items():
        if quantizer is not None and quantizer.scaling != "tensor":
            raise Declined(f"{name} has {quantizer.scaling} scaling, tensor is served")
    return Call(
        spec=spec,
        query=query,
        keys=keys,
        heads=heads,
        hidden=hidden,
        page_table=None if tensors.page_table is None else host.array(tensors.page_table),
        bias=_on_host(tensors.bias),
        slopes=slopes,
        softmax_offset=_on_host(tensors.softmax_offset),
        rng=rng,
    )


def valid(parts: list[F64], side: Side) -> list[F64]:
    """Parts with zeros past each sequence's length: what lies there may be NaN, and 0 times NaN would spread."""
    return [
        np.where(np.arange(len(part))[:, None, None] < n, part, 0.0) for part, n in zip(parts, side.length, strict=True)
    ]


def operands(call: Call, q: Any, k: Any, v: Any) -> tuple[list[F64], list[F64], list[F64]]:
    """Per sequence (tokens, h, d): values, with keys and values repeated to one per query head."""
    everything = [casts.values_of(x, name) for name, x in (("q", q), ("k", k), ("v", v))]
    queries = valid([everything[0][index] for index in call.query.tokens], call.query)
    shared: list[list[F64]] = []
    for x in everything[1:]:
        if call.page_table is not None:
            parts = from_pages(x, call.page_table, call.keys.length)
        else:
            parts = [x[index] for index in call.keys.tokens]
        shared.append([np.repeat(part, call.heads // part.shape[1], axis=1) for part in valid(parts, call.keys)])
    return queries, shared[0], shared[1]


def scores_of(call: Call, n: int, q: F64, k: F64) -> Scores:
    """Sequence n's scores: the operator's formulas, line by line."""
    rows, columns = len(q), len(k)
    hidden, offset = hidden_mask(call.spec, rows, columns, call.query.length[n], call.keys.length[n])
    masked = np.broadcast_to(hidden, (call.heads, rows, columns))
    if call.hidden is not None:
        masked = masked | call.hidden[n, :, :rows, :columns]
    bias = None
    if call.bias is not None:
        bias = call.bias[n if call.bias.shape[0] > 1 else 0, :, :rows, :columns]
    elif call.slopes is not None:
        distance = np.arange(columns)[None, :] - np.arange(rows)[:, None] - offset
        bias = call.slopes[n if len(call.slopes) > 1 else 0][:, None, None] * distance
    with np.errstate(all="ignore"):
        z = call.spec.scale * np.einsum("ihd,jhd->hij", q, k)
        if bias is not None and call.spec.bias_type == "pre_scale":
            z = z + call.spec.scale * bias
        capped = np.zeros_like(z)
        if call.spec.softcap > 0:
            capped = np.tanh(z / call.spec.softcap)
            z = call.spec.softcap * capped
        if bias is not None and call.spec.bias_type != "pre_scale":
            z = z + bias
        z = np.where(masked, -np.inf, z)
        p, p_offset, lse = _softmax(call, z)
    keep = np.ones(z.shape)
    if call.spec.dropout_p > 0:
        heads, i, j = np.indices(z.shape)
        index = ((n * call.heads + heads) * call.query.extent + i) * call.keys.extent + j
        keep = keep_scale(call.spec.dropout_p, *call.rng, index)
    return Scores(z, capped, p, p_offset, lse, keep)


def _softmax(call: Call, z: F64) -> tuple[F64, F64, F64]:
    """p, the offset's share, and the log of the denominator."""
    offset = np.full((call.heads, 1, 1), -np.inf)  # ln s
    if call.spec.softmax_type == "off-by-one":
        offset[:] = 0.0
    elif call.softmax_offset is not None:
        offset[:, 0, 0] = call.softmax_offset
    top = z.max(-1, keepdims=True, initial=-np.inf)
    empty = top == -np.inf
    # Any shift gives the same quotient; the largest exponent keeps exp from overflowing.
    shift = np.where(empty, 0.0, np.maximum(top, offset))
    weights = np.exp(z - shift)
    total = weights.sum(-1, keepdims=True) + np.exp(offset - shift)
    safe = np.where(empty, 1.0, total)
    lse = np.where(empty, -np.inf, shift + np.log(safe))
    p_offset = np.where(empty, 0.0, np.exp(offset - shift) / safe)
    return np.where(empty, 0.0, weights / safe), p_offset[..., 0], lse[..., 0]


def cast_values(parts: list[F64], quantizer: Quantizer | None) -> list[F64]:
    """The values that a per-tensor cast of all parts together leaves (of their fp32 roundings)."""
    if quantizer is None or not parts:
        return parts
    flat = np.concatenate([part.reshape(-1) for part in parts]).astype(np.float32)
    cpu = torch.device("cpu")
    record = casts.quantized(flat, flat.shape, quantizer, "row", torch.float32, cpu, intermediate=True)
    values = casts.matrix(record, prefer_column=False).reshape(-1)
    ends = np.cumsum([part.size for part in parts])[:-1]
    return [v.reshape(part.shape) for v, part in zip(np.split(values, ends), parts, strict=True)]
