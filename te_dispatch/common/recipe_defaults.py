# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Defaults of recipes' fields that environment variables set. Variables are read when a recipe is made.

A variable set to nothing counts as not set, as everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable


def word(name: str, default: str) -> Callable[[], str]:
    """The default of a field: what the variable says."""
    return lambda: os.getenv(name, "").strip() or default


def flag(name: str) -> Callable[[], bool]:
    """The default of a field: False, or what the variable says, which must be 0 or 1."""

    def read() -> bool:
        value = word(name, "0")()
        if value not in ("0", "1"):
            raise ValueError(f"{name}={value}: expected 0 or 1, got {value!r}")
        return value == "1"

    return read


def override() -> str | None:
    """The default of `backward_override`."""
    return word("NVTE_BACKWARD_OVERRIDE", "")() or None
