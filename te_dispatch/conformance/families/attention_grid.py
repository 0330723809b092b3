# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention of more sequences, or more sequences times heads, than 65,535: the most blocks that a GPU's grid has in its
second and third dimension (CUDA C++ Programming Guide, technical specifications per compute capability). And of five
tiles of 128 queries and keys, of which a kernel visits those that a diagonal or a window crosses.

A case takes seconds, so only results are judged, and nothing varies that has nothing to do with a grid or with tiles.
"""

from __future__ import annotations

from te_dispatch.conformance.families import attention_inputs as inputs
from te_dispatch.conformance.families.attention_rules import backward_rules, forward_rules
from te_dispatch.conformance.space import Axis, Space, Values, register

_LEAST = (Axis("dims", ("8/8",)), Axis("dtype", ("bf16",)))
_HEADS = Axis("heads", ("1024/1024", "1/1"))
_DENSE = (Axis("shape", ("67x3x5", "65537x1x2")), _HEADS, Axis("layout", ("bshd",)), *_LEAST)
_RAGGED = (
    Axis("lengths", ("67:5", "65537:2")), _HEADS, Axis("layout", ("thd",)), Axis("mask", ("padding",)), *_LEAST,
)  # fmt: skip
_WITH_MANY_HEADS = ("67x3x5", "67:5")


#: Windows are wider than a tile, and end inside of one.
_CROSSING = (
    Axis("dtype", ("bf16", "fp32")), Axis("shape", ("1x520x520", "1x389x520", "2x1x1032")), Axis("layout", ("bshd",)),
    Axis("mask", ("causal", "none", "causal_bottom_right", "padding_causal_bottom_right")),
    Axis("window", ("none", "200:0", "150:70")), Axis("valid", ("full", "ragged")), Axis("heads", ("2/1",)),
    Axis("dims", ("16/16",)),
)  # fmt: skip


def _crossed(values: Values) -> bool:
    """Something ends inside of a tile; lengths where the mask has them; a causal mask ends windows at the diagonal."""
    masked, padded = values["mask"] != "none", values["mask"].startswith("padding")
    if values["window"] == ("150:70" if masked else "200:0") or (values["valid"] == "ragged") != padded:
        return False
    return masked or values["window"] != "none"


def _of_few_elements(values: Values) -> bool:
    """Many heads of few sequences, one head of many."""
    size = values["shape"] if "shape" in values else values["lengths"]
    return (values["heads"] == "1024/1024") == (size in _WITH_MANY_HEADS)


register(
    Space(
        "attention_fwd", "grid", _DENSE, inputs.forward, forward_rules, valid=_of_few_elements,
        checks=("values",), slow=True,
    ),
    Space(
        "attention_fwd", "grid_ragged", _RAGGED, inputs.forward, forward_rules, valid=_of_few_elements,
        checks=("values",), slow=True,
    ),
    Space(
        "attention_fwd", "crossing", _CROSSING, inputs.forward, forward_rules, valid=_crossed,
        checks=("values",), slow=True,
    ),
    Space(
        "attention_bwd", "crossing", _CROSSING, inputs.backward, backward_rules, valid=_crossed,
        forward=inputs.forward_of, checks=("values",), slow=True,
    ),
    Space(
        "attention_bwd", "grid", _DENSE, inputs.backward, backward_rules, valid=_of_few_elements,
        forward=inputs.forward_of, checks=("values",), slow=True,
    ),
    Space(
        "attention_bwd", "grid_ragged", _RAGGED, inputs.backward, backward_rules, valid=_of_few_elements,
        forward=inputs.forward_of, checks=("values",), slow=True,
    ),
)  # fmt: skip
