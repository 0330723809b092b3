# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where the policies that come with the package are."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def shipped_directory() -> Path:
    """The folder of the shipped policies.

    They live once, in ``policies/`` of the source tree, to which ``te_dispatch/policies`` is a symbolic link that the
    wheel holds as a folder. A copy of the tree that lost the link still has the folder beside the package.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "policies"
    return inside.resolve() if inside.is_dir() else package.parent / "policies"


@cache
def shipped_policies() -> dict[str, Path]:
    """Name -> file, in name order."""
    return {path.stem: path for path in sorted(shipped_directory().glob("*.yaml"))}
