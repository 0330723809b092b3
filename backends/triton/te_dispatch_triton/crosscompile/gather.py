# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The launches that operator calls would make on a chip, each form of a kernel once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from te_dispatch.conformance import blank
from te_dispatch.conformance.blank import Call
from te_dispatch_triton import targets
from te_dispatch_triton.crosscompile.calls import FAMILIES
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
        for call in blank.calls(FAMILIES[family]):
            launches: list[Launch] = []
            with recording(launches):
                run(call, target)
            for launch in launches:
                key = (launch.kernel.name, launch.config, *specialization_of(launch, target))
                found.setdefault(key, Variant(family, call.name, launch))
    finally:
        targets.pretend(_HOST, None)
    return list(found.values())


def run(call: Call, target: Target) -> None:
    """Run a call with this backend's implementation for a chip (`te_dispatch.conformance.blank.run`)."""
    vendor = "nvidia" if target.backend == "cuda" else "amd"
    blank.run(call, NAME, f"{vendor}:{target.arch}")


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
