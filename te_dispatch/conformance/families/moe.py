# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `moe_permute`, `moe_unpermute` and `moe_unpermute_bwd`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.bounds import training as bounds
from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.families.quantize import quantizer_of
from te_dispatch.conformance.inputs import BEYOND_HALF
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Bitwise, Rule
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Turned, Values, register
from te_dispatch.numerics.quantized import Quantized

_DTYPE = Axis("dtype", ("fp32", "bf16", "fp16"))
#: tokens x features.
_SHAPE = Axis(
    "shape", ("33x65", "1x1", "127x16", "129x128", "16x257", "0x16", "257x3"), ("33x65", "129x128", "0x16"),
    once=("65549x2", "4099x16", "5x8209", "3x65557"),
)  # fmt: skip
_TOP_K = Axis("top_k", ("2", "1", "8"), once=("33", "4", "6"))
_PROBS = Axis("probs", ("none", "fp32", "bf16"))
#: Share of the choices that are dropped.
_DROPPED = Axis("dropped", ("0.0", "0.3", "1.0"), dull=("1.0",))
_CAPACITY = Axis("capacity", ("none", "fewer", "more", "zero"), dull=("zero",))
_EXPERTS = Axis("experts", ("4", "1", "60"), once=("257", "600", "1100", "70001"))


def _choices(values: Values, maker: Maker) -> torch.Tensor:
    """(T, top_k) experts, -1 where dropped."""
    shape = (int(values["shape"].split("x")[0]), int(values["top_k"]))
    index = torch.int64 if values.get("index") == "int64" else torch.int32
    chosen = maker.integers(0, int(values["experts"]), *shape, dtype=index)
    return torch.where(maker.boolean(*shape, share=float(values["dropped"])), -1, chosen)


def _capacity(values: Values, choices: int) -> int | None:
    return {"none": None, "fewer": choices // 2, "more": choices + 17, "zero": 0}[values["capacity"]]


def _permute(values: Values, maker: Maker) -> Arguments:
    tokens, features = (int(n) for n in values["shape"].split("x"))
    x = maker.tensor(tokens, features, dtype=values["dtype"], values=values["values"])
    indices = _choices(values, maker)
    made: Arguments = {"x": x, "indices": indices, "capacity": _capacity(values, indices.numel())}
    if values["cast"] != "plain":
        made["x"] = maker.quantized(x, quantizer_of(values["cast"], "e4m3fn"), "row")
    if values["probs"] != "none":
        made["probs"] = maker.tensor(*indices.shape, dtype=values["probs"], values="one_sign")
    return made


def _turned(arguments: Arguments) -> Arguments:
    """The same experts as often, of other tokens."""
    return {**arguments, "indices": arguments["indices"].flip(0)}


def _scale_of_x(arguments: Arguments, results: Mapping[str, torch.Tensor]) -> str | None:
    """`Space.placed`: a scale of the whole tensor is x's own."""
    x = arguments["x"]
    if isinstance(x, Quantized):
        for name in ("row_scale_inv",) if x.scaling == "tensor" else ("global_scale_inv",):
            made = results.get(f"permuted.{name}")
            if made is not None and made.data_ptr() != getattr(x, name).data_ptr():
                return f"permuted.{name} is a copy of x's, and must share its memory"
    return None


def _moved(judged: Judged) -> Mapping[str, Rule]:
    """Rows move as bytes."""
    return {path: Bitwise(moved=True) for path in judged.actual}


def _routed(values: Values, maker: Maker) -> tuple[torch.Tensor, int]:
    """A row map as `moe_permute` makes it, and how many rows it leads to."""
    indices = _choices(values, maker)
    given = {"x": torch.zeros(indices.shape[0], 1), "indices": indices, "capacity": _capacity(values, indices.numel())}
    made = maker.reference("moe_permute").call(given)
    return made.row_map, made.permuted.shape[0]


def _probs(values: Values, maker: Maker, row_map: torch.Tensor) -> torch.Tensor | None:
    """Some are 0, by which Inf or NaN is multiplied too; NaN where a choice was dropped: nothing may be made of it."""
    if values["probs"] == "none":
        return None
    probs = maker.tensor(*row_map.shape, dtype=values["probs"], values="one_sign")
    if values["values"] == BEYOND_HALF:  # gradients are beyond fp16, their products are not
        probs = probs * 2.0**-9
    probs = probs * ~maker.boolean(*row_map.shape, share=0.125)
    return torch.where(row_map < 0, torch.nan, probs)


def _unpermute(values: Values, maker: Maker) -> Arguments:
    row_map, rows = _routed(values, maker)
    x = maker.tensor(rows, int(values["shape"].split("x")[1]), dtype=values["dtype"], values=values["values"])
    unused = torch.ones(rows, dtype=torch.bool)
    unused[row_map[row_map >= 0].long()] = False
    x[unused] = torch.nan
    return {"x": x, "row_map": row_map, "probs": _probs(values, maker, row_map)}


def _unpermute_bwd(values: Values, maker: Maker) -> Arguments:
    made = _unpermute(values, maker)
    dy = maker.tensor(made["row_map"].shape[0], made["x"].shape[1], dtype=values["grads"], values=values["values"])
    return {"dy": dy, **made}


def _gathered(x: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """(T, top_k, K) float64, 0 for dropped choices."""
    extended = torch.cat((x.double(), torch.zeros(1, x.shape[1], dtype=torch.float64)))
    return extended[torch.where(row_map < 0, x.shape[0], row_map).long()]


def _weights(arguments: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    probs = arguments.get("probs")
    return None if probs is None else torch.where(arguments["row_map"] < 0, 0.0, probs.double())


def _unpermute_rules(judged: Judged) -> Mapping[str, Rule]:
    given = judged.arguments
    known = bounds.unpermute(_gathered(given["x"], given["row_map"]), _weights(given))
    return {"result": within(known, judged.expected["result"], judged.actual["result"])}


def _unpermute_bwd_rules(judged: Judged) -> Mapping[str, Rule]:
    """dinput is a product, dprobs a sum over features; rows that no choice leads to, and dropped choices, get 0."""
    given = judged.arguments
    row_map, x = given["row_map"], given["x"]
    spread = Known.read(given["dy"].double()[:, None].expand(*row_map.shape, x.shape[1]))
    weights = _weights(given)
    rows = spread if weights is None else spread * Known.read(weights[..., None].expand_as(spread.value))
    kept = row_map >= 0
    value, error = (torch.zeros(x.shape, dtype=torch.float64) for _ in range(2))
    value[row_map[kept].long()], error[row_map[kept].long()] = rows.value[kept], rows.error[kept]
    rules: dict[str, Rule] = {"dinput": within(Known(value, error), judged.expected["dinput"], judged.actual["dinput"])}
    if "dprobs" in judged.actual:
        dprobs = (Known.read(_gathered(x, row_map)) * spread).sum(2).part(kept)
        rules["dprobs"] = within(dprobs, judged.expected["dprobs"], judged.actual["dprobs"])
    return rules


def _half(arguments: Arguments) -> Arguments:
    """The first half of the tokens; the rows that they came to stay where they are."""
    tokens = arguments["row_map"].shape[0] // 2
    probs = arguments["probs"]
    return {**arguments, "row_map": arguments["row_map"][:tokens], "probs": None if probs is None else probs[:tokens]}


_VALUES = Axis("values", ("normal", "spread", "one_sign", "denormal", "nan", "inf"), ("normal",))
#: Every expert beyond a table of 256, 512 or 1,024 is chosen.
_MANY_EXPERTS = tuple({"experts": experts, "shape": "4099x16", "dropped": "0.0"} for experts in _EXPERTS.once)
#: Dtypes of numbers beyond fp16's.
_WIDE = ("bf16", "fp32")
#: What a sum over a token's choices is made of.
_SUMS = ("dtype", "top_k", "probs")

register(
    Space(
        "moe_permute", "plain",
        (
            Axis("cast", ("plain", "current", "block_1d", "mxfp8", "nvfp4")), _SHAPE, _TOP_K, _DTYPE, _PROBS, _DROPPED,
            _CAPACITY, _EXPERTS, Axis("index", ("int32", "int64")),
            Axis("values", ("normal", "nan", "inf", "zeros"), ("normal", "nan")),
        ),
        _permute, _moved, widen=False, fixed=_MANY_EXPERTS, turned=Turned(_turned), placed=_scale_of_x,
    ),
    Space(
        "moe_unpermute", "plain", (_DTYPE, _SHAPE, _TOP_K, _PROBS, _DROPPED, _CAPACITY, _EXPERTS, _VALUES),
        _unpermute, _unpermute_rules, batch=_half, together=(_SUMS,),
    ),
    Space(
        "moe_unpermute_bwd", "plain",
        (
            _DTYPE, _SHAPE, Axis("grads", ("fp32", "bf16", "fp16")), _TOP_K, _PROBS, _DROPPED, _CAPACITY, _EXPERTS,
            Axis("values", _VALUES.values, _VALUES.smoke, once=(BEYOND_HALF,)),
        ),
        _unpermute_bwd, _unpermute_bwd_rules, together=(_SUMS,),
        fixed=tuple({"dtype": "fp16", "grads": g, "probs": p, "values": BEYOND_HALF} for g in _WIDE for p in _WIDE),
    ),
)  # fmt: skip
