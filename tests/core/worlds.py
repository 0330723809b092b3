# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Hypothesis strategies over the toy world: manifests, policies, devices and calls."""

from __future__ import annotations

import functools
from typing import Any

from hypothesis import strategies as st

from te_dispatch.core.facts import UNKNOWN, Arch, DeviceFacts, FactValue
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.operator import Operator
from te_dispatch.core.policy import Numerics, Policy, Rule, Selector
from te_dispatch.core.requirements import All, AnyOf, Compare, Condition, MultipleOf, NoneOf, OneOf, OnVendor
from tests.core.toy import CPU, TOYS, answering, target

BACKENDS = ("alpha", "beta", "gamma", "delta")
NAMES = ("one", "two", "three")
IDS = tuple(f"{b}.{n}" for b in BACKENDS for n in NAMES)
VALUES: dict[str, tuple[FactValue, ...]] = {
    "dtype": ("bf16", "fp16", "fp32"),
    "size": (8, 15, 16, 24, 256),
    "mode": ("plain", "odd"),
    "fast": (None, True, False, 1),
    "cast": (None, "tight", "loose"),
    "kind": ("tight", "loose"),
    "flag": (True, False),
}
DEVICES = (
    CPU,
    DeviceFacts("cuda", "nvidia", "sm_90", table=Arch(("e4m3fn",), True), extra={"version.lib": "9.10.2"}),
    DeviceFacts("cuda", "nvidia", "sm_100", table=Arch(("e4m3fn",), True)),
    DeviceFacts("cuda", "amd", "gfx942", table=Arch(("e4m3fnuz",), True, warp_size=64)),
)


def values_of(operator: Operator, name: str) -> tuple[FactValue, ...]:
    fact = operator.facts[name]
    if fact.kind in ("dtype", "size"):
        return VALUES[fact.kind]
    return VALUES.get(name, VALUES["flag"])


@functools.cache
def conditions(operator: Operator) -> st.SearchStrategy[Condition]:
    """Conditions on the facts of a call and of a device."""
    keyed = [n for n in operator.facts if not n.endswith(".default") and n not in ("saved", "a.scaling")]
    sizes = [n for n in keyed if operator.facts[n].kind == "size"]

    @st.composite
    def values(draw: st.DrawFn, kind: type) -> Condition:
        name = draw(st.sampled_from(keyed))
        picked = draw(st.lists(st.sampled_from(values_of(operator, name)), min_size=1, max_size=2))
        condition: Condition = kind(name, *picked)
        return condition

    parts: list[st.SearchStrategy[Any]] = [values(OneOf), values(NoneOf)]
    if sizes:
        bounds = st.sampled_from((15, 16, 100))
        parts.append(st.builds(Compare, st.sampled_from(sizes), st.sampled_from((">=", "<", ">", "<=")), bounds))
        parts.append(st.builds(MultipleOf, st.sampled_from(sizes), st.sampled_from((8, 16))))
    parts += [
        st.builds(
            lambda v: OneOf("device.vendor", *v), st.lists(st.sampled_from(("nvidia", "amd", "cpu")), min_size=1)
        ),
        st.just(Compare("device.arch", ">=", "sm_100")),
        st.just(OneOf("device.encodings", "e4m3fn")),
        st.just(Compare("device.version.lib", ">=", "9.2")),
    ]
    single = st.one_of(parts)
    return st.one_of(
        single,
        single,
        st.builds(lambda parts: AnyOf(*parts), st.lists(single, min_size=1, max_size=3)),
        st.builds(lambda parts: All(*parts), st.lists(single, min_size=1, max_size=3)),
        st.builds(OnVendor, st.sampled_from(("nvidia", "cpu")), single),
    )


@st.composite
def implementations(draw: st.DrawFn, backend: str, name: str, real: bool) -> Implementation:
    op = draw(st.sampled_from(sorted(TOYS)))
    saved = draw(st.sampled_from(("canonical", "own"))) if op.startswith("scan") else "canonical"
    return Implementation(
        op=f"{op}@1",
        name=name,
        target=target(answering(op, f"{backend}.{name}")) if real else "te_dispatch_toy_nowhere:nothing",
        requires=tuple(draw(st.lists(conditions(TOYS[op]), max_size=2))),
        rank=draw(st.sampled_from((10, 50, 100))),
        claims=frozenset(draw(st.sets(st.sampled_from(("deterministic", "capturable"))))),
        traits=frozenset(draw(st.sets(st.sampled_from(("emulated", "plain_torch", "flash")), max_size=2))),
        saved_format=saved,
        inference=op == "scan_fwd" and draw(st.booleans()),
    )


@st.composite
def manifests(draw: st.DrawFn, real: bool = False) -> list[Manifest]:
    """One to four backends. `real`: their implementations can be imported, and answer with their id."""
    names = draw(st.lists(st.sampled_from(BACKENDS), min_size=1, max_size=4, unique=True))
    return [
        Manifest(
            name,
            1,
            tuple(draw(implementations(name, n, real)) for n in NAMES[: draw(st.integers(1, 3))]),
            vendors=tuple(draw(st.sets(st.sampled_from(("nvidia", "amd", "cpu"))))),
        )
        for name in names
    ]


_SELECTORS = st.sampled_from(
    (*BACKENDS, *IDS, "native", "trait:emulated", "trait:flash", "composite", "composite.spelled", "absent")
)
_LISTS = st.lists(_SELECTORS, max_size=3).map(lambda texts: tuple(map(Selector, dict.fromkeys(texts))))
_ALLOWED = st.one_of(st.none(), st.none(), _LISTS)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    op = draw(st.sampled_from(sorted(TOYS)))
    return Rule(
        op=draw(st.sampled_from((op, TOYS[op].family, "*", "scan*"))),
        when=tuple(draw(st.lists(conditions(TOYS[op]), max_size=1))),
        prefer=draw(_LISTS),
        allow=draw(_ALLOWED),
        deny=draw(st.one_of(st.just(()), _LISTS)),
        require=draw(st.one_of(st.just(()), st.just(()), _LISTS)),
    )


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    require = draw(st.one_of(st.just(()), st.just(()), _LISTS.map(lambda group: (group,) if group else ())))
    return Policy(
        prefer=draw(_LISTS),
        allow=draw(_ALLOWED),
        deny=draw(st.one_of(st.just(()), _LISTS)),
        require=require,
        rules=tuple(draw(st.lists(rules(), max_size=3))),
        numerics=Numerics("native", draw(st.sampled_from((False, False, False, True)))),
    )


devices = st.sampled_from(DEVICES)


@st.composite
def calls(draw: st.DrawFn, operator: Operator, complete: bool = False) -> dict[str, FactValue]:
    """A call's facts; unless `complete`, some are missing and some are there as unknown."""
    call: dict[str, FactValue] = {}
    for name in operator.facts:
        if name == "saved":
            continue
        if not complete and draw(st.integers(0, 5)) == 0:
            if draw(st.booleans()):
                call[name] = UNKNOWN
            continue
        call[name] = draw(st.sampled_from(values_of(operator, name)))
    return call


def operators() -> st.SearchStrategy[Operator]:
    return st.sampled_from([TOYS[name] for name in sorted(TOYS)])
