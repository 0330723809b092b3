# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The registry as one immutable value: which backends there are and what is known to be wrong with them.

Discovery makes the first snapshot; every later finding (an import that failed, a signature that lacks a newer
parameter) makes a new one. Nothing in a snapshot is ever changed in place, so readers need no lock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from te_dispatch.core.facts import Arch
from te_dispatch.core.manifest import Implementation, Manifest


@dataclass(frozen=True)
class InstalledBackend:
    """A registered backend and the distribution it came from."""

    manifest: Manifest
    distribution: str
    version: str

    @property
    def name(self) -> str:
        return self.manifest.name


@dataclass(frozen=True)
class PluginFailure:
    """An entry point that could not become a backend.

    Attributes:
        traceback: of the exception behind it, empty where there was none.
    """

    name: str
    distribution: str
    version: str
    reason: str
    traceback: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"backend {self.name!r} of {self.distribution} {self.version}: {self.reason}"


def grouped(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """(Implementation id, what is wrong with it) in one line for each thing that is wrong."""
    names: dict[str, list[str]] = {}
    for candidate, reason in reasons:
        names.setdefault(reason, []).append(candidate)
    return [
        f"{of[0]}: {reason}" if len(of) == 1 else f"{len(of)} implementations ({', '.join(of)}): {reason}"
        for reason, of in names.items()
    ]


@dataclass(frozen=True)
class Snapshot:
    """Attributes:
    backends: by name, in name order (order carries no meaning: resolution sorts).
    failures: plugins that are not among them.
    unavailable: backend -> why nothing of it runs on this machine.
    unusable: implementation id -> why (wrong operator version, import failed, signature does not fit).
    lacking: implementation id -> newer keyword parameters it does not have; it serves calls that leave them alone.
    """

    backends: Mapping[str, InstalledBackend] = field(default_factory=dict)
    failures: tuple[PluginFailure, ...] = ()
    unavailable: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(default_factory=dict)
    lacking: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def candidates(self, operator: str) -> list[tuple[InstalledBackend, Implementation]]:
        return [
            (backend, implementation)
            for backend in self.backends.values()
            for implementation in backend.manifest.implementations
            if implementation.operator == operator
        ]

    def implementation(self, candidate_id: str) -> tuple[InstalledBackend, Implementation]:
        backend_name, _, name = candidate_id.partition(".")
        backend = self.backends[backend_name]
        for implementation in backend.manifest.implementations:
            if implementation.name == name:
                return backend, implementation
        raise KeyError(candidate_id)

    def absence(self, backend: str) -> str:
        """Why a backend that is not registered is not: nobody installed it, or it was refused."""
        refused = [failure.reason for failure in self.failures if failure.name == backend]
        return f"installed, but refused: {'; '.join(dict.fromkeys(refused))}" if refused else "not installed"

    def archs(self) -> dict[str, dict[str, Arch]]:
        """Vendor -> arch -> table row, over all manifests; a backend native to the vendor has the last word."""
        found: dict[str, dict[str, Arch]] = {}
        by_claim = sorted(self.backends.values(), key=lambda b: (bool(b.manifest.vendors), b.name))
        for backend in by_claim:
            for vendor, rows in backend.manifest.archs.items():
                found.setdefault(vendor.lower(), {}).update(rows)
        for backend in by_claim:
            for vendor in backend.manifest.vendors:
                found.setdefault(vendor, {})
        return found

    def with_unusable(self, candidate_id: str, reason: str) -> Snapshot:
        return dataclasses.replace(self, unusable={**self.unusable, candidate_id: reason})

    def with_lacking(self, candidate_id: str, parameters: tuple[str, ...]) -> Snapshot:
        return dataclasses.replace(self, lacking={**self.lacking, candidate_id: parameters})
