# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention on cuDNN, 16-bit operands. Contract: `te_dispatch.ops.attention`.

A forward whose backward will follow builds both graphs, so that a backward never finds that cuDNN has no engine for it.
What cuDNN refuses is remembered by `Setting`, in its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import attention as checks
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention import calls, repeated, run
from te_dispatch_cuda.attention.rows import batch_of, dense_lengths
from te_dispatch_cuda.attention.setting import ALIGNMENT
from te_dispatch_cuda.memory import copied, dense, dense_aligned, empty, stream_of

FORMAT = "cuda.cudnn/1"
_NAME = {False: "cuda.cudnn_attention", True: "cuda.cudnn_attention_deterministic"}
#: Addresses have these bits clear.
_LOW = ALIGNMENT - 1


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
    """One graph run; where sequences have lengths of their own, a kernel before it and one behind it."""
    checks.attention(
        q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, page_table, bias, bias_type, alibi_slopes, softmax_scale,
        softmax_type, softmax_offset, softcap, dropout_p, rng_state,
    )  # fmt: skip
    checks.forward(inference, page_table, s_quantizer, out_quantizer, out_dtype, q.device)
    key = (
        q.get_device(), q.dtype, layout, packing, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), mask,
        window, 0 if layout != "thd" else cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_kv,  # type: ignore[union-attr]
        None if page_table is None else page_table.shape, None if bias is None else bias.shape,
        None if bias is None else bias.dtype, bias_type == "alibi", softmax_scale, softmax_type, softcap,
        deterministic,
    )  # fmt: skip
    call = calls.FORWARDS.get((key, inference, with_max_logit)) or calls.forward(key, inference, with_max_logit)
    if call.refused is not None:
        raise Declined(call.refused)
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if call.copied or (addresses[0] | addresses[1] | addresses[2]) & _LOW:
        return attention_fwd(
            copied(q), copied(k), copied(v), layout=layout, packing=packing, mask=mask, window=window,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded, max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv,
            page_table=page_table, bias=bias, bias_type=bias_type, softmax_scale=softmax_scale,
            softmax_type=softmax_type, softmax_offset=softmax_offset, softcap=softcap,
            deterministic=deterministic, inference=inference, with_max_logit=with_max_logit,
            out_dtype=out_dtype,
        )  # fmt: skip
    device, index = q.device, key[0]
    stream = stream_of(index)
    out = empty("out", call.out, q.dtype, device)
    lse = None if inference else empty("lse", call.lse, torch.float32, device)
    largest = empty("max_logit", (call.heads,), torch.float32, device) if with_max_logit else None
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    table = page_table if page_table is None else dense(page_table)
    bias = None if bias is None else dense_aligned(bias, ALIGNMENT)
    sink = None if softmax_offset is None else dense(softmax_offset)
    lengths = dense_lengths(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    run.forward(
        call, index, stream, workspace.data_ptr(), addresses, out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        0 if bias is None else bias.data_ptr(), 0 if sink is None else sink.data_ptr(),
        0 if table is None else table.data_ptr(), 0 if largest is None else largest.data_ptr(),
        batch_of(call.setting, *lengths)
        if call.uneven
        else None,
    )  # fmt: skip
    return AttentionForward(out, lse, largest, None if inference else Saved(_NAME[deterministic], FORMAT))


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
    """The graph that the forward built. Gradients are written packed where `packing` says so."""
    checks.attention(
        q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, None, bias, bias_type, alibi_slopes, softmax_scale,
        softmax_type, softmax_offset, softcap, dropout_p, rng_state,
    )  # fmt: skip
    checks.backward(dout, q, v, out, lse, layout, bias, with_dbias, s_quantizer, dp_quantizer, dqkv_quantizer)
    key = (
        q.get_device(), q.dtype, layout, packing, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), mask,
        window, 0 if layout != "thd" else cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_kv,  # type: ignore[union-attr]
        None, None if bias is None else bias.shape, None if bias is None else bias.dtype, bias_type == "alibi",
        softmax_scale, softmax_type, softcap, deterministic,
    )  # fmt: skip
    call = calls.BACKWARDS.get((key, with_dbias)) or calls.backward(key, with_dbias)
    if call.refused is not None:
        raise RuntimeError(f"{_NAME[deterministic]}: {call.refused}; the forward of this call was another one")
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if call.copied or (addresses[0] | addresses[1] | addresses[2]) & _LOW:
        return attention_bwd(
            dout, copied(q), copied(k), copied(v), out, lse, saved, layout=layout, packing=packing, mask=mask,
            window=window, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded, cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            max_seqlen_q=max_seqlen_q, max_seqlen_kv=max_seqlen_kv, bias=bias, bias_type=bias_type,
            softmax_scale=softmax_scale, softmax_type=softmax_type, softmax_offset=softmax_offset, softcap=softcap,
            deterministic=deterministic, with_dbias=with_dbias,
        )  # fmt: skip
    device, index = q.device, key[0]
    stream = stream_of(index)
    dout, out, lse = dense_aligned(dout, ALIGNMENT), dense_aligned(out, ALIGNMENT), dense(lse)
    dq, dk, dv = call.gradients(device)
    bias = None if bias is None else dense_aligned(bias, ALIGNMENT)
    dbias = made_dbias = None
    if with_dbias and bias is not None:
        dbias = made_dbias = empty("dbias", tuple(bias.shape), bias.dtype, device)
        if bias.dtype is not q.dtype:
            made_dbias = empty("workspace", tuple(bias.shape), q.dtype, device)
    sink = None if softmax_offset is None else dense(softmax_offset)
    dsink = empty("dsoftmax_offset", (call.heads,), torch.float32, device) if sink is not None else None
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    lengths = dense_lengths(cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded)
    run.backward(
        call, index, stream, workspace.data_ptr(), addresses, out.data_ptr(), lse.data_ptr(), dout.data_ptr(),
        (dq.data_ptr(), dk.data_ptr(), dv.data_ptr()), 0 if bias is None else bias.data_ptr(),
        0 if made_dbias is None else made_dbias.data_ptr(),
        0 if sink is None else sink.data_ptr(), 0 if dsink is None else dsink.data_ptr(),
        batch_of(call.setting, *lengths)
        if call.uneven
        else None,
    )  # fmt: skip
    if dbias is not None and made_dbias is not dbias:
        dbias.copy_(made_dbias)  # type: ignore[arg-type]
    return AttentionBackward(dq, dk, dv, dbias, dsink)


def plan_fwd(varying: tuple[str, ...], **given: Any) -> Callable[..., AttentionForward] | None:
    saved = Saved(_NAME[given["deterministic"]], FORMAT)
    return repeated.forward(attention_fwd, saved, varying, given)


def plan_bwd(varying: tuple[str, ...], **given: Any) -> Callable[..., AttentionBackward] | None:
    return repeated.backward(attention_bwd, varying, given)
