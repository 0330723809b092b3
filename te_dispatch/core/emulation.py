# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Devices that a backend emulates: its kernels are compiled for a chip that is not here and executed on host memory.

A manifest's `emulators` name, for each such chip, a function of the backend. While its context is entered, tensors on
the CPU count as the chip's: dispatch reads the chip's facts instead of the host's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from te_dispatch.core.bind import import_target
from te_dispatch.core.devices import describe_device
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import DeviceFacts, FactValue
from te_dispatch.core.snapshot import Snapshot

if TYPE_CHECKING:
    from te_dispatch.core.manager import OpManager


class EmulatorMissing(Exception):
    """Raised by a backend's emulator where something that it needs is not installed; the message says what to do."""


@dataclass(frozen=True)
class Emulation:
    """What a backend's emulator says of itself.

    Attributes:
        by: what executes the kernels, with its version.
        extra: facts beside those of the backend's arch table, as a probe of the chip would tell them.
        unproven: what a kernel that passes here may still do wrong on the chip, a phrase each.
    """

    by: str
    extra: Mapping[str, FactValue] = field(default_factory=dict)
    unproven: tuple[str, ...] = ()


def emulators(snapshot: Snapshot) -> dict[str, list[str]]:
    """Emulated devices as ``vendor:arch``, each with the backends that emulate it."""
    found: dict[str, list[str]] = {}
    for name, backend in sorted(snapshot.backends.items()):
        for label in backend.manifest.emulators:
            found.setdefault(label.lower(), []).append(name)
    return found


def emulating(snapshot: Snapshot, device: str) -> tuple[DeviceFacts, list[str]]:
    """A device that is emulated: its described facts, and the backends that emulate it.

    Args:
        device: ``vendor:arch``, or the arch alone where one vendor has it.

    Raises:
        DispatchError: nobody knows it, or nobody emulates it; says what is emulated.
    """
    known = emulators(snapshot)
    listed = ", ".join(known) or "none"
    try:
        facts = describe_device(snapshot, device)
    except DispatchError as error:
        raise DispatchError(f"{error}; emulated devices: {listed}") from None
    backends = known.get(facts.label().lower(), [])
    if not backends:
        raise DispatchError(f"no installed backend emulates {facts.label()}; emulated devices: {listed}")
    return facts, backends


@contextmanager
def emulated(manager: OpManager, device: str) -> Iterator[Emulation]:
    """Let tensors on the CPU count as an emulated device's, for all of the process.

    Args:
        manager: whose backends are asked, and whose calls see the device's facts.
        device: as `emulating` takes it.

    Raises:
        DispatchError: as `emulating`, or what the emulator needs is not installed.
    """
    snapshot = manager.snapshot
    facts, (backend, *_) = emulating(snapshot, device)
    targets = {label.lower(): target for label, target in snapshot.backends[backend].manifest.emulators.items()}
    emulator = import_target(targets[facts.label().lower()])
    with ExitStack() as stack:
        try:
            emulation: Emulation = stack.enter_context(emulator(facts.arch))
        except EmulatorMissing as error:
            raise DispatchError(f"{facts.label()} cannot be emulated: {error}") from error
        # The extra facts are of this machine's software, which compiles and executes.
        here = dataclasses.replace(
            facts, name=f"{facts.label()} (emulated)", extra=dict(emulation.extra), described=False
        )
        manager.stand_in(here, emulation)
        stack.callback(manager.stand_in, None, None)
        yield emulation
