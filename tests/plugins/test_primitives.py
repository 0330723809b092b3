# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The guide's table of primitives: a backend with exactly these requirements serves every composite."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
from te_dispatch.core.decision import Accepted
from te_dispatch.core.discovery import register
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import Condition, NoneOf, OneOf
from te_dispatch.core.resolve import resolve
from tests.core.toy import extension

GUIDE = Path(__file__).parents[2] / "docs" / "writing_a_backend.md"
DEVICE = DeviceFacts("zeta", "zeta", "z1", index=0)

_CAST = {"quantizer": "delayed", "quantizer.encoding": "e4m3fn", "quantizer.scaling": "tensor", "usage": "both"}
_FP8 = {"a.dtype": "e4m3fn", "b.dtype": "e4m3fn", "a.scaling": "tensor", "b.scaling": "tensor", "layout": "NT"}
_OUT_QUANTIZER = {"out_quantizer": "current", "out_quantizer.encoding": "e4m3fn", "out_quantizer.scaling": "tensor"}
_AUX_QUANTIZER = {"aux_quantizer": "current", "aux_quantizer.encoding": "e4m3fn", "aux_quantizer.scaling": "tensor"}
_LIST = {"quantizers": "delayed", "quantizers.encoding": "e4m3fn", "usage": "both"}
_ATTENTION = {"q.dtype": "bf16", "q.scaling": "none", "layout": "sbhd"}

#: (operator, facts) of calls that nothing but a composite serves.
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("quantize_dbias", {"x.dtype": "bf16", **_CAST}),
    ("split_quantize", {"x.dtype": "bf16", **_LIST}),
    ("multi_tensor_quantize", {"xs.dtype": "bf16", **_LIST}),
    *((f"{norm}_fwd", {"x.dtype": "bf16", **_CAST, "residual": with_it}) for norm in ("layernorm", "rmsnorm")
      for with_it in (False, True)),
    *((f"{norm}_fwd", {"x.dtype": "bf16", "residual": True}) for norm in ("layernorm", "rmsnorm")),
    ("activation_fwd", {"x.dtype": "bf16", "x.scaling": "none", "kind": "swiglu", **_CAST}),
    ("activation_bwd", {"dy.dtype": "bf16", "x.dtype": "bf16", "x.scaling": "none", "kind": "swiglu", **_CAST,
                        "with_dbias": True}),
    ("activation_bwd", {"dy.dtype": "bf16", "x.dtype": "bf16", "x.scaling": "none", "kind": "gelu",
                        "with_dbias": True}),
    ("gemm", {**_FP8, "epilogue": "gelu", "aux": False, "bias": True, **_OUT_QUANTIZER, **_AUX_QUANTIZER}),
    ("gemm", {**_FP8, "epilogue": "dgelu", "aux": True, "aux.dtype": "bf16", "aux.scaling": "none"}),
    ("gemm", {**_FP8, "layout": "TN", "epilogue": "bgrad_b", "out": True, "accumulate": True}),
    ("grouped_gemm", {**_FP8, "out": True, "accumulate": True}),
    ("grouped_gemm", {**_FP8, "bias": True}),
    ("attention_fwd", {**_ATTENTION, "mask": "arbitrary"}),
    ("attention_bwd", {**_ATTENTION, "mask": "causal", "dout.dtype": "bf16", "saved": "composite.unfused_attention"}),
]  # fmt: skip


def _table() -> dict[str, tuple[Condition, ...]]:
    """Operator -> its minimal requirements, as the guide writes them."""
    section = GUIDE.read_text(encoding="utf-8").split("## What you get for free", 1)[1].split("\n## ", 1)[0]
    found = {}
    for row in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ((?:`OneOf.*?)|none) \| .* \|$", section, re.MULTILINE):
        written = re.findall(r'`(OneOf\("[\w.]+", (?:None|False|"\w+")\))`', row[1])
        assert written or row[1] == "none"
        conditions = tuple(eval(one, {"OneOf": OneOf}) for one in written)
        found.update(dict.fromkeys(re.findall(r"\w+", row[0]), conditions))
    return found


def _resolved(
    operator: str, facts: Mapping[str, Any], refused: Mapping[str, Condition] | None = None
) -> Accepted | None:
    """Who serves a call beside a backend of primitives alone, some of which refuse something more."""
    implementations = tuple(
        Implementation(f"{name}@1", name, "m:f", (*requires, *filter(None, [(refused or {}).get(name)])))
        for name, requires in _table().items()
    )
    snapshot = register([extension(Manifest("zeta", 1, implementations, vendors=("zeta",)))], OPERATORS)
    assert not snapshot.failures and not snapshot.unusable
    declared = OPERATORS[operator]
    call = {**declared.default_facts(), **facts}
    return resolve(declared, call, DEVICE, Policy(name="default"), snapshot).chosen


def _leaves(candidate: Accepted) -> Iterator[str]:
    if not candidate.pieces:
        yield candidate.id
    for piece in candidate.pieces.values():
        assert piece.chosen is not None
        yield from _leaves(piece.chosen)


@pytest.mark.parametrize(("operator", "facts"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_backend_of_primitives_serves_every_composite(operator: str, facts: dict[str, Any]) -> None:
    chosen = _resolved(operator, facts)
    assert chosen is not None and chosen.id.startswith("composite.")
    assert all(leaf.startswith("zeta.") for leaf in _leaves(chosen))


def test_no_composite_is_left_out() -> None:
    declared = {operator.name for operator in OPERATORS.values() if operator.decompositions}
    assert {operator for operator, _ in CALLS} == declared
    assert all(len(operator.decompositions) <= 1 for operator in OPERATORS.values())


@pytest.mark.parametrize(
    ("primitive", "refused", "lost"),
    [
        ("quantize", NoneOf("x.dtype", "fp32"), "layernorm_fwd"),
        ("quantize", OneOf("usage", "row"), "quantize_dbias"),
        ("layernorm_fwd", NoneOf("out_dtype", "fp32"), "layernorm_fwd"),
        ("rmsnorm_fwd", NoneOf("out_dtype", "fp32"), "rmsnorm_fwd"),
        ("activation_fwd", NoneOf("out_dtype", "fp32"), "activation_fwd"),
        ("activation_bwd", NoneOf("dy.dtype", "fp32"), "activation_bwd"),
        ("activation_fwd", NoneOf("kind", "gelu"), "gemm"),
        ("gemm", NoneOf("out_dtype", "fp32"), "gemm"),
        ("gemm", OneOf("bias", False), "gemm"),
        ("gemm", OneOf("out", False), "grouped_gemm"),
        ("gemm", OneOf("accumulate", False), "grouped_gemm"),
        ("softmax_fwd", OneOf("mask", False), "attention_fwd"),
        ("softmax_bwd", NoneOf("dy.dtype", "fp32"), "attention_bwd"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.describe(),
)
def test_what_composites_ask_for_cannot_be_refused(primitive: str, refused: Condition, lost: str) -> None:
    calls = [facts for operator, facts in CALLS if operator == lost]
    assert all(_resolved(lost, facts) is not None for facts in calls)
    assert any(_resolved(lost, facts, {primitive: refused}) is None for facts in calls)
