# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a call of attention brings: its query, key and value, apart or packed, and their shapes, checked."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.ops.attention import LAYOUTS
from te_dispatch.pytorch.arguments import require_choice, require_tensor
from te_dispatch.pytorch.tensor.quantized_tensor import plain

_DIMS = {"sbhd": "(s, b, h, d)", "bshd": "(b, s, h, d)", "thd": "(t, h, d)"}


class Operands(NamedTuple):
    """Query, key and value as `attention` takes them.

    Attributes:
        q, k, v: three tensors; or, `joined` = 2, q and a packed k; or, `joined` = 3, a packed q.
        joined: see there.
        packing: the operators' `packing`, None where nothing is known.
        q_shape, k_shape, v_shape: of the three, without the packed dimension.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    joined: int
    packing: str | None
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]

    def given(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.q, self.k, self.v) if t is not None)


def _packed_shape(name: str, tensor: torch.Tensor, count: int, dim: int) -> tuple[tuple[int, ...], str]:
    if dim not in (-3, -2):
        raise ValueError(f"qkv_interleave_dim must be -3 (.., {count}, h, d) or -2 (.., h, {count}, d), got {dim}")
    if tensor.dim() < 4 or tensor.shape[dim] != count:
        raise ValueError(f"{name} must have size {count} in dimension {dim}, got shape {tuple(tensor.shape)}")
    shape = list(tensor.shape)
    del shape[dim]
    return tuple(shape), f"{count}hd" if dim == -3 else f"h{count}d"


def gather_operands(
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    qkv: torch.Tensor | None,
    kv: torch.Tensor | None,
    interleave_dim: int,
) -> Operands:
    """The operands of a call that gives `qkv_layer`, or `query_layer` and `kv_layer`, or all three apart.

    Raises:
        ValueError: another combination, or a packed tensor of another shape than `qkv_interleave_dim` says.
    """
    names = ("query_layer", "key_layer", "value_layer", "qkv_layer", "kv_layer")
    query, key, value, qkv, kv = plain(query), plain(key), plain(value), plain(qkv), plain(kv)
    given = []
    for name, tensor in zip(names, (query, key, value, qkv, kv), strict=True):
        if tensor is not None:
            require_tensor(name, tensor)
            given.append(name)
    if given == ["qkv_layer"]:
        assert qkv is not None
        shape, packing = _packed_shape("qkv_layer", qkv, 3, interleave_dim)
        return Operands(qkv, None, None, 3, packing, shape, shape, shape)
    if given == ["query_layer", "kv_layer"]:
        assert query is not None and kv is not None
        shape, packing = _packed_shape("kv_layer", kv, 2, interleave_dim)
        return Operands(query, kv, None, 2, packing, tuple(query.shape), shape, shape)
    if given == ["query_layer", "key_layer", "value_layer"]:
        assert query is not None and key is not None and value is not None
        shapes = tuple(query.shape), tuple(key.shape), tuple(value.shape)
        return Operands(query, key, value, 0, shared_packing(query, key, value), *shapes)
    raise ValueError(
        "give query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer; "
        f"got {', '.join(given) or 'none of them'}"
    )


def under_autocast(x: torch.Tensor | None) -> torch.Tensor | None:
    """An operand in the dtype of torch.autocast, where that is on for its device."""
    if not isinstance(x, torch.Tensor) or not torch.is_autocast_enabled(x.device.type):
        return x
    return plain(x).to(torch.get_autocast_dtype(x.device.type))


def as_given(
    query: torch.Tensor | None,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    qkv: torch.Tensor | None,
    kv: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`Operands.q`, `k` and `v` of a call that `gather_operands` has passed before."""
    if qkv is not None:
        return qkv, None, None
    return query, key if kv is None else kv, value  # type: ignore[return-value]


def shared_packing(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """``3hd``, ``h3d``, ``2hd`` or ``h2d`` where the tensors are views of one packed tensor, else None.

    While compiling nothing is known about addresses, so the answer is None: a missed optimization, never wrong.
    """
    if torch.compiler.is_compiling() or k._base is None or k._base is not v._base:
        return None
    if k.shape != v.shape or k.stride() != v.stride():
        return None
    heads, width = k.shape[-2:]
    step = v.storage_offset() - k.storage_offset()
    three = (
        q._base is k._base
        and q.shape == k.shape
        and q.stride() == k.stride()
        and k.storage_offset() - q.storage_offset() == step
    )
    count = 3 if three else 2
    strides = k.stride()
    if strides[-1] != 1 or strides[-3] % (count * heads * width):
        return None
    if step == heads * width and strides[-2] == width:
        return f"{count}hd"
    if step == width and strides[-2] == count * width:
        return f"h{count}d"
    return None


def check_operands(operands: Operands, layout: str, heads: int, groups: int, widths: tuple[int, int]) -> None:
    """Raise a ValueError that names the argument for any shape, dtype or device that does not fit.

    Args:
        operands: the call's.
        layout: ``sbhd``, ``bshd`` or ``thd``.
        heads, groups: of the query, and of key and value.
        widths: head dimensions of query and key, and of value.
    """
    require_choice("qkv_format", layout, LAYOUTS)
    named = (
        ("query_layer", operands.q_shape, heads, widths[0]),
        ("key_layer", operands.k_shape, groups, widths[0]),
        ("value_layer", operands.v_shape, groups, widths[1]),
    )
    for name, shape, h, d in named:
        if len(shape) != len(layout):
            raise ValueError(f"{name} must be {_DIMS[layout]} for qkv_format={layout!r}, got shape {shape}")
        if shape[-2:] != (h, d):
            raise ValueError(f"{name} must end in ({h} heads, head dimension {d}), got shape {shape}")
    if operands.k_shape[:-1] != operands.v_shape[:-1]:
        raise ValueError(
            f"value_layer must have key_layer's tokens and heads {operands.k_shape[:-1]}, got shape {operands.v_shape}"
        )
    if layout != "thd":
        batch = layout.index("b")
        if operands.q_shape[batch] != operands.k_shape[batch]:
            raise ValueError(
                f"key_layer must have query_layer's batch size {operands.q_shape[batch]} in dimension {batch}, "
                f"got shape {operands.k_shape}"
            )
    q = operands.q
    for tensor in operands.given()[1:]:
        if tensor.dtype != q.dtype:
            raise ValueError(f"key_layer and value_layer must be {q.dtype} as query_layer is, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"key_layer and value_layer must be on {q.device} as query_layer is, got {tensor.device}")
