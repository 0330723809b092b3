# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Companions as one unit: which backward a forward is bound with, and which forward a backward belongs to.

A pair must agree on what the forward saves. A reason is given instead of an id where there is no partner; None where
none is needed.
"""

from __future__ import annotations

from te_dispatch.core.composition import Composites, Resolve
from te_dispatch.core.decision import Accepted, Rejected
from te_dispatch.core.eligibility import unmet
from te_dispatch.core.manifest import CANONICAL, Implementation
from te_dispatch.core.policy import COMPOSITE
from te_dispatch.core.policy.view import PolicyView, candidate_id
from te_dispatch.core.snapshot import InstalledBackend


def backward_of(
    view: PolicyView, resolve: Resolve, backend: InstalledBackend, forward: Implementation
) -> str | Rejected | None:
    """The backward a forward is bound with: one that reads what it saves, of its own backend if possible."""
    candidate = candidate_id(backend, forward)
    if view.call.get("inference") is True:
        return None
    if forward.inference:
        return Rejected(candidate, "serves inference only, and this call may need a gradient", "companion")
    backward = view.of_companion()
    readers: list[tuple[tuple[float | str, ...], str]] = []
    reasons: list[str] = []
    for other, implementation in view.snapshot.candidates(backward.operator.name):
        if implementation.saved_format != forward.saved_format:
            continue
        reader = candidate_id(other, implementation)
        filtered = backward.filtered(other, implementation)
        failed, _ = unmet(backward, other, implementation)
        if filtered is not None:
            reasons.append(f"{reader}: {filtered[0]}")
        elif failed is not None:
            reasons.append(f"{reader}: {failed[1]}")
        else:
            place = backward.place(other, implementation, candidate)
            readers.append(((float(other.name != backend.name), *place.key(), reader), reader))
    if readers:
        return min(readers)[1]
    # A composite reads the operator's own results; where those do not suffice, only its own forward's.
    if forward.saved_format == CANONICAL and backward.operator.saved is None:
        for decomposition in backward.operator.decompositions:
            composite = Composites(backward, resolve).consider(decomposition, {})
            if isinstance(composite, Accepted):
                return composite.id
            if composite is not None:
                reasons.append(f"{composite.id}: {composite.reason}")
    why = "; ".join(sorted(reasons)) or f"none reads the saved format {forward.saved_format!r}"
    return Rejected(candidate, f"no {backward.operator.name} goes with it ({why})", "companion")


def forward_of(view: PolicyView, backend: InstalledBackend, backward: Implementation) -> str | Rejected | None:
    """The forward a backward belongs to: the one that saved, where the call says which; else any that could."""
    assert view.companion is not None
    candidate = candidate_id(backend, backward)
    if view.operator.saved is not None:
        saved = view.call.get("saved")
        if isinstance(saved, str):
            saved_format = _saved_format(view, saved)
            if saved_format != backward.saved_format:
                reason = f"reads {backward.saved_format!r}, but {saved} saved {saved_format!r}"
                return Rejected(candidate, reason, "companion")
            return saved
    forwards = [
        (other.name, candidate_id(other, forward))
        for other, forward in view.snapshot.candidates(view.companion.name)
        if forward.saved_format == backward.saved_format and not forward.inference
    ]
    if not forwards and backward.saved_format != CANONICAL:
        return Rejected(candidate, f"nothing saves the format {backward.saved_format!r}", "companion")
    # As `backward_of` pairs them: within a backend, and across only for forwards without a reader of their own.
    served = [name for owner, name in forwards if owner == backend.name]
    if not served:
        readers = view.snapshot.candidates(view.operator.name)
        at_home = {other.name for other, b in readers if b.saved_format == backward.saved_format}
        served = [name for owner, name in forwards if owner not in at_home]
    prefer = (*(view.ordering.prefer if view.ordering else ()), *view.policy.prefer)
    named = next((selector.text for selector in prefer if selector.text in served), None)
    return named or min(served, default=None)


def _saved_format(view: PolicyView, forward: str) -> str:
    if forward.startswith(f"{COMPOSITE}."):
        return forward
    try:
        return view.snapshot.implementation(forward)[1].saved_format
    except KeyError:
        return f"(unknown: {forward} is not installed)"
