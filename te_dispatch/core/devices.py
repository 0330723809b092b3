# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Device facts: from the backends' probes for a device that is here, from the arch tables for one that is not."""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

from te_dispatch.core.bind import import_target
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import DeviceFacts, FactValue
from te_dispatch.core.snapshot import Snapshot

_log = logging.getLogger("te_dispatch")

#: PyTorch's device type by vendor, for devices described by name. ROCm builds call theirs cuda.
_TYPES = {"nvidia": "cuda", "amd": "cuda", "intel": "xpu", "apple": "mps", "cpu": "cpu"}


def probe_device(snapshot: Snapshot, type: str, index: int | None) -> tuple[DeviceFacts, list[str]]:
    """Ask every backend that knows the device type; the one native to the device's vendor is believed first.

    Returns:
        The facts, and what went wrong with a probe: a probe that raises costs its facts, nothing else.
    """
    answers: list[tuple[bool, str, DeviceFacts]] = []
    problems: list[str] = []
    for backend in snapshot.backends.values():
        target = backend.manifest.devices.get(type)
        if target is None:
            continue
        try:
            facts = import_target(target)(0 if index is None else index)
        except (Exception, SystemExit) as error:
            problems.append(f"backend {backend.name!r}: its probe of {type} raised {error.__class__.__name__}: {error}")
            continue
        if facts is not None:
            answers.append((facts.vendor not in backend.manifest.vendors, backend.name, facts))
    if not answers:
        return DeviceFacts(type=type, vendor=type, arch=type, index=index), problems
    answers.sort(key=lambda answer: answer[:2])
    first = answers[0][2]
    extra: dict[str, FactValue] = {}
    for _, _, facts in reversed(answers):
        if (facts.vendor, facts.arch) == (first.vendor, first.arch):
            extra.update(facts.extra)
    return dataclasses.replace(first, type=type, index=index, extra=extra), problems


def probe_backends(snapshot: Snapshot) -> tuple[Snapshot, list[str]]:
    """Ask every backend that can tell whether it works on this machine.

    Returns:
        The snapshot with the reasons of those that do not, and what went wrong with a check.
    """
    unavailable = dict(snapshot.unavailable)
    problems: list[str] = []
    for backend in snapshot.backends.values():
        if backend.manifest.unavailable is None:
            continue
        try:
            reason = import_target(backend.manifest.unavailable)()
        except (Exception, SystemExit) as error:
            reason = f"its check of this machine raised {type(error).__name__}: {error}"
            problems.append(f"backend {backend.name!r}: {reason}")
        if reason is not None:
            unavailable[backend.name] = str(reason)
    return dataclasses.replace(snapshot, unavailable=unavailable), problems


def describe_device(snapshot: Snapshot, text: str) -> DeviceFacts:
    """Facts of a device that need not be here, e.g. ``nvidia:sm_90``; library versions are unknown.

    Raises:
        DispatchError: no installed manifest knows the vendor or the arch; the message lists those that are known.
    """
    archs = snapshot.archs()
    vendor, _, arch = text.lower().partition(":")
    if vendor not in archs:
        known = ", ".join(sorted(archs)) or "none"
        raise DispatchError(f"unknown vendor {vendor!r} in device {text!r}; known vendors: {known}")
    rows = archs[vendor]
    if not arch and vendor in rows:
        arch = vendor
    arch = next((row for row in rows if row.lower() == arch), arch)  # as the vendor writes it
    if arch not in rows:
        known = ", ".join(sorted(rows)) or "none"
        raise DispatchError(f"unknown arch {arch!r} of vendor {vendor}; known: {known} (write {vendor}:ARCH)")
    type = _TYPES.get(vendor) or next(
        (t for b in snapshot.backends.values() if vendor in b.manifest.vendors for t in b.manifest.devices), vendor
    )
    return DeviceFacts(
        type=type, vendor=vendor, arch=arch, name=f"{vendor} {arch} (described)", table=rows[arch], described=True
    )


def current_accelerator() -> Any:
    """PyTorch's current accelerator as a ``torch.device``; None without one, or where torch is not loaded."""
    accelerator = getattr(sys.modules.get("torch"), "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return None
    return accelerator.current_accelerator()


def is_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def is_compiling() -> bool:
    """Whether torch.compile or torch.export is tracing what runs now."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def is_imitation(device: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call's operands are meta or fake tensors, which never reach a backend."""
    if getattr(device, "type", None) == "meta":
        return True
    return any(_imitates(value) for value in args)


def _imitates(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_imitates(v) for v in value)
    name = type(value).__name__
    if name == "Quantized":
        # Made by an implementation of plain PyTorch operations that ran on fake tensors.
        return _imitates(value.row_data) or _imitates(value.col_data)
    return name == "FakeTensor" or name == "FakeQuantized"
