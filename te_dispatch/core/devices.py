# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Device facts: from the backends' probes for a device that is here, from the arch tables for one that is not."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Collection, Mapping
from typing import Any

from te_dispatch.core.bind import import_target
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import UNKNOWN, Arch, DeviceFacts, FactValue
from te_dispatch.core.failures import on_request, phrase, place, traceback_text
from te_dispatch.core.manifest_check import arch_problem
from te_dispatch.core.policy.known import VERSION_PREFIX, did_you_mean
from te_dispatch.core.snapshot import Snapshot

_log = logging.getLogger("te_dispatch")

#: PyTorch's device type by vendor, for devices described by name. ROCm builds call theirs cuda.
_TYPES = {"nvidia": "cuda", "amd": "cuda", "intel": "xpu", "apple": "mps", "cpu": "cpu"}


def probe_device(snapshot: Snapshot, type: str, index: int | None) -> tuple[DeviceFacts, list[str]]:
    """Ask every backend that knows the device type; the one native to the device's vendor is believed first.

    Returns:
        The facts, and what went wrong with a probe: one that raises, or whose answer cannot be, costs its facts and
        nothing else.
    """
    answers: list[tuple[bool, str, DeviceFacts]] = []
    problems: list[str] = []
    for backend in snapshot.backends.values():
        target = backend.manifest.devices.get(type)
        if target is None:
            continue
        where = f"backend {backend.name!r}: its probe of {type}"
        _log.debug("asking %s", where)  # the last line of a process that a probe ends
        try:
            facts = import_target(target)(0 if index is None else index)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            problems.append(f"{where} raised {phrase(error)}{place(error)}{on_request(traceback_text(error))}")
            continue
        if facts is None:
            continue
        problem = facts_problem(facts, type, backend.manifest.vendors)
        if problem is not None:
            problems.append(f"{where} {problem}; its facts are ignored")
            continue
        unlisted = unlisted_arch(facts, backend.manifest.vendors, backend.manifest.archs)
        if unlisted is not None:
            problems.append(f"{where} {unlisted}")
        if facts.table is None:
            row = backend.manifest.archs.get(facts.vendor, {}).get(facts.arch)
            facts = dataclasses.replace(facts, table=row)
        answers.append((facts.vendor not in backend.manifest.vendors, backend.name, facts))
    if not answers:
        return DeviceFacts(type=type, vendor=type, arch=type, index=index), problems
    answers.sort(key=lambda answer: answer[:2])
    first = answers[0][2]
    extra: dict[str, FactValue] = {}
    for _, _, facts in reversed(answers):
        # What is known of the host's software holds for a chip that the host stands for, too.
        if (facts.vendor, facts.arch) == (first.vendor, first.arch) or first.emulated:
            extra.update(facts.extra)
    return dataclasses.replace(first, type=type, index=index, extra=extra), problems


def facts_problem(facts: object, type: str, vendors: Collection[str]) -> str | None:
    """Why what a probe returned cannot be believed, or None.

    Args:
        facts: returned by the probe.
        type: the device type that was asked about.
        vendors: those that the probe's backend is native to; empty for a portable backend.
    """
    if not isinstance(facts, DeviceFacts):
        return f"returned {facts!r}, neither DeviceFacts nor None"
    for name in ("type", "vendor", "arch", "name"):
        if not isinstance(getattr(facts, name), str):
            return f"returned DeviceFacts whose {name} is {getattr(facts, name)!r}, not a str"
    if facts.index is not None and (isinstance(facts.index, bool) or not isinstance(facts.index, int)):
        return f"returned DeviceFacts whose index is {facts.index!r}, not an int"
    if facts.table is not None and not isinstance(facts.table, Arch):
        return f"returned DeviceFacts whose table is {facts.table!r}, not an Arch"
    if facts.table is not None and (problem := arch_problem(facts.table)) is not None:
        return f"returned DeviceFacts with a wrong table: {problem}"
    if not isinstance(facts.extra, Mapping) or not all(isinstance(name, str) for name in facts.extra):
        return f"returned DeviceFacts whose extra is {facts.extra!r}, not a dict with names for keys"
    for name, value in facts.extra.items():
        if name.startswith(VERSION_PREFIX) and not (value is None or value is UNKNOWN or isinstance(value, str)):
            return f"returned DeviceFacts whose {name} is {value!r}, not a str such as '1.0'"
    if facts.type != type:
        return f"says that the device's type is {facts.type!r}"
    if vendors and facts.vendor not in vendors:
        hint = did_you_mean(facts.vendor, vendors)
        return f"says vendor {facts.vendor!r}, to which its manifest is not native{hint}"
    if not vendors and type in _TYPES.values() and facts.vendor not in _TYPES:
        return f"says vendor {facts.vendor!r}, which is not in its manifest's vendors"
    elsewhere = _TYPES.get(facts.vendor, type)
    if elsewhere != type and not facts.emulated:
        return f"says vendor {facts.vendor!r}, whose devices are not of this type"
    return None


def unlisted_arch(facts: DeviceFacts, vendors: Collection[str], archs: Mapping[str, Collection[str]]) -> str | None:
    """What to say of an arch that the table of a native backend does not list, which is no reason to disbelieve it."""
    rows = next((rows for vendor, rows in archs.items() if vendor.lower() == facts.vendor), None)
    if facts.vendor not in vendors or not rows or facts.arch in rows:
        return None
    hint = did_you_mean(facts.arch, rows)
    return f"says arch {facts.arch!r}, which its manifest does not list{hint}"


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
        _log.debug("asking backend %r: its check of this machine", backend.name)
        try:
            reason, problem = read_reason(import_target(backend.manifest.unavailable)())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = problem = f"raised {phrase(error)}"
            problem += f"{place(error)}{on_request(traceback_text(error))}"
        if problem is not None:
            problems.append(f"backend {backend.name!r}: its check of this machine {problem}")
            reason = reason and f"its check of this machine {reason}"
        if reason is not None:
            unavailable[backend.name] = reason
    return dataclasses.replace(snapshot, unavailable=unavailable), problems


def read_reason(answer: object) -> tuple[str | None, str | None]:
    """What a backend's ``unavailable()`` returned: (the reason, None if it works; what is wrong with the answer, of
    which the reason is then made)."""
    if answer is None:
        return None, None
    if isinstance(answer, str) and answer.strip():
        return answer, None
    problem = f"returned {answer!r}; it returns the reason as a str, or None if it works"
    # False, 0 and "" are what those return who take the name for a question.
    return (problem if answer else None), problem


def describe_device(snapshot: Snapshot, text: str) -> DeviceFacts:
    """Facts of a device that need not be here, e.g. ``nvidia:sm_90``; library versions are unknown. The vendor may be
    left out where one vendor alone has such an arch.

    Raises:
        DispatchError: no installed manifest knows the vendor or the arch; the message lists those that are known.
    """
    archs = snapshot.archs()
    vendor, _, arch = text.lower().partition(":")
    if vendor not in archs and not arch:
        owners = [owner for owner, rows in archs.items() if vendor in map(str.lower, rows)]
        if len(owners) == 1:
            vendor, arch = owners[0], vendor
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


def is_traced() -> bool:
    """Whether `make_fx`, or torch.export without dynamo, is making a graph of the operations that run now."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return proxies is not None and proxies.get_proxy_mode() is not None


def is_imitation(device: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call's operands are meta or fake tensors, which have no data."""
    if getattr(device, "type", None) == "meta":
        return True
    return any(_imitates(value) for value in args)


def _imitates(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_imitates(v) for v in value)
    name = type(value).__name__
    if name == "Quantized":
        # Made of fake tensors, by plain PyTorch operations or while a graph is traced.
        return _imitates(value.row_data) or _imitates(value.col_data)
    return name == "FakeTensor" or name == "FakeQuantized"
