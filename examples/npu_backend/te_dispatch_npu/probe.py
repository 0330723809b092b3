# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has."""

from __future__ import annotations

from te_dispatch.core.facts import DeviceFacts


def probe(index: int = 0) -> DeviceFacts | None:
    """Facts of ``npu:<index>``. Called for devices of that type only."""
    import torch

    from te_dispatch_npu import MANIFEST

    if not hasattr(torch, "npu") or index >= torch.npu.device_count():
        return None
    table = MANIFEST.archs["tide"]["n1"]
    return DeviceFacts("npu", "tide", "n1", "Tide n1", index, table, {"version.tide_driver": "1.0"})


def unavailable() -> str | None:
    """Why nothing of this backend can run here."""
    from te_dispatch_npu import native

    return native.missing()


def doctor() -> list[tuple[str, str, str]]:
    import torch

    missing = unavailable()
    found = [("kernels", "missing", missing) if missing else ("kernels", "ok", "compiled")]
    if not hasattr(torch, "npu"):
        return [*found, ("n1", "missing", "PyTorch knows no device npu: install npu_device")]
    return [*found, ("n1", "ok", f"{torch.npu.device_count()} device(s)")]
