# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `rope_fwd` and `rope_bwd`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance.bounds import position as bounds
from te_dispatch.conformance.bounds.known import within
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Rule, Within
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Turned, Values, register, turned_lengths

#: Sequence x batch x heads x head dimension.
_SHAPES = (
    "17x2x3x32",
    "1x1x1x2",
    "16x3x1x64",
    "15x1x5x128",
    "129x2x2x16",
    "127x1x1x34",
    "8x2x4x256",
    "0x2x2x16",
    "4x0x2x16",
)
_SMOKE_SHAPES = ("17x2x3x32", "127x1x1x34", "0x2x2x16")
#: As many sequences as positions, where values alone tell one layout from the other; positions past 4,096 and 65,536,
#: many sequences, many heads, large heads and such as no power of two.
_LARGE_SHAPES = (
    "5x5x3x8",
    "4211x1x2x8",
    "8200x2x1x4",
    "65549x1x1x2",
    "3x1031x1x4",
    "5x1x67x16",
    "3x2x2x1024",
    "9x2x2x96",
    "5x1x2x192",
)
#: Sequences' lengths (``3*129``: 129 of length 3), and tokens behind the last one.
_SEQUENCES = ("5+9+3", "1", "0+7+0", "16+1+15", "129", "5+6/4", "0")
_LARGE_SEQUENCES = ("4211+3", "3*129", "2*1031+5", "65549")
#: Positions of first tokens start here.
_OFFSETS = {"yes": 0, "far": 70_000}


def _freqs(values: Values, positions: int, head_dim: int) -> torch.Tensor:
    """Angles like those of `RotaryPositionEmbedding`: each twice, by halves or by pairs; base 10,000 or 500,000."""
    r = {"all": head_dim, "half": max(head_dim // 4 * 2, 2), "two": 2}[values["rotated"]]
    base = 500_000.0 if values["angles"] == "other_base" else 10_000.0
    inverse = base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    angles = torch.arange(max(positions, 1), dtype=torch.float64)[:, None] * inverse
    angles = angles.repeat_interleave(2, 1) if values["interleaved"] == "yes" else torch.cat((angles, angles), 1)
    # Positions far out: an angle of 10^5, which has to be reduced in full.
    far = 100_000.0 if values["angles"] == "large" else 0.0
    return (angles + far).float().reshape(max(positions, 1), 1, 1, r)


def _operand(maker: Maker) -> str:
    return "x" if maker.case.operator == "rope_fwd" else "dy"


def _dense(values: Values, maker: Maker) -> Arguments:
    s, b, h, d = (int(size) for size in values["shape"].split("x"))
    shape = (s, b, h, d) if values["layout"] == "sbhd" else (b, s, h, d)
    arguments: Arguments = {_operand(maker): maker.tensor(*shape, dtype=values["dtype"], values=values["values"])}
    arguments |= {"layout": values["layout"], "interleaved": values["interleaved"] == "yes"}
    first = _add_offsets(arguments, values, maker, b)
    arguments["freqs"] = _freqs(values, first + s + {"exact": 9, "more": 40}[values["room"]], d)
    return arguments


def _thd(values: Values, maker: Maker) -> Arguments:
    lengths, _, behind = values["lengths"].partition("/")
    parts = [part.partition("*") for part in lengths.split("+")]
    rows = [int(length) for length, _, count in parts for _ in range(int(count or 1))]
    h, d = (int(size) for size in values["heads"].split("x"))
    x = maker.tensor(sum(rows) + int(behind or 0), h, d, dtype=values["dtype"], values=values["values"])
    arguments: Arguments = {_operand(maker): x, "layout": "thd", "interleaved": values["interleaved"] == "yes"}
    arguments["cu_seqlens"] = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()], dtype=torch.int32)
    first = _add_offsets(arguments, values, maker, len(rows))
    arguments["freqs"] = _freqs(values, first + max(rows) + 9, d)
    return arguments


def _add_offsets(arguments: Arguments, values: Values, maker: Maker, sequences: int) -> int:
    """Offsets, where the case has them, of which no two neighbours are equal; returns where they start."""
    first = _OFFSETS.get(values["offsets"])
    if first is None:
        return 0
    arguments["offsets"] = (first + maker.integers(1, 9, sequences).cumsum(0) % 9).int()
    return first


def positions(x: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
    """int64, of x's tokens: the position of each in its sequence, offset included; -1 behind the last sequence."""
    layout, offsets = arguments.get("layout", "sbhd"), arguments.get("offsets")
    if layout == "thd":
        bounds_ = arguments["cu_seqlens"].long()
        found = torch.full((x.shape[0],), -1)
        for i in range(len(bounds_) - 1):
            start, end = int(bounds_[i]), int(bounds_[i + 1])
            found[start:end] = torch.arange(end - start) + (0 if offsets is None else int(offsets[i]))
        return found
    length, batch = (x.shape[0], x.shape[1]) if layout == "sbhd" else (x.shape[1], x.shape[0])
    first = torch.zeros(batch, dtype=torch.int64) if offsets is None else offsets.long()
    grid = torch.arange(length)[:, None] + first
    return grid if layout == "sbhd" else grid.t()


def rules(judged: Judged) -> Mapping[str, Rule]:
    """Tokens behind the last sequence belong to none: the contract gives them no position."""
    arguments = judged.arguments
    backward = "dy" in arguments
    x = arguments["dy" if backward else "x"]
    freqs = arguments["freqs"]
    found = positions(x, arguments)
    angles = freqs.reshape(freqs.shape[0], freqs.shape[-1])[found.clamp_min(0)].unsqueeze(-2)
    known = bounds.rotated(x, angles, arguments.get("interleaved", False), backward)
    rule = within(known, judged.expected["result"], judged.actual["result"])
    return {"result": Within(rule.limit, (found >= 0)[..., None, None])}


def _half(arguments: Arguments) -> Arguments:
    """The first half of the leading dimension, the sequence (sbhd) or the batch (bshd); of one, the first half of the
    other."""
    name = "x" if "x" in arguments else "dy"
    x = arguments[name]
    dim = 0 if x.shape[0] != 1 else 1
    size = x.shape[dim] // 2
    changed = {**arguments, name: x.narrow(dim, 0, size)}
    if arguments.get("offsets") is not None and dim == (arguments["layout"] == "sbhd"):
        changed["offsets"] = arguments["offsets"][:size]
    return changed


_DTYPE = Axis("dtype", ("bf16", "fp32", "fp16"))
_OPTIONS = (
    Axis("interleaved", ("no", "yes")),
    Axis("rotated", ("all", "half", "two")),
    Axis("offsets", ("no", "yes"), once=("far",)),
    Axis("angles", ("small", "large", "other_base")),
    Axis(
        "values", ("normal", "spread", "one_sign", "outlier", "denormal", "zeros", "nan", "inf", "huge", "log_uniform")
    ),
)


def _valid(values: Values) -> bool:
    # Two products of the largest numbers may overflow between.
    return values["values"] != "log_uniform" or values["dtype"] == "fp16"


for _operator in ("rope_fwd", "rope_bwd"):
    register(
        Space(
            _operator,
            "dense",
            (
                _DTYPE, Axis("layout", ("sbhd", "bshd")), Axis("shape", _SHAPES, _SMOKE_SHAPES, once=_LARGE_SHAPES),
                Axis("room", ("exact", "more")), *_OPTIONS,
            ),
            _dense,
            rules,
            _valid,
            batch=_half,
        ),
        Space(
            _operator,
            "thd",
            (
                _DTYPE, Axis("lengths", _SEQUENCES, ("5+9+3", "0+7+0", "5+6/4"), once=_LARGE_SEQUENCES),
                Axis("heads", ("3x32", "1x2", "2x130"), once=("67x8",)), *_OPTIONS,
            ),
            _thd,
            rules,
            _valid,
            turned=Turned(turned_lengths, ("offsets",)),  # with which a longer sequence may reach beyond the angles
        ),
    )  # fmt: skip
