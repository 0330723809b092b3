# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `gemm` on records, and products over many k. Rules: `te_dispatch.conformance.families.gemm`."""

from __future__ import annotations

import torch

from te_dispatch.conformance.families.gemm import (
    BIAS,
    LAYOUT,
    OUT_DTYPE,
    SWIZZLED,
    add_epilogue,
    add_options,
    epilogue_valid,
    exactly,
    operand_shapes,
    plain_operands,
    rules,
    sizes,
)
from te_dispatch.conformance.families.quantize import quantizer_of
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, every, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.gemm import LAYOUTS, operand_format

#: In multiples of what FP8 units take, and ragged; 272 = 2 x 128 + 16 has a partial block.
SHAPES = (
    "48x32x64", "16x16x16", "128x128x128", "144x272x272", "1x16x32", "127x129x131", "17x31x15", "1x1x1", "16x48x1040",
    "0x16x16", "16x0x16",
)  # fmt: skip
#: Beyond one chunk of k, and many tiles each way, in multiples of what FP8 units take.
_LARGE = ("32x48x528", "16x32x1040", "32x16x4112", "272x1040x144", "1040x272x144", "65552x16x16", "256x128x512")
#: encoding of a and of b: of one flavour, mixed as fprop and backward mix them.
PAIRS = ("e4m3fn+e4m3fn", "e4m3fn+e5m2", "e5m2+e4m3fn", "e4m3fnuz+e4m3fnuz", "e5m2fnuz+e4m3fnuz", "e4m3fnuz+e5m2fnuz")
#: Scaling of a and of b.
SCALINGS = (
    "current+current", "delayed+current", "block_1d+block_1d", "block_1d+block_2d", "block_2d+block_1d",
    "block_1d_laid_out+block_1d_laid_out", "block_1d_laid_out+block_2d_laid_out", "mxfp8+mxfp8", "nvfp4+nvfp4",
    "mxfp8_swizzled+mxfp8_swizzled", "nvfp4_swizzled+nvfp4_swizzled",
)  # fmt: skip


def _record(
    x: torch.Tensor, cast: str, encoding: str, copies: str, operand: str, layout: str, maker: Maker
) -> Quantized:
    """x cast by the reference, with the copy that is read by default, with both, or with the other one alone."""
    quantizer = quantizer_of(cast.removesuffix(SWIZZLED), encoding, scale=16.0)
    usage = operand_format(layout, operand, quantizer.scaling)[0]
    if copies == "other":
        usage = "row" if usage == "column" else "column"
    made = maker.quantized(x, quantizer, "both" if copies == "both" else usage)
    return maker.laid_out(made, "swizzled_32x4x4") if cast.endswith(SWIZZLED) else made


def _clear_scales(x: Quantized) -> None:
    """Every other scale becomes 0, which makes its block's values 0."""
    for scale in (x.row_scale_inv, x.col_scale_inv):
        if scale is not None:
            scale.view(-1)[::2] = 0


def _records(values: Values, maker: Maker) -> Arguments:
    layout, dtypes = values["layout"], values["dtype"].split("+")
    shapes = operand_shapes(*sizes(values), layout)
    casts, encodings = values["scaling"].split("+"), values["encodings"].split("+")
    arguments: Arguments = {"layout": layout}
    kind = "normal" if values["values"] == "zero_scale" else values["values"]
    for i, name in enumerate("ab"):
        x = maker.tensor(*shapes[i], dtype=dtypes[i % len(dtypes)], values=kind)
        arguments[name] = _record(x, casts[i], encodings[i], values.get("copies", "read"), name, layout, maker)
    if values["values"] == "zero_scale":
        _clear_scales(arguments["a"])
    arguments["split_accumulator"] = {"default": None, "split": True, "fast": False}[values["accumulation"]]
    values = {**values, "dtype": dtypes[0]}
    add_options(arguments, values, maker)
    if values.get("epilogue", "none") != "none":
        add_epilogue(arguments, values, encodings[0], maker)
    elif values.get("cast", "none") != "none":
        arguments["out_quantizer"] = quantizer_of(values["cast"], encodings[0])
    return arguments


_records_valid = every(
    lambda values: not values["scaling"].startswith("nvfp4") or values["encodings"] == PAIRS[0],
    # Where scales lie has nothing to do with what codes mean.
    lambda values: not values["scaling"].endswith(SWIZZLED) or values["encodings"] == PAIRS[0],
    # A block's two copies hold different values: only where one is there does the contract say what is multiplied.
    lambda values: values["copies"] != "both" or values["scaling"] in ("current+current", "delayed+current"),
    epilogue_valid,
    lambda values: values["values"] != "nan" or values["cast"] == "none",
    lambda values: values["values"] != "nan" or not values["scaling"].startswith("nvfp4"),
    # E8M0 scales have no zero.
    lambda values: values["values"] != "zero_scale" or not values["scaling"].startswith("mxfp8"),
)


#: Operands and mode of accumulation, as one axis: every pair of it with a kind of values is a case.
_LONG = {
    "bf16": ("bf16", "", ""),
    "fp16": ("fp16", "", ""),
    "fp32": ("fp32", "", ""),
    "fp8-split": ("bf16", "current", "split"),
    "fp8-fast": ("bf16", "current", "fast"),
    "fp8-default": ("bf16", "current", "default"),
    "block-split": ("bf16", "block_1d", "split"),
    "mxfp8": ("bf16", "mxfp8", "default"),
    "nvfp4": ("bf16", "nvfp4", "default"),
}


def _long(values: Values, maker: Maker) -> Arguments:
    dtype, cast, accumulation = _LONG[values["mode"]]
    if not cast:
        return plain_operands({**values, "dtype": dtype}, maker) | {"out_dtype": torch.float32}
    given = {
        **values, "dtype": dtype, "scaling": f"{cast}+{cast}", "encodings": PAIRS[0], "accumulation": accumulation,
        "out_dtype": "fp32",
    }  # fmt: skip
    return _records(given, maker)


def _twice(values: Values, maker: Maker) -> Arguments:
    """One record as both operands."""
    m, n, k = sizes(values)
    x = maker.tensor(*operand_shapes(m, n, k, values["layout"])[0], dtype="bf16", values=values["values"])
    record = _record(x, values["cast"], values["encoding"], "read", "a", values["layout"], maker)
    return {"a": record, "b": record, "layout": values["layout"]}


def _square(values: Values, maker: Maker) -> Arguments:
    """Operands whose shapes are the same in every layout."""
    cast, encodings = values["cast"], values["encodings"].split("+")
    arguments: Arguments = {"layout": values["layout"]}
    for name, encoding in zip("ab", encodings):
        x = maker.tensor(*sizes(values)[:2], dtype=values["dtype"])
        arguments[name] = x if cast == "plain" else _record(x, cast, encoding, "both", name, values["layout"], maker)
    return arguments


#: Of e5m2 (OCP 8-bit Floating Point Specification, revision 1.0, table 1): S.11111.00.
_INF_CODE = 0x7C


def _infinite(values: Values, maker: Maker) -> Arguments:
    """The operand in e5m2 holds one code of Inf: no cast of this project makes it, and the contract says what it is."""
    given = {**values, "dtype": "bf16", "values": "normal", "accumulation": "default", "shape": "48x32x64"}
    arguments = _records({**given, "scaling": f"{values['scaling']}+{values['scaling']}"}, maker)
    x = arguments["ab"[values["encodings"].split("+").index("e5m2")]]
    for codes in (x.row_data, x.col_data):
        if codes is not None:
            codes.view(-1)[codes.numel() // 3] = _INF_CODE | (0x80 if values["sign"] == "-" else 0)
    return arguments


#: A training step's products: activations and weights in e4m3, gradients in e5m2.
_STEPS = tuple(
    {
        "scaling": "current+current", "encodings": pair, "layout": layout, "accumulation": accumulation,
        "shape": shape, "copies": "read", "values": "normal",
    }
    for pair in ("e4m3fn+e4m3fn", "e5m2+e4m3fn", "e4m3fnuz+e4m3fnuz", "e5m2fnuz+e4m3fnuz")
    for layout in LAYOUTS
    for accumulation in ("default", "split")
    for shape in ("48x32x64", "32x48x528", "16x32x1040", "32x16x4112")
)  # fmt: skip
#: Every block scaling in every layout, where taking the scale of another block, or of another tile of them, shows.
_SCALED = tuple(
    {"scaling": scaling, "layout": layout, "shape": "144x272x272", "values": "tile_scales", "copies": "read"}
    for scaling in SCALINGS
    for layout in LAYOUTS
)
#: Every scaling with one option at a time, where nothing else can hide it; and with blocks whose scales are above 1.
_ALONE = tuple(
    {"scaling": scaling, "cast": "none", "epilogue": "none", "values": "normal", "out": "new", "bias": "none",
     "alpha": "1", "out_dtype": "same", **option}
    for scaling in SCALINGS
    if not scaling.endswith(SWIZZLED)
    for option in ({"alpha": "-0.5"}, {"bias": "same"}, {"out": "added"}, {"out_dtype": "fp32"},
                   {"values": "spread"})
)  # fmt: skip

register(
    Space(
        "gemm",
        "quantized",
        (
            Axis("scaling", SCALINGS),
            Axis("encodings", PAIRS),
            LAYOUT,
            Axis("shape", SHAPES, ("48x32x64", "144x144x144", "127x129x131"), once=_LARGE),
            Axis("dtype", ("bf16", "fp32", "fp16", "bf16+fp32", "fp16+bf16"), ("bf16", "fp32", "fp16")),  # of a + of b
            Axis("copies", ("read", "both", "other")),
            Axis("accumulation", ("default", "split", "fast")),
            Axis("alpha", ("1", "-0.5")),
            Axis("bias", BIAS),
            Axis("epilogue", ("none", "gelu", "dgelu", "bgrad_b", "bgrad_a")),
            Axis("out", ("new", "given", "added")),
            OUT_DTYPE,
            Axis(
                "cast",
                ("none", "delayed", "delayed_seen", "current", "mxfp8", "aux-delayed", "aux-delayed_seen",
                 "aux-current", "both-delayed", "both-delayed_silent"),
            ),
            Axis(
                "values",
                (
                    "normal", "spread", "outlier", "one_sign", "denormal", "zeros", "saturation", "nan", "tile_scales",
                    "zero_scale",
                ),
                dull=("zero_scale",),
            ),
        ),
        _records,
        rules,
        _records_valid,
        together=(
            ("layout", "encodings", "accumulation"),
            ("scaling", "layout", "accumulation"),
            ("scaling", "layout", "encodings"),
        ),
        within=({"cast": "none", "epilogue": "none"},),
        fixed=_STEPS + _SCALED + _ALONE,
        forms=("scaling",),
    ),
    Space(
        "gemm",
        "twice_quantized",
        (
            Axis("cast", ("current", "delayed", "block_1d", "block_2d", "mxfp8", "nvfp4")),
            Axis("encoding", ("e4m3fn", "e5m2", "e4m3fnuz")),
            Axis("layout", ("NT", "TN")),
            Axis("shape", ("48x48x64", "144x144x272")),
            Axis("values", ("normal", "tile_scales")),
        ),
        _twice,
        rules,
        lambda values: not values["cast"].startswith("nvfp4") or values["encoding"] == "e4m3fn",
        like="quantized",
    ),
    Space(
        "gemm",
        "square",
        (
            Axis("cast", ("current", "delayed", "plain")),
            LAYOUT,
            Axis("shape", ("48x48x48", "144x144x144")),
            Axis("encodings", ("e4m3fn+e4m3fn", "e4m3fnuz+e4m3fnuz")),
            Axis("dtype", ("bf16", "fp16", "fp32")),
        ),
        _square,
        rules,
        lambda values: values["cast"] != "plain" or values["encodings"] == "e4m3fn+e4m3fn",
        forms=("cast",),
        checks=("values", "renewed"),
    ),
    Space(
        "gemm",
        "infinite_codes",
        (
            Axis("scaling", ("current", "delayed", "block_1d", "mxfp8")),
            Axis("encodings", ("e5m2+e4m3fn", "e4m3fn+e5m2")),
            LAYOUT,
            Axis("sign", ("+", "-")),
            OUT_DTYPE,
        ),
        _infinite,
        rules,
        checks=("values",),
    ),
    Space(
        "gemm",
        "long",
        (
            Axis("mode", tuple(_LONG), ("bf16", "fp8-split", "block-split")),
            Axis("values", ("one_sign", "normal", "cancelling", "spread"), ("one_sign",), once=("exact",)),
            Axis("layout", ("NT", "NN", "TN")),
            Axis("shape", ("16x16x4096", "16x16x520"), ("16x16x520",), once=("16x16x1040", "16x16x16400")),
        ),
        _long,
        rules,
        lambda values: values["values"] != "exact" or values["mode"] in ("bf16", "fp16", "fp32"),
        fixed=exactly(("bf16", "fp16", "fp32"), "mode", ("16x16x4096",)),
        like="quantized",
    ),
)  # fmt: skip
