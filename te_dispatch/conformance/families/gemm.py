# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `gemm`, and how matrix products are judged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.bounds import U32, elementary
from te_dispatch.conformance.bounds import gemm as bounds
from te_dispatch.conformance.bounds.known import Known, or_nan, within
from te_dispatch.conformance.families.quantize import quantizer_of
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Instead, Open, Rule
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, every, register
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.gemm import LAYOUTS, operand_format

#: More than 512, 1,024 and 4,096 products in a sum, in whole vectors and not.
_DEEP = ("17x33x520", "33x17x1032", "16x8x4104", "24x9x1037")
#: Beyond what one tile, one wave, one chunk of k, and a 16-bit count of tiles or rows hold; and whole tiles only.
LARGE = (
    *_DEEP, "257x33x72", "1033x24x40", "24x1033x40", "4099x8x16", "8x4099x16",
    "65553x3x5", "3x65553x5", "64x128x256", "256x256x512",
)  # fmt: skip
#: m x n x k: small, prime, around tiles of 16 and 128, tall, wide, deep, and empty in each dimension.
SHAPES = (
    "31x37x41", "1x1x1", "16x16x16", "15x17x16", "17x15x17", "127x129x128", "129x127x129", "128x128x127", "1x257x64",
    "509x1x33", "3x5x1031", "0x8x16", "8x0x16", "8x16x0",
)  # fmt: skip
_SMOKE_SHAPES = ("31x37x41", "129x127x129", "8x16x0")
BIAS = ("none", "same", "fp32")
#: Behind the name of a cast: its scales are then tiled.
SWIZZLED = "_swizzled"
#: Kinds whose sums stay finite in fp32. The contract says nothing of sums that overflow on their way.
_FINITE = ("normal", "spread", "outlier", "one_sign", "denormal", "zeros", "cancelling", "tile_scales", "exact")


def mode_of(judged: Judged) -> str:
    """How sums may be accumulated: FP8 operands on real FP8 units fast unless the call or a block scale says split."""
    a = judged.arguments["a"]
    a = a[0] if isinstance(a, (list, tuple)) and a else a
    if not isinstance(a, Quantized) or "emulated" in judged.traits:
        return "fp32"
    if judged.arguments.get("split_accumulator") or a.scaling != "tensor":
        return "split"
    return "fast"


def matrices(a: Any, b: Any, layout: str, lifted: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 (m, k) and (k, n), of the copies that `operand_format` names; `lifted` as in `casting.values`."""
    found = []
    for name, x in (("a", a), ("b", b)):
        column = isinstance(x, Quantized) and operand_format(layout, name, x.scaling)[0] == "column"
        found.append(casting.values(x, column, lifted))
    return found[0].t() if layout[0] == "T" else found[0], found[1].t() if layout[1] == "T" else found[1]


def product(arguments: Mapping[str, Any], mode: str) -> Known:
    """alpha * a b + bias, (m, n), before the epilogue."""
    left, right = matrices(arguments["a"], arguments["b"], arguments["layout"])
    alpha, bias = arguments.get("alpha", 1.0), arguments.get("bias")
    if alpha == 0:  # see `_maybe_nan`
        z = Known.exactly(left.new_zeros(left.shape[0], right.shape[1]))
    else:
        alone = alpha == 1.0 and bias is None and not arguments.get("accumulate")
        narrow = mode != "fp32" and arguments["a"].scaling != "nvfp4"
        aligned = matrices(arguments["a"], arguments["b"], arguments["layout"], True) if narrow else None
        z = bounds.product(left, right, mode, alone, aligned)
        z = z if alpha == 1.0 else z * alpha
    return z if bias is None else z + bounds.term(bias, left.shape[1])


def inner_size(arguments: Mapping[str, Any]) -> int:
    """k."""
    a = arguments["a"]
    return int(a.shape[-1] if arguments["layout"][0] == "N" else math.prod(a.shape[:-1]))


def _maybe_nan(arguments: Mapping[str, Any]) -> torch.Tensor | None:
    """bool (m, n), where alpha = 0 meets a product that is not finite: 0, or NaN; None if it does so nowhere."""
    if arguments.get("alpha", 1.0) != 0:
        return None
    left, right = matrices(arguments["a"], arguments["b"], arguments["layout"])
    where = ~(left.abs() @ right.abs() <= torch.finfo(torch.float32).max)
    return where if bool(where.any()) else None


def rules(judged: Judged) -> Mapping[str, Rule]:
    """The product's bound, carried through alpha, bias, epilogue and accumulation in the contract's order."""
    arguments = judged.arguments
    z, maybe_nan = product(arguments, mode_of(judged)), _maybe_nan(arguments)
    found: dict[str, Rule] = {}
    epilogue = arguments.get("epilogue")
    dbias, nan_sums = None, None
    if epilogue == "gelu":
        found |= _result("aux", z, arguments.get("aux_quantizer"), judged, maybe_nan)
        z = elementary.gelu(z)
    elif epilogue == "dgelu":
        aux = arguments["aux"]
        held = casting.values(aux).reshape(z.value.shape)
        # A record's values are rounded to fp32 before they are used.
        before = Known(held, held.abs() * U32 if isinstance(aux, Quantized) else torch.zeros_like(held))
        z = z * elementary.gelu_derivative(before)
        dbias, nan_sums = z.sum(0), None if maybe_nan is None else maybe_nan.any(0)
    elif epilogue in ("bgrad_a", "bgrad_b"):
        left, right = matrices(arguments["a"], arguments["b"], arguments["layout"])
        dbias = bounds.operand_sum(left, 1) if epilogue == "bgrad_a" else bounds.operand_sum(right, 0)
    if dbias is not None:
        found |= _result("dbias", dbias, None, judged, nan_sums)
    if arguments.get("accumulate"):
        out = arguments["out"].reshape(z.value.shape)
        z = z + (Known.exactly(out) if epilogue in ("gelu", "dgelu") else bounds.term(out, inner_size(arguments)))
    return found | _result("out", z, arguments.get("out_quantizer"), judged, maybe_nan)


def _result(path: str, z: Known, quantizer: Any, judged: Judged, maybe_nan: torch.Tensor | None) -> dict[str, Rule]:
    """Of z, or NaN where it `maybe_nan`."""
    if quantizer is not None:
        found = casting.cast_rules(path, quantizer, z, judged.actual, judged.expected, f"{path}_quantizer")
        if maybe_nan is None:
            return found
        return {name: Open("alpha is 0 and a product is not finite: what is cast may be NaN") for name in found}
    actual, expected = judged.actual[path], judged.expected[path]
    if maybe_nan is None:
        return {path: within(z, expected, actual)}
    # Whichever of the two the oracle gives.
    where, value = maybe_nan.reshape(expected.shape), z.value.reshape(expected.shape)
    instead = or_nan(where), Instead(where, value, within(z, value.float(), actual).limit)
    return {path: within(z, expected, actual, instead)}


def sizes(values: Values) -> tuple[int, int, int]:
    m, n, k = (int(size) for size in values["shape"].split("x"))
    return m, n, k


def operand_shapes(m: int, n: int, k: int, layout: str) -> tuple[tuple[int, int], tuple[int, int]]:
    return ((k, m) if layout[0] == "T" else (m, k)), ((n, k) if layout[1] == "T" else (k, n))


#: How the operands of a product lead: with one dimension each, with two, or one of a product that contracts them.
LEADS = ("1", "2", "of_a", "of_b")


def lead_valid(values: Values) -> bool:
    return values["lead"] in ("1", "2") or values["layout"] == "TN"


def _led(shape: tuple[int, int], lead: bool) -> tuple[int, ...]:
    """With two leading dimensions instead of one: 3 of them where that divides."""
    if not lead:
        return shape
    first = 3 if shape[0] % 3 == 0 else 1
    return (first, shape[0] // first, shape[1])


#: Significant bits of integers that TF32, bf16 and fp16 arithmetic on wider dtypes cannot hold.
_INTEGER_BITS = {"fp32": 12, "bf16": 8, "fp16": 11}


def pair(shapes: Sequence[tuple[int, ...]], values: Values, maker: Maker) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of one kind of values, and of those that concern both.

    ``exact``: integers of as many bits as the dtype holds in a, and -1, 0, 1 in b (in every other case the other way
    round): fp32 products and sums are exact up to k = 4096, those of less precise arithmetic are not.
    ``inf_times_zero``: a has Inf, half of b is 0.
    """
    kind, dtype = values["values"], values["dtype"]
    if kind == "exact":
        top = 2 ** _INTEGER_BITS[dtype]
        tops = (top, 2) if bool(maker.boolean()) else (2, top)
        a, b = (maker.integers(1 - n, n, *shape).to(DTYPES[dtype]) for shape, n in zip(shapes, tops))
    elif kind == "inf_times_zero":
        a = maker.tensor(*shapes[0], dtype=dtype, values="inf")
        b = maker.tensor(*shapes[1], dtype=dtype) * maker.boolean(*shapes[1])
    else:
        a, b = (maker.tensor(*shape, dtype=dtype, values=kind) for shape in shapes)
    return a, b


def plain_operands(values: Values, maker: Maker) -> Arguments:
    layout, lead = values["layout"], values.get("lead", "1")
    flat = operand_shapes(*sizes(values), layout)
    shapes = [_led(shape, lead in ("2", of)) for shape, of in zip(flat, ("of_a", "of_b"))]
    a, b = pair(shapes, values, maker)
    if layout != "TN":
        b = b.reshape(flat[1])  # a weight
    return {"a": a, "b": b, "layout": layout}


def _out_shape(a: Any, n: int, layout: str) -> tuple[int, ...]:
    return (a.shape[-1], n) if layout == "TN" else (*a.shape[:-1], n)


def add_options(arguments: Arguments, values: Values, maker: Maker) -> Arguments:
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
        added = values["out"] == "added"
        held = maker.tensor(*shape, dtype=dtype if wanted == "same" else wanted)
        # What is not added to is overwritten, whatever it held.
        arguments |= {"out": held if added else torch.full_like(held, torch.nan), "accumulate": added}
    if wanted != "same":
        arguments["out_dtype"] = DTYPES[wanted]
    return arguments


def _plain(values: Values, maker: Maker) -> Arguments:
    return add_options(plain_operands(values, maker), values, maker)


_plain_valid = every(
    lead_valid,
    lambda values: values["values"] != "log_uniform" or values["dtype"] == "fp16",
)


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
    arguments = add_options(plain_operands(values, maker), values, maker)
    add_epilogue(arguments, values, "e5m2" if values["epilogue"] == "dgelu" else "e4m3fn", maker)
    return arguments


#: What makes the square of a number around 1 overflow fp32, or, of fp16, fp16.
_FAR = {"fp32": 1e30, "bf16": 1e30, "fp16": 4096.0}


def add_epilogue(arguments: Arguments, values: Values, encoding: str, maker: Maker) -> None:
    """The epilogue, and what is cast of it: the result, to an encoding, what gelu keeps and dgelu reads, or both."""
    arguments["epilogue"] = values["epilogue"]
    which, _, cast = values["cast"].rpartition("-")
    of_aux = quantizer_of(cast, "e4m3fn") if which in ("aux", "both") else None
    if cast != "none" and which != "aux":
        arguments["out_quantizer"] = quantizer_of(cast, encoding)
    if values["epilogue"] == "gelu" and of_aux is not None:
        arguments["aux_quantizer"] = of_aux
    if values["epilogue"] == "dgelu":
        shape = _out_shape(arguments["a"], sizes(values)[1], values["layout"])
        aux = maker.tensor(*shape, dtype=values["dtype"], values="normal") * 3
        if of_aux is None:  # where the square overflows, gelu' is 0 or 1
            aux.view(-1)[::7] *= _FAR[values["dtype"]]
        arguments["aux"] = aux if of_aux is None else maker.quantized(aux, of_aux)


epilogue_valid = every(
    lambda values: "lead" not in values or lead_valid(values),
    lambda values: not values["cast"].startswith(("aux-", "both-")) or values["epilogue"] in ("gelu", "dgelu"),
    lambda values: values["cast"] == "none" or values["cast"].startswith("aux-") or values["out"] == "new",
)


def _leading(values: Values, maker: Maker) -> Arguments:
    """Two leading dimensions of several elements each, in every layout, so that their order in memory matters."""
    layout, _, lead = values["form"].partition("/")
    return _plain({**values, "layout": layout, "lead": lead, "values": "normal"}, maker)


def _twice(values: Values, maker: Maker) -> Arguments:
    """One tensor as both operands."""
    m, n, k = sizes(values)
    x = maker.tensor(*operand_shapes(m, n, k, values["layout"])[0], dtype=values["dtype"])
    return add_options({"a": x, "b": x, "layout": values["layout"]}, values, maker)


OUT_DTYPE = Axis("out_dtype", ("same", "fp32", "bf16", "fp16"))
LAYOUT = Axis("layout", LAYOUTS)
DTYPE = Axis("dtype", ("bf16", "fp32", "fp16"))


def exactly(modes: Sequence[str], axis: str, shapes: Sequence[str], **others: str) -> tuple[Values, ...]:
    """Fixed cases: products of integers, which arithmetic less precise than fp32 gets wrong, in every layout."""
    return tuple(
        {axis: mode, "layout": layout, "shape": shape, "values": "exact", **others}
        for mode in modes for layout in LAYOUTS for shape in shapes
    )  # fmt: skip


#: Long sums of an epilogue's own: over k, and over the rows of the result.
_DEEP_EPILOGUES = tuple(
    {"dtype": dtype, "epilogue": epilogue, "layout": layout, "shape": shape, "cast": "none", "values": "normal"}
    for dtype in ("bf16", "fp32")
    for epilogue, layout, shape in (
        ("bgrad_b", "TN", "16x8x4104"), ("bgrad_a", "TN", "16x8x4104"), ("dgelu", "NN", "4099x8x16"),
        ("gelu", "NT", "16x8x4104"),
    )
)  # fmt: skip


register(
    Space(
        "gemm",
        "plain",
        (
            DTYPE,
            LAYOUT,
            Axis("shape", SHAPES, _SMOKE_SHAPES, once=LARGE),
            Axis("lead", LEADS),
            Axis("alpha", ("1", "-0.5", "1.7", "0")),
            Axis("bias", BIAS),
            Axis("out", ("new", "given", "added")),
            OUT_DTYPE,
            Axis(
                "values",
                (*_FINITE, "log_uniform", "nan", "inf", "inf_times_zero"),
                ("normal", "one_sign", "cancelling"),
            ),
        ),
        _plain,
        rules,
        _plain_valid,
        batch=_half,
        together=(("dtype", "layout", "out", "out_dtype"), ("dtype", "layout", "bias", "out_dtype")),
        fixed=exactly(("fp32", "bf16", "fp16"), "dtype", _DEEP, alpha="1", bias="none", out="new"),
    ),
    Space(
        "gemm",
        "epilogue",
        (
            DTYPE,
            Axis("epilogue", ("gelu", "dgelu", "bgrad_b", "bgrad_a")),
            LAYOUT,
            Axis("shape", SHAPES[:-4] + ("0x8x16", "8x16x0"), ("31x37x41", "128x128x127"), once=LARGE),
            Axis("lead", LEADS),
            Axis("alpha", ("1", "0.125")),
            Axis("bias", BIAS),
            Axis("out", ("new", "given", "added")),
            OUT_DTYPE,
            Axis(
                "cast",
                ("none", "delayed", "delayed_seen", "delayed_silent", "current", "current_floored", "block_1d",
                 "block_1d_floored", "block_2d", "mxfp8", "nvfp4", "aux-delayed", "aux-delayed_seen", "aux-current",
                 "aux-mxfp8", "both-delayed", "both-delayed_silent"),
                ("none", "delayed", "current", "aux-delayed"),
            ),
            Axis("values", ("normal", "one_sign", "cancelling", "zeros")),
        ),
        _epilogue,
        rules,
        epilogue_valid,
        together=(("epilogue", "layout", "dtype", "bias", "out_dtype"),),
        within=({"cast": "none"},),
        fixed=_DEEP_EPILOGUES,
        forms=("epilogue", "layout"),
    ),
    Space(
        "gemm",
        "leading",
        (
            DTYPE, Axis("form", ("TN/2", "TN/of_a", "TN/of_b", "NT/2", "NN/2")), Axis("shape", ("33x40x42",)),
            Axis("out", ("new", "added")),
        ),
        _leading,
        rules,
        checks=("values", "strided", "permuted", "expanded"),
        forms=("form",),
    ),
    Space(
        "gemm",
        "twice",
        (DTYPE, Axis("layout", ("NT", "TN", "NN")), Axis("shape", ("31x31x41", "16x16x64", "48x48x48")), OUT_DTYPE),
        _twice,
        rules,
        lambda values: values["layout"] != "NN" or values["shape"] == "48x48x48",
        like="plain",
    ),
)  # fmt: skip
