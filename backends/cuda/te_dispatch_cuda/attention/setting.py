# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What of a call a cuDNN graph depends on: every size, stride and option, and nothing of what tensors contain."""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.core.errors import Declined

#: Bytes that cuDNN's kernels load at once: rows and tensors start at multiples of it.
ALIGNMENT = 16
Sizes = tuple[int, ...]


class Setting(NamedTuple):
    """The key of a graph. Shapes and strides (in elements) are as the operator's layout has them.

    Attributes:
        batch: of a thd call, whose shapes do not tell; else 0.
        longest_q, longest_kv: of a thd call, None where not given.
        table: shape of the page table, None without one.
        bias, bias_dtype: shape and dtype of a bias, None without one.
        scale: of the logits, None for 1/sqrt(d).
        kinds: encodings and casts of FP8 attention, empty for 16-bit operands.
    """

    device: int
    dtype: torch.dtype
    layout: str
    packing: str | None
    q: Sizes
    q_stride: Sizes
    k: Sizes
    k_stride: Sizes
    v: Sizes
    v_stride: Sizes
    mask: str
    window: tuple[int, int] | None
    batch: int
    longest_q: int | None
    longest_kv: int | None
    table: Sizes | None
    bias: Sizes | None
    bias_dtype: torch.dtype | None
    alibi: bool
    scale: float | None
    softmax_type: str
    softcap: float
    deterministic: bool
    kinds: tuple[str, ...] = ()


class Side(NamedTuple):
    """Queries, keys or values as cuDNN takes them: (batch, heads, rows, features), strides in elements.

    Attributes:
        token: elements from one row of a packed tensor to the next; what ragged offsets count in.
    """

    dims: Sizes
    strides: Sizes
    token: int


def fits(shape: Sizes, stride: Sizes, element_size: int) -> bool:
    """Whether cuDNN can read a tensor where it lies: features beside each other, rows aligned, nothing broadcast."""
    if shape[-1] > 1 and stride[-1] != 1:
        return False
    return all(n == 1 or (step > 0 and step * element_size % ALIGNMENT == 0) for n, step in zip(shape[:-1], stride))


def contiguous(shape: Sizes) -> Sizes:
    """Row-major strides."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def packed(shape: Sizes, packing: str, first: int) -> tuple[Sizes, Sizes, int]:
    """Shape of the tensor that gradients are views of, the strides of a view, and elements from one to the next.

    Args:
        shape: of each view. first: how many operands stand outside: 0 for ``3hd`` and ``h3d``, 1 for the others.
    """
    count, axis = 3 - first, len(shape) - 2 if packing.endswith("hd") else len(shape) - 1
    whole = (*shape[:axis], count, *shape[axis:])
    strides = contiguous(whole)
    return whole, (*strides[:axis], *strides[axis + 1 :]), strides[axis]


def _named(shape: Sizes, stride: Sizes) -> list[int]:
    """Strides, those of dimensions of size 1 as a dense tensor would have them: callers leave anything there."""
    found = list(stride)
    found[-1] = 1
    for axis in range(len(shape) - 2, -1, -1):
        if shape[axis] == 1:
            found[axis] = found[axis + 1] * shape[axis + 1]
    return found


def side(shape: Sizes, stride: Sizes, layout: str, batch: int, longest: int) -> Side:
    """One operand. Of a packed one cuDNN only uses the strides of rows and heads."""
    step = _named(shape, stride)
    if layout == "thd":
        heads, features = shape[1], shape[2]
        return Side((batch, heads, longest, features), (longest * step[0], step[1], step[0], 1), step[0])
    if layout == "sbhd":
        rows, batch, heads, features = shape
        return Side((batch, heads, rows, features), (step[1], step[2], step[0], 1), step[0])
    batch, rows, heads, features = shape
    return Side((batch, heads, rows, features), (step[0], step[2], step[1], 1), step[1])


def pages(shape: Sizes, stride: Sizes) -> Side:
    """Blocks of keys or values: (pages, page size, groups, features)."""
    step = _named(shape, stride)
    return Side((shape[0], shape[2], shape[1], shape[3]), (step[0], step[2], step[1], 1), step[1])


class Extents(NamedTuple):
    """Sizes of the score matrix: batch, query heads, key heads, rows, columns, features of q and k, of v."""

    batch: int
    heads: int
    groups: int
    rows: int
    columns: int
    features: int
    features_v: int


#: The most blocks of a CUDA grid in its second and third dimension. Dense batches beyond it cannot be launched, and
#: packed ones take a workspace of 72 GiB in the backward (cuDNN 9.19 on an H100).
_BATCHES = 65_535


def extents(s: Setting) -> Extents:
    """Of a checked call.

    Raises:
        Declined: a dimension of size 0, more than `_BATCHES` sequences, or a scale that is not positive: cuDNN's
            kernels find the largest logit before they scale, and give NaN (cuDNN 9.19 on an H100).
    """
    if s.scale is not None and not s.scale > 0:
        raise Declined(f"cuDNN's attention needs a positive softmax_scale, got {s.scale}")
    heads, groups, features, features_v = s.q[-2], s.k[-2], s.q[-1], s.v[-1]
    if s.layout == "thd":
        # All rows of a packed tensor bound every sequence's: more is computed than needed, nothing is read back.
        # cuDNN's kernel for a single row writes log-sum-exps of grouped heads to other places than the graph says.
        batch, rows = s.batch, s.q[0] if s.longest_q is None else max(s.longest_q, 2)
    else:
        batch, rows = (s.q[1], s.q[0]) if s.layout == "sbhd" else (s.q[0], s.q[1])
    if s.table is not None:
        columns = s.table[1] * s.k[1]
    elif s.layout == "thd":
        columns = s.k[0] if s.longest_kv is None else max(s.longest_kv, 2)
    else:
        columns = s.k[0] if s.layout == "sbhd" else s.k[1]
    found = Extents(batch, heads, groups, rows, columns, features, features_v)
    if 0 in found or 0 in s.q or 0 in s.k:
        raise Declined(f"cuDNN's attention takes no dimension of 0, got {found}")
    if batch > _BATCHES:
        raise Declined(f"cuDNN's attention takes batches up to {_BATCHES}, got {batch}")
    return found


def band(s: Setting) -> tuple[int, int, bool]:
    """(left, right, bottom_right): key j is seen by row i in [i + offset - left, i + offset + right], -1 unbounded."""
    left, right = s.window or (-1, -1)
    return left, 0 if "causal" in s.mask else right, s.mask.endswith("bottom_right")


def ragged(s: Setting) -> bool:
    """Whether sequences have lengths of their own."""
    return s.layout == "thd" or s.mask.startswith("padding") or s.table is not None
