# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has. Counting devices comes first; nothing here creates a context that PyTorch would not."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from typing import Any

from te_dispatch.core.facts import UNKNOWN, DeviceFacts, FactValue
from te_dispatch_cuda.archs import ARCHS

#: What the driver calls itself.
DRIVER = "libcuda.so.1"


@functools.cache
def driver_version() -> int | None:
    """CUDA version that the driver supports, as 1000 * major + 10 * minor; None without a driver."""
    try:
        library = ctypes.CDLL(DRIVER)
    except OSError:
        return None
    version = ctypes.c_int()
    return version.value if library.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def unavailable() -> str | None:
    """Why nothing of this backend can run here, None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    from te_dispatch_cuda import native

    try:
        module = native.load()
    except ImportError as error:
        return str(error)
    return driver_problem(module)


def driver_problem(module: Any) -> str | None:
    """Why the driver does not serve a compiled module (None for none at all), None if it does."""
    driver = driver_version()
    if driver is None:
        return f"no NVIDIA driver: {DRIVER} does not open, or does not tell its version"
    # A driver serves every minor release of its major one.
    if module is not None and driver // 1000 < module.RUNTIME_VERSION // 1000:
        return (
            f"the driver supports CUDA {version_text(driver)}, this build needs CUDA "
            f"{version_text(module.RUNTIME_VERSION)}: update the driver, or build with an older toolkit"
        )
    return None


def built_for(major: int, minor: int, archs: str) -> bool:
    """Whether a build for `archs` (``80,89,90a,100a``) holds code for a chip: its own, or a smaller minor of its major.

    A suffix ties code to the very chip it names.
    """
    for arch in archs.split(","):
        number = int(arch.rstrip("af"))
        if number // 10 == major and (number % 10 == minor or (arch[-1].isdigit() and number % 10 < minor)):
            return True
        # sm_100f and the like serve their family.
        if arch.endswith("f") and number // 10 == major and number % 10 <= minor:
            return True
    return False


def cuda(index: int = 0) -> DeviceFacts | None:
    """Facts of an NVIDIA device; None where there is none, or where PyTorch's ``cuda`` devices are AMD's."""
    if unavailable() is not None:
        return None
    import torch

    if torch.version.hip is not None or index >= torch.cuda.device_count():
        return None
    from te_dispatch_cuda import libraries, native, packages

    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    driver = driver_version()
    extra: dict[str, FactValue] = {
        "memory": int(properties.total_memory),
        "version.cuda_driver": UNKNOWN if driver is None else version_text(driver),
        "cuda.built": built_for(major, minor, native.load().BUILT_ARCHS),
        **libraries.versions(),
        **packages.versions(),
    }
    arch = f"sm_{major}{minor}"
    return DeviceFacts("cuda", "nvidia", arch, properties.name, index, ARCHS["nvidia"].get(arch), extra)
