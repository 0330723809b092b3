# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention with dropout, and causal attention whose later tokens change.

The mask shows in the output where v holds unit vectors: with v_j = e_c, feature c of output row i is drop(p_ij). A few
calls show all columns, as many at a time as v has features. Logits here are small, so that no p is rounded to 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from te_dispatch.conformance.casting import values as values_of
from te_dispatch.conformance.families import attention as fwd
from te_dispatch.conformance.families import attention_inputs as inputs
from te_dispatch.conformance.families.attention_rules import (
    backward_expected,
    backward_rules,
    forward_expected,
    forward_rules,
)
from te_dispatch.conformance.maker import Maker
from te_dispatch.conformance.rules import Open, Rule
from te_dispatch.conformance.space import Arguments, Axis, Dropout, Judged, Later, Space, Values, register
from te_dispatch.conformance.spread import spread
from te_dispatch.conformance.transfer import moved
from te_dispatch.numerics.quantized import Quantized

_REASON = "depends on which elements fall; the check `dropout` judges it"


def _recover(run: Callable[[Arguments], Any], arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """bool (b, h, s_q, s_kv), True where kept or masked; and where not masked."""
    host = moved(arguments, "cpu")
    call, v = spread(host), arguments["v"]
    columns, wide = call.keys.extent, v.shape[-1]
    found = torch.zeros((call.q.shape[0], call.heads, call.queries.extent, columns))
    for start in range(0, columns, wide):
        count = min(wide, columns - start)
        unit = torch.zeros((call.q.shape[0], call.groups, columns, wide))
        unit[:, :, start : start + count, :count] = torch.eye(count)
        shown = call.keys.write(unit).reshape(v.shape).to(v)
        out = run({**arguments, "v": shown}).out
        seen = call.queries.read(values_of(out.detach().cpu()).reshape(-1, call.heads, wide))
        found[..., start : start + count] = seen[..., :count]
    live = ~call.hidden.expand(found.shape)
    return (found != 0) | ~live, live


def _forward_judged(judged: Judged, keep: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Rule]]:
    judged = replace(judged, expected=forward_expected(judged, keep))
    return judged.expected, forward_rules(judged, keep)


def _backward_judged(judged: Judged, keep: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Rule]]:
    judged = replace(judged, expected=backward_expected(judged, keep))
    return judged.expected, backward_rules(judged, keep)


def _open_forward(judged: Judged) -> Mapping[str, Rule]:
    """The log-sum-exp and the largest logit do not depend on the mask."""
    return {**forward_rules(judged), "out": Open(_REASON)}


def _open(judged: Judged) -> Mapping[str, Rule]:
    return {path: Open(_REASON) for path in judged.actual}


# -- later tokens -----------------------------------------------------------------------------------------------------


def _later(values: Values, arguments: Arguments, maker: Maker) -> Later:
    """The second half of the tokens of every sequence becomes -4 times itself."""
    axis = 0 if arguments["layout"] == "sbhd" else 1
    extent = arguments["q"].shape[axis]
    before = torch.arange(extent) < extent // 2
    shape = [1, 1, 1, 1]
    shape[axis] = extent
    earlier = before.view(shape)

    def changed(x: Any) -> Any:
        plain = values_of(x).float().reshape(x.shape) if isinstance(x, Quantized) else x
        other = torch.where(earlier, plain, -4 * plain)
        if not isinstance(x, Quantized):
            return other
        made = inputs.record(maker, other, values["operands"], "e4m3fn")
        made.dtype = x.dtype
        return made

    made = {**arguments, **{name: changed(arguments[name]) for name in ("q", "k", "v")}}
    shared = "current" in (values["operands"], values["s"])
    return Later(made, {"out": earlier, "lse": before.view(1, 1, extent)}, shared)


_DROPPED = (
    fwd.DTYPE, Axis("dropout", ("0.1", "0.5", "0.8"), once=("0.002",)), fwd.DENSE,
    Axis("mask", ("none", "causal", "padding", "padding_causal_bottom_right")), Axis("valid", ("full", "ragged")),
    # More keys, and more queries, than any tile has.
    Axis("shape", ("2x33x40", "1x129x127", "3x16x16"), once=("1x20x1040", "1x1040x20")),
    Axis("heads", ("4/2", "2/2", "6/3")), Axis("dims", ("16/16", "64/24")), Axis("bias", ("none", "post_scale")),
    Axis("bias_shape", ("11",)), Axis("bias_dtype", ("fp32",)), fwd.WINDOW, fwd.SOFTMAX,
)  # fmt: skip
_DROPPED_RAGGED = (
    Axis("lengths", ("17+40+9", "33+1+0")), Axis("layout", ("thd",)), Axis("dropout", ("0.25", "0.5")), fwd.GAPS,
    fwd.LONGEST, Axis("mask", ("padding", "padding_causal")), fwd.KEYS, Axis("heads", ("4/2", "2/2")), fwd.SOFTMAX,
    fwd.DTYPE,
)  # fmt: skip


#: More elements than tell a small probability from one of 8 bits.
_MANY = ({"dropout": "0.002", "shape": "1x129x127", "heads": "6/3", "mask": "none", "window": "none"},)


def _valid(values: Values) -> bool:
    return values["mask"].startswith("padding") or values["valid"] == "full"


register(
    Space(
        "attention_fwd", "dropped", _DROPPED, inputs.forward, _open_forward, valid=_valid, fixed=_MANY,
        dropout=Dropout(_recover, _forward_judged),
    ),
    Space(
        "attention_fwd", "dropped_ragged", _DROPPED_RAGGED, inputs.forward, _open_forward,
        dropout=Dropout(_recover, _forward_judged), like="dropped",
    ),
    Space(
        "attention_bwd", "dropped", _DROPPED, inputs.backward, _open, valid=_valid, forward=inputs.forward_of,
        dropout=Dropout(_recover, _backward_judged),
    ),
    Space(
        "attention_bwd", "dropped_ragged", _DROPPED_RAGGED, inputs.backward, _open, forward=inputs.forward_of,
        dropout=Dropout(_recover, _backward_judged), like="dropped",
    ),
    Space(
        "attention_fwd", "causal",
        (
            Axis("operands", ("plain", "current", "delayed", "mxfp8", "block_1d")), fwd.CAST_OF_P, fwd.DENSE,
            Axis("mask", ("causal",)), Axis("shape", ("2x16x16", "1x129x129", "2x33x33")),
            Axis("heads", ("2/2", "4/2")), Axis("dims", ("32/32", "64/64")), Axis("dtype", ("bf16", "fp32", "fp16")),
        ),
        inputs.forward, forward_rules, valid=fwd.castable, later=_later, like="plain",
    ),
)  # fmt: skip
