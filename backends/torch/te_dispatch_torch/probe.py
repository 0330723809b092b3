# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has, as PyTorch sees it. Counting devices comes first: it creates no context."""

from __future__ import annotations

import importlib.util

from te_dispatch.core.facts import UNKNOWN, Arch, DeviceFacts, FactValue
from te_dispatch_torch.archs import ARCHS


def _facts(type_: str, vendor: str, arch: str, name: str, index: int, extra: dict[str, FactValue]) -> DeviceFacts:
    import torch

    table: Arch | None = ARCHS.get(vendor, {}).get(arch)
    versions: dict[str, FactValue] = {"version.torch": str(torch.__version__)}
    return DeviceFacts(type_, vendor, arch, name, index, table, {**versions, **extra})


def cpu(index: int = 0) -> DeviceFacts | None:
    """Facts of the host."""
    if unavailable() is not None:
        return None
    import os
    import platform

    try:
        memory: FactValue = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = UNKNOWN
    return _facts("cpu", "cpu", "cpu", platform.processor() or platform.machine(), index, {"memory": memory})


def cuda(index: int = 0) -> DeviceFacts | None:
    """Facts of a device of PyTorch's ``cuda`` type: NVIDIA's or, in a ROCm build, AMD's. None where there is none."""
    if unavailable() is not None:
        return None
    import torch

    # device_count asks the driver's management library; only past this point may PyTorch initialize the device.
    if index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    extra: dict[str, FactValue] = {"memory": int(properties.total_memory)}
    if torch.version.hip is not None:
        arch = str(properties.gcnArchName).partition(":")[0]
        extra["version.hip"] = str(torch.version.hip)
        return _facts("cuda", "amd", arch, properties.name, index, extra)
    major, minor = torch.cuda.get_device_capability(index)
    extra["version.cuda"] = str(torch.version.cuda) if torch.version.cuda else UNKNOWN
    return _facts("cuda", "nvidia", f"sm_{major}{minor}", properties.name, index, extra)


def xpu(index: int = 0) -> DeviceFacts | None:
    """Facts of an Intel GPU, None where there is none."""
    if unavailable() is not None:
        return None
    import torch

    if not hasattr(torch, "xpu") or index >= torch.xpu.device_count():
        return None
    properties = torch.xpu.get_device_properties(index)
    return _facts("xpu", "intel", "xpu", properties.name, index, {"memory": int(properties.total_memory)})


def mps(index: int = 0) -> DeviceFacts | None:
    """Facts of Apple's GPU, None where there is none."""
    if unavailable() is not None:
        return None
    import torch

    if index != 0 or not torch.backends.mps.is_available():
        return None
    memory = int(torch.mps.recommended_max_memory())
    return _facts("mps", "apple", "mps", "Apple GPU", index, {"memory": memory})


def unavailable() -> str | None:
    """Why nothing of this backend can run here, None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    return None


def doctor() -> list[tuple[str, str, str]]:
    """(subject, state, reason) for ``te-dispatch doctor``."""
    reason = unavailable()
    if reason is not None:
        return [("torch", "missing", reason)]
    import torch

    lines = [("torch", "ok", f"PyTorch {torch.__version__}")]
    if torch.version.cuda is None and torch.version.hip is None:
        lines.append(("accelerator", "warning", "this PyTorch build serves no NVIDIA or AMD device"))
    elif torch.cuda.device_count() == 0:
        lines.append(("accelerator", "missing", "no device is visible to PyTorch"))
    else:
        lines.append(("accelerator", "ok", f"{torch.cuda.device_count()} device(s) visible"))
    return lines
