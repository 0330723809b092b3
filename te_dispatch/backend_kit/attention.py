# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention's 30 parameters as one `AttentionSpec` and the tensors beside q, k and v.

``@attention_forward`` and ``@attention_backward`` turn a function of those into an implementation, which has the
operator's signature and checks its arguments:

    @attention_forward
    def attention_fwd(q, k, v, spec, tensors, inference, with_max_logit, s_quantizer, out_quantizer, out_dtype):
        plan = plans.get(spec) or build(spec)  # a dict: the spec is a key
        ...
        return AttentionForward(out, lse, None, Saved("acme.flash_attention", "acme.flash/1"))

A manifest names it as it names any function: ``target="acme.attention:attention_fwd"``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.backend_kit.memory import Empty
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops import alloc
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.checks import attention as checks
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved

if TYPE_CHECKING:
    from te_dispatch.numerics.quantized import Operand


#: What an implementation has of the function that it is made of.
_NAMES = ("__module__", "__name__", "__qualname__", "__doc__")


def attention_forward(attend: Callable[..., AttentionForward]) -> Callable[..., AttentionForward]:
    """An implementation of `attention_fwd`.

    Args:
        attend: (q, k, v, spec, tensors, inference, with_max_logit, s_quantizer, out_quantizer, out_dtype), called by
            position with checked arguments.
    """

    def attention_fwd(
        q: Operand,
        k: Operand,
        v: Operand,
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
        spec = checks.attention(
            q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
            cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, page_table, bias, bias_type, alibi_slopes, softmax_scale,
            softmax_type, softmax_offset, softcap, dropout_p, rng_state, deterministic,
        )  # fmt: skip
        checks.forward(inference, page_table, s_quantizer, out_quantizer, out_dtype, spec.device)
        tensors = AttentionTensors(
            attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, page_table, bias,
            alibi_slopes, softmax_offset, rng_state,
        )  # fmt: skip
        return attend(q, k, v, spec, tensors, inference, with_max_logit, s_quantizer, out_quantizer, out_dtype)

    functools.update_wrapper(attention_fwd, attend, _NAMES)
    del attention_fwd.__wrapped__  # type: ignore[attr-defined]  # the signature is the operator's
    return attention_fwd


def attention_backward(attend: Callable[..., AttentionBackward]) -> Callable[..., AttentionBackward]:
    """An implementation of `attention_bwd`.

    Args:
        attend: (dout, q, k, v, out, lse, saved, spec, tensors, s_quantizer, dp_quantizer, dqkv_quantizer, with_dbias),
            called by position with checked arguments.
    """

    def attention_bwd(
        dout: Operand,
        q: Operand,
        k: Operand,
        v: Operand,
        out: Operand,
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
        spec = checks.attention(
            q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
            cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, None, bias, bias_type, alibi_slopes, softmax_scale,
            softmax_type, softmax_offset, softcap, dropout_p, rng_state, deterministic,
        )  # fmt: skip
        checks.backward(dout, q, v, out, lse, layout, bias, with_dbias, s_quantizer, dp_quantizer, dqkv_quantizer)
        tensors = AttentionTensors(
            attn_mask, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded, None, bias,
            alibi_slopes, softmax_offset, rng_state,
        )  # fmt: skip
        return attend(
            dout, q, k, v, out, lse, saved, spec, tensors, s_quantizer, dp_quantizer, dqkv_quantizer, with_dbias
        )

    functools.update_wrapper(attention_bwd, attend, _NAMES)
    del attention_bwd.__wrapped__  # type: ignore[attr-defined]
    return attention_bwd


#: The arguments of the check by name, with the operator's defaults.
_DEFAULTS = {
    name: OPERATORS["attention_fwd"].signature.parameters[name].default
    for name in inspect.signature(checks.attention).parameters
}


def spec_of(**arguments: Any) -> AttentionSpec:
    """The spec of a call, given as arguments of either operator by name; they are checked."""
    return checks.attention(*[arguments.get(name, default) for name, default in _DEFAULTS.items()])


def packed_shape(shape: tuple[int, ...], packing: str) -> tuple[tuple[int, ...], int]:
    """Shape of the tensor that operands of a `packing` are views of, and the axis along which these lie.

    Args:
        shape: of each view.
    """
    axis = len(shape) - (2 if packing.endswith("hd") else 1)
    return (*shape[:axis], int(packing.strip("hd")), *shape[axis:]), axis


def empty_gradients(
    spec: AttentionSpec, dtype: torch.dtype, empty: Empty | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for dq, dk and dv: views of one tensor where the operands are.

    Args:
        empty: where memory comes from; None for `te_dispatch.ops.alloc.empty`.
    """
    take, packing, device = empty or alloc.empty, spec.packing, spec.device
    if packing is None:
        return (
            take("dq", spec.q_shape, dtype, device), take("dk", spec.k_shape, dtype, device),
            take("dv", spec.v_shape, dtype, device),
        )  # fmt: skip
    whole, axis = packed_shape(spec.k_shape, packing)
    if "3" in packing:
        dq, dk, dv = take("dq", whole, dtype, device).unbind(axis)
    else:
        dq = take("dq", spec.q_shape, dtype, device)
        dk, dv = take("dk", whole, dtype, device).unbind(axis)
    return dq, dk, dv
