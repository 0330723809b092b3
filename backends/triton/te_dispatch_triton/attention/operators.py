# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention forward and backward. Contract: `te_dispatch.ops.attention`.

Nothing is read back from the device: `max_seqlen_q` and `max_seqlen_kv` are not needed, because blocks of a packed
tensor find their sequences by themselves. Dropout is documented at `kernels.attention.row_keys` and `kept`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_dispatch.backend_kit import attention as kit
from te_dispatch.backend_kit.call_plans import TENSOR
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_triton.attention.plans import Plan, plan
from te_dispatch_triton.kernels import attention_backward, attention_bias, attention_forward
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed

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


def _planned(given: Sequence[torch.Tensor], spec: AttentionSpec) -> tuple[Sequence[torch.Tensor], Plan]:
    """q, k and v as kernels read them, copied where they lie otherwise, and the plan."""
    q, k, v = given
    read = _rows(q), *((_rows(k), _rows(v)) if spec.page_table is None else (dense(k), dense(v)))
    copied = any(x is not y for x, y in zip(given, read, strict=True))
    return read, plan(spec.of(*read) if copied else spec)


@replayed(q=TENSOR, k=TENSOR, v=TENSOR)
@kit.attention_forward
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
    """One launch, and one more for `max_logit`. Always deterministic; `packing` is read through strides."""
    device = q.device
    (q, k, v), p = _planned((q, k, v), spec)
    form = p.form("forward", p.size)
    out = empty("out", spec.out_shape, out_dtype or q.dtype, device)
    lse = None if inference else empty("lse", spec.lse_shape, torch.float32, device)
    programs, heads = form.grid[0], p.of.heads
    partial = max_logit = None
    if with_max_logit:
        max_logit = empty("max_logit", (heads,), torch.float32, device)
        partial = empty("workspace", (max(programs, 1),), torch.float32, device)
    if spec.layout == "thd" and spec.batch == 0:
        _clear(out, lse, max_logit)
    elif programs:
        _FORWARD(
            device, form.grid,
            (
                q, k, v, out, lse, partial, *_lengths(p, tensors), _dense(tensors.page_table),
                _hidden(tensors.attn_mask), _dense(tensors.bias), _dense(tensors.alibi_slopes),
                _dense(tensors.softmax_offset), _dense(tensors.rng_state) if p.dropout else None, *form.tail,
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


def _lengths(p: Plan, t: AttentionTensors) -> tuple[torch.Tensor | None, ...]:
    """Cumulative lengths of queries and keys, and where sequences of thd tensors start."""
    cu_q = _dense(t.cu_seqlens_q) if p.padding[0] else None
    cu_kv = _dense(t.cu_seqlens_kv) if p.padding[1] else None
    if p.layout != "thd":
        return cu_q, cu_kv, None, None
    starts_q = cu_q if t.cu_seqlens_q_padded is None else dense(t.cu_seqlens_q_padded)
    return cu_q, cu_kv, starts_q, cu_kv if t.cu_seqlens_kv_padded is None else dense(t.cu_seqlens_kv_padded)


def _hidden(attn_mask: torch.Tensor | None) -> torch.Tensor | None:
    """attn_mask as bytes."""
    return None if attn_mask is None else attn_mask.view(torch.uint8)


@replayed(dout=TENSOR, q=TENSOR, k=TENSOR, v=TENSOR, out=TENSOR)
@kit.attention_backward
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
    """Two launches; one more for `dbias`, one for `dsoftmax_offset`. Always deterministic."""
    device = q.device
    dq, dk, dv = kit.empty_gradients(spec, q.dtype, empty)
    (q, k, v), p = _planned((q, k, v), spec)
    bias = _dense(tensors.bias)
    dbias = empty("dbias", tuple(bias.shape), bias.dtype, device) if with_dbias and bias is not None else None
    dsink = empty("dsoftmax_offset", (p.of.heads,), torch.float32, device) if p.sink == "learnable" else None
    if spec.layout == "thd" and spec.batch == 0:
        for x in (dq, dk, dv, dbias, dsink):
            if x is not None:
                x.zero_()
        return AttentionBackward(dq, dk, dv, dbias, dsink)
    common = (*_lengths(p, tensors), _hidden(tensors.attn_mask), bias)
    rng = _dense(tensors.rng_state) if p.dropout else None
    delta = empty("workspace", spec.lse_shape, torch.float32, device)
    call = _Call(p, q, k, v, dense(out), dense(dout), dense(lse), delta, common, _dense(tensors.alibi_slopes), rng)
    partial, lines = call.queries(dq, dsink is not None, _dense(tensors.softmax_offset))
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
