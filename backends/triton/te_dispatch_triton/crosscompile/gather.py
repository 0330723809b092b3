# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The launches that operator calls would make on a chip, each form of a kernel once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from te_dispatch.conformance.space import Arguments
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.core.devices import describe_device
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import Policy
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER
from te_dispatch_triton import targets
from te_dispatch_triton.crosscompile.calls import Call, calls
from te_dispatch_triton.crosscompile.matrix import specialization_of
from te_dispatch_triton.launch import Launch, recording
from te_dispatch_triton.targets import Target

_HOST = torch.device("cpu")
NAME = "triton"


class Variant(NamedTuple):
    """A form of a kernel, and the first call that launches it."""

    family: str
    call: str
    launch: Launch


def variants(target: Target, family: str) -> list[Variant]:
    """Every form of every kernel that a family's calls launch on a target.

    To be called once in a process: host code keeps what it chose for a device.

    Raises:
        NotServed: a call that no implementation of this backend serves there.
    """
    found: dict[Any, Variant] = {}
    targets.pretend(_HOST, target)
    try:
        for call in calls(family):
            launches: list[Launch] = []
            with recording(launches):
                run(call, target)
            for launch in launches:
                key = (launch.kernel.name, launch.config, *specialization_of(launch, target))
                found.setdefault(key, Variant(family, call.name, launch))
    finally:
        targets.pretend(_HOST, None)
    return list(found.values())


class NotServed(Exception):
    """No implementation of this backend serves a call; says why each does not."""


def run(call: Call, target: Target) -> None:
    """Call what dispatch would choose among this backend's implementations on a chip; a backward behind its forward.

    Raises:
        NotServed: there is none.
    """
    device = describe_device(MANAGER.snapshot, f"{'nvidia' if target.backend == 'cuda' else 'amd'}:{target.arch}")
    arguments, operator = call.arguments, call.operator
    if call.forward is not None:
        assert operator.companion is not None
        forward = OPERATORS[operator.companion]
        made = _chosen(forward, call.forward, device, call.name).call(call.forward)
        arguments = {**arguments, **{name: getattr(made, name) for name in ("out", "lse", "saved")}}
    _chosen(operator, arguments, device, call.name).call(arguments)


def _chosen(operator: Operator, arguments: Arguments, device: DeviceFacts, name: str) -> Subject:
    known = {one.id: one for one in subjects(MANAGER, operator, _HOST, NAME)}
    facts = next(iter(known.values())).facts(arguments)
    decision = resolve(operator, facts, device, Policy(), MANAGER.snapshot)
    for accepted in decision.accepted:
        if accepted.id in known:
            return known[accepted.id]
    reasons = "; ".join(f"{one.id}: {one.reason}" for one in decision.rejected if one.id in known)
    raise NotServed(f"{name} on {device.label()}: {reasons}")


def first_of_each(found: Iterable[Variant]) -> list[Variant]:
    """One form of every kernel, and one of every pair of encodings that it multiplies."""
    chosen: dict[Any, Variant] = {}
    for variant in found:
        chosen.setdefault((variant.launch.kernel.name, codes_of(variant.launch)), variant)
    return list(chosen.values())


def codes_of(launch: Launch) -> tuple[str, str] | None:
    """The FP8 encodings that a launch multiplies, scaled by fp32 numbers; None where it multiplies none."""
    from te_dispatch.numerics.encodings import FP8_ENCODINGS
    from te_dispatch_triton.launch import constant_names

    named = dict(zip(constant_names(launch.kernel), launch.constants))
    pair = named.get("A_CODE"), named.get("B_CODE")
    if pair[0] in FP8_ENCODINGS and pair[1] in FP8_ENCODINGS and named.get("SCALING") not in ("mx", "nv"):
        return str(pair[0]), str(pair[1])
    return None
