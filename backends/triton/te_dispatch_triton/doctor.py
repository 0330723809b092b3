# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What of this backend works here, and what is missing: the report for ``te-dispatch doctor``."""

from __future__ import annotations

import importlib.util

from te_dispatch_triton import probe

Row = tuple[str, str, str]


def doctor() -> list[Row]:
    """(subject, state, reason) of PyTorch, Triton, its cache directory, and each visible device."""
    if importlib.util.find_spec("torch") is None:
        return [("PyTorch", "missing", "not installed")]
    reason = probe.missing_triton()
    if reason is not None:
        return [("Triton", "missing", reason)]
    rows: list[Row] = [("Triton", "ok", str(probe.triton_version()))]
    folder = probe.cache_directory()
    reason = probe.unwritable(folder)
    rows.append(("cache directory", "ok" if reason is None else "missing", reason or str(folder)))
    if probe.interpreting():
        rows.append(("interpreter", "ok", f"{probe.INTERPRET} is set: kernels run on the CPU, for tests"))
    return rows + _devices()


def _devices() -> list[Row]:
    import torch

    if torch.cuda.device_count() == 0:
        return [("devices", "missing", "PyTorch sees no NVIDIA or AMD device")]
    vendor = "nvidia" if torch.version.hip is None else "amd"
    rows = []
    for index in range(torch.cuda.device_count()):
        facts = probe.cuda(index)
        name = "device" if facts is None else f"{facts.name}, {facts.arch}"
        if not probe.compiles_for(vendor):
            rows.append((f"device {index}", "missing", f"{name}: this Triton has no compiler for {vendor} devices"))
        elif probe.interpreting():
            rows.append((f"device {index}", "warning", f"{name}: not used while {probe.INTERPRET} is set"))
        else:
            rows.append((f"device {index}", "ok", name))
    return rows
