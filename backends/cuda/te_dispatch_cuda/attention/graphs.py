# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""cuDNN graphs: built once per `AttentionSpec`, then run with addresses alone.

Tensors of a graph are known by number (`Slot`). A call hands over one tuple of addresses in the order of the numbers,
and a graph picks those that it reads and writes.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch

from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.core.errors import Declined
from te_dispatch.ops.attention_spec import AttentionSpec, Sizes
from te_dispatch_cuda.attention import frontend
from te_dispatch_cuda.attention.geometry import Extents, Side, extents, ragged


class Slot(enum.IntEnum):
    """Tensors of a graph. Offsets of packed tensors follow the last one."""

    Q = 1
    K = 2
    V = 3
    OUT = 4
    LSE = 5
    BIAS = 6
    LENGTHS_Q = 7
    LENGTHS_KV = 8
    SINK = 9
    ROW_MAX = 10
    TABLE_K = 11
    TABLE_V = 12
    DOUT = 13
    DQ = 14
    DK = 15
    DV = 16
    DBIAS = 17
    DSINK = 18
    ROW_SUM = 19
    OFFSETS = 20


#: Addresses of tensors that a graph does not have: behind lse, up to dout, behind dv.
BEHIND_LSE = (0,) * (Slot.OFFSETS - Slot.LSE - 1)
UP_TO_DOUT = (0,) * (Slot.DOUT - Slot.LSE - 1)
BEHIND_DV = (0,) * (Slot.OFFSETS - Slot.DV - 1)

_ALIGNED = 256


def up(size: int) -> int:
    """The next multiple of what CUDA allocations are aligned to."""
    return -(-size // _ALIGNED) * _ALIGNED


class Builder:
    """One graph in the making.

    Attributes:
        ragged: (whether of keys, elements per row) of each array of offsets that the graph's packed tensors share.
    """

    def __init__(self, spec: AttentionSpec, handle: int) -> None:
        self.cudnn = frontend.load()
        self.codes = {
            torch.bfloat16: self.cudnn.data_type.BFLOAT16, torch.float16: self.cudnn.data_type.HALF,
            torch.float32: self.cudnn.data_type.FLOAT, torch.int32: self.cudnn.data_type.INT32,
            torch.int64: self.cudnn.data_type.INT64, torch.float8_e4m3fn: self.cudnn.data_type.FP8_E4M3,
            torch.float8_e5m2: self.cudnn.data_type.FP8_E5M2,
        }  # fmt: skip
        single = self.cudnn.data_type.FLOAT
        self.graph = frontend.graph_class()(
            name="attention", io_data_type=self.codes[spec.dtype], intermediate_data_type=single,
            compute_data_type=single, handle=handle,
        )  # fmt: skip
        self.spec = spec
        self.extents = extents(spec)
        self.ragged: list[tuple[bool, int]] = []
        self._offsets: list[Any] = []
        self._slots: list[int] = []

    def tensor(self, slot: int, dims: Sizes, strides: Sizes, dtype: torch.dtype, offsets: Any = None) -> Any:
        """An operand."""
        self._slots.append(int(slot))
        return self.graph._make_tensor(
            dim=list(dims), stride=list(strides), data_type=self.codes[dtype], ragged_offset=offsets,
            name=f"t{int(slot)}", uid=int(slot),
        )  # fmt: skip

    def offsets(self, keys: bool, elements: int) -> Any:
        """Where sequences start in a packed tensor with so many elements per row; None of a dense one."""
        if self.spec.layout != "thd" or (keys and self.spec.page_table is not None):
            return None
        if (keys, elements) not in self.ragged:
            number = Slot.OFFSETS + len(self.ragged)
            self.ragged.append((keys, elements))
            self._offsets.append(self.tensor(number, (self.extents.batch + 1, 1, 1, 1), (1, 1, 1, 1), torch.int64))
        return self._offsets[self.ragged.index((keys, elements))]

    def operand(self, slot: int, x: Side, keys: bool, dtype: torch.dtype | None = None) -> Any:
        return self.tensor(slot, x.dims, x.strides, dtype or self.spec.dtype, self.offsets(keys, x.token))

    def scalar(self, slot: int, dtype: torch.dtype, count: int) -> Any:
        return self.tensor(slot, (count, 1, 1, 1), (1, 1, 1, 1), dtype)

    def result(self, made: Any, slot: int, x: Side, keys: bool, dtype: torch.dtype | None = None) -> None:
        """Names a tensor that an operation makes, and says where it goes."""
        self._slots.append(int(slot))
        made.set_uid(int(slot)).set_name(f"t{int(slot)}").set_output(True)
        made.set_dim(list(x.dims)).set_stride(list(x.strides)).set_data_type(self.codes[dtype or self.spec.dtype])
        offsets = self.offsets(keys, x.token)
        if offsets is not None:
            made.set_ragged_offset(offsets)

    def single_result(self, made: Any, slot: int) -> None:
        """A result of one fp32 number."""
        self._slots.append(int(slot))
        made.set_uid(int(slot)).set_name(f"t{int(slot)}").set_output(True)
        made.set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(self.cudnn.data_type.FLOAT)

    def options(self) -> dict[str, Any]:
        """Options that the forward and the backward graph share: scale, masks, bias, softmax."""
        s, e = self.spec, self.extents
        left, right = s.band
        found: dict[str, Any] = {"attn_scale": s.scale}
        alignment = self.cudnn.diagonal_alignment
        found["diagonal_alignment"] = alignment.BOTTOM_RIGHT if s.bottom_right else alignment.TOP_LEFT
        if left >= 0:
            found["diagonal_band_left_bound"] = left + 1
        if right >= 0:
            found["diagonal_band_right_bound"] = right
        if ragged(s):
            found |= {
                "use_padding_mask": True,
                "seq_len_q": self.scalar(Slot.LENGTHS_Q, torch.int32, e.batch),
                "seq_len_kv": self.scalar(Slot.LENGTHS_KV, torch.int32, e.batch),
            }
        if s.bias is not None and s.bias_dtype is not None:
            if tuple(s.bias[2:]) != (e.rows, e.columns):
                raise Declined(f"cuDNN takes a bias of {e.rows} x {e.columns} scores, got {tuple(s.bias)}")
            found["bias"] = self.tensor(Slot.BIAS, s.bias, contiguous_strides(s.bias), s.bias_dtype)
        if s.bias_type == "alibi":
            found["use_alibi_mask"] = True
        if s.softmax_type != "vanilla":
            found["sink_token"] = self.tensor(Slot.SINK, (1, e.heads, 1, 1), (e.heads, 1, 1, 1), torch.float32)
        return found

    def done(self) -> Graph:
        """Plans and compiles.

        Raises:
            Declined: cuDNN has no engine for it; its own message.
        """
        modes = [self.cudnn.heur_mode.A, self.cudnn.heur_mode.FALLBACK]
        try:
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans(modes)
            self.graph.check_support()
            self.graph.build_plans(self.cudnn.build_plan_policy.HEURISTICS_CHOICE)
            size = self.graph.get_workspace_size()
        except Exception as error:
            raise Declined(refusal(error)) from None
        return Graph(self.graph, size, tuple(self.ragged), self.extents.batch, ragged(self.spec), self._slots)


def rows_of(e: Extents, is_packed: bool) -> Side:
    """A number per row: (b, h, s), or (t, h) where packed, as a side with one feature."""
    if is_packed:
        return Side((e.batch, e.heads, e.rows, 1), (e.heads * e.rows, 1, e.heads, 1), e.heads)
    return Side((e.batch, e.heads, e.rows, 1), (e.heads * e.rows, e.rows, 1, 1), 1)


def refusal(error: Exception) -> str:
    """cuDNN's message on one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return f"cuDNN: {text[:300]}"


class Graph:
    """A graph that can be run.

    Its workspace holds, one after the other: cuDNN's own, offsets of packed tensors, lengths of sequences.

    Attributes:
        ragged: as `Builder.ragged`. bytes: of the workspace. offsets_at, lengths_at: bytes into it.
    """

    __slots__ = ("_execute", "_graph", "_order", "_pick", "_step", "batch", "bytes", "lengths_at",
                 "offsets_at", "ragged", "with_lengths")  # fmt: skip

    def __init__(
        self,
        graph: Any,
        size: int,
        offsets: tuple[tuple[bool, int], ...],
        batch: int,
        with_lengths: bool,
        slots: list[int],
    ) -> None:
        self._graph = graph
        self.ragged, self.batch, self.with_lengths = offsets, batch, with_lengths
        self._step = 8 * (batch + 1)
        self.offsets_at = up(size)
        self.lengths_at = self.offsets_at + up(self._step * len(offsets))
        self.bytes = self.lengths_at + (2 * up(4 * batch) if with_lengths else 0)
        # Releases before 1.20 or so take a dictionary, which costs some microseconds.
        self._execute = getattr(graph, "_execute_with_raw_ptrs", None)
        self._order = sorted(slots)
        if self._execute is not None:
            graph._prepare_variant_pack_template()
            self._order = graph._get_variant_pack_uids_sorted()
        self._pick: Callable[[tuple[int, ...]], tuple[int, ...]] = itemgetter(*self._order)

    def lengths(self, workspace: int) -> tuple[int, int]:
        """Where lengths of queries and keys are."""
        if not self.with_lengths:
            return 0, 0
        first = workspace + self.lengths_at
        return first, first + up(4 * self.batch)

    def run(self, addresses: tuple[int, ...], workspace: int, handle: int) -> None:
        """`addresses`: by slot, the first 22 (the zeroth is nothing)."""
        if self.ragged:
            first = workspace + self.offsets_at
            addresses = (*addresses, *range(first, first + len(self.ragged) * self._step, self._step))
        picked = self._pick(addresses)
        if self._execute is None:
            self._graph._execute(dict(zip(self._order, picked, strict=True)), workspace, handle)
            return
        pointers = array("Q", picked)
        self._execute(pointers.buffer_info()[0], len(picked), workspace, handle, -1)
