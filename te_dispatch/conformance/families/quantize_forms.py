# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that read a `Quantized`: `dequantize`, `transpose_quantized`, `relayout_scales`, `convert_encoding`.

Records are drawn, not cast: every code appears as data, and every E8M0 and e4m3fn code as a scale, with scales from
below the normal range to where products overflow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.conformance.families.quantize import ENCODING, USAGE, bits, float_dtype, moved_bits, sizes
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, register
from te_dispatch.numerics.encodings import ENCODINGS, FP8_ENCODINGS
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.shapes import data_shapes, scale_shapes

#: Exponents of drawn fp32 scales.
_EXPONENTS = {"ordinary": (-12, 12), "tiny": (-149, -120), "huge": (100, 127)}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """How a record is drawn.

    Attributes:
        scaling, encoding, usage, shape, dtype: the record's.
        scales: of `_EXPONENTS`.
        largest: every code's magnitude is at most this, where given.
    """

    scaling: str
    encoding: str
    usage: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    scales: str = "ordinary"
    largest: int | None = None


def drawn(maker: Maker, how: Drawn) -> Quantized:
    """A record with canonical scales."""
    datas, scales = data_shapes(how.shape, how.scaling), scale_shapes(how.shape, how.scaling)
    parts: list[torch.Tensor | None] = []
    for column, side in enumerate(("row", "column")):
        present = how.usage in (side, "both")
        parts += [_data(maker, datas[column], how), _scale(maker, scales[column], how)] if present else [None, None]
    row, row_scale, col, col_scale = parts
    if how.scaling == "tensor" and row_scale is not None and col_scale is not None:
        col_scale = row_scale
    shared = _floats(maker, (1,), how.scales) if how.scaling == "nvfp4" else None
    device = torch.device("cpu")
    return Quantized(
        row, col, row_scale, col_scale, how.encoding, how.scaling, CANONICAL_SCALES, how.shape, how.dtype, device,
        shared,
    )  # fmt: skip


def _data(maker: Maker, shape: tuple[int, ...], how: Drawn) -> torch.Tensor:
    """Every code in turn, from a drawn one on; where the tensor is small, whichever come first."""
    count = torch.Size(shape).numel()
    start = int(maker.integers(0, 256))
    # 167 is odd: a multiple of it runs through all codes, in no order that a block size could hide.
    codes = ((torch.arange(count) * 167 + start) % 256).to(torch.uint8)
    if how.largest is not None:
        codes = torch.where((codes & 0x7F) > how.largest, codes & 0x80 | how.largest, codes)
    return codes.view(shape)


def _scale(maker: Maker, shape: tuple[int, ...], how: Drawn) -> torch.Tensor:
    if how.scaling in ("mxfp8", "nvfp4"):
        return _data(maker, shape, dataclasses.replace(how, largest=None))
    return _floats(maker, shape, how.scales)


def _floats(maker: Maker, shape: tuple[int, ...], scales: str) -> torch.Tensor:
    low, high = _EXPONENTS[scales]
    exponent = low + (high - low) * torch.rand(shape, generator=maker.generator, dtype=torch.float64)
    return torch.exp2(exponent).float()


def _record(values: Values, maker: Maker, **changes: Any) -> Quantized:
    encoding = "e2m1" if values["scaling"] == "nvfp4" else values["encoding"]
    dtype = DTYPES[values.get("nominal", "bf16")]
    how = Drawn(values["scaling"], encoding, values["usage"], sizes(values), dtype, values.get("scales", "ordinary"))
    record = drawn(maker, dataclasses.replace(how, **changes))
    layout = values.get("layout", CANONICAL_SCALES)
    if layout == CANONICAL_SCALES:
        return record
    return maker.laid_out(record, _layout(values["scaling"], layout))


#: The layout besides the canonical one that is defined for a scaling.
OTHER_LAYOUTS = {
    "block_1d": "gemm_1d", "block_2d": "gemm_2d", "mxfp8": "swizzled_32x4x4", "nvfp4": "swizzled_32x4x4",
}  # fmt: skip


def _layout(scaling: str, name: str) -> str:
    return OTHER_LAYOUTS[scaling] if name == "other" else CANONICAL_SCALES


def _meaningful(values: Values) -> bool:
    if values["scaling"] == "tensor" and "other" in (values.get("layout"), values.get("scale_layout")):
        return False
    return values["scaling"] != "nvfp4" or values["encoding"] == FP8_ENCODINGS[0]


def _dequantize(values: Values, maker: Maker) -> Arguments:
    return {"x": _record(values, maker), "dtype": float_dtype(values["dtype"])}


def _first_rows(arguments: Arguments) -> Arguments:
    """Of records whose row-wise copy is read: the first half of the rows, in whole blocks of 128 where tiles share."""
    x = arguments["x"]
    rows = x.shape[0] // 2 if x.scaling != "block_2d" else x.shape[0] // 256 * 128
    per_row = {"tensor": 1, "block_2d": -(-rows // 128)}.get(x.scaling, rows)
    part = Quantized(
        x.row_data[:rows], None, x.row_scale_inv[:per_row], None, x.encoding, x.scaling, x.scale_layout,
        (rows, *x.shape[1:]), x.dtype, x.device, x.global_scale_inv,
    )  # fmt: skip
    return {**arguments, "x": part}


def _transpose(values: Values, maker: Maker) -> Arguments:
    return {"x": _record(values, maker)}


def _relayout(values: Values, maker: Maker) -> Arguments:
    return {"x": _record(values, maker), "scale_layout": _layout(values["scaling"], values["scale_layout"])}


def other_form(encoding: str) -> str:
    """FNUZ of OCP and the other way round."""
    return {"e4m3fn": "e4m3fnuz", "e4m3fnuz": "e4m3fn", "e5m2": "e5m2fnuz", "e5m2fnuz": "e5m2"}[encoding]


def _convert(values: Values, maker: Maker) -> Arguments:
    target = other_form(values["encoding"])
    # ``error`` is about codes beyond the target's range: without them it must convert like ``saturate``.
    largest = ENCODINGS[target].max_code if values["overflow"] == "error" else None
    if ENCODINGS[target].fnuz:
        largest = None
    arguments: Arguments = {"x": _record(values, maker, largest=largest), "encoding": target}
    arguments["overflow"] = values["overflow"]
    if values["count"] != "none":
        arguments["count"] = torch.full((1,), int(values["count"]), dtype=torch.int64)
    return arguments


def _convert_wrongly(values: Values, maker: Maker) -> Arguments:
    encoding = values["encoding"]
    x = _record(values, maker)
    counted = x.row_data if x.row_data is not None else x.col_data
    assert counted is not None
    # The record may be too small to hold every code; and of the two that do not convert it holds one.
    for data in (x.row_data, x.col_data):
        if data is not None:
            data[(data & 0x7F) == 0x7F] = 0x7E
    counted.view(-1)[-1] = int(values["code"], 16)
    count = torch.full((1,), 5, dtype=torch.int64)
    return {"x": x, "encoding": other_form(encoding), "overflow": "error", "count": count}


def _sharing(*names: str) -> Callable[[Arguments, Mapping[str, torch.Tensor]], str | None]:
    """`Space.placed`: these tensors of the record that is made are those of the record x."""

    def placed(arguments: Arguments, results: Mapping[str, torch.Tensor]) -> str | None:
        for name in names:
            own, made = getattr(arguments["x"], name), results.get(name)
            if own is not None and made is not None and own.numel() and made.data_ptr() != own.data_ptr():
                return f"{name} is a copy of x's, and must share its memory"
        return None

    return placed


_SCALINGS = Axis("scaling", ("tensor", "block_1d", "block_2d", "mxfp8", "nvfp4"))
_FP32_SCALED = Axis("scaling", ("tensor", "block_1d", "block_2d"))
_SHAPE = Axis(
    "shape",
    ("33x65", "127x129", "128x128", "129x257", "2x3x48", "1x1", "31", "0x16", "16x0", "256x512"),
    # The last has as many blocks of 32 rows as it has columns.
    once=("65553x3", "3x8209", "1031x257", "130x1056", "130x1058", "512x16", "1039x1031"),
)
#: Of which some have several tiles each way: with tiles in one row, scales read the same transposed and not. One has
#: as many down as across, where scales that are not transposed fit.
_TWO_D = Axis(
    "shape",
    ("33x65", "127x129", "128x128", "129x257", "130x250", "2x3x48", "257x1", "0x16", "16x0", "31"),
    once=("65553x3", "3x8209", "1031x257", "1039x1031"),
)
_SCALES = Axis("scales", tuple(_EXPONENTS))
_LAYOUT = Axis("layout", ("canonical", "other"))
_NOMINAL = Axis("nominal", ("bf16", "fp32", "fp16"))
#: Whether column-wise scales are turned cannot be told from their shape.
_SQUARE_SCALES = {
    "scaling": "mxfp8", "shape": "512x16", "usage": "both", "layout": "canonical", "scale_layout": "other",
}  # fmt: skip
#: Scales in several rows, whose length no alignment divides; of columns alone, too.
_PADDED = tuple(
    {"scaling": scaling, "shape": shape, "usage": usage}
    for scaling in OTHER_LAYOUTS
    for shape, usage in (("129x257", "both"), ("130x1058", "both"), ("130x1058", "column"))
)
_RELAID = tuple(
    {**values, "layout": layout, "scale_layout": other}
    for values in _PADDED
    for layout, other in (("canonical", "other"), ("other", "canonical"))
)

register(
    Space(
        "dequantize", "plain",
        (
            _SCALINGS, ENCODING, USAGE, _SHAPE, _SCALES, _LAYOUT, _NOMINAL,
            Axis("dtype", ("none", "fp32", "bf16", "fp16")),
        ),
        _dequantize, bits, valid=_meaningful, widen=False, forms=("scaling",),
        fixed=tuple({**values, "layout": "other"} for values in _PADDED),
    ),
    Space(
        "dequantize", "rows",
        (_SCALINGS, ENCODING, Axis("usage", ("row",)), Axis("shape", ("66x40", "512x256")), Axis("dtype", ("none",))),
        _dequantize, bits, valid=_meaningful, widen=False, batch=_first_rows,
    ),
    Space(
        "transpose_quantized", "plain",
        (Axis("scaling", ("tensor", "block_2d")), ENCODING, Axis("usage", ("row", "both")), _TWO_D, _NOMINAL),
        _transpose, moved_bits, widen=False, forms=("scaling",), placed=_sharing("row_data", "row_scale_inv"),
    ),
    Space(
        "relayout_scales", "plain",
        (
            _SCALINGS, ENCODING, USAGE, _SHAPE, _LAYOUT, Axis("scale_layout", ("other", "canonical")), _NOMINAL,
        ),
        _relayout, moved_bits, valid=_meaningful, widen=False, forms=("scaling",), fixed=(_SQUARE_SCALES, *_RELAID),
        placed=_sharing("row_data", "col_data"),
    ),
    Space(
        "convert_encoding", "plain",
        (
            _FP32_SCALED, ENCODING, USAGE, _TWO_D, _SCALES, _LAYOUT, Axis("overflow", ("saturate", "error")),
            Axis("count", ("none", "0", "41", str(2**31 + 5))),
        ),
        _convert, bits, valid=_meaningful, widen=False, forms=("scaling",),
    ),
    Space(
        "convert_encoding", "overflow",
        (
            _FP32_SCALED, Axis("encoding", ("e4m3fnuz",)), USAGE, Axis("shape", ("33x65", "2x3x48", "1x1")),
            Axis("code", ("7F", "FF")),
        ),
        _convert_wrongly, bits, valid=_meaningful, widen=False, raises=ValueError,
    ),
)  # fmt: skip
