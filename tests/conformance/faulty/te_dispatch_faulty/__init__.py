# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the conformance kit is tested with. This module holds two manifests: data only.

``loopback`` hands every call on to the torch backend and gives the results back unchanged, in memory of
`te_dispatch.ops.alloc`: the kit must find nothing. ``faulty`` does the same, but each of its implementations makes one
mistake of a known class, after which it is named (`te_dispatch_faulty.catalogue`): the kit must find every one.
"""

import dataclasses

from te_dispatch.core.manifest import API_VERSION, CANONICAL, Implementation, Manifest
from te_dispatch.core.requirements import OneOf
from te_dispatch_faulty.catalogue import FAULTS, Fault
from te_dispatch_torch.implementations import IMPLEMENTATIONS

_ON_CUDA = OneOf("device.type", "cuda")
_SOUND = {one.name: one for one in IMPLEMENTATIONS if _ON_CUDA not in one.requires}


def _derived(base: str, name: str, target: str, **changes: object) -> Implementation:
    """The torch backend's entry under another name. Results are copied, so that it is no plain PyTorch any more."""
    sound = _SOUND[base]
    target = f"te_dispatch_faulty.binding:{target}"
    traits = sound.traits - {"plain_torch"}
    return dataclasses.replace(sound, **{"name": name, "target": target, "traits": traits, **changes})  # type: ignore[arg-type]


def _faulty(fault: Fault) -> list[Implementation]:
    """The implementation of a fault and, where a forward and a backward exchange more than results, its partner."""
    sound = _SOUND[fault.base]
    changes: dict[str, object] = {"claims": sound.claims | fault.claims}
    if fault.traits is not None:
        changes["traits"] = fault.traits
    if sound.saved_format == CANONICAL:
        return [_derived(fault.base, fault.name, f"faulty__{fault.name}", **changes)]
    # A format of its own: no other fault's partner may stand in.
    changes["saved_format"] = f"faulty.{fault.name}/1"
    found = [_derived(fault.base, fault.name, f"faulty__{fault.name}", **changes)]
    for partner in fault.partners:
        found.append(
            _derived(partner.base, partner.name, f"partner__{partner.name}", saved_format=changes["saved_format"])
        )
    return found


LOOPBACK = Manifest(
    name="loopback",
    api_version=API_VERSION,
    description="The torch backend, called through another one. For tests.",
    implementations=tuple(_derived(name, name, f"loopback__{name}") for name in _SOUND),
)

FAULTY = Manifest(
    name="faulty",
    api_version=API_VERSION,
    description="One known fault per implementation. For tests.",
    implementations=tuple(one for fault in FAULTS for one in _faulty(fault)),
)
