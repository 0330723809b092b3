# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Making a recorded call again: on the implementation that made it, or on others, against the same other backend.

A recording is a case whose id names the file, so that its units run like all others, in worker processes too:

    torch.matmul/values/gemm.recorded[file=/tmp/gemm.pt]
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.emulated import device_entered
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.planning import backends_of, device_of
from te_dispatch.conformance.recording import Recording
from te_dispatch.conformance.running import run
from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.conformance.subject import subjects
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS

#: The check that a call is made again under: the numbers, and what became of memory.
_CHECK = "values"


def replay(
    file: str | os.PathLike[str], backends: Sequence[str] = (), *, isolated: bool = True, device: str | None = None
) -> list[Outcome]:
    """Make a recorded call again.

    Args:
        file: written by shadow mode (``shadow`` in a policy).
        backends: whose implementations of the operator make it; empty for the one that made it before.
        isolated: in a process of its own, so that a crash is an outcome.
        device: where; None for the accelerator if there is one.

    Returns:
        One outcome per implementation; ``not_claimed`` where its requirements reject the call.

    Raises:
        UsageError: the file cannot be read, or a backend is not installed, or has no such implementation.
    """
    recording = Recording.load(file)
    case = recording.case(file)
    Recording.of_case(case)  # now, and not in a worker
    settings = Settings(backends=tuple(backends), against=recording.against, device=device, isolated=isolated)
    with device_entered(scopes.MANAGER, settings):
        units = [Unit(one, _CHECK, case) for one in _implementations(recording, settings)]
        return list(run(units, settings))


def _implementations(recording: Recording, settings: Settings) -> list[str]:
    manager, device = scopes.MANAGER, device_of(settings)
    backends_of(manager, settings)
    there = [one.id for one in subjects(manager, OPERATORS[recording.operator], device)]
    if settings.backends:
        found = [one for one in there if one.partition(".")[0] in settings.backends]
    else:
        found = [one for one in there if one == recording.implementation]
    if not found:
        wanted = " or ".join(settings.backends) or recording.implementation
        raise UsageError(
            f"replay: nothing here of {wanted} implements {recording.operator}; what does: {', '.join(there) or 'none'}"
        )
    return found
