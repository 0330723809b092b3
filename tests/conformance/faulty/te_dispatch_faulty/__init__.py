# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the conformance kit is tested with. This module holds manifests: data only.

``loopback`` hands every call on to the torch backend and gives the results back unchanged, in memory of
`te_dispatch.ops.alloc`: the kit must find nothing. ``faulty`` does the same until one of its known mistakes is switched
on (`te_dispatch_faulty.catalogue`): the kit must then find it. ``TE_DISPATCH_FAULT=name`` switches one on in a process,
`te_dispatch_faulty.binding.fault` in a block.
"""

import dataclasses

from te_dispatch.core.manifest import API_VERSION, CANONICAL, Implementation, Manifest
from te_dispatch.core.requirements import OneOf
from te_dispatch_torch.implementations import IMPLEMENTATIONS

_ON_CUDA = OneOf("device.type", "cuda")
_SOUND = {one.name: one for one in IMPLEMENTATIONS if _ON_CUDA not in one.requires}

#: Implementations of a name of their own -> the torch backend's that they hand on to; all others have its name.
OTHER_NAMES = {
    "native_gemm": "emulated_gemm",
    "saving_attention": "unfused_attention",
    "sparing_attention": "unfused_attention",
    "shared_attention_bwd": "unfused_attention_bwd",
}


def _derived(backend: str, name: str, **changes: object) -> Implementation:
    """The torch backend's entry in another one. Results are copied, so that it is no plain PyTorch any more."""
    sound = _SOUND[OTHER_NAMES.get(name, name)]
    target = f"te_dispatch_faulty.binding:{backend}__{name}"
    traits = sound.traits - {"plain_torch"}
    return dataclasses.replace(sound, **{"name": name, "target": target, "traits": traits, **changes})  # type: ignore[arg-type]


def _spoiled(name: str, saved_format: str = "faulty.own/1", **changes: object) -> Implementation:
    """One that a fault may be switched on in; forwards and backwards of other backends do not go with it."""
    if _SOUND[OTHER_NAMES.get(name, name)].saved_format != CANONICAL:
        changes["saved_format"] = saved_format
    return _derived("faulty", name, **changes)


LOOPBACK = Manifest(
    name="loopback",
    api_version=API_VERSION,
    description="The torch backend, called through another one. For tests.",
    implementations=tuple(_derived("loopback", name) for name in _SOUND),
)

FAULTY = Manifest(
    name="faulty",
    api_version=API_VERSION,
    description="The torch backend, with one known fault at a time. For tests.",
    implementations=(
        *(_spoiled(name) for name in _SOUND if not name.startswith(("sdpa", "varlen"))),
        # Judged as hardware is: an emulation's sums are exact.
        _spoiled("native_gemm", traits=frozenset({"fused"})),
        # Two forwards, one backward: what one forward saves and the other does not, that backward must not read.
        _spoiled("saving_attention", "faulty.shared/1"),
        _spoiled("sparing_attention", "faulty.shared/1"),
        _spoiled("shared_attention_bwd", "faulty.shared/1"),
    ),
)

MANIFESTS = {manifest.name: manifest for manifest in (LOOPBACK, FAULTY)}
