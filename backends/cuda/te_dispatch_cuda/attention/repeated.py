# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention that is made again and again (`te_dispatch.core.repeating`): of operands that look like those of one call,
dense sequences and no other tensors. That call's graph is kept, so neither its key nor its arguments are looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.backend_kit.attention import empty_gradients, spec_of
from te_dispatch.backend_kit.flash import ALIGNMENT
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention import calls
from te_dispatch_cuda.attention.assemble import Call
from te_dispatch_cuda.attention.graphs import BEHIND_DV, BEHIND_LSE, UP_TO_DOUT
from te_dispatch_cuda.attention.run import execute
from te_dispatch_cuda.memory import empty, stream_of

_LOW = ALIGNMENT - 1
#: Arguments that such calls leave at their defaults.
_ABSENT = (
    "attn_mask", "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded", "bias",
    "alibi_slopes", "softmax_offset", "rng_state",
)  # fmt: skip
_OPERANDS = ("q", "k", "v")
_OF_BACKWARD = ("dout", *_OPERANDS, "out", "lse", "saved")


def _plain(call: Call | None) -> bool:
    """Whether a call is a graph and nothing around it."""
    return call is not None and call.refused is None and not (call.copied or call.prepared or call.cleaned)


def forward(
    attend: Callable[..., AttentionForward], saved: Saved, varying: tuple[str, ...], given: dict[str, Any]
) -> Callable[..., AttentionForward] | None:
    """A function of q, k and v; None where such calls are not served past `attend`, which makes any.

    Args:
        saved: what the forward leaves. given: all arguments of a call that was made.
    """
    absent = (*_ABSENT, "page_table")
    if varying != _OPERANDS or given["layout"] == "thd" or any(given[name] is not None for name in absent):
        return None
    if given["inference"] or given["with_max_logit"]:
        return None
    call = calls.FORWARDS.get((spec_of(**given), False, False))
    if call is None or not _plain(call):
        return None
    options = {name: value for name, value in given.items() if name not in _OPERANDS}
    device, dtype, index = call.spec.device, call.spec.dtype, call.spec.device.index
    shape, rows, size = call.out, call.lse, (call.bytes,)

    def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionForward:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if (at_q | at_k | at_v) & _LOW:
            return attend(q, k, v, **options)
        stream = stream_of(index)
        out = empty("out", shape, dtype, device)
        lse = empty("lse", rows, torch.float32, device)
        workspace = empty("workspace", size, torch.uint8, device).data_ptr()
        addresses = (0, at_q, at_k, at_v, out.data_ptr(), lse.data_ptr(), *BEHIND_LSE)
        execute(call.graph, index, stream, workspace, addresses)
        return AttentionForward(out, lse, None, saved)

    return again


def backward(
    attend: Callable[..., AttentionBackward], varying: tuple[str, ...], given: dict[str, Any]
) -> Callable[..., AttentionBackward] | None:
    """The same of the gradients: a function of dout, q, k, v, out, lse and saved."""
    if varying != _OF_BACKWARD or given["layout"] == "thd" or any(given[name] is not None for name in _ABSENT):
        return None
    if given["with_dbias"] or not all(given[name].is_contiguous() for name in ("dout", "out", "lse")):
        return None
    call = calls.BACKWARDS.get((spec_of(**given), False))
    if call is None or not _plain(call):
        return None
    options = {name: value for name, value in given.items() if name not in _OF_BACKWARD}
    spec, size = call.spec, (call.bytes,)
    device, dtype, index = spec.device, spec.dtype, spec.device.index

    def again(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, saved: Saved) -> AttentionBackward:
        at_q, at_k, at_v, at_out, at_dout = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), dout.data_ptr()
        if (at_q | at_k | at_v | at_out | at_dout) & _LOW:
            return attend(dout, q, k, v, out, lse, saved, **options)
        stream = stream_of(index)
        dq, dk, dv = empty_gradients(spec, dtype)
        workspace = empty("workspace", size, torch.uint8, device).data_ptr()
        addresses = (
            0, at_q, at_k, at_v, at_out, lse.data_ptr(), *UP_TO_DOUT, at_dout, dq.data_ptr(), dk.data_ptr(),
            dv.data_ptr(), *BEHIND_DV,
        )  # fmt: skip
        execute(call.graph, index, stream, workspace, addresses)
        return AttentionBackward(dq, dk, dv, None, None)

    return again
