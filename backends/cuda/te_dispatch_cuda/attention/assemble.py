# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Graphs of forward and backward out of an `AttentionSpec`, and all that a call of its kind needs besides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.attention import packed_shape
from te_dispatch.backend_kit.flash import rows_aligned
from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.core.errors import Declined
from te_dispatch.ops.attention_spec import AttentionSpec, Sizes
from te_dispatch_cuda.attention.frontend import handle_of
from te_dispatch_cuda.attention.geometry import extents, pages, ragged, side
from te_dispatch_cuda.attention.graphs import Builder, Graph, Slot, refusal, rows_of, up
from te_dispatch_cuda.attention.rows import Rows, Sequences, dense_rows, rows

#: Up to so many keys per feature Hopper's backward is faster through the gradient of the scores in memory (16 bits
#: each), and so deterministic, than through sums of dq that atomics make in fp32 and a kernel rounds: 331 against 460
#: us at 256 keys of 128 features under a diagonal, 473 against 522 at 768, 946 against 881 at 2048; without a diagonal
#: 393 against 482 at 256, 933 against 824 at 1024 (H100, 8192 tokens, 32 heads).
_SHORT_CAUSAL, _SHORT_FULL = 6, 3


class Cleaned(NamedTuple):
    """An operand of which the graph reads a copy, rows outside of sequences and queries that see nothing as zeros.

    Attributes:
        operand: 0 to 3 for q, k, v and dout. at: of the copy, bytes into the workspace.
    """

    operand: int
    of_keys: bool
    source: Rows
    target: Rows
    heads: int
    at: int


class Call:
    """One kind of call.

    Attributes:
        refused: why cuDNN does not serve it, None if it does.
        copied: q, k and v do not lie as cuDNN reads them; nothing else is set.
        out, lse: shapes. heads: of queries. bytes: of the workspace. uneven: sequences have lengths of their own.
        cleaned: operands that the graph reads copies of. written: how the results that it writes lie.
        sink_at, statistics_at: of zeros, of every row's largest logit and sum, in bytes into the workspace; -1: none.
        prepared: whether a kernel runs before the graph.
    """

    __slots__ = ("bytes", "cleaned", "copied", "graph", "heads", "lse", "out", "per_row", "prepared",
                 "refused", "sequences", "sink_at", "spec", "statistics_at", "uneven", "written")  # fmt: skip

    def __init__(self, spec: AttentionSpec, refused: str | None = None, copied: bool = False) -> None:
        self.spec, self.refused, self.copied = spec, refused, copied
        self.heads = spec.q_shape[-2]
        self.uneven = ragged(spec)
        self.out, self.lse = spec.out_shape, spec.lse_shape
        self.bytes, self.sink_at, self.statistics_at, self.per_row = 0, -1, -1, 0
        self.prepared = False
        self.graph: Graph = None  # type: ignore[assignment]  # set where neither refused nor copied
        self.sequences: Sequences = None  # type: ignore[assignment]
        self.written: tuple[Rows, ...] = ()
        self.cleaned: tuple[Cleaned, ...] = ()

    def finish(self, graph: Graph, cleaned: tuple[int, ...]) -> None:
        """Room in the workspace, once the graph is there; `cleaned` as `Cleaned.operand`."""
        s = self.spec
        self.graph, self.bytes = graph, graph.bytes
        if s.softmax_type == "off-by-one":
            self.sink_at = self.room(4 * self.heads)
        self.prepared = self.uneven or self.sink_at >= 0
        self.sequences = Sequences(s, graph.ragged)
        lie = (*_operands_of(s), (self.out, contiguous_strides(self.out)))
        size = s.dtype.itemsize
        for index in cleaned:
            shape, stride = lie[index]
            target = dense_rows(shape, s.layout, size)
            at = self.room(_count(shape) * size)
            copy = Cleaned(index, index in (1, 2), rows(shape, stride, s.layout, size), target, shape[-2], at)
            self.cleaned = (*self.cleaned, copy)

    def room(self, size: int) -> int:
        """More workspace; where it starts."""
        at = self.bytes
        self.bytes += up(size)
        return at


def _count(shape: Sizes) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _operands_of(s: AttentionSpec) -> tuple[tuple[Sizes, Sizes], ...]:
    """Shapes and strides of q, k and v."""
    return (s.q_shape, s.q_stride), (s.k_shape, s.k_stride), (s.v_shape, s.v_stride)


def unfit(s: AttentionSpec) -> bool:
    """Whether cuDNN cannot read q, k or v where they lie."""
    return not all(rows_aligned(shape, stride, s.dtype.itemsize) for shape, stride in _operands_of(s))


def _with_copies(s: AttentionSpec, cleaned: tuple[int, ...]) -> AttentionSpec:
    """The spec of a graph that reads dense copies of some operands."""
    q, k, v = (
        contiguous_strides(shape) if i in cleaned else stride for i, (shape, stride) in enumerate(_operands_of(s))
    )
    return s._replace(q_stride=q, k_stride=k, v_stride=v)


def operands(b: Builder) -> list[Any]:
    """q, k and v of a graph."""
    s, e = b.spec, b.extents
    made = [b.operand(Slot.Q, side(s.q_shape, s.q_stride, s.layout, e.batch, e.rows), False)]
    for slot, (shape, stride) in zip((Slot.K, Slot.V), _operands_of(s)[1:], strict=True):
        x = pages(shape, stride) if s.page_table else side(shape, stride, s.layout, e.batch, e.columns)
        made.append(b.operand(slot, x, True))
    return made


def _attempt(s: AttentionSpec, build: Callable[[], Call]) -> Call:
    """A call, or one that says why there is none."""
    if unfit(s):
        return Call(s, copied=True)
    try:
        return build()
    except Declined as declined:
        return Call(s, refused=str(declined))
    except (RuntimeError, TypeError, ValueError) as error:  # what an operation itself refuses
        return Call(s, refused=refusal(error))


def forward(s: AttentionSpec, inference: bool, with_max_logit: bool) -> Call:
    """The device must be the current one."""
    return _attempt(s, lambda: _forward(s, inference, with_max_logit))


def _forward(s: AttentionSpec, inference: bool, with_max_logit: bool) -> Call:
    if with_max_logit and s.softmax_type != "vanilla":
        raise Declined("cuDNN's largest logits count the softmax offset as one")
    # Of packed tensors cuDNN reads no row behind a sequence's end; of dense ones it does, and 0 * NaN is NaN.
    padded = s.ragged and s.layout != "thd" and s.page_table is None
    cleaned: tuple[int, ...] = (2,) if padded else ()
    b = Builder(_with_copies(s, cleaned), handle_of(s.device.index, 0))
    e, call = b.extents, Call(s)
    per_row = rows_of(e, s.layout == "thd")
    options = b.options()
    if s.page_table is not None:
        for slot, name in ((Slot.TABLE_K, "paged_attention_k_table"), (Slot.TABLE_V, "paged_attention_v_table")):
            pages_b = s.page_table[1]
            options[name] = b.tensor(slot, (e.batch, 1, pages_b, 1), (pages_b, pages_b, 1, 1), torch.int32)
        options["paged_attention_max_seq_len_kv"] = e.columns
    if with_max_logit:
        options["score_max"] = b.operand(Slot.ROW_MAX, per_row, False, torch.float32).set_output(True)
        options["score_sum_exp"] = b.operand(Slot.ROW_SUM, per_row, False, torch.float32).set_output(True)
    # cuDNN gives log-sum-exps, or what they are made of.
    stats = not inference and not with_max_logit
    made = b.graph.sdpa(*operands(b), generate_stats=stats, name="sdpa", **options)
    b.result(made[0], Slot.OUT, side(call.out, contiguous_strides(call.out), s.layout, e.batch, e.rows), False)
    if stats:
        b.result(made[1], Slot.LSE, per_row, False, torch.float32)
    call.finish(b.done(), cleaned)
    call.written = (dense_rows(call.out, s.layout, s.dtype.itemsize),)
    if with_max_logit:
        call.per_row = up(4 * e.heads * (s.q_shape[0] if s.layout == "thd" else e.batch * e.rows))
        call.statistics_at = call.room(2 * call.per_row)
    return call


def backward(s: AttentionSpec, with_dbias: bool) -> Call:
    """The device must be the current one."""
    found = None
    for through_scores in _routes(s):
        found = _attempt(s, lambda: _backward(s, with_dbias, through_scores))  # noqa: B023  # called at once
        if found.refused is None:
            break
    assert found is not None
    return found


def _routes(s: AttentionSpec) -> tuple[bool, ...]:
    """Whether the gradient of the scores goes through memory, the better first."""
    if s.deterministic:
        return (True,)
    try:
        e = extents(s)
    except Declined:
        return (False,)
    keys_per_feature = _SHORT_FULL if s.band == (-1, -1) else _SHORT_CAUSAL
    short = max(e.rows, e.columns) <= keys_per_feature * e.features
    return (True, False) if short and torch.cuda.get_device_capability(s.device)[0] == 9 else (False,)


def _backward(s: AttentionSpec, with_dbias: bool, through_scores: bool) -> Call:
    cleaned: tuple[int, ...] = ()
    if s.layout == "thd":
        # cuDNN multiplies what dout has in rows that see nothing by their probabilities, and 0 * NaN is NaN.
        cleaned = (3,) if s.band[0] >= 0 or s.bottom_right else ()
    elif s.mask.startswith("padding"):
        cleaned = (0, 1, 2, 3)
    b = Builder(_with_copies(s, cleaned), handle_of(s.device.index, 0))
    e, call = b.extents, Call(s)
    options = b.options()
    if s.bias is not None and s.bias_dtype is not None and with_dbias:
        # Whatever dtype it is given, cuDNN writes it as the operands'.
        options["dBias"] = b.tensor(Slot.DBIAS, s.bias, contiguous_strides(s.bias), s.dtype).set_output(True)
    if s.softmax_type == "learnable":
        dsink = b.tensor(Slot.DSINK, (1, e.heads, 1, 1), (e.heads, 1, 1, 1), torch.float32)
        options["dSink_token"] = dsink.set_output(True)
    if s.layout == "thd" and (s.packing is None or e.heads == e.groups):
        # Else accumulators are sized for sequences that are all the longest.
        options |= {"max_total_seq_len_q": s.q_shape[0], "max_total_seq_len_kv": s.k_shape[0]}
    out = side(call.out, contiguous_strides(call.out), s.layout, e.batch, e.rows)
    made = b.graph.sdpa_backward(
        *operands(b), b.operand(Slot.OUT, out, False), b.operand(Slot.DOUT, out, False),
        b.operand(Slot.LSE, rows_of(e, s.layout == "thd"), False, torch.float32),
        use_deterministic_algorithm=through_scores, name="sdpa_backward", **options,
    )  # fmt: skip
    gradients = _gradients(s)
    for x, slot, (shape, stride) in zip(made, (Slot.DQ, Slot.DK, Slot.DV), gradients, strict=False):
        longest = e.rows if slot == Slot.DQ else e.columns
        b.result(x, slot, side(shape, stride, s.layout, e.batch, longest), slot != Slot.DQ)
    call.finish(b.done(), cleaned)
    call.written = tuple(rows(shape, stride, s.layout, s.dtype.itemsize) for shape, stride in gradients)
    return call


def _gradients(s: AttentionSpec) -> list[tuple[Sizes, Sizes]]:
    """Shapes and strides of dq, dk and dv as `te_dispatch.backend_kit.attention.empty_gradients` makes them."""
    found = [(shape, contiguous_strides(shape)) for shape, _ in _operands_of(s)]
    if s.packing is not None:
        whole, axis = packed_shape(s.k_shape, s.packing)
        strides = contiguous_strides(whole)
        for index in range(3 - whole[axis], 3):
            found[index] = found[index][0], (*strides[:axis], *strides[axis + 1 :])
    return found
