# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands as cuDNN takes them: their dimensions and strides; sizes of the score matrix."""

from __future__ import annotations

from typing import NamedTuple

from te_dispatch.core.errors import Declined
from te_dispatch.ops.attention_spec import AttentionSpec, Sizes


class Side(NamedTuple):
    """Queries, keys or values as cuDNN takes them: (batch, heads, rows, features), strides in elements.

    Attributes:
        token: elements from one row of a packed tensor to the next; what ragged offsets count in.
    """

    dims: Sizes
    strides: Sizes
    token: int


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


def extents(s: AttentionSpec) -> Extents:
    """Of a checked call.

    Raises:
        Declined: a dimension of size 0, more than `_BATCHES` sequences, or a scale that is not positive: cuDNN's
            kernels find the largest logit before they scale, and give NaN (cuDNN 9.19 on an H100).
    """
    if not s.scale > 0:
        raise Declined(f"cuDNN's attention needs a positive softmax_scale, got {s.softmax_scale}")
    q, k, sequence = s.q_shape, s.k_shape, 1 if s.layout == "bshd" else 0
    rows, columns = q[sequence], k[sequence]
    if s.layout == "thd":
        # All rows of a packed tensor bound every sequence's: more is computed than needed, nothing is read back.
        # cuDNN's kernel for a single row writes log-sum-exps of grouped heads to other places than the graph says.
        rows = rows if s.max_seqlen_q is None else max(s.max_seqlen_q, 2)
        columns = columns if s.max_seqlen_kv is None else max(s.max_seqlen_kv, 2)
    if s.page_table is not None:
        columns = s.page_table[1] * k[1]
    found = Extents(s.batch, q[-2], k[-2], rows, columns, q[-1], s.v_shape[-1])
    if 0 in found or 0 in q or 0 in k:
        raise Declined(f"cuDNN's attention takes no dimension of 0, got {found}")
    if s.batch > _BATCHES:
        raise Declined(f"cuDNN's attention takes batches up to {_BATCHES}, got {s.batch}")
    return found


def ragged(s: AttentionSpec) -> bool:
    """Whether sequences have lengths of their own."""
    return s.ragged or s.page_table is not None
