# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Step 3 of the dispatch contract: what an implementation requires of the device, then of the call."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.policy.view import PolicyView, candidate_id
from te_dispatch.core.requirements import DEVICE_PREFIX, Condition, OneOf
from te_dispatch.core.snapshot import InstalledBackend

#: How the assumption begins that a backend which is unavailable here is available on a described device.
ELSEWHERE = "backend "


def unmet(
    view: PolicyView, backend: InstalledBackend, implementation: Implementation
) -> tuple[tuple[str, str] | None, list[str]]:
    """((where, reason) of the first step that fails, or None; what unknown facts left open)."""
    candidate = candidate_id(backend, implementation)
    if candidate in view.snapshot.unusable:
        return ("bind", view.snapshot.unusable[candidate]), []
    assumed: list[str] = []
    if backend.name in view.snapshot.unavailable:
        if not view.device.described:
            return ("backend", view.snapshot.unavailable[backend.name]), []
        why = view.snapshot.unavailable[backend.name]
        assumed.append(f"{ELSEWHERE}{backend.name} works there, as it does not here ({why})")
    try:
        return _unmet_conditions(view, candidate, implementation, assumed)
    except Exception as error:
        # A condition is a plugin's own object where it subclasses one of ours: its failure is its implementation's.
        return ("bind", f"its requirements cannot be checked: {type(error).__name__}: {error}"), assumed


def _unmet_conditions(
    view: PolicyView, candidate: str, implementation: Implementation, assumed: list[str]
) -> tuple[tuple[str, str] | None, list[str]]:
    on_device = [c for c in implementation.requires if _device_only(c)]
    on_call = [c for c in implementation.requires if not _device_only(c)]
    # An implementation that lacks a newer keyword serves the calls that leave it at its default.
    on_call += [OneOf(f"{name}.default", True) for name in view.snapshot.lacking.get(candidate, ())]
    for where, conditions in (("device", on_device), ("call", on_call)):
        reasons = []
        for condition in conditions:
            verdict = condition.check(view.call, view.device)
            if verdict.holds is False:
                reasons.append(verdict.reason)
            elif verdict.holds is None:
                assumed.append(verdict.reason)
        if reasons:
            return (where, "; ".join(reasons)), assumed
    return None, assumed


def _device_only(condition: Condition) -> bool:
    return all(name.startswith(DEVICE_PREFIX) for name in condition.reads())
