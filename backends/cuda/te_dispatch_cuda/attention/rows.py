# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Sequences of a batch as cuDNN wants them, and rows that it leaves undefined. Kernels: csrc/attention.

cuDNN takes lengths and offsets where the operator has cumulative lengths. In rows that belong to no sequence or see
nothing it writes nothing, or whatever it computes, where the operator promises zeros and -Inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors, Sizes
from te_dispatch_cuda.attention.geometry import extents, ragged
from te_dispatch_cuda.memory import dense
from te_dispatch_cuda.native import load

_native = load()

_MAX_OFFSETS = 10


class Batch(NamedTuple):
    """Addresses of the cumulative lengths in force, 0 for none: of queries, keys, and where they start in memory."""

    queries: int
    keys: int
    starts_q: int
    starts_kv: int


def batch_of(
    spec: AttentionSpec,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_kv_padded: torch.Tensor | None,
) -> Batch:
    """Of dense lengths (`dense_lengths`). They count for thd and padding masks; those of paged keys wherever they are
    given."""
    return Batch(
        _address(cu_seqlens_q) if spec.ragged else 0,
        _address(cu_seqlens_kv) if ragged(spec) else 0,
        _address(cu_seqlens_q_padded), _address(cu_seqlens_kv_padded),
    )  # fmt: skip


def dense_lengths(t: AttentionTensors) -> tuple[torch.Tensor | None, ...]:
    """Cumulative lengths and starts of queries and keys, in the order of `batch_of`, those copied that are not dense.
    Hold on to them until the call is launched: the memory of a copy that is let go is the next copy's."""
    given = t.cu_seqlens_q, t.cu_seqlens_kv, t.cu_seqlens_q_padded, t.cu_seqlens_kv_padded
    return tuple(x if x is None else dense(x) for x in given)


def _address(x: torch.Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class Rows(NamedTuple):
    """One tensor's rows in bytes: strides of batch (0 where packed), row and head, and bytes of one head's row."""

    batch: int
    row: int
    head: int
    bytes: int


def rows(shape: Sizes, stride: Sizes, layout: str, element_size: int) -> Rows:
    """Of a tensor in a layout."""
    step = [n * element_size for n in stride]
    if layout == "thd":
        return Rows(0, step[0], step[1], shape[-1] * element_size)
    first, second = (step[1], step[0]) if layout == "sbhd" else (step[0], step[1])
    return Rows(first, second, step[2], shape[-1] * element_size)


class Sequences:
    """What is done around one graph's run; knows the sizes, is given addresses.

    Attributes:
        uneven: whether sequences have lengths of their own, so that rows may belong to none or see nothing.
    """

    __slots__ = ("_batch", "_bits", "_device", "_elements", "_extents", "_heads", "_mask", "_wanted", "uneven")

    def __init__(self, spec: AttentionSpec, offsets: tuple[tuple[bool, int], ...]) -> None:
        e = extents(spec)
        packed = spec.layout == "thd"
        self.uneven = ragged(spec)
        self._device, self._batch, self._heads = spec.device.index, e.batch, (e.heads, e.groups)
        self._extents = (
            spec.q_shape[0] if packed else e.rows, spec.k_shape[0] if packed and spec.page_table is None else e.columns
        )  # fmt: skip
        self._wanted = (e.rows, e.columns)
        self._mask = (packed, packed and spec.page_table is None, *spec.band, spec.bottom_right)
        self._bits = sum(keys << r for r, (keys, _) in enumerate(offsets))
        self._elements = (*(n for _, n in offsets), *[0] * (_MAX_OFFSETS - len(offsets)))

    def all_see_themselves(self, batch: Batch) -> bool:
        """Whether sequences of packed queries are those of the keys, so that no row sees nothing."""
        return self._mask[0] and batch.queries == batch.keys

    def describe(
        self,
        stream: int,
        batch: Batch,
        lengths: tuple[int, int],
        offsets: int,
        count: int,
        zeros: int,
    ) -> None:
        """Write where a graph reads them: lengths, offsets and zeros."""
        _native.attention_sequences(
            self._device, stream, self._batch, *batch, *self._wanted, *lengths, offsets, count, self._bits,
            *self._elements, zeros, self._heads[0] if zeros else 0,
        )  # fmt: skip

    def mend_forward(self, stream: int, batch: Batch, out: int, of: Rows, lse: int) -> None:
        """Zeros and -Inf in rows that see nothing."""
        _native.attention_mend(
            self._device, stream, self._batch, *batch, *self._extents, *self._mask, out, of.batch, of.row, of.head,
            self._heads[0], of.bytes, lse, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        )  # fmt: skip

    def mend_backward(
        self, stream: int, batch: Batch, addresses: tuple[int, int, int], of: tuple[Rows, Rows, Rows]
    ) -> None:
        """Zeros in gradients of rows that see nothing, and of keys and values that belong to no sequence."""
        q, k, v = of
        _native.attention_mend(
            self._device, stream, self._batch, *batch, *self._extents, *self._mask,
            addresses[0], q.batch, q.row, q.head, self._heads[0], q.bytes, 0,
            addresses[1], k.batch, k.row, k.head, self._heads[1], k.bytes,
            addresses[2], v.batch, v.row, v.head, v.bytes,
        )  # fmt: skip

    def clean(self, stream: int, batch: Batch, copies: tuple[tuple[int, ...], ...]) -> None:
        """Copy tensors, rows that belong to no sequence, and of queries those that see nothing, as zeros.

        Args:
            copies: of each whether it is of keys, address and strides of the source and of the target, heads, bytes.
        """
        packed, _, left, right, bottom_right = self._mask
        _native.attention_clean(
            self._device, stream, self._batch, *batch, *self._extents, packed, left, right, bottom_right, copies,
        )  # fmt: skip

    def summarize(self, stream: int, batch: Batch, maxima: int, sums: int, lse: int, largest: int) -> None:
        """The largest logit per head and, unless `lse` is 0, log-sum-exps, out of every row's maximum and sum."""
        packed, _, left, right, bottom_right = self._mask
        _native.attention_summarize(
            self._device, stream, self._batch, batch.queries, batch.keys, batch.starts_q, *self._extents, packed, left,
            right, bottom_right, maxima, sums, self._heads[0], lse, largest,
        )  # fmt: skip


def dense_rows(shape: Sizes, layout: str, element_size: int) -> Rows:
    """Of a contiguous tensor."""
    return rows(shape, contiguous_strides(shape), layout, element_size)
