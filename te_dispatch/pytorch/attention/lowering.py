# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The last step of a call's preparation: biases, explicit masks, and what the operators have no name for."""

from __future__ import annotations

import torch

from te_dispatch.pytorch.arguments import require_choice
from te_dispatch.pytorch.attention.function import AttentionOptions, NoGradTensors
from te_dispatch.pytorch.attention.inputs import Operands
from te_dispatch.pytorch.attention.masks import Extent, spelled_out_alibi, spelled_out_window

#: A mask, or one of queries and one of keys.
AttentionMask = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

#: `core_attention_bias_type` -> the operators' `bias_type`.
BIAS_TYPES = {"no_bias": "none", "pre_scale_bias": "pre_scale", "post_scale_bias": "post_scale", "alibi": "alibi"}


def operator_bias_type(name: str, bias: torch.Tensor | None) -> str:
    """The operators' `bias_type`, with the presence of the bias checked."""
    require_choice("core_attention_bias_type", name, BIAS_TYPES)
    if (bias is not None) != name.endswith("scale_bias"):
        expected = "a tensor" if bias is None else "None"
        raise ValueError(
            f"core_attention_bias must be {expected} for core_attention_bias_type={name!r}, "
            f"got {'None' if bias is None else 'a tensor of shape ' + str(tuple(bias.shape))}"
        )
    return BIAS_TYPES[name]


def of_every_query(bias: torch.Tensor | None, operands: Operands, layout: str) -> torch.Tensor | None:
    """A bias with a row for each query, made of one that has a row for all of them: (.., 1, s_kv)."""
    if bias is None or bias.dim() != 4 or bias.shape[2] != 1 or "s" not in layout:
        return bias
    return bias.expand(-1, -1, operands.q_shape[layout.index("s")], -1).contiguous()


def arbitrary_mask(operands: Operands, layout: str, mask_type: str, mask: AttentionMask | None) -> torch.Tensor | None:
    """The operators' `attn_mask`, its dtype and shape checked; None for other masks, which do not read it."""
    if mask_type != "arbitrary":
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be one bool tensor for attn_mask_type='arbitrary', got {got}")
    batch, length = layout.index("b"), layout.index("s")
    full = (operands.q_shape[batch], operands.q_shape[-2], operands.q_shape[length], operands.k_shape[length])
    fits = mask.dim() <= 4 and all(m in (1, f) for m, f in zip(reversed(mask.shape), reversed(full), strict=False))
    if not fits:
        raise ValueError(f"attention_mask must be broadcastable to (b, h, s_q, s_kv) = {full}, got {tuple(mask.shape)}")
    return mask


def spell_out(
    options: AttentionOptions,
    tensors: NoGradTensors,
    operands: Operands,
    bias: torch.Tensor | None,
    bottom_right: bool,
) -> tuple[AttentionOptions, NoGradTensors, torch.Tensor | None]:
    """Replace what the operators have no name for: windows on another diagonal, ALiBi towards later keys."""
    if "causal" in options.mask or (options.window is None and options.bias_type != "alibi"):
        return options, tensors, bias
    layout = options.layout
    if layout == "thd":
        shifted = bottom_right and tensors.cu_seqlens_q is not tensors.cu_seqlens_kv
        if options.bias_type == "alibi":
            raise NotImplementedError(
                "core_attention_bias_type='alibi' with qkv_format='thd' is supported for causal masks only, "
                f"got attn_mask_type={options.mask!r}"
            )
        if shifted:
            raise NotImplementedError(
                "window_size with qkv_format='thd' and attn_mask_type='padding' needs bottom_right_diagonal=False, or "
                "one tensor as both cu_seqlens_q and cu_seqlens_kv; got bottom_right_diagonal=True and two tensors"
            )
        return options, tensors, bias
    shape, other = operands.q_shape, operands.k_shape
    batch, length = layout.index("b"), layout.index("s")
    bounds = tensors.cu_seqlens_q, tensors.cu_seqlens_kv
    extent = Extent(shape[batch], shape[length], other[length], *bounds, operands.q.device)
    if options.bias_type == "alibi":
        heads = operands.q_shape[-2]
        bias = spelled_out_alibi(extent, heads, tensors.alibi_slopes, bottom_right, operands.q.dtype)
        options, tensors = options._replace(bias_type="post_scale"), tensors._replace(alibi_slopes=None)
    if options.window is not None and bottom_right and not extent.aligned():
        masked = spelled_out_window(extent, options.window, bottom_right, tensors.attn_mask)
        options = options._replace(mask="arbitrary", window=None)
        tensors = tensors._replace(attn_mask=masked, cu_seqlens_q=None, cu_seqlens_kv=None)
    return options, tensors, bias
