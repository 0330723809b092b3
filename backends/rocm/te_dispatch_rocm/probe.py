# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has, as facts for dispatch."""

from __future__ import annotations

import functools
import importlib.util
import os
from importlib import metadata

from te_dispatch.core.facts import UNKNOWN, DeviceFacts, FactValue
from te_dispatch_rocm import devices, libraries, native
from te_dispatch_rocm.archs import ARCHS

#: Names of AITER's distribution, as it was published under.
AITER = ("amd-aiter", "aiter")
#: ``host``: HIP's libraries work on the host's memory, so that tensors of the CPU count as those of HIP's device 0. For
#: libraries that stand for the chip in tests.
MEMORY = "TE_DISPATCH_ROCM_MEMORY"


def on_host() -> bool:
    """Whether tensors of the CPU are the device's.

    Raises:
        ValueError: the variable has a value that means nothing.
    """
    value = os.environ.get(MEMORY, "").strip()
    if value not in ("", "host"):
        raise ValueError(f"{MEMORY}={value}: expected host, or nothing")
    return value == "host"


def driver_version(file: str = "/sys/module/amdgpu/version") -> FactValue:
    """The kernel module's own release, such as ``6.12.12``; unknown where it is the one of the Linux kernel, which has
    none beside the kernel's."""
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read().strip() or UNKNOWN
    except OSError:
        return UNKNOWN


@functools.cache
def aiter_version() -> str:
    """AITER's, by its metadata: importing it compiles."""
    for name in AITER:
        try:
            return metadata.version(name)
        except (metadata.PackageNotFoundError, OSError):
            continue
    return "not installed"


def unavailable() -> str | None:
    """Why nothing of this backend can run here, None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    try:
        native.load()
    except ImportError as error:
        return str(error)
    return devices.found().problem


def cuda(index: int = 0) -> DeviceFacts | None:
    """Facts of an AMD device; None where there is none, or where PyTorch's ``cuda`` devices are NVIDIA's."""
    if unavailable() is not None:
        return None
    import torch

    if torch.version.hip is None or index >= torch.cuda.device_count():
        return None
    # PyTorch's devices are HIP's, in the same order.
    return _facts("cuda", index, str(torch.cuda.get_device_properties(index).gcnArchName).partition(":")[0])


def cpu(index: int = 0) -> DeviceFacts | None:
    """Facts of HIP's device 0 where it works on the host's memory, else None."""
    if not on_host() or unavailable() is not None:
        return None
    return _facts("cpu", index, None, hip_index=0)


def _facts(type_: str, index: int, arch: str | None, hip_index: int | None = None) -> DeviceFacts | None:
    hip_index = index if hip_index is None else hip_index
    known = devices.found().devices
    if hip_index >= len(known):
        return None
    device = known[hip_index]
    arch = arch or device.arch
    state = device.hipblaslt
    if device.arch not in (arch, "unknown"):
        state = f"PyTorch's device {index} is a {arch}, HIP's a {device.arch}: two installations of ROCm are in use"
    hip = libraries.hip()
    extra: dict[str, FactValue] = {
        "memory": device.memory or UNKNOWN,
        "version.hip": UNKNOWN if isinstance(hip, str) or hip.version == (0, 0, 0) else hip.version_text,
        "version.hipblaslt": device.version or UNKNOWN,
        "hipblaslt": state,
        "version.amdgpu": driver_version(),
        "version.aiter": aiter_version(),
    }
    if type_ == "cpu":
        extra["emulated"] = True
    return DeviceFacts(type_, "amd", arch, device.name, index, ARCHS["amd"].get(arch), extra)
