# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Python packages that this backend uses where they are installed. Reads their metadata alone, imports none."""

from __future__ import annotations

import functools
from importlib import metadata

#: fact -> names of the distribution, as they were published under.
DISTRIBUTIONS = {
    "version.cudnn_frontend": ("nvidia-cudnn-frontend",),
    "version.flash_attn": ("flash-attn",),
    "version.flash_attn_3": ("flash-attn-3", "flash-attn-interface"),
    "version.flash_attn_4": ("flash-attn-4",),
}
ABSENT = "not installed"


@functools.cache
def versions() -> dict[str, str]:
    """Device facts: the version of each package, or that it is not installed."""
    return {name: _version(names) for name, names in DISTRIBUTIONS.items()}


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except (metadata.PackageNotFoundError, OSError):
            continue
    return ABSENT
