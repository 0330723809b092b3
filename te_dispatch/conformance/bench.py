# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Making a `Bench` of settings."""

from __future__ import annotations

from te_dispatch.conformance.execute import Bench
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.planning import device_of
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import scopes
from te_dispatch.core.manager import OpManager


def bench_of(settings: Settings, manager: OpManager | None = None) -> Bench:
    """The process's registry, the settings' device and oracle.

    Raises:
        UsageError: the device cannot be used.
    """
    found = manager or scopes.MANAGER
    device = device_of(settings)
    # The reference computes on the host wherever it is called; another backend is compared where it runs.
    where = "cpu" if settings.against == "reference" else str(device)
    return Bench(found, device, Oracle(found, settings.against, where))
