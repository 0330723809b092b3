# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch plan check``: would this machine choose what a lock file says?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rich.text import Text

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.cli.console import FOUND, emit, out
from te_dispatch.core.plan import Plan
from te_dispatch.core.scopes import MANAGER


def check(lock_file: str, as_json: bool) -> int:
    """Compare a lock file with this machine.

    Returns:
        0 if they agree, 1 with the differences shown if they do not.

    Raises:
        PlanError: the file cannot be read, is no lock file, or was edited.
    """
    plan = Plan._read(Path(lock_file))
    if any(facts.get("type") != "cpu" for facts in plan.devices.values()) and importlib.util.find_spec("torch"):
        import torch  # noqa: F401  # the manager looks for accelerators where PyTorch is loaded
    differences = plan.differences(MANAGER)
    if as_json:
        emit({"ok": not differences, "file": lock_file, "digest": plan.digest, "differences": differences})
    elif differences:
        out().print(Text(f"{lock_file} does not fit this machine:"))
        for line in differences:
            out().print(Text(f"  {line}"))
    else:
        out().print(Text(f"{lock_file}: OK, {len(plan.choices)} choices, digest {plan.digest[:16]}"))
    return FOUND if differences else 0
