# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What this machine has. Counting devices comes first; nothing here creates a context that PyTorch would not."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import tempfile
from pathlib import Path

from te_dispatch.core.facts import UNKNOWN, DeviceFacts, FactValue
from te_dispatch_triton.archs import ARCHS

#: The oldest release that the kernels are compiled and run with. 3.5 has no assembler for NVIDIA's chips but one that
#: makes wrong binaries of some of them (`te_dispatch_triton.assembler`).
OLDEST = (3, 6)
INTERPRET = "TRITON_INTERPRET"


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU in this process, as Triton itself reads it."""
    return os.environ.get(INTERPRET, "").lower() in ("1", "true", "yes", "on", "y")


@functools.cache
def triton_version() -> str | None:
    """The installed release; None without one."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cache_directory() -> Path:
    """Where Triton keeps compiled kernels."""
    given = os.environ.get("TRITON_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"


def unavailable() -> str | None:
    """Why nothing of this backend can run here, None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed"
    return missing_triton() or (None if interpreting() else unwritable(cache_directory()))


def missing_triton() -> str | None:
    """Why there is no Triton to compile with, None if there is."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    version = triton_version()
    if version is not None and _release(version) < OLDEST:
        return f"Triton {version} is too old, needs {'.'.join(map(str, OLDEST))}: pip install -U triton"
    return None


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:2]:
        digits = "".join(c for c in part if c.isdigit())
        numbers.append(int(digits or 0))
    return tuple(numbers)


def unwritable(folder: Path) -> str | None:
    """Why Triton cannot keep compiled kernels in a folder, None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        reason = error.strerror or error
        return f"Triton cannot write its cache directory {folder} ({reason}): set TRITON_CACHE_DIR to one that it can"


def compiles_for(backend: str) -> bool:
    """Whether the installed Triton has a compiler for ``nvidia`` or ``amd`` devices."""
    return importlib.util.find_spec(f"triton.backends.{backend}") is not None


def cpu(index: int = 0) -> DeviceFacts | None:
    """Facts of the host, which Triton's interpreter serves where the process asked for it."""
    if unavailable() is not None:
        return None
    extra: dict[str, FactValue] = {"triton.ready": interpreting(), "version.triton": triton_version() or UNKNOWN}
    return DeviceFacts("cpu", "cpu", "cpu", "host", index, None, extra)


def cuda(index: int = 0) -> DeviceFacts | None:
    """Facts of a device of PyTorch's ``cuda`` type: NVIDIA's or, in a ROCm build, AMD's. None where there is none."""
    if unavailable() is not None:
        return None
    import torch

    if index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    arch = str(properties.gcnArchName).partition(":")[0] if amd else f"sm_{properties.major}{properties.minor}"
    vendor = "amd" if amd else "nvidia"
    extra: dict[str, FactValue] = {
        "memory": int(properties.total_memory),
        "version.triton": triton_version() or UNKNOWN,
        # An interpreted kernel reads host memory.
        "triton.ready": compiles_for(vendor) and not interpreting(),
    }
    return DeviceFacts("cuda", vendor, arch, properties.name, index, ARCHS[vendor].get(arch), extra)
