# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What ``te-dispatch doctor`` reads off manifests, beside each other and beside this machine's devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from te_dispatch.core.manifest import CANONICAL, Implementation
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy.known import DEVICE_FACTS, FIRST_PARTY_VENDORS, VERSION_PREFIX, did_you_mean
from te_dispatch.core.probing import Answer
from te_dispatch.core.requirements import DEVICE_PREFIX, OneOf, atoms
from te_dispatch.core.snapshot import InstalledBackend, Snapshot, grouped

#: A device as doctor shows it.
Device = Mapping[str, Any]

_ARCH = f"{DEVICE_PREFIX}arch"
_VENDOR = f"{DEVICE_PREFIX}vendor"


def unknown_facts(
    backend: InstalledBackend, answers: Sequence[Answer], devices: Sequence[Device], unusable: Collection[str]
) -> dict[str, list[str]]:
    """Device facts of no standard name that no probe tells -> the implementations that require them.

    Of a backend with probes that found no device of theirs nothing can be said. What its own probes tell counts even
    where a backend native to the device is believed instead.

    Args:
        answers: of the backend's probes.
        devices: as doctor shows them.
        unusable: implementations of which something worse is told already.
    """
    own = [device for a in answers if a.kind == "devices" for device in a.value or ()]
    if backend.manifest.devices and not own:
        return {}
    told = {*DEVICE_FACTS, *(name for device in (*devices, *own) for name in device["facts"])}
    found: dict[str, list[str]] = {}
    for implementation in backend.manifest.implementations:
        candidate = f"{backend.name}.{implementation.name}"
        if candidate in unusable:
            continue
        for name in sorted({name for condition in implementation.requires for name in condition.reads()}):
            fact = name.removeprefix(DEVICE_PREFIX)
            if name != fact and fact not in told and not fact.startswith(VERSION_PREFIX):
                found.setdefault(name, []).append(candidate)
    return found


def without_companion(backend: InstalledBackend, formats: set[tuple[str, str]]) -> dict[str, str]:
    """Implementation -> what is missing for it to be chosen in training: a counterpart with its saved format.

    Args:
        formats: operators and saved formats of all implementations that are installed.
    """
    found = {}
    for implementation in backend.manifest.implementations:
        operator, saved = OPERATORS.get(implementation.operator), implementation.saved_format
        if operator is None or operator.companion is None or implementation.inference:
            continue
        if (operator.companion, saved) not in formats:
            verb = "leaves it" if operator.backward else "reads it"
            cure = ": set saved_format in both halves, or inference=True" if saved == CANONICAL else ""
            found[f"{backend.name}.{implementation.name}"] = (
                f"its saved format is {saved!r}, and no implementation of {operator.companion} {verb}{cure}"
            )
    return found


def notes(backend: InstalledBackend, snapshot: Snapshot, devices: Sequence[Device]) -> list[str]:
    """What is legal and may be a mistake all the same."""
    found = (*_unlisted(backend, snapshot, devices), *_without_forward(backend, snapshot), *_anywhere(backend))
    return grouped(found)


def _anywhere(backend: InstalledBackend) -> Iterator[tuple[str, str]]:
    """(Implementation, what follows) where a backend is native to vendors, and it asks for no device."""
    manifest = backend.manifest
    asked = f"OneOf({_VENDOR!r}, {', '.join(map(repr, manifest.vendors))})"
    reason = f"requires nothing of the device, so it is a candidate on every device; {asked} keeps it to its own"
    for implementation in manifest.implementations if manifest.vendors else ():
        if not any(name.startswith(DEVICE_PREFIX) for one in implementation.requires for name in one.reads()):
            yield f"{backend.name}.{implementation.name}", reason


def _unlisted(backend: InstalledBackend, snapshot: Snapshot, devices: Sequence[Device]) -> Iterator[tuple[str, str]]:
    """(Implementation, reason) where it requires one of archs, or of vendors, of which no manifest and no device here
    has any."""
    listed = snapshot.archs()
    archs = {arch for rows in listed.values() for arch in rows} | {device["facts"]["arch"] for device in devices}
    vendors = {*FIRST_PARTY_VENDORS, *listed, *(device["facts"]["vendor"] for device in devices)}
    manifest = backend.manifest
    known = {
        _ARCH: (archs, [arch for rows in manifest.archs.values() for arch in rows], "an arch"),
        _VENDOR: (vendors, [*manifest.vendors, *FIRST_PARTY_VENDORS], "a vendor"),
    }
    for implementation in manifest.implementations:
        for condition in implementation.requires:
            for atom in atoms(condition):
                if not isinstance(atom, OneOf) or atom.fact not in known:
                    continue
                words, likely, what = known[atom.fact]
                if words.isdisjoint(atom.values):
                    hint = did_you_mean(str(atom.values[0]), likely)
                    reason = f"requires {atom.describe()!r}, and no installed manifest lists such {what}{hint}"
                    yield f"{backend.name}.{implementation.name}", reason


def _without_forward(backend: InstalledBackend, snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """(Backward, with what forwards it goes) where its backend has no forward whose results it reads."""
    for implementation in backend.manifest.implementations:
        operator = OPERATORS.get(implementation.operator)
        if operator is None or operator.companion is None or not operator.backward:
            continue
        forwards = [
            (other.name, f"{other.name}.{forward.name}")
            for other, forward in snapshot.candidates(operator.companion)
            if forward.saved_format == implementation.saved_format and not forward.inference
        ]
        others = [name for owner, name in forwards if owner != backend.name]
        if len(others) < len(forwards) or (not others and implementation.saved_format != CANONICAL):
            continue  # its backend has one; or nobody has, which is told as an error
        yield f"{backend.name}.{implementation.name}", _goes_with(backend, implementation, operator.companion, others)


def _goes_with(backend: InstalledBackend, implementation: Implementation, companion: str, others: Sequence[str]) -> str:
    told = f"{backend.name} has no {companion} that goes with it. It serves a backward that is called by itself"
    if not others:
        return f"{told}; no other backend has one either"
    return (
        f"{told}, and forwards of other backends ({', '.join(others)}) where their own backend's "
        f"{implementation.operator} does not take the call"
    )
