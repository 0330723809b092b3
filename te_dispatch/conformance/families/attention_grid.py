# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention of more sequences, or more sequences times heads, than 65,535: the most blocks that a GPU's grid has in its
second and third dimension (CUDA C++ Programming Guide, technical specifications per compute capability).

A case takes seconds, so only results are judged, and nothing varies that has nothing to do with a grid.
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
        "attention_bwd", "grid", _DENSE, inputs.backward, backward_rules, valid=_of_few_elements,
        forward=inputs.forward_of, checks=("values",), slow=True,
    ),
    Space(
        "attention_bwd", "grid_ragged", _RAGGED, inputs.backward, backward_rules, valid=_of_few_elements,
        forward=inputs.forward_of, checks=("values",), slow=True,
    ),
)  # fmt: skip
