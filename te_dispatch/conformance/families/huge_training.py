# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention, dropout's backward and scaling on more elements than 31 bits count (level soak), judged on samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.bounds.known import Known, within
from te_dispatch.conformance.bounds.training import dropout_add
from te_dispatch.conformance.families.attention_rules import forward_results
from te_dispatch.conformance.families.huge_rows import sampled_rows
from te_dispatch.conformance.families.quantize_huge import places, repeated
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Rule, Sampled
from te_dispatch.conformance.space import Arguments, Axis, Judged, Space, Values, register
from te_dispatch.ops.results import AttentionForward

#: Repeated to fill an operand: a prime, that no row length divides.
_PERIOD = 1_048_573


def _sizes(values: Values) -> tuple[int, ...]:
    return tuple(int(size) for size in values["shape"].split("x"))


def _filled(maker: Maker, shape: tuple[int, ...]) -> torch.Tensor:
    return repeated(maker.tensor(_PERIOD, dtype="bf16"), shape)


# -- attention: whole sequences of the batch --------------------------------------------------------------------------


def _attention(values: Values, maker: Maker) -> Arguments:
    batch, length, heads, groups, dim = _sizes(values)
    made: Arguments = {name: _filled(maker, (batch, length, groups, dim)) for name in ("k", "v")}
    return {"q": _filled(maker, (batch, length, heads, dim)), **made, "layout": "bshd", "mask": values["mask"]}


def _sequences(arguments: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Arguments]:
    """The sampled sequences, and the same call on them alone."""
    q = arguments["q"]
    rows = sampled_rows(q.shape[0], q[0].numel())
    return rows, {**arguments, **{name: arguments[name][rows] for name in ("q", "k", "v")}}


def _attention_oracle(arguments: Arguments, values: Values) -> AttentionForward:
    """Samples are flat."""
    found = {path: known.value.float().flatten() for path, known in forward_results(_sequences(arguments)[1]).items()}
    return AttentionForward(found["out"], found["lse"], None, None)


def _attention_rules(judged: Judged) -> Mapping[str, Rule]:
    rows, few = _sequences(judged.arguments)
    rules: dict[str, Rule] = {}
    for path, known in forward_results(few).items():
        actual = judged.actual[path]
        width = actual[0].numel()
        where = (rows[:, None] * width + torch.arange(width)).flatten()
        rules[path] = Sampled(where, within(known.reshape(-1), judged.expected[path], actual))
    return rules


# -- elements ---------------------------------------------------------------------------------------------------------


def _dropout(values: Values, maker: Maker) -> Arguments:
    mask = repeated(maker.boolean(_PERIOD, share=0.5).to(torch.uint8), _sizes(values))
    return {"dy": _filled(maker, _sizes(values)), "mask": mask, "dropout_p": 0.5}


def _dropped(arguments: Mapping[str, torch.Tensor]) -> Known:
    dy, mask = (arguments[name].flatten() for name in ("dy", "mask"))
    at = places(dy.numel())
    return dropout_add(dy[at], None, None, mask[at] != 0, float(arguments["dropout_p"]))


def _dropout_rules(judged: Judged) -> Mapping[str, Rule]:
    expected, actual = judged.expected["result"], judged.actual["result"]
    return {"result": Sampled(places(actual.numel()), within(_dropped(judged.arguments), expected, actual))}


def _scale(values: Values, maker: Maker) -> Arguments:
    x = _filled(maker, _sizes(values))
    return {"inputs": [x], "outputs": [torch.empty_like(x)], "scale": 0.3}


def _scaled(arguments: Mapping[str, list[torch.Tensor]]) -> Known:
    x = arguments["inputs"][0].flatten()
    return Known.exactly(x[places(x.numel())]) * 0.3


def _scale_oracle(arguments: Arguments, values: Values) -> None:
    """The samples stand where the operator writes."""
    arguments["outputs"] = [_scaled(arguments).value.float()]


def _scale_rules(judged: Judged) -> Mapping[str, Rule]:
    path = "argument:outputs.0"
    expected, actual = judged.expected[path], judged.actual[path]
    return {path: Sampled(places(actual.numel()), within(_scaled(judged.arguments), expected, actual))}


register(
    Space(
        "attention_fwd", "huge", (Axis("mask", ("causal", "none")), Axis("shape", ("65600x16x16x2x128",))),
        _attention, _attention_rules, widen=False, oracle=_attention_oracle, sampled=True,
    ),
    Space(
        "dropout_add_bwd", "huge", (Axis("shape", ("46343x46351",)),), _dropout, _dropout_rules, widen=False,
        oracle=lambda arguments, values: _dropped(arguments).value.float(), sampled=True,
    ),
    Space(
        "multi_tensor_scale", "huge", (Axis("shape", ("46343x46351",)),), _scale, _scale_rules, widen=False,
        oracle=_scale_oracle, sampled=True,
    ),
)  # fmt: skip
