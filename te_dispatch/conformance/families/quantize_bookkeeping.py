# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `compute_amax`, `partial_amax`, `partial_cast` and `update_delayed_scales`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.families.quantize import DTYPE, ENCODING, LATE, SHAPE, VALUES, bits, operand
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Rule, Within
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.numerics.encodings import ENCODINGS, FP8_ENCODINGS
from te_dispatch.ops.shapes import ceil_div


def _amax(values: Values, maker: Maker) -> Arguments:
    x = operand(values, maker) if values["shape"] != "scalar" else maker.tensor(dtype=values["dtype"])
    arguments: Arguments = {"x": x}
    if values["out"] == "given":
        arguments["out"] = torch.full((1,), 1e30)  # overwritten, not accumulated into
    return arguments


#: (height, width, start, length) of a shard: whole, from within one row to within another, inside one row, less than a
#: row that begins in one row of blocks and ends in the next, none, across and beyond 2^32.
_SHARDS = {
    "whole": (200, 300, 0, 60_000), "middle": (200, 300, 4_321, 45_678), "in_row": (7, 1031, 130, 900),
    "beyond": (65_537, 65_537, 2**32 + 1_000, 300), "next_block": (200, 300, 38_300, 200),
    "last": (129, 129, 129 * 129 - 1, 1), "none": (200, 300, 17, 0), "tall": (1031, 3, 5, 3000),
    "small": (16, 16, 3, 77), "far": (65_537, 65_537, 2**32 - 150, 300), "rows": (70_001, 3, 100, 200_000),
    "columns": (5, 9_001, 123, 40_000), "long": (1_031, 1_033, 77, 1_050_000),
}  # fmt: skip
_LARGE = ("rows", "columns", "long")
_SHARD = Axis("shard", tuple(n for n in _SHARDS if n not in _LARGE), ("whole", "middle", "small"), once=_LARGE)
_BLOCK = Axis("block", ("128", "0"))


def _shard(values: Values, maker: Maker) -> tuple[Arguments, tuple[int, int]]:
    height, width, start, length = _SHARDS[values["shard"]]
    block = int(values["block"])
    x = maker.tensor(length, dtype=values["dtype"], values=values["values"])
    blocks = (ceil_div(height, block), ceil_div(width, block)) if block else (1, 1)
    return {"x": x, "height": height, "width": width, "start": start, "block": block}, blocks


def _partial_amax(values: Values, maker: Maker) -> Arguments:
    arguments, blocks = _shard(values, maker)
    # Some blocks have seen more than this shard holds, some nothing.
    before = {"zero": 0.0, "large": 1e5, "small": 0.01, "special": 0.01}[values["before"]]
    amax = before * maker.boolean(*blocks, share=0.7).float()
    if values["before"] == "special":  # kept where the shard holds nothing of a block
        special = torch.where(maker.boolean(*blocks, share=0.5), torch.nan, torch.inf)
        amax = torch.where(_missed(arguments, blocks), special, amax)
    return {**arguments, "amax": amax}


def _missed(arguments: Arguments, blocks: tuple[int, int]) -> torch.Tensor:
    """Blocks of which the shard holds nothing."""
    missed = torch.ones(blocks, dtype=torch.bool)
    places = arguments["start"] + torch.arange(arguments["x"].numel())
    row, column = places // arguments["width"], places % arguments["width"]
    block = arguments["block"]
    missed[row // block if block else row * 0, column // block if block else column * 0] = False
    return missed


#: Middle exponents of scales; by the large ones, codes of subnormal numbers are not 0.
_EXPONENTS = {"ordinary": 0, "large": 117, "small": -117}


def _partial_cast(values: Values, maker: Maker) -> Arguments:
    arguments, blocks = _shard(values, maker)
    scale = torch.exp2(20 * torch.rand(blocks, generator=maker.generator) - 10 + _EXPONENTS[values["scales"]])
    out = maker.integers(0, 256, arguments["x"].numel(), dtype=torch.uint8)
    return {**arguments, "out": out, "scale": scale, "encoding": values["encoding"]}


#: (length, columns) of the histories of one call.
_HISTORIES = {
    # Several first: what is refused for the last of them must have left the others alone.
    "several": ((1024, 3), (1, 4), (16, 129)), "one": ((16, 5),), "single_row": ((1, 7),), "two_rows": ((2, 3),),
    "empty": ((4, 0), (3, 2)),
}  # fmt: skip
#: More columns, more histories and longer ones than one launch or block has room for.
_LARGE_HISTORIES = {
    "wide": ((3, 8209),), "long": ((4099, 2),), "25": ((5, 2),) * 25, "67": ((3, 2),) * 67,
    "330": tuple((1 + i % 4, 1 + i % 3) for i in range(330)),
}  # fmt: skip
#: What may stand in a history, besides ordinary numbers.
_SPECIAL = {
    "ordinary": (1.0,),
    "unused": (0.0, 0.0, 1.0),
    "special": (0.0, torch.inf, torch.nan, 1.0),
    "extreme": (1e-45, 1e-38, 3e38, 1.0),
}


def _history(length: int, columns: int, kind: str, maker: Maker) -> torch.Tensor:
    """Drawn amaxes, of which a share per row, row 0 too, is replaced by what `kind` says."""
    history = maker.tensor(length, columns).abs()
    pool = torch.tensor(_SPECIAL[kind])
    chosen = pool[maker.integers(0, pool.numel(), length, columns, dtype=torch.int64)]
    replaced = maker.boolean(length, columns, share=0.6) & (chosen != 1.0)
    return torch.where(replaced, chosen, history)


def _update(values: Values, maker: Maker) -> Arguments:
    shapes = {**_HISTORIES, **_LARGE_HISTORIES}[values["histories"]]
    histories = [_history(*shape, values["kind"], maker) for shape in shapes]
    largest = [[ENCODINGS[maker.choice(FP8_ENCODINGS)].max for _ in range(columns)] for _, columns in shapes]
    arguments: Arguments = {
        "histories": histories,
        "scales": [maker.tensor(columns).abs() for _, columns in shapes],
        "max_values": largest,
        "algorithm": values["algorithm"],
        "margin": int(values["margin"]),
    }
    if values["amaxes"] == "given":
        arguments["amaxes"] = [maker.tensor(columns).abs() for _, columns in shapes]
    return arguments


_WITH_SCALAR = Axis("shape", (*SHAPE.values, "scalar"), SHAPE.smoke, once=SHAPE.once)


def _equal(judged: Judged) -> Mapping[str, Rule]:
    """Equal numbers: the larger of the maximum and -minimum of zeros is -0."""
    return {path: Within(torch.zeros((), dtype=torch.float64)) for path in judged.actual}


register(
    Space(
        "compute_amax", "plain",
        (DTYPE, _WITH_SCALAR, VALUES, Axis("out", ("fresh", "given"))),
        _amax, _equal, widen=False, fixed=LATE,
    ),
    Space(
        "partial_amax", "plain",
        (DTYPE, _SHARD, _BLOCK, VALUES, Axis("before", ("zero", "small", "large", "special"))),
        _partial_amax, bits, widen=False,
    ),
    Space(
        "partial_cast", "plain",
        (DTYPE, _SHARD, _BLOCK, VALUES, ENCODING, Axis("scales", tuple(_EXPONENTS), ("ordinary",))),
        _partial_cast, bits, widen=False,
        # Casts keep subnormal numbers.
        fixed=tuple(
            {"dtype": dtype, "shard": "whole", "values": "subnormal", "scales": "large"} for dtype in ("fp32", "bf16")
        ),
    ),
    Space(
        "update_delayed_scales", "plain",
        (
            Axis("histories", tuple(_HISTORIES), once=tuple(_LARGE_HISTORIES), dull=("single_row", "empty")),
            Axis("kind", tuple(_SPECIAL)),
            Axis("algorithm", ("max", "most_recent")), Axis("margin", ("0", "3", "-2", "157")),
            Axis("amaxes", ("given", "none")),
        ),
        _update, bits, widen=False,
    ),
)  # fmt: skip
