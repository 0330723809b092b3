# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention forward and backward. Contract: `te_dispatch.ops.attention`.

Nothing is read back from the device: `max_seqlen_q` and `max_seqlen_kv` are not needed, because blocks of a packed
tensor find their sequences by themselves. Dropout is documented at `kernels.attention.row_keys` and `kept`.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import attention as checks
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_triton.argument_facts import TENSOR
from te_dispatch_triton.attention.setting import Plan, packed, plan
from te_dispatch_triton.kernels import attention_backward, attention_bias, attention_forward
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.prepared import prepared

NAME, FORMAT = "triton.flash_attention", "triton.flash_attention/1"
_FORWARD = Kernel(attention_forward.forward)
_LARGEST = Kernel(attention_forward.largest_logits)
_QUERIES = Kernel(attention_backward.queries)
_KEYS = Kernel(attention_backward.keys)
_OFFSETS = Kernel(attention_backward.offset_sums)
_BIAS = Kernel(attention_bias.bias_gradient)
#: Of reductions of one number per program.
_SUM = 1024


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x, its features beside each other."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else dense(x)


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else dense(x)


def _hidden(attn_mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, layout: str) -> torch.Tensor | None:
    """attn_mask over (b, h, s_q, s_kv), as bytes."""
    if attn_mask is None:
        return None
    sequence = 0 if layout == "sbhd" else 1
    return attn_mask.expand(q.shape[1 - sequence], q.shape[2], q.shape[sequence], k.shape[sequence]).view(torch.uint8)


def _plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, packing: str | None, mask: str, window: Any,
    cu_seqlens_q: Any, cu_seqlens_kv: Any, longest: int | None, table: Any, bias: Any, hidden: Any, bias_type: str,
    slopes: Any, scale: float | None, softmax_type: str, softcap: float, dropout_p: float,
) -> Plan:  # fmt: skip
    return plan((
        q.device, q.dtype, layout, packing, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), mask, window,
        cu_seqlens_q.shape[0] - 1 if layout == "thd" else 0, longest, None if table is None else table.shape,
        cu_seqlens_kv is not None, None if bias is None else bias.shape, None if hidden is None else hidden.shape,
        () if hidden is None else hidden.stride(), bias_type, 0 if slopes is None else slopes.ndim, scale,
        softmax_type, softcap, dropout_p,
    ))  # fmt: skip


@prepared(q=TENSOR, k=TENSOR, v=TENSOR)
def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    layout: str = "sbhd",
    packing: str | None = None,
    mask: str = "causal",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    page_table: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_type: str = "none",
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    inference: bool = False,
    with_max_logit: bool = False,
    s_quantizer: Quantizer | None = None,
    out_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
) -> AttentionForward:
    """One launch, and one more for `max_logit`. Always deterministic; `packing` is read through strides."""
    checks.attention(
        q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, page_table, bias, bias_type, alibi_slopes, softmax_scale,
        softmax_type, softmax_offset, softcap, dropout_p, rng_state,
    )  # fmt: skip
    checks.forward(inference, page_table, s_quantizer, out_quantizer, out_dtype, q.device)
    device = q.device
    q, k, v = (_rows(q), _rows(k), _rows(v)) if page_table is None else (_rows(q), dense(k), dense(v))
    hidden, bias, table = _hidden(attn_mask, q, k, layout), _dense(bias), _dense(page_table)
    p = _plan(
        q, k, v, layout, None, mask, window, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, table, bias, hidden, bias_type,
        alibi_slopes, softmax_scale, softmax_type, softcap, dropout_p,
    )  # fmt: skip
    form = p.form("forward", p.size)
    out = empty("out", p.out, out_dtype or q.dtype, device)
    lse = None if inference else empty("lse", p.lse, torch.float32, device)
    programs, heads = form.grid[0], p.of.heads
    partial = max_logit = None
    if with_max_logit:
        max_logit = empty("max_logit", (heads,), torch.float32, device)
        partial = empty("workspace", (max(programs, 1),), torch.float32, device)
    if layout == "thd" and p.of.batch == 0:
        _clear(out, lse, max_logit)
    elif programs:
        cu_q, cu_kv = _dense(cu_seqlens_q) if p.padding[0] else None, _dense(cu_seqlens_kv) if p.padding[1] else None
        starts_q, starts_kv = _starts(layout, cu_q, cu_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
        _FORWARD(
            device, form.grid,
            (
                q, k, v, out, lse, partial, cu_q, cu_kv, starts_q, starts_kv, table, hidden, bias, _dense(alibi_slopes),
                _dense(softmax_offset), _dense(rng_state) if p.dropout else None, *form.tail,
            ),
            form.constants, form.config,
        )  # fmt: skip
        if max_logit is not None:
            _LARGEST(device, (heads, 1, 1), (partial, max_logit, programs // heads), (_SUM,), Config())
    elif max_logit is not None:
        max_logit.fill_(float("-inf"))
    return AttentionForward(out, lse, max_logit, None if inference else Saved(NAME, FORMAT))


def _clear(out: torch.Tensor, lse: torch.Tensor | None, max_logit: torch.Tensor | None) -> None:
    """A thd tensor without sequences: its rows belong to none."""
    out.zero_()
    for x in (lse, max_logit):
        if x is not None:
            x.fill_(float("-inf"))


def _starts(layout: str, cu_q: Any, cu_kv: Any, padded_q: Any, padded_kv: Any) -> tuple[Any, Any]:
    """Where sequences of thd tensors start."""
    if layout != "thd":
        return None, None
    return cu_q if padded_q is None else dense(padded_q), cu_kv if padded_kv is None else dense(padded_kv)


def _gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: str | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for dq, dk and dv: views of one tensor where the operands are."""
    if packing is None:
        return tuple(empty(name, tuple(x.shape), x.dtype, x.device) for name, x in zip(("dq", "dk", "dv"), (q, k, v)))  # type: ignore[return-value]
    first = 0 if "3" in packing else 1
    whole, axis = packed(tuple((q, k)[first].shape), packing)
    alone = (empty("dq", tuple(q.shape), q.dtype, q.device),) if first else ()
    return (*alone, *empty("dk" if first else "dq", whole, q.dtype, q.device).unbind(axis))  # type: ignore[return-value]


@prepared(dout=TENSOR, q=TENSOR, k=TENSOR, v=TENSOR, out=TENSOR)
def attention_bwd(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    saved: Saved,
    *,
    layout: str = "sbhd",
    packing: str | None = None,
    mask: str = "causal",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    bias: torch.Tensor | None = None,
    bias_type: str = "none",
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    s_quantizer: Quantizer | None = None,
    dp_quantizer: Quantizer | None = None,
    dqkv_quantizer: Quantizer | None = None,
    with_dbias: bool = False,
) -> AttentionBackward:
    """Two launches; one more for `dbias`, one for `dsoftmax_offset`. Always deterministic."""
    checks.attention(
        q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, None, bias, bias_type, alibi_slopes, softmax_scale,
        softmax_type, softmax_offset, softcap, dropout_p, rng_state,
    )  # fmt: skip
    checks.backward(dout, q, v, out, lse, layout, bias, with_dbias, s_quantizer, dp_quantizer, dqkv_quantizer)
    device = q.device
    dq, dk, dv = _gradients(q, k, v, packing)
    q, k, v = _rows(q), _rows(k), _rows(v)
    hidden, bias = _hidden(attn_mask, q, k, layout), _dense(bias)
    p = _plan(
        q, k, v, layout, packing, mask, window, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, None, bias, hidden,
        bias_type, alibi_slopes, softmax_scale, softmax_type, softcap, dropout_p,
    )  # fmt: skip
    dbias = empty("dbias", tuple(bias.shape), bias.dtype, device) if with_dbias and bias is not None else None
    dsink = empty("dsoftmax_offset", (p.of.heads,), torch.float32, device) if p.sink == "learnable" else None
    if layout == "thd" and p.of.batch == 0:
        for x in (dq, dk, dv, dbias, dsink):
            if x is not None:
                x.zero_()
        return AttentionBackward(dq, dk, dv, dbias, dsink)
    cu_q, cu_kv = (_dense(cu_seqlens_q), _dense(cu_seqlens_kv)) if p.padding[0] else (None, None)
    common = (cu_q, cu_kv, *_starts(layout, cu_q, cu_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded), hidden, bias)
    rng = _dense(rng_state) if p.dropout else None
    delta = empty("workspace", p.lse, torch.float32, device)
    call = _Call(p, q, k, v, dense(out), dense(dout), dense(lse), delta, common, _dense(alibi_slopes), rng)
    partial, lines = call.queries(dq, dsink is not None, _dense(softmax_offset))
    if dsink is not None and p.of.heads:
        _OFFSETS(device, (p.of.heads, 1, 1), (partial, dsink, lines), (_SUM,), Config())
    call.keys(dk, dv)
    if dbias is not None:
        call.bias(dbias)
    return AttentionBackward(dq, dk, dv, dbias, dsink)


class _Call:
    """A backward's launches. common: lengths of queries and keys, where their sequences start, mask, bias."""

    __slots__ = ("p", "q", "k", "v", "out", "dout", "lse", "delta", "common", "slopes", "rng", "bytes_each")

    def __init__(
        self, p: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, dout: torch.Tensor,
        lse: torch.Tensor, delta: torch.Tensor, common: tuple[Any, ...], slopes: Any, rng: Any,
    ) -> None:  # fmt: skip
        self.p, self.q, self.k, self.v, self.out, self.dout = p, q, k, v, out, dout
        self.lse, self.delta, self.common, self.slopes, self.rng = lse, delta, common, slopes, rng
        self.bytes_each = max(x.itemsize for x in (q, out, dout))

    def queries(self, dq: torch.Tensor, with_sink: bool, sink: Any) -> tuple[torch.Tensor | None, int]:
        """dq and delta; partial gradients of the softmax offset, and how many of each head."""
        device, form = self.q.device, self.p.form("queries", self.bytes_each)
        programs = form.grid[0]
        partial = empty("workspace", (max(programs, 1),), torch.float32, device) if with_sink else None
        if programs:
            _QUERIES(
                device, form.grid,
                (
                    self.q, self.k, self.v, self.out, self.dout, self.lse, dq, self.delta, partial, *self.common,
                    self.slopes, sink, self.rng, *form.tail,
                ),
                form.constants, form.config,
            )  # fmt: skip
        return partial, programs // max(self.p.of.heads, 1)

    def keys(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """dk and dv, behind `queries`."""
        form = self.p.form("keys", self.bytes_each)
        if form.grid[0]:
            _KEYS(
                self.q.device, form.grid,
                (
                    self.q, self.k, self.v, self.dout, self.lse, self.delta, dk, dv, *self.common, self.slopes,
                    self.rng, *form.tail,
                ),
                form.constants, form.config,
            )  # fmt: skip

    def bias(self, dbias: torch.Tensor) -> None:
        """dbias, behind `queries`."""
        form = self.p.form("bias_gradient", self.bytes_each)
        if form.grid[0]:
            _BIAS(
                self.q.device, form.grid,
                (self.q, self.k, self.v, self.dout, self.lse, self.delta, dbias, *self.common, self.rng, *form.tail),
                form.constants, form.config,
            )  # fmt: skip
