# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `grouped_gemm`: groups as lists, as rows dealt by splits on the host or the device, some empty."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance.bounds import gemm as bounds
from te_dispatch.conformance.bounds.known import within
from te_dispatch.conformance.families.gemm import SWIZZLED, inner_size, mode_of, operand_shapes, product
from te_dispatch.conformance.families.quantize import counts, quantizer_of
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Rule
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Turned, Values, every, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.gemm import LAYOUTS, operand_format


def _make(values: Values, maker: Maker) -> Arguments:
    """Group i has rows[i] of the dimension that differs: m in NT and NN, k in TN (a weight's gradient); the other two
    are equal, or take turns (``48x64/80x32``)."""
    rows = counts(values["rows"])
    columns = itertools.cycle(tuple(map(int, part.split("x"))) for part in values["columns"].split("/"))
    layout, dtype = values["layout"], values["dtype"]
    sizes = [(k, n, r) if layout == "TN" else (r, n, k) for r, (n, k) in zip(rows, columns)]
    shapes = [operand_shapes(*size, layout) for size in sizes]
    a = [maker.tensor(*shape[0], dtype=dtype, values=values["values"]) for shape in shapes]
    b: list[Any] = [maker.tensor(*shape[1], dtype=dtype, values=values["values"]) for shape in shapes]
    arguments: Arguments = {"a": a, "b": b, "layout": layout}
    if values["splits"] != "list":
        arguments["a"] = [torch.cat(a)]
        arguments["splits"] = rows if values["splits"] == "host" else torch.tensor(rows)
    if "cast" in values:
        for name in "ab":
            arguments[name] = [_record(x, values, name, maker) for x in arguments[name]]
    mixed = values["out_dtype"] == "mixed"
    own = dtype if values["out_dtype"] in ("same", "mixed") else values["out_dtype"]
    if values["out_dtype"] not in ("same", "mixed"):
        arguments["out_dtype"] = DTYPES[own]
    if values["out"] != "new":
        added = values["out"] == "added"
        dtypes = ("bf16", "fp32") if mixed else (own,)
        held = [maker.tensor(m, n_, dtype=of) for (m, n_, _), of in zip(sizes, itertools.cycle(dtypes))]
        # What is not added to is overwritten, whatever it held.
        arguments["out"] = held if added else [torch.full_like(x, torch.nan) for x in held]
        arguments["accumulate"] = added
    if values["bias"] == "yes":
        arguments["bias"] = [maker.tensor(n_, dtype=dtype) for _, n_, _ in sizes]
    accumulation = values.get("accumulation", "default")
    arguments["split_accumulator"] = {"default": None, "split": True, "fast": False}[accumulation]
    return arguments


def _record(x: torch.Tensor, values: Values, name: str, maker: Maker) -> Quantized:
    cast, other = values["cast"], values["b_encoding"]
    own = "e4m3fnuz" if other.endswith("fnuz") else "e4m3fn"
    quantizer = quantizer_of(cast.removesuffix(SWIZZLED), own if name == "a" else other)
    usage = operand_format(values["layout"], name, quantizer.scaling)[0]
    made = maker.quantized(x, quantizer, "both" if quantizer.scaling == "tensor" else usage)
    return maker.laid_out(made, "swizzled_32x4x4") if cast.endswith(SWIZZLED) else made


def _rows_of(x: torch.Tensor | Quantized, start: int, end: int) -> torch.Tensor | Quantized:
    if not isinstance(x, Quantized):
        return x[start:end]
    assert x.row_data is not None
    return Quantized(
        x.row_data[start:end], None, x.row_scale_inv, None, x.encoding, x.scaling, x.scale_layout,
        (end - start, x.shape[-1]), x.dtype, x.device,
    )  # fmt: skip


def groups(arguments: Mapping[str, Any]) -> list[Arguments]:
    """The `gemm` that each group is."""
    a, splits = arguments["a"], arguments.get("splits")
    if splits is not None:
        rows = [int(n) for n in splits]
        ends = [sum(rows[: i + 1]) for i in range(len(rows))]
        a = [_rows_of(a[0], end - n, end) for n, end in zip(rows, ends)]
    bias = arguments.get("bias") or [None] * len(a)
    layout = arguments["layout"]
    return [{"a": x, "b": y, "layout": layout, "bias": shift} for x, y, shift in zip(a, arguments["b"], bias)]


def _rules(judged: Judged) -> Mapping[str, Rule]:
    """Each group by the bound of its product."""
    arguments = judged.arguments
    found: dict[str, Rule] = {}
    for i, group in enumerate(groups(arguments)):
        z = product(group, mode_of(judged))
        if arguments.get("accumulate"):
            z = z + bounds.term(arguments["out"][i], inner_size(group))
        found[str(i)] = within(z, judged.expected[str(i)], judged.actual[str(i)])
    return found


def _turned(arguments: Arguments) -> Arguments:
    """Splits in reverse order, where a group's weight serves any number of rows."""
    splits = arguments.get("splits")
    if not isinstance(splits, torch.Tensor) or arguments["layout"] == "TN":
        return arguments
    return {**arguments, "splits": splits.flip(0)}


#: The memory of results fits their groups.
_TURNED = Turned(_turned, ("out",))


_ROWS = Axis(
    "rows",
    ("16+32+16", "3+0+17", "129", "0+0", "1+127+16+5"),
    ("16+32+16", "3+0+17"),
    once=("18:5", "67:5", "300:3", "1033+7", "4099"),
)
_COLUMNS = Axis(
    "columns", ("48x64", "17x15", "128x272"), once=("16x1040", "1040x16", "64x512", "48x64/80x32", "17x15/40x33")
)
_REST = (
    Axis("out", ("new", "given", "added")),
    Axis("out_dtype", ("same", "fp32", "bf16", "mixed")),
    Axis("bias", ("no", "yes")),
    Axis("values", ("normal", "one_sign", "cancelling", "spread", "tile_scales")),
)
_DTYPE = Axis("dtype", ("bf16", "fp32", "fp16"))
_LAYOUT = Axis("layout", LAYOUTS)
_SPLITS = Axis("splits", ("list", "host", "device"))

#: Several tiles of scales both ways.
_TILED = tuple(
    {"cast": f"mxfp8{SWIZZLED}", "layout": layout, "rows": "129", "columns": "128x272", "values": "tile_scales"}
    for layout in LAYOUTS
)
#: A gradient of a weight that met no rows is 0, whatever its memory held.
_WRITTEN = (("layout", "rows", "out"),)


def _alike(values: Values) -> bool:
    """Rows that are dealt out are of one tensor, and results that are made of one dtype."""
    if values["out_dtype"] == "mixed" and values["out"] == "new":
        return False
    return "/" not in values["columns"] or values["splits"] == "list"


def _tensor_scaled_or_listed(values: Values) -> bool:
    """Records with scales of blocks are not dealt out, and are made in OCP's encodings."""
    if values["cast"] in ("current", "delayed"):
        return True
    return values["splits"] == "list" and not values["b_encoding"].endswith("fnuz")


# Two spaces, because they are served by different implementations: each must see every pair of the other options.
register(
    Space(
        "grouped_gemm", "plain", (_DTYPE, _ROWS, _COLUMNS, _LAYOUT, _SPLITS, *_REST), _make, _rules, _alike,
        turned=_TURNED, together=_WRITTEN,
    ),
    Space(
        "grouped_gemm",
        "quantized",
        (
            _DTYPE,
            _ROWS,
            _COLUMNS,
            _LAYOUT,
            _SPLITS,
            Axis("cast", ("current", "delayed", "block_1d", "mxfp8", f"mxfp8{SWIZZLED}")),
            Axis("b_encoding", ("e4m3fn", "e5m2", "e4m3fnuz")),
            Axis("accumulation", ("default", "split", "fast")),
            *_REST,
        ),
        _make,
        _rules,
        every(_alike, _tensor_scaled_or_listed),
        forms=("cast",),
        turned=_TURNED,
        together=_WRITTEN,
        fixed=_TILED,
    ),
)  # fmt: skip
