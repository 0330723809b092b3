# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Third-party backends on devices that they are not native to, and emulation as a property of the device."""

from __future__ import annotations

import pytest

import te_dispatch.ops.declared  # noqa: F401  # fills OPERATORS
from te_dispatch.core.decision import Decision
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.manifest import Manifest
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy
from te_dispatch.core.resolve import resolve
from tests.core.toy import CPU, backend, installed, kernel, preferring, rule, selectors

FP8 = {"a.dtype": "e4m3fn", "a.scaling": "tensor", "b.dtype": "e4m3fn", "b.scaling": "tensor"}
PREFER = preferring("native", "torch")


def decide(device: DeviceFacts, policy: Policy, *manifests: Manifest, scaling: str = "tensor") -> Decision:
    return resolve(OPERATORS["gemm"], {**FP8, "a.scaling": scaling}, device, policy, installed(*manifests))


def ids(decision: Decision) -> list[str]:
    return [accepted.id for accepted in decision.accepted]


def portable(*traits: str) -> Manifest:
    """The repository's portable backend as far as resolution is concerned."""
    return backend("torch", kernel("gemm", "k", traits=frozenset(traits)))


@pytest.mark.parametrize("vendors", [("zeta",), ()])
@pytest.mark.parametrize("traits", [(), ("emulated",)])
@pytest.mark.parametrize(
    "policy",
    [Policy(), PREFER, preferring("native", rules=(rule("gemm", deny=("zeta.other",)),))],
    ids=["empty", "default", "rule"],
)
def test_installing_a_plugin_changes_nothing_on_a_device_it_is_not_native_to(
    vendors: tuple[str, ...], traits: tuple[str, ...], policy: Policy
) -> None:
    plugin = backend("zeta", kernel("gemm", "k", rank=1), vendors=vendors)
    decision = decide(CPU, policy, plugin, portable(*traits))
    assert ids(decision) == ["torch.k", "zeta.k"]
    native_to = "zeta" if vendors else "no vendor"
    assert f"native to {native_to}, not to cpu, and no preference names it" in decision.accepted[1].place


def test_a_plugin_comes_first_on_its_own_devices() -> None:
    plugin = backend("zeta", kernel("gemm", "k"), vendors=("zeta",))
    assert ids(decide(DeviceFacts("cpu", "zeta", "z2"), PREFER, plugin, portable())) == ["zeta.k", "torch.k"]


@pytest.mark.parametrize("named", ["zeta", "zeta.k"])
def test_a_preference_brings_a_plugin_to_any_device(named: str) -> None:
    plugin = backend("zeta", kernel("gemm", "k"), vendors=("zeta",))
    assert ids(decide(CPU, preferring(named, "torch"), plugin, portable())) == ["zeta.k", "torch.k"]


@pytest.mark.parametrize(
    ("units", "scaling", "emulates"), [(False, "tensor", True), (True, "tensor", False), (False, "none", False)]
)
def test_a_product_of_quantized_operands_is_emulated_where_the_device_has_no_unit_for_it(
    units: bool, scaling: str, emulates: bool
) -> None:
    plugin = backend("zeta", kernel("gemm", "k"), vendors=("zeta",))
    device = DeviceFacts("cpu", "zeta", "z1", table=Arch(("e4m3fn",), units))
    [accepted] = decide(device, PREFER, plugin, scaling=scaling).accepted
    assert ("emulated" in accepted.traits) is emulates
    assert ("zeta:z1 has no FP8 matrix units" in accepted.place) is emulates
    denied = decide(device, Policy(deny=selectors("trait:emulated")), plugin, scaling=scaling)
    assert bool(denied.accepted) is not emulates
