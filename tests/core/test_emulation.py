# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Devices that a backend emulates: what dispatch sees while one is entered, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from te_dispatch.core.emulation import Emulation, EmulatorMissing, emulated, emulators
from te_dispatch.core.errors import DispatchError, NoImplementation
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import Manifest
from te_dispatch.core.manifest_check import check_manifest
from te_dispatch.core.requirements import OneOf
from tests.core.toy import answering, backend, installed, kernel, manager, target

pytestmark = pytest.mark.usefixtures("toy_operators")


class Device(NamedTuple):
    """What dispatch reads of a ``torch.device``."""

    type: str
    index: int | None = None


CPU = Device("cpu")
ARCHS = {"zeta": {"z1": Arch(), "z2": Arch(encodings=("e4m3fnuz",), warp_size=64)}}


class Emulator:
    """A backend's emulator that notes what is asked of it."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def __call__(self, arch: str) -> Iterator[Emulation]:
        self.events.append(f"enter {arch}")
        yield Emulation("zeta's emulator 3", {"version.zeta": "7.1"}, ("speed",))
        self.events.append("leave")


def zeta(emulator: Callable[..., Any], name: str = "zeta") -> Manifest:
    on_z2 = kernel("pack", "on_z2", answering("pack", "on_z2"), requires=(OneOf("device.arch", "z2"),))
    return backend(name, on_z2, vendors=("zeta",), archs=ARCHS, emulators={"zeta:z2": target(emulator)})


def call(m: OpManager) -> Any:
    return m.ops.pack(SimpleNamespace(device=CPU, dtype="fp32", shape=(1,)))


def test_dispatch_sees_the_emulated_device_while_it_is_entered() -> None:
    emulator = Emulator()
    m = manager(zeta(emulator))
    with pytest.raises(NoImplementation, match="arch is cpu"):
        call(m)
    with emulated(m, "zeta:z2") as emulation:
        assert m.emulation is emulation and emulation.by == "zeta's emulator 3"
        facts = m.device_facts(CPU)
        assert (facts.label(), facts["warp_size"], facts["version.zeta"]) == ("zeta:z2", 64, "7.1")
        assert facts.name == "zeta:z2 (emulated)" and not facts.described
        assert call(m) == "on_z2"
        assert [one.label() for one in m.devices.seen()] == ["zeta:z2"]
        assert emulator.events == ["enter z2"]
    assert emulator.events == ["enter z2", "leave"] and m.emulation is None
    with pytest.raises(NoImplementation, match="arch is cpu"):
        call(m)


def test_the_host_comes_back_after_an_error() -> None:
    m = manager(zeta(Emulator()))
    with pytest.raises(RuntimeError, match="inside"), emulated(m, "z2"):
        raise RuntimeError("inside")
    assert m.emulation is None and m.device_facts(CPU).vendor == "cpu"


def test_another_registry_keeps_the_emulated_device() -> None:
    m = manager(zeta(Emulator()))
    with emulated(m, "z2"):
        m.replace_snapshot(installed(zeta(Emulator())))
        assert m.device_facts(CPU).label() == "zeta:z2"


def test_other_devices_are_themselves() -> None:
    probe = target(lambda index: DeviceFacts("zpu", "zeta", "z1", table=ARCHS["zeta"]["z1"]))
    m = manager(zeta(Emulator()), backend("eta", vendors=("zeta",), archs=ARCHS, devices={"zpu": probe}))
    with emulated(m, "z2"):
        assert m.device_facts(Device("zpu", 0)).label() == "zeta:z1"


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("zeta:z1", "no installed backend emulates zeta:z1; emulated devices: zeta:z2"),
        ("zeta:z3", "unknown arch 'z3' of vendor zeta; .*; emulated devices: zeta:z2"),
        ("theta:t1", "unknown vendor 'theta' in device 'theta:t1'; .*; emulated devices: zeta:z2"),
    ],
)
def test_what_is_not_emulated_is_refused_with_what_is(device: str, told: str) -> None:
    with pytest.raises(DispatchError, match=told), emulated(manager(zeta(Emulator())), device):
        raise AssertionError("entered")


def test_an_emulator_says_what_is_missing() -> None:
    @contextmanager
    def missing(arch: str) -> Iterator[Emulation]:
        raise EmulatorMissing("zeta_emulator is not installed: pip install zeta_emulator")
        yield

    m = manager(zeta(missing))
    told = "zeta:z2 cannot be emulated: zeta_emulator is not installed: pip install zeta_emulator"
    with pytest.raises(DispatchError, match=told), emulated(m, "z2"):
        raise AssertionError("entered")
    assert m.emulation is None and m.device_facts(CPU).vendor == "cpu"


def test_emulators_are_listed_with_their_backends() -> None:
    assert emulators(installed(zeta(Emulator()), zeta(Emulator(), "alpha"))) == {"zeta:z2": ["alpha", "zeta"]}


@pytest.mark.parametrize(
    ("emulators", "told"),
    [
        (("zeta:z2",), "emulators is the tuple .*, not a dict of 'vendor:arch' -> 'module:function'"),
        ({"z2": "zeta:emulate"}, "emulators\\['z2'\\] must read 'vendor:arch': 'module:function'"),
        ({"zeta:z2": "emulate"}, "emulators\\['zeta:z2'\\] must read .*, got 'emulate'"),
    ],
)
def test_a_wrong_manifest_is_refused(emulators: Any, told: str) -> None:
    problem = check_manifest(backend("zeta", emulators=emulators), "zeta")
    assert problem is not None and re.search(told, problem), problem
