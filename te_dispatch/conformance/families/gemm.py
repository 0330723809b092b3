# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `gemm`, and how matrix products are judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.bounds import U32, elementary
from te_dispatch.conformance.bounds import gemm as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.families.quantize import quantizer_of
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Rule
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, every, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.gemm import LAYOUTS, operand_format

#: m x n x k: small, prime, around tiles of 16 and 128, tall, wide, deep, and empty in each dimension.
SHAPES = (
    "31x37x41", "1x1x1", "16x16x16", "15x17x16", "17x15x17", "127x129x128", "129x127x129", "128x128x127", "1x257x64",
    "509x1x33", "3x5x1031", "0x8x16", "8x0x16", "8x16x0",
)  # fmt: skip
_SMOKE_SHAPES = ("31x37x41", "129x127x129", "8x16x0")
#: In multiples of what FP8 units take, and ragged; 272 = 2 x 128 + 16 has a partial block.
_RECORD_SHAPES = (
    "48x32x64", "16x16x16", "128x128x128", "144x272x272", "1x16x32", "127x129x131", "17x31x15", "1x1x1", "16x48x1040",
    "0x16x16", "16x0x16",
)  # fmt: skip
_BIAS = ("none", "same", "fp32")
#: Kinds whose sums stay finite in fp32. The contract says nothing of sums that overflow on their way.
_FINITE = ("normal", "spread", "outlier", "one_sign", "denormal", "zeros", "cancelling")


def mode_of(judged: Judged) -> str:
    """How sums may be accumulated: FP8 operands on real FP8 units fast unless the call or a block scale says split."""
    a = judged.arguments["a"]
    a = a[0] if isinstance(a, (list, tuple)) and a else a
    if not isinstance(a, Quantized) or "emulated" in judged.traits:
        return "fp32"
    if judged.arguments.get("split_accumulator") or a.scaling != "tensor":
        return "split"
    return "fast"


def matrices(a: Any, b: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (m, k) and (k, n), of the copies that `operand_format` names."""
    found = []
    for name, x in (("a", a), ("b", b)):
        column = isinstance(x, Quantized) and operand_format(layout, name, x.scaling)[0] == "column"
        found.append(casting.values(x, column))
    return found[0].t() if layout[0] == "T" else found[0], found[1].t() if layout[1] == "T" else found[1]


def product(arguments: Mapping[str, Any], mode: str) -> Known:
    """alpha * a b + bias, (m, n), before the epilogue."""
    left, right = matrices(arguments["a"], arguments["b"], arguments["layout"])
    z = bounds.product(left, right, mode)
    alpha = arguments.get("alpha", 1.0)
    z = z if alpha == 1.0 else z * alpha
    bias = arguments.get("bias")
    return z if bias is None else z + Known.exactly(bias)


def rules(judged: Judged) -> Mapping[str, Rule]:
    """The product's bound, carried through alpha, bias, epilogue and accumulation in the contract's order."""
    arguments = judged.arguments
    z = product(arguments, mode_of(judged))
    found: dict[str, Rule] = {}
    epilogue = arguments.get("epilogue")
    dbias = None
    if epilogue == "gelu":
        found |= _result("aux", z, arguments.get("aux_quantizer"), judged)
        z = elementary.gelu(z)
    elif epilogue == "dgelu":
        aux = arguments["aux"]
        held = casting.values(aux).reshape(z.value.shape)
        # A record's values are rounded to fp32 before they are used.
        before = Known(held, held.abs() * U32 if isinstance(aux, Quantized) else torch.zeros_like(held))
        z = z * elementary.gelu_derivative(before)
        dbias = z.sum(0)
    elif epilogue in ("bgrad_a", "bgrad_b"):
        left, right = matrices(arguments["a"], arguments["b"], arguments["layout"])
        dbias = bounds.operand_sum(left, 1) if epilogue == "bgrad_a" else bounds.operand_sum(right, 0)
    if dbias is not None:
        found["dbias"] = within(dbias, judged.expected["dbias"], judged.actual["dbias"])
    if arguments.get("accumulate"):
        out = arguments["out"]
        z = z + Known.exactly(out.reshape(z.value.shape))
    return found | _result("out", z, arguments.get("out_quantizer"), judged)


def _result(path: str, z: Known, quantizer: Any, judged: Judged) -> dict[str, Rule]:
    if quantizer is not None:
        return casting.cast_rules(path, quantizer, z, judged.actual, judged.expected, f"{path}_quantizer")
    return {path: within(z, judged.expected[path], judged.actual[path])}


def sizes(values: Values) -> tuple[int, int, int]:
    m, n, k = (int(size) for size in values["shape"].split("x"))
    return m, n, k


def operand_shapes(m: int, n: int, k: int, layout: str) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout[0] == "T" else (m, k)), ((n, k) if layout[1] == "T" else (k, n))


def _led(shape: tuple[int, int], lead: str) -> tuple[int, ...]:
    """With two leading dimensions instead of one: 3 of them where that divides."""
    if lead == "1":
        return shape
    first = 3 if shape[0] % 3 == 0 else 1
    return (first, shape[0] // first, shape[1])


def _operands(values: Values, maker: Maker) -> Arguments:
    layout = values["layout"]
    shapes = [_led(shape, values.get("lead", "1")) for shape in operand_shapes(*sizes(values), layout)]
    a, b = (maker.tensor(*shape, dtype=values["dtype"], values=values["values"]) for shape in shapes)
    if values.get("lead", "1") != "1" and layout != "TN":
        b = b.reshape(shapes[1][0] * shapes[1][1], shapes[1][2])  # a weight
    return {"a": a, "b": b, "layout": layout}


def _out_shape(a: Any, n: int, layout: str) -> tuple[int, ...]:
    return (a.shape[-1], n) if layout == "TN" else (*a.shape[:-1], n)


def _add_options(arguments: Arguments, values: Values, maker: Maker) -> Arguments:
    """alpha, bias, out, out_dtype, where the case has them."""
    n = sizes(values)[1]
    dtype = values.get("dtype", "bf16")
    if values.get("alpha", "1") != "1":
        arguments["alpha"] = float(values["alpha"])
    if values.get("bias", "none") != "none":
        arguments["bias"] = maker.tensor(n, dtype=dtype if values["bias"] == "same" else values["bias"])
    wanted = values.get("out_dtype", "same")
    if values.get("out", "new") != "new":
        shape = _out_shape(arguments["a"], n, values["layout"])
        arguments["out"] = maker.tensor(*shape, dtype=dtype if wanted == "same" else wanted)
        arguments["accumulate"] = values["out"] == "added"
    if wanted != "same":
        arguments["out_dtype"] = DTYPES[wanted]
    return arguments


def _plain(values: Values, maker: Maker) -> Arguments:
    return _add_options(_operands(values, maker), values, maker)


def _plain_valid(values: Values) -> bool:
    return values["values"] != "log_uniform" or values["dtype"] == "fp16"


def _half(arguments: Arguments) -> Arguments:
    """The first half of the output's rows."""
    a, transposed = arguments["a"], arguments["layout"][0] == "T"
    rows = (a.shape[-1] if transposed else a.shape[0]) // 2
    changed = {**arguments, "a": a[..., :rows] if transposed else a[:rows]}
    for name in ("out", "aux"):
        if arguments.get(name) is not None:
            changed[name] = arguments[name][:rows]
    return changed


def _epilogue(values: Values, maker: Maker) -> Arguments:
    arguments = _add_options(_operands(values, maker), values, maker)
    arguments["epilogue"] = values["epilogue"]
    cast = values["cast"]
    if cast.startswith("aux-"):
        if values["epilogue"] == "gelu":
            arguments["aux_quantizer"] = quantizer_of(cast[4:], "e4m3fn")
    elif cast != "none":
        encoding = "e5m2" if values["epilogue"] == "dgelu" else "e4m3fn"
        arguments["out_quantizer"] = quantizer_of(cast, encoding)
    if values["epilogue"] == "dgelu":
        shape = _out_shape(arguments["a"], sizes(values)[1], values["layout"])
        aux = maker.tensor(*shape, dtype=values["dtype"], values="normal") * 3
        arguments["aux"] = maker.quantized(aux, quantizer_of(cast[4:], "e4m3fn")) if cast.startswith("aux-") else aux
    return arguments


_epilogue_valid = every(
    lambda values: not values["cast"].startswith("aux-") or values["epilogue"] in ("gelu", "dgelu"),
    lambda values: values["cast"] == "none" or values["cast"].startswith("aux-") or values["out"] == "new",
)


#: encoding of a and of b: of one flavour, mixed as fprop and backward mix them.
_PAIRS = ("e4m3fn+e4m3fn", "e4m3fn+e5m2", "e5m2+e4m3fn", "e4m3fnuz+e4m3fnuz", "e5m2fnuz+e4m3fnuz", "e4m3fnuz+e5m2fnuz")
#: Scaling of a and of b.
_SCALINGS = (
    "current+current", "delayed+current", "block_1d+block_1d", "block_1d+block_2d", "block_2d+block_1d",
    "block_1d_laid_out+block_1d_laid_out", "block_1d_laid_out+block_2d_laid_out", "mxfp8+mxfp8", "nvfp4+nvfp4",
)  # fmt: skip


def _record(
    x: torch.Tensor, cast: str, encoding: str, copies: str, operand: str, layout: str, maker: Maker
) -> Quantized:
    """x cast by the reference, with the copy that is read by default, with both, or with the other one alone."""
    quantizer = quantizer_of(cast, encoding, scale=16.0)
    usage = operand_format(layout, operand, quantizer.scaling)[0]
    if copies == "other":
        usage = "row" if usage == "column" else "column"
    return maker.quantized(x, quantizer, "both" if copies == "both" else usage)


def _records(values: Values, maker: Maker) -> Arguments:
    layout, dtype = values["layout"], values["dtype"]
    shapes = operand_shapes(*sizes(values), layout)
    casts, encodings = values["scaling"].split("+"), values["encodings"].split("+")
    arguments: Arguments = {"layout": layout}
    for i, name in enumerate("ab"):
        x = maker.tensor(*shapes[i], dtype=dtype, values=values["values"])
        arguments[name] = _record(x, casts[i], encodings[i], values.get("copies", "read"), name, layout, maker)
    arguments["split_accumulator"] = {"default": None, "split": True, "fast": False}[values["accumulation"]]
    _add_options(arguments, values, maker)
    if values.get("epilogue", "none") != "none":
        arguments["epilogue"] = values["epilogue"]
    if values.get("cast", "none") != "none":
        arguments["out_quantizer"] = quantizer_of(values["cast"], encodings[0])
    return arguments


_records_valid = every(
    lambda values: not values["scaling"].startswith("nvfp4") or values["encodings"] == _PAIRS[0],
    # A block's two copies hold different values: only where one is there does the contract say what is multiplied.
    lambda values: values["copies"] != "both" or values["scaling"] in ("current+current", "delayed+current"),
    lambda values: values["cast"] == "none" or values["out"] == "new",
    lambda values: values["values"] != "nan" or values["cast"] == "none",
    lambda values: values["values"] != "nan" or not values["scaling"].startswith("nvfp4"),
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
        return _operands({**values, "dtype": dtype}, maker) | {"out_dtype": torch.float32}
    given = {
        **values, "dtype": dtype, "scaling": f"{cast}+{cast}", "encodings": _PAIRS[0], "accumulation": accumulation,
        "out_dtype": "fp32",
    }  # fmt: skip
    return _records(given, maker)


_OUT_DTYPE = Axis("out_dtype", ("same", "fp32", "bf16", "fp16"))
_LAYOUT = Axis("layout", LAYOUTS)
_DTYPE = Axis("dtype", ("bf16", "fp32", "fp16"))

register(
    Space(
        "gemm",
        "plain",
        (
            _DTYPE,
            _LAYOUT,
            Axis("shape", SHAPES, _SMOKE_SHAPES),
            Axis("lead", ("1", "2")),
            Axis("alpha", ("1", "-0.5", "1.7")),
            Axis("bias", _BIAS),
            Axis("out", ("new", "given", "added")),
            _OUT_DTYPE,
            Axis("values", (*_FINITE, "log_uniform", "nan", "inf"), ("normal", "one_sign", "cancelling")),
        ),
        _plain,
        rules,
        _plain_valid,
        batch=_half,
    ),
    Space(
        "gemm",
        "epilogue",
        (
            _DTYPE,
            Axis("epilogue", ("gelu", "dgelu", "bgrad_b", "bgrad_a")),
            _LAYOUT,
            Axis("shape", SHAPES[:-4] + ("0x8x16", "8x16x0"), ("31x37x41", "128x128x127")),
            Axis("lead", ("1", "2")),
            Axis("alpha", ("1", "0.125")),
            Axis("bias", _BIAS),
            Axis("out", ("new", "given", "added")),
            _OUT_DTYPE,
            Axis("cast", ("none", "delayed", "current", "block_1d", "block_2d", "mxfp8", "nvfp4", "aux-delayed",
                          "aux-current", "aux-mxfp8"), ("none", "delayed", "current", "aux-delayed")),
            Axis("values", ("normal", "one_sign", "cancelling", "zeros")),
        ),
        _epilogue,
        rules,
        _epilogue_valid,
    ),
    Space(
        "gemm",
        "quantized",
        (
            Axis("scaling", _SCALINGS),
            Axis("encodings", _PAIRS),
            _LAYOUT,
            Axis("shape", _RECORD_SHAPES, ("48x32x64", "144x272x272", "127x129x131")),
            Axis("dtype", ("bf16", "fp32", "fp16")),
            Axis("copies", ("read", "both", "other")),
            Axis("accumulation", ("default", "split", "fast")),
            Axis("alpha", ("1", "-0.5")),
            Axis("bias", _BIAS),
            Axis("epilogue", ("none", "gelu", "bgrad_b", "bgrad_a")),
            Axis("out", ("new", "given", "added")),
            _OUT_DTYPE,
            Axis("cast", ("none", "delayed", "current", "mxfp8")),
            Axis("values", ("normal", "spread", "outlier", "one_sign", "denormal", "zeros", "saturation", "nan")),
        ),
        _records,
        rules,
        _records_valid,
    ),
    Space(
        "gemm",
        "long",
        (
            Axis("mode", tuple(_LONG), ("bf16", "fp8-split", "block-split")),
            Axis("values", ("one_sign", "normal", "cancelling", "spread"), ("one_sign",)),
            Axis("layout", ("NT",)),
            Axis("shape", ("16x16x4096",)),
        ),
        _long,
        rules,
    ),
)  # fmt: skip
