# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has, as far as the reference cares: a CPU, NumPy and ml_dtypes, and PyTorch for its tensors."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform

from te_dispatch.core.facts import Arch, DeviceFacts

_NEEDS = ("numpy", "ml_dtypes", "torch")


def probe(index: int = 0) -> DeviceFacts:
    """Facts of the host. It has no FP8 hardware, so it lists no encodings and casts to the OCP forms."""
    return DeviceFacts(
        type="cpu",
        vendor="cpu",
        arch="cpu",
        name=platform.processor() or platform.machine(),
        index=0,
        table=Arch(warp_size=1),
    )


def unavailable() -> str | None:
    """Why nothing of this backend can run here, or None."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def doctor() -> list[tuple[str, str, str]]:
    """(subject, state, reason) per library."""
    rows = []
    for name in _NEEDS:
        if importlib.util.find_spec(name) is None:
            rows.append((name, "missing", f"not installed: pip install {name}"))
        else:
            rows.append((name, "ok", importlib.metadata.version(name)))
    return rows
