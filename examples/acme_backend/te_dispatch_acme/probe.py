# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has. A real probe asks a driver; this chip is an environment variable."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

from te_dispatch.core.facts import DeviceFacts

_LIBRARIES = ("numpy", "torch")

NOT_BUILT = "installed without compiled kernels: install gcc or clang, then te-dispatch-acme again"


def _here() -> bool:
    return os.environ.get("ACME_DEVICE") == "1"


def probe(index: int = 0) -> DeviceFacts | None:
    """Facts of the x1, or None: without one, the CPU is none of this backend's business."""
    # Imported late: the probe's module is named by the manifest, and the manifest is what imports this package.
    from te_dispatch_acme import MANIFEST

    if not _here() or index != 0:
        return None
    return DeviceFacts(
        type="cpu",
        vendor="acme",
        arch="x1",
        name="Acme x1",
        index=index,
        table=MANIFEST.archs["acme"]["x1"],
        # Device facts of our own. What requires the kernels is rejected with "device.acme_kernels is not built".
        extra={"version.acme_driver": "1.0", "acme_kernels": "compiled" if kernels() else "not built"},
    )


def kernels() -> Path | None:
    """The compiled kernels' file, if the wheel has it. Looking costs nothing; it is loaded when a kernel is chosen."""
    return next(Path(__file__).parent.glob("_kernels*.so"), None)


def unavailable() -> str | None:
    """Why nothing of this backend can run, or None.

    The chip's absence is no reason: that is the probe's to say. Nor are absent kernels: NumPy serves.
    """
    missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


def doctor() -> list[tuple[str, str, str]]:
    """(subject, state, reason) for ``te-dispatch doctor``."""
    rows = []
    if _here():
        rows.append(("x1", "ok", "1 device"))
    else:
        rows.append(("x1", "missing", "no device: set ACME_DEVICE=1 to pretend that the CPU is one"))
    rows.append(("kernels", "ok", "compiled") if kernels() else ("kernels", "missing", NOT_BUILT))
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is None:
            rows.append((name, "missing", f"not installed: pip install {name}"))
        else:
            rows.append((name, "ok", importlib.metadata.version(name)))
    return rows
