# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A small world for policy tests: four operators and five installed backends. `cuda` and `rocm` are absent."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from te_dispatch.core.facts import Arch
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.operator import Decomposition, Fact, Operator
from te_dispatch.core.policy.known import Known
from te_dispatch.core.requirements import Compare, OneOf
from tests.core.toy import only_toys


def _operator(name: str, family: str, version: int, facts: dict[str, str], companion: str | None = None) -> Operator:
    return Operator(
        name=name,
        version=version,
        family=family,
        signature=inspect.Signature(),
        doc="",
        device="None",
        facts={fact: Fact(fact, fact, kind) for fact, kind in facts.items()},
        shape=lambda: None,
        companion=companion,
    )


_ATTENTION_FACTS = {"q.dtype": "dtype", "seqlen_q": "size", "seqlen_kv": "size", "mask": "option"}
_OPERATORS = {
    operator.name: operator
    for operator in (
        _operator("gemm", "gemm", 2, {"a.dtype": "dtype", "k": "size", "layout": "option", "name": "option"}),
        _operator("grouped_gemm", "gemm", 1, {"a.dtype": "dtype", "k": "size"}),
        _operator("attention_fwd", "attention", 1, _ATTENTION_FACTS, "attention_bwd"),
        _operator("attention_bwd", "attention", 1, _ATTENTION_FACTS, "attention_fwd"),
    )
}
_OPERATORS["gemm"].decompositions.append(Decomposition("gemm_then_gelu", lambda call: None, lambda: len))


def _implementation(op: str, name: str, claims: frozenset[str] = frozenset(), trait: str = "fused") -> Implementation:
    return Implementation(op, name, "nowhere:nothing", claims=claims, traits=frozenset((trait,)))


_DETERMINISTIC = frozenset(("deterministic",))
_MANIFESTS = (
    Manifest("reference", 1, (_implementation("gemm@2", "gemm", _DETERMINISTIC, "emulated"),)),
    Manifest(
        "torch",
        1,
        (
            _implementation("gemm@2", "matmul", _DETERMINISTIC),
            _implementation("attention_fwd@1", "sdpa_fwd", frozenset(), "fused"),
            _implementation("attention_bwd@1", "sdpa_bwd", frozenset(), "fused"),
            _implementation("attention_fwd@1", "math_fwd", _DETERMINISTIC, "unfused"),
        ),
        archs={"nvidia": {"sm_80": Arch(), "sm_90": Arch(("e4m3fn", "e5m2"))}},
    ),
    Manifest("triton", 1, (_implementation("attention_fwd@1", "flash_fwd", _DETERMINISTIC, "flash"),)),
    Manifest(
        "acme",
        1,
        (
            Implementation(
                "gemm@2",
                "tiles",
                "nowhere:nothing",
                requires=(OneOf("a.dtype", "acme8"), Compare("device.tile_count", ">=", 4)),
            ),
        ),
        vendors=("acme",),
        archs={"acme": {"x1": Arch(("acme8",)), "x2": Arch()}},
    ),
)


@pytest.fixture(scope="session")
def known() -> Known:
    return Known.of(_MANIFESTS, _OPERATORS)


@pytest.fixture(scope="module")
def toy_operators() -> Iterator[None]:
    """While a module's tests run, the operators of `tests.core.toy` are all there are."""
    with only_toys():
        yield
