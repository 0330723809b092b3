# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``--device``: a device of this machine, or one that is described by vendor and arch."""

from __future__ import annotations

import te_dispatch.ops  # noqa: F401  # before scopes
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.process_devices import HERE as HERE
from te_dispatch.core.scopes import MANAGER

#: ``--device``'s help.
HELP = "vendor:arch of any device, here or not (nvidia:sm_90), or a device of this machine (cuda:0, here)."


def find_device(text: str) -> DeviceFacts:
    """Facts for ``--device``, which takes what `ProcessDevices.named` does, and raises what it raises."""
    return MANAGER.devices.named(text)
