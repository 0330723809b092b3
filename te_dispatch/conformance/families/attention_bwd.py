# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of `attention_bwd`, each behind the forward that the implementation goes with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.families import attention as fwd
from te_dispatch.conformance.families import attention_inputs as inputs
from te_dispatch.conformance.families.attention_rules import backward_rules
from te_dispatch.conformance.space import Arguments, Axis, Space, Values, register

_DBIAS = Axis("dbias", ("yes", "no"))


def _with_bias(values: Values) -> bool:
    """A bias tensor has a gradient."""
    return values["bias"] in ("pre_scale", "post_scale") or values["dbias"] == "no"


def _masked(values: Values) -> bool:
    """`fwd.masked`, and what lies in the output's gradient where the mask or the window hides all keys of a row."""
    rows, columns = (int(n) for n in values["shape"].split("x")[1:])
    if rows > columns and (values["mask"] == "causal_bottom_right" or values["window"] not in ("none", "-1:-1")):
        values = {**values, "hole": "number"}
    return fwd.masked(values)


def packed_alike(arguments: Arguments, results: Mapping[str, torch.Tensor]) -> str | None:
    """Gradients of operands that are views of one tensor are views of one tensor, stacked along the same axis. Of
    gradients that are cast, the codes are."""
    names, axis = inputs.PACKED[arguments["packing"]]
    given = [arguments[name] for name in names]
    whole = torch.stack([torch.empty(x.shape, device="meta") for x in given], axis)
    wanted = [(x.storage_offset(), x.stride()) for x in whole.unbind(axis)]
    part = "" if arguments.get("dqkv_quantizer") is None else ".row_data"
    found = [results[f"d{name}{part}"] for name in names]
    start = found[0].storage_offset()
    lies = [(x.storage_offset() - start, x.stride()) for x in found]
    if len({x.untyped_storage().data_ptr() for x in found}) != 1 or lies != wanted:
        asked = ", ".join(f"d{name}{part}" for name in names)
        return f"{asked} are not packed as {arguments['packing']}: offsets and strides {lies}, expected {wanted}"
    return None


register(
    Space(
        "attention_bwd", "plain", fwd.PLAIN, inputs.backward, backward_rules, valid=fwd.propagating,
        forward=inputs.forward_of,
        together=(("dtype", "layout", "mask", "dims"),), fixed=fwd.COMMON,
    ),
    Space(
        "attention_bwd", "masked", fwd.MASKED, inputs.backward, backward_rules, valid=_masked,
        forward=inputs.forward_of, together=(("layout", "mask", "window"),),
    ),
    Space("attention_bwd", "twice", fwd.SAME, inputs.backward, backward_rules, forward=inputs.forward_of, like="plain"),
    Space(
        "attention_bwd", "ragged", (*fwd.RAGGED, _DBIAS), inputs.backward, backward_rules,
        valid=lambda values: fwd.uneven(values) and _with_bias(values), forward=inputs.forward_of, turned=fwd.TURNED,
        together=(("keys", "gaps", "window"), ("mask", "keys", "gaps")),
    ),
    Space(
        "attention_bwd", "scored", (*fwd.SCORED, _DBIAS), inputs.backward, backward_rules,
        valid=lambda values: fwd.scored(values) and _with_bias(values), forward=inputs.forward_of,
    ),
    Space(
        "attention_bwd", "packed", (*fwd.STACKED, Axis("dqkv", ("none", "delayed", "current"))), inputs.backward,
        backward_rules, valid=fwd.stackable, forward=inputs.forward_of, views=True, placed=packed_alike,
    ),
    Space(
        "attention_bwd", "eight_bit",
        (
            *fwd.EIGHT_BIT, Axis("dp", ("none", "delayed", "delayed_seen", "delayed_silent", "current")),
            Axis("dqkv", ("none", "delayed", "delayed_seen", "delayed_silent", "current", "current_floored")),
            Axis("out_cast", ("none", "current")),
        ),
        inputs.backward, backward_rules, forward=inputs.forward_of,
        valid=lambda v: fwd.castable(v) and (v["operands"] in ("delayed", "current") or v["dp"] == "none"),
    ),
)  # fmt: skip
