# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How queries, keys and values lie in memory, under Transformer Engine's names.

A layout names the formats of the three, as in ``bshd_bshd_bshd``. A number says that tensors are the parts of one, and
stands where the dimension of the parts is: in ``bs3hd`` all three, in ``bshd_bs2hd`` keys and values. The prefix
``paged_kv_`` is of keys and values in pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from te_dispatch.pytorch.arguments import reject_unsupported, require_choice

__all__ = ["QKVLayouts", "get_qkv_layout", "qkv_layout_needs_detection", "transpose_to_bhsd_htd_pytorch"]

_FORMATS = ("sbhd", "bshd", "thd")

#: Formats of queries and of keys and values that differ, as `get_qkv_layout` takes them.
_MIXED = {"sbhd_2bshd", "bshd_2sbhd", "thd_2bshd", "thd_2sbhd"}


def _packed(form: str, parts: int) -> tuple[str, str]:
    """The format of one tensor of several parts: their dimension before the heads, or behind them."""
    return f"{form[:-2]}{parts}{form[-2:]}", f"{form[:-1]}{parts}{form[-1:]}"


def _layouts() -> Iterator[str]:
    for form in _FORMATS:
        yield from _packed(form, 3)
        yield from (f"{form}_{packed}" for packed in _packed(form, 2))
        yield f"{form}_{form}_{form}"
    for prefix in ("", "paged_kv_"):
        for q in _FORMATS:
            yield from (f"{prefix}{q}_{kv}_{kv}" for kv in ("bshd", "sbhd") if prefix or kv != q)


#: All layouts.
QKVLayouts = tuple(_layouts())


def transpose_to_bhsd_htd_pytorch(tensor: torch.Tensor, src_format: str) -> torch.Tensor:
    """A contiguous copy with the dimension of tokens last but one.

    Args:
        tensor: as `src_format` says: sbhd, bshd or thd; bhsd and htd are returned as they are.

    Returns:
        (b, h, s, d), or (h, t, d).
    """
    require_choice("src_format", src_format, (*_FORMATS, "bhsd", "htd"))
    if src_format in ("bhsd", "htd"):
        return tensor
    order = [src_format.index(dim) for dim in ("htd" if src_format == "thd" else "bhsd")]
    return tensor.permute(order).contiguous()


def qkv_layout_needs_detection(*qkv: torch.Tensor | None) -> bool:
    """Whether one of the tensors may be a part of another: it is not contiguous, nor all of its memory."""
    return any(
        x is not None and not x.is_contiguous() and x.untyped_storage().nbytes() != x.numel() * x.element_size()
        for x in qkv
    )


def get_qkv_layout(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qkv_format: str = "sbhd", inference_params: Any = None
) -> tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, str, str]:
    """The layout of three tensors.

    Args:
        q, k, v: (s, b, h, d), (b, s, h, d) or (t, h, d), contiguous in the last dimension.
        qkv_format: ``sbhd``, ``bshd`` or ``thd``, or two of them such as ``thd_2bshd``: that of queries, and that of
            keys and values.
        inference_params: not supported yet.

    Returns:
        (layout, q, k, v, format of q, format of k and v). Tensors that are neither contiguous nor the parts of one are
        copied.

    Raises:
        NotImplementedError: `inference_params`. ValueError: another format, or elements of the last dimension apart.
    """
    reject_unsupported("get_qkv_layout", {"inference_params": inference_params}, {"inference_params": None})
    require_choice("qkv_format", qkv_format, (*_FORMATS, *sorted(_MIXED)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.stride(-1) != 1:
            raise ValueError(f"get_qkv_layout: {name} must have stride 1 in its last dimension, got {x.stride()}")
    form, _, of_keys = qkv_format.partition("_2")
    kv_form = of_keys or form
    if not of_keys and not torch.compiler.is_compiling():
        for dim, packed in zip((-3, -2), _packed(form, 3)):
            if _are_parts((q, k, v), dim):
                return packed, q, k, v, form, form
        for dim, packed in zip((-3, -2), _packed(form, 2)):
            if _are_parts((k, v), dim):
                return f"{form}_{packed}", q.contiguous(), k, v, form, form
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    return f"{form}_{kv_form}_{kv_form}", q, k, v, form, kv_form


def _are_parts(tensors: Sequence[torch.Tensor], dim: int) -> bool:
    """Whether tensors are those that a contiguous one unbinds into, along the dimension that is `dim` in it."""
    first, count = tensors[0], len(tensors)
    if any((x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device) for x in tensors):
        return False
    shape = list(first.shape)
    shape.insert(len(shape) + 1 + dim, count)
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    step = strides.pop(len(shape) + dim)
    address = first.data_ptr()
    return all(
        list(x.stride()) == strides
        and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and x.data_ptr() == address + place * step * x.element_size()
        for place, x in enumerate(tensors)
    )
