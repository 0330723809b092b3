# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The autograd Function of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.ops.results import AttentionBackward, Saved
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.autograd.scoped import in_forward_scope, outside_autocast
from te_dispatch.pytorch.capture.functions import Replayable, replayed, replayed_inference
from te_dispatch.pytorch.compile import returned
from te_dispatch.pytorch.step import step


class AttentionOptions(NamedTuple):
    """Everything about a call that is not a tensor; the names are the operators', and two say what is packed.

    Attributes:
        joined: how many of q, k, v arrive as one tensor: 3 (q holds all), 2 (k holds k and v) or 0.
        packing: the operators' `packing`; set as well where q, k, v arrive apart but are views of one tensor.
    """

    layout: str
    joined: int
    packing: str | None
    mask: str
    window: tuple[int, int] | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    bias_type: str
    softmax_scale: float | None
    softmax_type: str
    softcap: float
    dropout_p: float
    deterministic: bool
    with_max_logit: bool


class NoGradTensors(NamedTuple):
    """Tensors of a call that have no gradient."""

    attn_mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    rng_state: torch.Tensor | None = None


#: Where a packed tensor keeps its 3 or 2, counted from the end.
_PACKED_DIM = {"3hd": -3, "2hd": -3, "h3d": -2, "h2d": -2}


def _split(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if options.joined == 3:
        assert options.packing is not None
        return q.unbind(_PACKED_DIM[options.packing])  # type: ignore[return-value]
    if options.joined == 2:
        assert options.packing is not None and k is not None
        return (q, *k.unbind(_PACKED_DIM[options.packing]))  # type: ignore[return-value]
    assert k is not None and v is not None
    return q, k, v


@step
def _join(grads: tuple[torch.Tensor, ...], packing: str) -> torch.Tensor:
    """One packed tensor of its parts' gradients: the buffer they already share, if they do, else a copy."""
    dim = _PACKED_DIM[packing]
    first = grads[0]
    shape = list(first.shape)
    at = len(shape) + dim + 1
    shape.insert(at, len(grads))
    if not torch.compiler.is_compiling():
        base = first._base
        if base is not None and list(base.shape) == shape and base.is_contiguous():
            stride, start, step = list(base.stride()), base.storage_offset(), base.stride(at)
            del stride[at]
            expected = tuple(stride)
            for i, grad in enumerate(grads):
                if (
                    grad._base is not base
                    or grad.shape != first.shape
                    or grad.storage_offset() != start + i * step
                    or grad.stride() != expected
                ):
                    break
            else:
                return base
    return torch.stack(grads, at)


def _merged(out: torch.Tensor) -> torch.Tensor:
    """(..., h, d) -> (..., h * d)."""
    return out.reshape(*out.shape[:-2], out.shape[-2] * out.shape[-1])


class AttentionCall(Replayable):
    """Everything of a call that has no gradient, as the one object that an autograd Function takes beside tensors.

    Attributes:
        tensors: `NoGradTensors`, or () where all are None.
        fixed: keywords of what is no tensor, which the forward and the backward operator both take.
    """

    __slots__ = ("options", "tensors", "fixed")

    def __init__(self, options: AttentionOptions, tensors: NoGradTensors) -> None:
        super().__init__()
        self.options = options
        self.tensors: Sequence[torch.Tensor | None] = tensors if any(t is not None for t in tensors) else ()
        self.fixed = {
            "layout": options.layout,
            "packing": options.packing,
            "mask": options.mask,
            "window": options.window,
            "max_seqlen_q": options.max_seqlen_q,
            "max_seqlen_kv": options.max_seqlen_kv,
            "bias_type": options.bias_type,
            "softmax_scale": options.softmax_scale,
            "softmax_type": options.softmax_type,
            "softcap": options.softcap,
            "dropout_p": options.dropout_p,
            "deterministic": options.deterministic,
        }


def _arguments(
    fixed: dict[str, Any],
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    tensors: Sequence[torch.Tensor | None],
) -> dict[str, Any]:
    """Keywords that the forward and the backward operator both take: `AttentionCall.fixed` and the call's tensors.

    Args:
        tensors: as `NoGradTensors`, or () where all are None.
    """
    if not tensors and bias is None and offset is None:
        return fixed
    return {**fixed, **dict(zip(NoGradTensors._fields, tensors)), "bias": bias, "softmax_offset": offset}


@replayed(in_forward_scope, "call")
class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        bias: torch.Tensor | None,
        offset: torch.Tensor | None,
        call: AttentionCall,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        options, tensors = call.options, call.tensors
        result = ops.attention_fwd(
            *_split(q, k, v, options),
            **_arguments(call.fixed, bias, offset, tensors),
            with_max_logit=options.with_max_logit,
        )
        out = returned(_merged(result.out))
        saved = result.saved
        ctx.save_for_backward(q, k, v, bias, offset, *tensors, result.out, result.lse, *saved.tensors)
        ctx.options = options
        ctx.fixed = call.fixed
        ctx.count = len(tensors)
        # Its tensors go through save_for_backward, where checkpointing and offloading see them.
        ctx.saved_by = saved.implementation
        ctx.saved_format = saved.format
        ctx.saved_options = saved.options
        ctx.scope = scopes.capture()
        if not options.with_max_logit:
            return out
        ctx.mark_non_differentiable(result.max_logit)
        return out, result.max_logit

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        options: AttentionOptions = ctx.options
        q, k, v, bias, offset, *rest = ctx.saved_tensors
        tensors = rest[: ctx.count]
        out, lse, *extra = rest[ctx.count :]
        grads = ops.attention_bwd(
            dout.contiguous().view(out.shape),
            *_split(q, k, v, options),
            out,
            lse,
            Saved(ctx.saved_by, ctx.saved_format, tuple(extra), ctx.saved_options),
            **_arguments(ctx.fixed, bias, offset, tensors),
            with_dbias=ctx.needs_input_grad[3],
        )
        return *_as_given(grads, options), grads.dbias, grads.dsoftmax_offset, None


def _as_given(
    grads: AttentionBackward, options: AttentionOptions
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of q, k and v as the Function was given them."""
    if not options.joined:
        return grads.dq, grads.dk, grads.dv
    assert options.packing is not None
    joined = _join((grads.dq, grads.dk, grads.dv)[3 - options.joined :], options.packing)
    return (joined, None, None) if options.joined == 3 else (grads.dq, joined, None)


def _inferred(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    bias: torch.Tensor | None,
    offset: torch.Tensor | None,
    call: AttentionCall,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    options = call.options
    result = ops.attention_fwd(
        *_split(q, k, v, options),
        **_arguments(call.fixed, bias, offset, call.tensors),
        with_max_logit=options.with_max_logit,
        inference=True,
    )
    return (_merged(result.out), result.max_logit) if options.with_max_logit else _merged(result.out)


#: (q, k, v, bias, softmax_offset, call), as `attention` has them: with gradients, and where nobody wants any.
run_attention = applied(_AttentionFunction)
infer_attention = replayed_inference(_inferred, "call")


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    call: AttentionCall,
    bias: torch.Tensor | None = None,
    softmax_offset: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention, with gradients where they are wanted.

    Args:
        q, k, v: as `options.joined` says: three tensors; q and a packed k with v None; or a packed q and two None.
            Shapes otherwise as `ops.attention_fwd` takes them.
        call: options, and tensors without gradient.
        bias: the operators' `bias`; softmax_offset: float32 (h,). Both have gradients.

    Returns:
        The output with its heads merged, (..., h * d_v); with `with_max_logit` also float32 (h,), without gradient.
    """
    if torch.compiler.is_compiling():  # dynamo traces no Function that is given one tensor twice
        v = v.view_as(v) if v is not None and (v is k or v is q) else v
        k = k.view_as(k) if k is not None and k is q else k
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, bias, softmax_offset)):
        function = run_attention
    else:
        function = infer_attention
    return outside_autocast(function, q, k, v, bias, softmax_offset, call)  # type: ignore[no-any-return]
