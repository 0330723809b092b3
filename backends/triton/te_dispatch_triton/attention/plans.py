# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What launches of calls with one `AttentionSpec` share: constants, numbers, sizes and grids."""

from __future__ import annotations

from typing import Any, NamedTuple

from te_dispatch.backend_kit.attention import packed_shape
from te_dispatch.backend_kit.caches import cached
from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.ops.attention_spec import AttentionSpec, Sizes
from te_dispatch_triton import configs
from te_dispatch_triton.launch import Config, blocks
from te_dispatch_triton.targets import INTERPRETER, Target, target_of

#: Chance is counted in multiples of 2^-24.
_STEPS = 1 << 24


class Extents(NamedTuple):
    """Sizes of the score matrix: rows and columns are all tokens where the layout is thd."""

    batch: int
    heads: int
    groups: int
    rows: int
    columns: int
    features: int
    features_v: int


def extents(s: AttentionSpec) -> Extents:
    """Of a checked call."""
    rows = s.q_shape[1] if s.layout == "bshd" else s.q_shape[0]
    if s.page_table is not None:
        columns = s.page_table[1] * s.k_shape[1]
    else:
        columns = s.k_shape[1] if s.layout == "bshd" else s.k_shape[0]
    return Extents(s.batch, s.q_shape[-2], s.k_shape[-2], rows, columns, s.q_shape[-1], s.v_shape[-1])


def steps(stride: Sizes, layout: str) -> Sizes:
    """Strides of batch, token and head."""
    if layout == "thd":
        return 0, stride[0], stride[1]
    return (stride[1], stride[0], stride[2]) if layout == "sbhd" else (stride[0], stride[1], stride[2])


class Form(NamedTuple):
    """A kernel's launch but for its tensors.

    Attributes:
        grid: programs. count: blocks of each head, of one sequence or of all that a thd tensor holds.
        tail: what follows the tensors among the kernel's parameters.
    """

    grid: tuple[int, int, int]
    count: int
    tail: tuple[Any, ...]
    constants: tuple[Any, ...]
    config: Config


class Plan(NamedTuple):
    """What launches of a kind share, in the order of the kernels' parameters.

    Attributes:
        sides: strides (batch, token, head) of q, k and v; `gradients` of theirs.
        extra: strides of the mask (b, h, i, j) and of the bias (b, h, i); None where there is none.
        pages_b: entries of the page table per sequence.
        numbers: left, right, threshold, scale, cap, keep.
        width: constants D, DV, BD, BDV.
        padding: whether lengths come from cu_seqlens: of queries, of keys.
        masked: constants BOTTOM, LEFT, RIGHT, BIAS, SLOPES, CAP.
        dropout: whether any; `last` constants: PLAIN, PRECISION, INTERPRETED.
        longest: queries of a sequence, for choosing tiles.
        forms: made so far.
    """

    of: Extents
    layout: str
    sides: Sizes
    gradients: Sizes
    extra: tuple[int | None, ...]
    pages_b: int | None
    numbers: tuple[int, int, int, float, float, float]
    width: tuple[int, int, int, int]
    padding: tuple[bool, bool]
    masked: tuple[bool, bool, bool, str, int, bool]
    sink: str
    dropout: bool
    page: int
    last: tuple[bool, str, bool]
    target: Target
    size: int
    longest: int
    bias: Sizes | None
    forms: dict[tuple[str, int], Form]

    def blocks_of(self, tokens: int, block: int) -> int:
        """Blocks of a head's queries or keys."""
        return tokens // block + self.of.batch if self.layout == "thd" else blocks(tokens, block)

    def grid(self, count: int, heads: int) -> tuple[int, int, int]:
        """Programs for so many blocks of each head."""
        return (count * heads * (1 if self.layout == "thd" else self.of.batch), 1, 1)

    def form(self, kernel: str, bytes_each: int) -> Form:
        """A kernel's launch; made once for each size of an element of the widest tensor that it reads."""
        found = self.forms.get((kernel, bytes_each))
        if found is None:
            choice = configs.choose(
                "attention", kernel, self.target, True, width=max(self.width[2:]), bytes=bytes_each,
                rows=self.longest, beside=sum(self.extra[place] is not None for place in (0, 4)),
            )  # fmt: skip
            tile = choice.constants["BM"], choice.constants["BN"], choice.constants.get("SPLIT", True)
            found = self.forms[kernel, bytes_each] = _FORMS[kernel](self, tile, choice.config)
        return found


Tile = tuple[int, int, bool]


def _forward(p: Plan, tile: Tile, config: Config) -> Form:
    count = p.blocks_of(p.of.rows, tile[0])
    return Form(
        p.grid(count, p.of.heads), count, (*p.sides, *p.extra, p.pages_b, count, *p.of[:5], *p.numbers),
        (p.layout, *p.width, *tile, *p.padding, *p.masked, p.sink, p.dropout, p.page, *p.last), config,
    )  # fmt: skip


def _queries(p: Plan, tile: Tile, config: Config) -> Form:
    count = p.blocks_of(p.of.rows, tile[0])
    return Form(
        p.grid(count, p.of.heads), count,
        (*p.sides, *p.gradients[:3], *p.extra, count, *p.of[:5], *p.numbers),
        (p.layout, *p.width, *tile, p.padding[0], *p.masked, p.sink, p.dropout, *p.last), config,
    )  # fmt: skip


def _keys(p: Plan, tile: Tile, config: Config) -> Form:
    count = p.blocks_of(p.of.columns, tile[1])
    return Form(
        p.grid(count, p.of.groups), count, (*p.sides, *p.gradients[3:], *p.extra, count, *p.of[:5], *p.numbers),
        (p.layout, *p.width, *tile, p.padding[0], *p.masked, p.dropout, *p.last), config,
    )  # fmt: skip


def _bias_gradient(p: Plan, tile: Tile, config: Config) -> Form:
    size = p.bias or (0, 0, 0, 0)
    count = blocks(size[2], tile[0]) * blocks(size[3], tile[1])
    bottom, left, right, kind, _, cap = p.masked
    return Form(
        (size[0] * size[1] * count, 1, 1), count, (*p.sides, *p.extra, *size, *p.of[:5], *p.numbers),
        (p.layout, *p.width, *tile[:2], p.padding[0], bottom, left, right, kind, cap, p.dropout, *p.last[1:]), config,
    )  # fmt: skip


_FORMS = {"forward": _forward, "queries": _queries, "keys": _keys, "bias_gradient": _bias_gradient}


def power_of_two(size: int) -> int:
    """The next one, and at least what matrix units take."""
    return max(16, 1 << (size - 1).bit_length())


def _strides(shape: Sizes | None, stride: Sizes, dimensions: int) -> tuple[int | None, ...]:
    """Strides of a tensor that broadcasts along what it lacks and where its size is 1; None for no tensor."""
    if shape is None:
        return (None,) * dimensions
    return (0,) * (dimensions - len(shape)) + tuple(0 if n == 1 else step for n, step in zip(shape, stride))


@cached(4096)  # lengths may differ in every call
def plan(s: AttentionSpec) -> Plan:
    """Everything that does not change from call to call. The bias is contiguous, and so are paged keys and values."""
    of = extents(s)
    paged = s.page_table is not None
    left, right = s.band
    chance = round(s.dropout_p * _STEPS)
    target = target_of(s.device)
    of_bias = None if s.bias is None else contiguous_strides(s.bias)
    extra = *_strides(s.attn_mask, s.attn_mask_stride, 4), *_strides(s.bias and s.bias[:2], of_bias or (), 2)
    k_sides = (0, s.k_stride[1], s.k_stride[2]) if paged else steps(s.k_stride, s.layout)
    v_sides = (0, s.v_stride[1], s.v_stride[2]) if paged else steps(s.v_stride, s.layout)
    plain = s.bias_type == "none" and not s.softcap > 0.0 and s.scale > 0.0
    return Plan(
        of=of, layout=s.layout, sides=(*steps(s.q_stride, s.layout), *k_sides, *v_sides), gradients=_gradients(s),
        extra=(*extra, None if of_bias is None else of_bias[2]),
        pages_b=s.page_table[1] if s.page_table is not None else None,
        # A left side beyond every position is none; so is a right one.
        numbers=(max(left, 0), max(right, 0), chance, s.scale, float(s.softcap), 1.0 / (1.0 - s.dropout_p)),
        width=(of.features, of.features_v, power_of_two(of.features), power_of_two(of.features_v)),
        padding=(s.ragged, s.kv_lengths if paged else s.ragged),
        masked=(s.bottom_right, left >= 0, right >= 0, s.bias_type, s.alibi_slopes, s.softcap > 0.0),
        sink=s.softmax_type, dropout=s.dropout_p > 0.0, page=s.k_shape[1] if paged else 0,
        last=(plain, "tf32x3" if target.backend == "cuda" else "ieee", target is INTERPRETER), target=target,
        size=s.dtype.itemsize, longest=_longest(s, of), bias=s.bias, forms={},
    )  # fmt: skip


def _gradients(s: AttentionSpec) -> Sizes:
    """Strides (batch, token, head) of dq, dk and dv."""
    found: list[int] = []
    for name, shape in (("q", s.q_shape), ("k", s.k_shape), ("v", s.v_shape)):
        if s.packing is None or (name == "q" and "2" in s.packing) or s.page_table is not None:
            strides = contiguous_strides(shape)
        else:
            whole, axis = packed_shape(shape, s.packing)
            strides = contiguous_strides(whole)
            strides = (*strides[:axis], *strides[axis + 1 :])
        found += steps(strides, s.layout)
    return tuple(found)


def _longest(s: AttentionSpec, of: Extents) -> int:
    """Queries of a sequence, for choosing tiles: never what depends on the batch."""
    if s.layout != "thd":
        return of.rows
    return 1 << 30 if s.max_seqlen_q is None else s.max_seqlen_q
