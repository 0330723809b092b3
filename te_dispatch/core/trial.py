# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Trying installed plugins in another process before this one runs them.

A manifest or a probe that ends its process would end this one without a word, and with exit code 0 as if all were
well; one that hangs would leave it silent. Commands and the conformance kit therefore try what they are about to run. A
program that calls operators does not: its first call is not to start a process.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Sequence

from te_dispatch.core import probing
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.policy.known import FIRST_PARTY_BACKENDS
from te_dispatch.core.snapshot import Snapshot


def fatal_manifests(time_limit: float = probing.TIME_LIMIT) -> dict[importlib.metadata.EntryPoint, str]:
    """Entry points that must not be imported here, because they ended a process that did, or never came to an end, with
    the reason."""
    points = _entry_points()
    answers = probing.run_probes(_manifests(points), time_limit, patient=False)
    return {points[int(a.subject)]: f"{a.problem} while it was imported" for a in answers if a.ended}


class FatalPlugin(DispatchError):
    """An installed plugin ends, or hangs, the process that imports its manifest or runs its probes."""


#: Places, names and targets of entry points that let themselves be imported and asked, with the device types; and names
#: of backends with modules of their implementations.
_survivors: set[tuple[object, ...]] = set()


def refuse_fatal(device: str | None = None, time_limit: float | None = None) -> None:
    """Import every installed manifest in another process, and ask there what resolution asks third-party backends:
    whether they work on this machine, and about its devices. An entry point that survives is not tried again.

    Args:
        device: as `ProcessDevices.named` takes it. Its type is asked about beside the CPU and PyTorch's current
            accelerator.
        time_limit: seconds for one answer; None for `te_dispatch.core.probing.TIME_LIMIT`.

    Raises:
        FatalPlugin: names the backends that ended that process or did not come to an end, the probe, and how.
    """
    types = [] if device is None else [device.lower().partition(":")[0]]
    limit = probing.TIME_LIMIT if time_limit is None else time_limit
    keys = {point: _key(point, types) for point in _entry_points()}
    points = [point for point, key in keys.items() if key not in _survivors]
    answers = probing.run_probes(_manifests(points), limit, patient=False, types=types)
    fatal = []
    owner = None
    for answer in answers:
        if answer.kind == "manifest":
            owner = points[int(answer.subject)]
        assert owner is not None  # every manifest's answer comes before those of its probes
        if answer.ended:
            fatal.append(_ended(owner, answer))
            keys.pop(owner, None)
    _survivors.update(keys.values())
    _raise(fatal)


def refuse_fatal_targets(snapshot: Snapshot, backends: Collection[str] = (), time_limit: float | None = None) -> None:
    """Import the modules of third-party backends' implementations in another process. A module that survives is not
    tried again.

    Args:
        backends: names; all for none.
        time_limit: as of `refuse_fatal`.

    Raises:
        FatalPlugin: names the implementations that ended that process or did not come to an end, and how.
    """
    limit = probing.TIME_LIMIT if time_limit is None else time_limit
    fatal = []
    for name, backend in snapshot.backends.items():
        if name in FIRST_PARTY_BACKENDS or (backends and name not in backends) or name in snapshot.unavailable:
            continue
        modules: dict[str, probing.Probe] = {}
        for probe in probing.probes_of(backend.manifest, snapshot.unusable):
            module = probe[2].partition(":")[0]
            if probe[0] == "implementation" and (name, module) not in _survivors:
                modules.setdefault(module, probe)
        if not modules:
            continue
        answers = probing.run_probes(list(modules.values()), limit, backend.manifest)
        ended = [answer for answer in answers if answer.ended]
        fatal += [f"backend {name!r}: {answer.what} {answer.problem} while it was imported" for answer in ended]
        if not ended:
            _survivors.update((name, module) for module in modules)
    _raise(fatal)


def _raise(fatal: Sequence[str]) -> None:
    if fatal:
        cure = "uninstall it, or mend it. te-dispatch doctor examines the rest of the installation"
        raise FatalPlugin("\n".join(fatal) + f": {cure}")


def _ended(point: importlib.metadata.EntryPoint, answer: probing.Answer) -> str:
    of = f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
    whose = f"backend {point.name!r} of {of}"
    if answer.kind == "manifest":
        return f"the manifest of {whose} {answer.problem} while it was imported"
    return f"{whose}: {answer.what} {answer.problem}"


def _key(point: importlib.metadata.EntryPoint, types: Sequence[str]) -> tuple[object, ...]:
    where = str(point.dist.locate_file("")) if point.dist else ""
    return where, point.name, point.value, *types


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    from te_dispatch.core.discovery import list_entry_points  # imports stevedore

    return list_entry_points()[0]


def _manifests(points: Sequence[importlib.metadata.EntryPoint]) -> list[probing.Probe]:
    return [("manifest", str(i), f"{point.module}:{point.attr}") for i, point in enumerate(points)]
