# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of casts to FP4 that rotate the column-wise copy, and of `quantize` to FP4 with stochastic rounding.

A sum of 16 products has no order in the contract, so what is rotated is judged within the interval of all orders: its
scales and codes must be those of a number between the ends (`te_dispatch.conformance.casting`). Row-wise copies, where
the values cast are given, have the bits of the contract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.bounds.known import Known
from te_dispatch.conformance.families import activation, norm
from te_dispatch.conformance.families.quantize import COMMON, DTYPE, USAGE, bits, operand, quantizer_of, sizes
from te_dispatch.conformance.families.quantize_many import dbias_rules
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Rule, Within
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.numerics import hadamard
from te_dispatch.numerics.quantizers import Quantizer

#: With rows that 16 divides.
_SHAPE = Axis("shape", ("48x33", "16x1", "128x128", "2x8x40", "16x0", "0x16"), ("48x33", "2x8x40"), once=("1040x257",))
_VALUES = Axis("values", ("normal", "outlier", "zeros", "denormal", "inf", "nan"), ("normal", "outlier"))
_OUT = Axis("out", ("fresh", "exact", "both", "flag_clear", "flag_set"), dull=("flag_set",))
_RHT = "nvfp4_rht"


def whole_blocks(values: Values) -> bool:
    """Checks make cases of more rows: there too 16 divides them, where they are rotated."""
    rows_alone = values["usage"] == "row" and values.get("out", "fresh") in ("fresh", "exact")
    if rows_alone or values.get("cast", _RHT) != _RHT:
        return True
    return math.prod(sizes(values)[:-1]) % hadamard.SIZE == 0


def _record_rules(
    judged: Judged, x: torch.Tensor, quantizer: Quantizer, prefix: str = "", stochastic: bool = False
) -> dict[str, Rule]:
    """Of the record at `prefix` that a cast of x made."""
    name = "record"
    inside = [
        {f"{name}.{path[len(prefix) :]}": part for path, part in parts.items() if path.startswith(prefix)}
        for parts in (judged.actual, judged.expected)
    ]
    found = casting.cast_rules(
        name, quantizer, Known.exactly(x), inside[0], inside[1], given=x.dtype, stochastic=stochastic
    )
    return {prefix + path[len(name) + 1 :]: rule for path, rule in found.items()}


def _column_rules(judged: Judged, x: torch.Tensor, quantizer: Quantizer, prefix: str = "") -> dict[str, Rule]:
    """The rules of a rotated copy; the row-wise scale beside its own is equal by bits."""
    found = _record_rules(judged, x, quantizer, prefix)
    whole = found[f"{prefix}global_scale_inv"]
    assert isinstance(whole, Within)
    limit = torch.cat((torch.zeros(1, dtype=torch.float64), whole.limit[1:]))
    columns = {path: found[path] for path in (f"{prefix}col_data", f"{prefix}col_scale_inv")}
    return {**columns, f"{prefix}global_scale_inv": Within(limit)}


def _call(values: Values, maker: Maker) -> Arguments:
    quantizer = quantizer_of(_RHT, "e2m1", values["common"] == "yes")
    return {"x": operand(values, maker), "quantizer": quantizer, "usage": values["usage"]}


def _cast(values: Values, maker: Maker) -> Arguments:
    arguments = _call(values, maker)
    if values["out"] != "fresh":
        x = arguments["x"]
        usage = values["usage"] if values["out"] == "exact" else "both"
        before = maker.tensor(*x.shape, dtype=values["dtype"])
        arguments["out"] = maker.quantized(before, quantizer_of(_RHT, "e2m1"), usage)
    if values["out"].startswith("flag"):
        arguments["noop_flag"] = torch.full((1,), float(values["out"] == "flag_set"))
    return arguments


def _rules(judged: Judged) -> Mapping[str, Rule]:
    arguments, found = judged.arguments, bits(judged)
    skipped = arguments.get("noop_flag") is not None and bool(arguments["noop_flag"] != 0)
    if arguments["usage"] == "row" or skipped:
        return found
    return {**found, **_column_rules(judged, arguments["x"], arguments["quantizer"])}


def _dbias_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments, found = judged.arguments, dbias_rules(judged)
    if arguments["usage"] == "row":
        return found
    return {**found, **_column_rules(judged, arguments["x"], arguments["quantizer"], "quantized.")}


_SPLITS = {"16+32": (16, 32), "48+0+16": (48, 0, 16)}


def _split(values: Values, maker: Maker) -> Arguments:
    splits = list(_SPLITS[values["splits"]])
    x = maker.tensor(sum(splits), 40, dtype=values["dtype"], values=values["values"])
    quantizers = [quantizer_of(_RHT, "e2m1", values["common"] == "yes") for _ in splits]
    return {"x": x, "splits": splits, "quantizers": quantizers, "usage": values["usage"]}


def _multi(values: Values, maker: Maker) -> Arguments:
    arguments = _split(values, maker)
    xs = list(arguments.pop("x").split(arguments.pop("splits")))
    return {"xs": xs, **arguments}


def _list_rules(judged: Judged) -> Mapping[str, Rule]:
    arguments, found = judged.arguments, dict(bits(judged))
    xs = arguments["xs"] if "xs" in arguments else arguments["x"].split(list(arguments["splits"]))
    if arguments["usage"] != "row":
        for i, (x, quantizer) in enumerate(zip(xs, arguments["quantizers"])):
            found |= _column_rules(judged, x, quantizer, f"{i}.")
    return found


def _activation(values: Values, maker: Maker) -> Arguments:
    x = maker.tensor(*sizes(values), dtype=values["dtype"])
    arguments = {"x": x, "kind": "gelu", **_fused(values)}
    if maker.case.operator == "activation_bwd":
        arguments["dy"] = maker.tensor(*sizes(values), dtype=values["dtype"])
    return arguments


def _norm(values: Values, maker: Maker) -> Arguments:
    shape = sizes(values)
    arguments = {"x": maker.tensor(*shape, dtype=values["dtype"]), "eps": 1e-5, **_fused(values)}
    arguments["gamma"] = maker.tensor(shape[-1], dtype=values["dtype"])
    if maker.case.operator == "layernorm_fwd":
        arguments["beta"] = maker.tensor(shape[-1], dtype=values["dtype"])
    return arguments


def _fused(values: Values) -> Arguments:
    return {"quantizer": quantizer_of(_RHT, "e2m1", values["common"] == "yes"), "usage": values["usage"]}


def _stochastic(values: Values, maker: Maker) -> Arguments:
    quantizer = quantizer_of(values["cast"], "e2m1", values["common"] == "yes")
    return {
        "x": operand(values, maker), "quantizer": quantizer, "usage": values["usage"], "rng_state": maker.rng_state()
    }  # fmt: skip


def stochastic_rules(judged: Judged) -> Mapping[str, Rule]:
    """Codes are either neighbour's. Scales do not depend on the draws."""
    x, quantizer = judged.arguments["x"], judged.arguments["quantizer"]
    found = _record_rules(judged, x, quantizer, stochastic=True)
    codes = {path: rule for path, rule in found.items() if path.endswith("_data")}
    if quantizer.kind == _RHT and judged.arguments["usage"] != "row":
        return {**bits(judged), **_column_rules(judged, x, quantizer), **codes}
    return {**bits(judged), **codes}


def _rotates(arguments: Mapping[str, Any]) -> bool:
    return arguments["quantizer"].kind == _RHT and arguments.get("rng_state") is None


def _rotates_list(arguments: Mapping[str, Any]) -> bool:
    return any(quantizer.kind == _RHT for quantizer in arguments["quantizers"])


def _draws_fp4(arguments: Mapping[str, Any]) -> bool:
    return arguments["quantizer"].encoding == "e2m1" and arguments.get("rng_state") is not None


_SMALL = Axis("shape", ("48x33", "128x128"))
_PLAIN = Axis("values", ("normal",))

register(
    Space(
        "quantize", "rotated", (DTYPE, _SHAPE, USAGE, _VALUES, COMMON, _OUT), _cast, _rules, whole_blocks, widen=False,
        serves=_rotates,
    ),
    Space(
        "quantize", "stochastic_fp4",
        (
            Axis("cast", ("nvfp4", "nvfp4_2d", _RHT)), DTYPE, Axis("shape", ("48x33", "16x0")), USAGE,
            Axis("values", ("normal", "outlier", "nan")), COMMON,
        ),
        _stochastic, stochastic_rules, whole_blocks, widen=False, serves=_draws_fp4,
    ),
    Space(
        "quantize_dbias", "rotated", (DTYPE, _SMALL, USAGE, _PLAIN, COMMON), _call, _dbias_rules, whole_blocks,
        widen=False, serves=_rotates,
    ),
    Space(
        "split_quantize", "rotated", (DTYPE, Axis("splits", tuple(_SPLITS)), USAGE, _PLAIN, COMMON),
        _split, _list_rules, widen=False, serves=_rotates_list,
    ),
    Space(
        "multi_tensor_quantize", "rotated", (DTYPE, Axis("splits", tuple(_SPLITS)), USAGE, _PLAIN, COMMON),
        _multi, _list_rules, widen=False, serves=_rotates_list,
    ),
    *(
        Space(
            operator, "rotated", (DTYPE, _SMALL, USAGE, COMMON), make, rules, whole_blocks,
            serves=lambda arguments: False,
        )
        for operator, make, rules in (
            ("activation_fwd", _activation, activation.forward_rules),
            ("activation_bwd", _activation, activation.backward_rules),
            ("layernorm_fwd", _norm, norm.forward_rules),
            ("rmsnorm_fwd", _norm, norm.forward_rules),
        )
    ),
)  # fmt: skip
