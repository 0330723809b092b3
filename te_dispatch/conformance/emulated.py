# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Devices that a backend emulates, as the kit's settings name them: ``emulated:gfx942``.

Subjects then run on tensors of the host, and the whole process sees the facts of that chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.core.emulation import emulated, emulating
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.manager import OpManager

PREFIX = "emulated:"


def emulated_device(settings: Settings) -> str | None:
    """The chip that a run is for, where it is an emulated one."""
    device = settings.device or ""
    return device.removeprefix(PREFIX) if device.startswith(PREFIX) else None


@contextmanager
def device_entered(manager: OpManager, settings: Settings) -> Iterator[None]:
    """Let the CPU count as the run's device while this is entered, where that is an emulated one.

    Raises:
        UsageError: nobody emulates it, what its emulator needs is not installed, or the run is to certify or to compare
            with a backend that would run on the host.
    """
    device = emulated_device(settings)
    with ExitStack() as stack:
        if device is not None:
            _require_emulated(manager, settings, device)
            if manager.emulation is None:
                try:
                    stack.enter_context(emulated(manager, device))
                except DispatchError as error:
                    raise UsageError(f"device: {settings.device}: {error}") from error
        yield


def _require_emulated(manager: OpManager, settings: Settings, device: str) -> None:
    """Raise for what `device_entered` refuses, but for what the emulator needs."""
    backends = emulating_backends(manager, settings)
    if settings.against != Settings.against:
        raise UsageError(f"against: on an emulated device results are compared with {Settings.against} alone")
    for name in settings.backends:
        if name in manager.snapshot.backends and name not in backends:
            raise UsageError(
                f"backend: {name} does not emulate {device}, and would run on the host; those that emulate it: "
                f"{', '.join(backends)}"
            )
    if manager.emulation is not None:
        entered, asked = manager.device_facts(torch.device("cpu")), emulating(manager.snapshot, device)[0]
        if entered.label() != asked.label():
            raise UsageError(f"device: {settings.device}: this process is emulating {entered.label()}")


def emulating_backends(manager: OpManager, settings: Settings) -> list[str]:
    """The backends that emulate a run's device; none where that is a real one.

    Raises:
        UsageError: nobody emulates it.
    """
    device = emulated_device(settings)
    if device is None:
        return []
    try:
        return emulating(manager.snapshot, device)[1]
    except DispatchError as error:
        raise UsageError(f"device: {settings.device}: {error}") from error
