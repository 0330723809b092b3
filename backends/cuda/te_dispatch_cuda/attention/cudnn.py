# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention on cuDNN, 16-bit operands. Contract: `te_dispatch.ops.attention`.

A forward whose backward will follow builds both graphs, so that a backward never finds that cuDNN has no engine for it.
What cuDNN refuses is kept under the `AttentionSpec`, in its own words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward, empty_gradients
from te_dispatch.backend_kit.flash import ALIGNMENT
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention import calls, repeated, run
from te_dispatch_cuda.attention.assemble import Call
from te_dispatch_cuda.attention.rows import batch_of, dense_lengths
from te_dispatch_cuda.memory import address, copied, dense, dense_aligned, empty, stream_of

FORMAT = "cuda.cudnn/1"
_NAME = {False: "cuda.cudnn_attention", True: "cuda.cudnn_attention_deterministic"}
#: Addresses have these bits clear.
_LOW = ALIGNMENT - 1


def _forward_call(spec: AttentionSpec, inference: bool, with_max_logit: bool) -> Call:
    key = spec, inference, with_max_logit
    call = calls.FORWARDS.get(key) or calls.forward(*key)
    if call.refused is not None:
        raise Declined(call.refused)
    return call


def _backward_call(spec: AttentionSpec, with_dbias: bool) -> Call:
    key = spec, with_dbias
    call = calls.BACKWARDS.get(key) or calls.backward(*key)
    if call.refused is not None:
        raise RuntimeError(f"{_NAME[spec.deterministic]}: {call.refused}; the forward of this call was another one")
    return call


@attention_forward
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
    """One graph run; where sequences have lengths of their own, a kernel before it and one behind it."""
    call = _forward_call(spec, inference, with_max_logit)
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if call.copied or (addresses[0] | addresses[1] | addresses[2]) & _LOW:
        q, k, v = copied(q), copied(k), copied(v)
        call = _forward_call(spec.of(q, k, v), inference, with_max_logit)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    device, index = spec.device, spec.device.index
    stream = stream_of(index)
    out = empty("out", call.out, spec.dtype, device)
    lse = None if inference else empty("lse", call.lse, torch.float32, device)
    largest = empty("max_logit", (call.heads,), torch.float32, device) if with_max_logit else None
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    table = None if tensors.page_table is None else dense(tensors.page_table)
    bias = None if tensors.bias is None else dense_aligned(tensors.bias, ALIGNMENT)
    sink = None if tensors.softmax_offset is None else dense(tensors.softmax_offset)
    lengths = dense_lengths(tensors) if call.uneven else ()
    run.forward(
        call, index, stream, workspace.data_ptr(), addresses, out.data_ptr(), address(lse), address(bias),
        address(sink), address(table), address(largest), batch_of(spec, *lengths) if call.uneven else None,
    )  # fmt: skip
    return AttentionForward(out, lse, largest, None if inference else Saved(_NAME[spec.deterministic], FORMAT))


@attention_backward
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
    """The graph that the forward built. Gradients are written packed where `packing` says so."""
    call = _backward_call(spec, with_dbias)
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if call.copied or (addresses[0] | addresses[1] | addresses[2]) & _LOW:
        q, k, v = copied(q), copied(k), copied(v)
        call = _backward_call(spec.of(q, k, v), with_dbias)
        addresses = q.data_ptr(), k.data_ptr(), v.data_ptr()
    device, index = spec.device, spec.device.index
    stream = stream_of(index)
    dout, out, lse = dense_aligned(dout, ALIGNMENT), dense_aligned(out, ALIGNMENT), dense(lse)
    dq, dk, dv = empty_gradients(spec, spec.dtype)
    bias = None if tensors.bias is None else dense_aligned(tensors.bias, ALIGNMENT)
    dbias = made_dbias = None
    if with_dbias and bias is not None:
        dbias = made_dbias = empty("dbias", tuple(bias.shape), bias.dtype, device)
        if bias.dtype is not spec.dtype:
            made_dbias = empty("workspace", tuple(bias.shape), spec.dtype, device)
    sink = None if tensors.softmax_offset is None else dense(tensors.softmax_offset)
    dsink = empty("dsoftmax_offset", (call.heads,), torch.float32, device) if sink is not None else None
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    lengths = dense_lengths(tensors) if call.uneven else ()
    run.backward(
        call, index, stream, workspace.data_ptr(), addresses, out.data_ptr(), lse.data_ptr(), dout.data_ptr(),
        (dq.data_ptr(), dk.data_ptr(), dv.data_ptr()), address(bias), address(made_dbias), address(sink),
        address(dsink), batch_of(spec, *lengths) if call.uneven else None,
    )  # fmt: skip
    if dbias is not None and made_dbias is not dbias:
        dbias.copy_(made_dbias)  # type: ignore[arg-type]
    return AttentionBackward(dq, dk, dv, dbias, dsink)


def plan_fwd(varying: tuple[str, ...], **given: Any) -> Callable[..., AttentionForward] | None:
    saved = Saved(_NAME[given["deterministic"]], FORMAT)
    return repeated.forward(attention_fwd, saved, varying, given)


def plan_bwd(varying: tuple[str, ...], **given: Any) -> Callable[..., AttentionBackward] | None:
    return repeated.backward(attention_bwd, varying, given)
