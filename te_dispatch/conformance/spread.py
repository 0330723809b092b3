# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention's operands as (batch, heads, sequence, features), whatever their layout: the kit's own reading of it.

Every layout is a table of token numbers: entry (b, s) says which row of the operand, its leading dimensions flattened,
holds position s of sequence b; one row past the end where there is none. Reading and writing back is indexing.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from te_dispatch.conformance.casting import values
from te_dispatch.ops.attention import attention_fwd

#: Stands for a bias of -Inf below a cap, whose tanh is -1 for both.
_BEFORE_CAP = -1e30
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(attention_fwd).parameters.items()
    if parameter.default is not inspect.Parameter.empty
}


@dataclass(frozen=True)
class Side:
    """Queries, or keys and values.

    Attributes:
        tokens: int64 (b, s), see the module.
        length: int64 (b,), how many positions of a sequence are valid.
        total: rows of the operand.
    """

    tokens: torch.Tensor
    length: torch.Tensor
    total: int

    @property
    def extent(self) -> int:
        return self.tokens.shape[1]

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, h, d) -> (b, h, s, d); zeros where no row is."""
        extended = torch.cat((x, x.new_zeros((1, *x.shape[1:]))))
        return extended[self.tokens].transpose(1, 2)

    def write(self, x: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """(b, h, s, ...) -> (rows, h, ...); `fill` in rows that belong to no sequence."""
        rows = x.transpose(1, 2).flatten(0, 1)
        target = x.new_full((self.total + 1, *rows.shape[1:]), fill)
        target[self.tokens.flatten()] = rows
        return target[: self.total]


def _side(tokens: torch.Tensor, length: torch.Tensor, total: int) -> Side:
    inside = torch.arange(tokens.shape[1]) < length[:, None]
    return Side(torch.where(inside, tokens, total), length, total)


def _dense(shape: tuple[int, ...], layout: str, length: torch.Tensor | None) -> Side:
    batch, extent = (shape[1], shape[0]) if layout == "sbhd" else (shape[0], shape[1])
    b, s = torch.arange(batch)[:, None], torch.arange(extent)[None, :]
    tokens = s * batch + b if layout == "sbhd" else b * extent + s
    full = torch.full((batch,), extent, dtype=torch.int64)
    return _side(tokens, full if length is None else length, batch * extent)


def _ragged(total: int, cu: torch.Tensor, padded: torch.Tensor | None, longest: int | None) -> Side:
    length = cu.long().diff()
    extent = longest if longest is not None else int(length.max()) if length.numel() else 0
    starts = (cu if padded is None else padded).long()[:-1]
    return _side(starts[:, None] + torch.arange(extent), length, total)


def _paged(shape: tuple[int, ...], table: torch.Tensor, length: torch.Tensor | None) -> Side:
    size = shape[1]
    position = torch.arange(table.shape[1] * size)
    tokens = table.long()[:, position // size] * size + position % size
    full = torch.full((table.shape[0],), position.numel(), dtype=torch.int64)
    return _side(tokens, full if length is None else length, shape[0] * size)


@dataclass(frozen=True)
class Spread:
    """One call's operands, in float64 and exact.

    Attributes:
        q, k, v: (b, h, s_q, d), (b, g, s_kv, d), (b, g, s_kv, d_v); zeros past each sequence's length.
        queries, keys: where they lie.
        hidden: bool (b, 1 or h, s_q, s_kv), True = masked, or of a logit that a bias makes -Inf.
        sees: bool (b, 1 or h, s_q), rows with a key that no mask hides.
        bias: broadcastable to the scores, ALiBi's made; None without one.
        early: whether the bias is added before the scale.
        scale, softcap: the formulas'.
        sink: (h, 1, 1), ln of s; None for vanilla.
        cap: of the logits, 0 for none.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    queries: Side
    keys: Side
    hidden: torch.Tensor
    sees: torch.Tensor
    bias: torch.Tensor | None
    early: bool
    scale: float
    sink: torch.Tensor | None
    cap: float
    dropout_p: float
    layout: str

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def groups(self) -> int:
        return self.k.shape[1]

    def per_head(self, x: torch.Tensor) -> torch.Tensor:
        """Keys or values (b, g, ...), one per query head."""
        return x.repeat_interleave(self.heads // self.groups, 1)

    def per_group(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the heads of a group."""
        return x.reshape(x.shape[0], self.groups, self.heads // self.groups, *x.shape[2:]).sum(2)

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        """lse (b, h, s_q) as the operator lays it out; -Inf where no query is."""
        return self.queries.write(x, -torch.inf) if self.layout == "thd" else x


def _rows(x: Any) -> torch.Tensor:
    """(..., h, d) as float64 (rows, h, d)."""
    rows = 1
    for size in x.shape[:-2]:
        rows *= size
    return values(x).reshape(rows, *x.shape[-2:])


def spread(arguments: Mapping[str, Any]) -> Spread:
    """Read a call of either operator. Parameters that are left out have their defaults."""
    given = {**_DEFAULTS, **arguments}
    q, k, v, layout, mask = (given[name] for name in ("q", "k", "v", "layout", "mask"))
    padding = mask.startswith("padding")

    def lengths(name: str, needed: bool) -> torch.Tensor | None:
        cu = given[name]
        return cu.long().diff() if needed and cu is not None else None

    paged = given["page_table"] is not None
    if layout == "thd":
        queries = _ragged(q.shape[0], given["cu_seqlens_q"], given["cu_seqlens_q_padded"], given["max_seqlen_q"])
    else:
        queries = _dense(tuple(q.shape), layout, lengths("cu_seqlens_q", padding))
    if paged:
        keys = _paged(tuple(k.shape), given["page_table"], lengths("cu_seqlens_kv", True))
    elif layout == "thd":
        keys = _ragged(k.shape[0], given["cu_seqlens_kv"], given["cu_seqlens_kv_padded"], given["max_seqlen_kv"])
    else:
        keys = _dense(tuple(k.shape), layout, lengths("cu_seqlens_kv", padding))
    offset = keys.length - queries.length if mask.endswith("bottom_right") else torch.zeros_like(keys.length)
    heads, bias_type = q.shape[-2], given["bias_type"]
    bias = given["bias"] if given["bias"] is None else given["bias"].double()
    if bias_type == "alibi":
        bias = _alibi(given["alibi_slopes"], heads, queries, keys, offset)
    sink = None
    if given["softmax_type"] != "vanilla":
        learned = given["softmax_offset"]
        sink = (torch.zeros(heads) if learned is None else learned).double().view(heads, 1, 1)
    scale = given["softmax_scale"]
    hidden = _hidden(mask, given["window"], given["attn_mask"], queries, keys, offset)
    sees = ~hidden.all(-1)
    if bias is not None and bool((bias == -torch.inf).any()):
        infinite = bias == -torch.inf
        if bias_type == "pre_scale" and given["softcap"] > 0:
            bias = torch.where(infinite, _BEFORE_CAP, bias)  # the cap makes a logit of -softcap of it
        else:
            hidden = hidden | infinite  # weight 0, gradient 0: what a mask does
            bias = torch.where(infinite, 0.0, bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return Spread(
        queries.read(_rows(q)), keys.read(_rows(k)), keys.read(_rows(v)), queries, keys, hidden, sees, bias,
        bias_type == "pre_scale", scale, sink, given["softcap"], given["dropout_p"], layout,
    )  # fmt: skip


def read_like_queries(call: Spread, x: Any) -> torch.Tensor:
    """The output's gradient, or the output, as (b, h, s_q, d_v): 0 in rows that see nothing, whatever they hold."""
    return torch.where(call.sees.unsqueeze(-1), call.queries.read(_rows(x)), 0.0)


def _positions(queries: Side, keys: Side) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(queries.extent).view(1, 1, -1, 1), torch.arange(keys.extent).view(1, 1, 1, -1)


def _hidden(
    mask: str,
    window: tuple[int, int] | None,
    attn_mask: torch.Tensor | None,
    queries: Side,
    keys: Side,
    offset: torch.Tensor,
) -> torch.Tensor:
    i, j = _positions(queries, keys)
    diagonal = i + offset.view(-1, 1, 1, 1)
    left, right = window or (-1, -1)
    right = 0 if "causal" in mask else right
    hidden = (i >= queries.length.view(-1, 1, 1, 1)) | (j >= keys.length.view(-1, 1, 1, 1))
    if left >= 0:
        hidden = hidden | (j < diagonal - left)
    if right >= 0:
        hidden = hidden | (j > diagonal + right)
    return hidden if attn_mask is None else hidden | attn_mask


def _alibi(slopes: torch.Tensor | None, heads: int, queries: Side, keys: Side, offset: torch.Tensor) -> torch.Tensor:
    """slope_h (j - i - offset); without slopes Press et al.'s: for n heads, n a power of two, 2^(-8 k / n); for other
    counts those of the next smaller power, then every other one of the next larger."""
    i, j = _positions(queries, keys)
    if slopes is None:
        power = 1 << max(heads.bit_length() - 1, 0)
        exact = [2.0 ** (-8.0 * n / power) for n in range(1, power + 1)]
        exact += [2.0 ** (-4.0 * n / power) for n in range(1, 2 * power, 2)]
        slopes = torch.tensor(exact[:heads], dtype=torch.float64)
    return slopes.double().view(-1, heads, 1, 1) * (j - i - offset.view(-1, 1, 1, 1))
