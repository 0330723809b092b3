# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest: everything a backend tells the runtime about itself, as data.

A backend's entry point (group ``te_dispatch.backends``) names a module attribute that is a `Manifest`. The module
must be light: it is imported on every start, so it imports nothing but this one. Kernels, probes and libraries are
named by ``"module:attribute"`` strings and imported only when they are about to be used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_dispatch.core.facts import Arch
from te_dispatch.core.requirements import Condition

#: Version of this contract, for new manifests. 2 added `Implementation.plan`, `operand_format` and `output_shape`. In
#: version 1 these were attributes of the function that `target` names, the first one called ``prepared``; an attribute
#: is still read where the manifest names no function.
API_VERSION = 2

#: Versions that are served. A manifest of another one is refused at discovery.
API_VERSIONS = (1, 2)

#: Promises the conformance kit holds an implementation to.
CLAIMS = ("deterministic", "batch_invariant", "capturable", "no_host_sync")

#: Descriptions that policies and environment variables select by. Of attention: `fused` is one kernel, `flash` works by
#: tiles with a running maximum, `unfused` stores the score matrix; `flash_package` is a FlashAttention package and
#: `vendor_library` the attention of a device vendor's library (cuDNN; CK and AOTriton, which also have `ck` and
#: `aotriton`); these and `unfused` are what Transformer Engine's variables switch. `emulated` ranks after every real
#: implementation; `oracle` is there to compare with and serves no call that does not name it; `plain_torch` says that
#: the function consists of PyTorch operations only: torch.compile inlines it, and it accepts meta and fake tensors
#: because every operation in it does.
TRAITS = (
    "fused", "flash", "unfused", "flash_package", "vendor_library", "ck", "aotriton", "emulated", "oracle",
    "plain_torch",
)  # fmt: skip

#: The trait of what serves only calls that name it.
ORACLE = "oracle"

#: `saved_format` of companions that exchange only what the operator's interface spells out.
CANONICAL = "canonical"


def _members(where: str, field: str, given: Any) -> tuple[Any, ...]:
    """A field that holds several values. A lone string would be taken apart into its letters.

    Raises:
        TypeError: it is one value.
    """
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"{where}: {field} holds several values, got {given!r} alone; write ({given!r},)")
    return tuple(given)


@dataclass(frozen=True)
class Implementation:
    """One callable that fulfils one operator.

    Attributes:
        op: the operator's name, with the version it was written against: ``"gemm@1"``.
        name: unique within the backend; the id is ``<backend>.<name>``.
        target: ``"module:attribute"`` of the callable, imported when it is first chosen.
        requires: conditions, all of which must hold; compose OR-sets with `AnyOf` and per-vendor ones with `OnVendor`.
        rank: place among the candidates that no policy orders, smaller first.
        claims: of `CLAIMS`.
        traits: of `TRAITS`.
        saved_format: what a forward leaves for its backward, and what a backward reads. Companions pair up only
            when these are equal. Leave it alone where the operator's own results are all the backward needs.
        inference: a forward that has no backward and serves only calls that need no gradient.
        version: of the kernel. Enters the plan's digest and the compile cache's key; raise it when results change.
        plan: ``"module:function"`` of ``plan(varying, **arguments)``, which prepares calls that come again (see
            `te_dispatch.core.repeating`); None where there is nothing to prepare.
        operand_format: of a GEMM, ``"module:function"`` of ``operand_format(layout, operand, scaling)``: which copy of
            a quantized operand it reads, and its scale layout (see `te_dispatch.ops.gemm.operand_format`); None for the
            default.
        output_shape: ``"module:function"`` with the operator's signature that returns results for meta or fake
            arguments; None where they are what the operator's own shape function says. These three are imported when
            they are first asked for.
    """

    op: str
    name: str
    target: str
    requires: tuple[Condition, ...] = ()
    rank: int = 100
    claims: frozenset[str] = frozenset()
    traits: frozenset[str] = frozenset()
    saved_format: str = CANONICAL
    inference: bool = False
    version: str = "1"
    plan: str | None = None
    operand_format: str | None = None
    output_shape: str | None = None

    def __post_init__(self) -> None:
        where = f"implementation {self.name!r}"
        object.__setattr__(self, "claims", frozenset(_members(where, "claims", self.claims)))
        object.__setattr__(self, "traits", frozenset(_members(where, "traits", self.traits)))
        object.__setattr__(self, "requires", _members(where, "requires", self.requires))

    @property
    def operator(self) -> str:
        return self.op.partition("@")[0]

    @property
    def operator_version(self) -> int:
        return int(self.op.partition("@")[2] or 0)


@dataclass(frozen=True)
class Manifest:
    """A backend's whole contract.

    Attributes:
        name: the backend's name: lower case, the first part of every implementation's id.
        api_version: the `API_VERSION` it was written for, one of `API_VERSIONS`.
        vendors: vendors whose devices this backend is *native* to (``nvidia``, ``amd``, ``acme``). Empty for a
            portable one. In a policy, ``native`` stands for every backend that declares the device's vendor.
        devices: PyTorch device type -> ``"module:function"`` of a probe ``probe(index: int) -> DeviceFacts | None``
            (None where this backend knows nothing of the device). A probe is light: no context, no kernel, and it
            never ends the process.
        archs: vendor -> arch -> `Arch`, so that a device that is not here can be asked about by name.
        implementations: what it offers.
        doctor: ``"module:function"`` of ``doctor() -> list[tuple[str, str, str]]``: (subject, state, reason), for
            ``te-dispatch doctor``; state is ``ok``, ``missing`` or ``warning``.
        unavailable: ``"module:function"`` of ``unavailable() -> str | None``: why nothing of this backend can run on
            this machine, None if it can. Asked once, at the first resolution.
        description: one line.
        emulators: ``vendor:arch`` of chips that this backend can emulate, for tests -> ``"module:function"`` of
            ``emulator(arch)``, a context manager that yields an `Emulation` (`te_dispatch.core.emulation`): while it is
            entered, the backend compiles kernels for that chip and executes them on tensors of the CPU.
    """

    name: str
    api_version: int
    implementations: tuple[Implementation, ...]
    vendors: tuple[str, ...] = ()
    devices: Mapping[str, str] = field(default_factory=dict)
    archs: Mapping[str, Mapping[str, Arch]] = field(default_factory=dict)
    doctor: str | None = None
    unavailable: str | None = None
    description: str = ""
    emulators: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"manifest {self.name!r}"
        object.__setattr__(self, "implementations", _members(where, "implementations", self.implementations))
        vendors = _members(where, "vendors", self.vendors)
        object.__setattr__(self, "vendors", tuple(v.lower() if isinstance(v, str) else v for v in vendors))
