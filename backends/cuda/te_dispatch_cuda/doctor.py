# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What of this backend works here, and what is missing: the report for ``te-dispatch doctor``.

Answers on every machine: without a GPU, a driver, PyTorch or the compiled module.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from te_dispatch_cuda import native, packages, probe

Row = tuple[str, str, str]

#: What `packages.DISTRIBUTIONS` names, for readers.
PACKAGES = {
    "version.cudnn_frontend": (
        "cudnn-frontend",
        "cuDNN's attention needs it: pip install --no-deps nvidia-cudnn-frontend",
    ),
    "version.flash_attn": ("FlashAttention 2", "not installed"),
    "version.flash_attn_3": ("FlashAttention 3", "not installed"),
    "version.flash_attn_4": ("FlashAttention 4", "not installed"),
}


def doctor() -> list[Row]:
    """(subject, state, reason) of the compiled module, the driver, each visible device, and the libraries."""
    module, row = _compiled()
    rows = [row, _driver(module)]
    if importlib.util.find_spec("torch") is None:
        rows.append(("PyTorch", "missing", "not installed"))
    else:
        rows += _devices(module)  # imports torch, whose libraries the next rows then see
    from te_dispatch_cuda import libraries

    return [*rows, *libraries.found(), *_packages()]


def _compiled() -> tuple[Any, Row]:
    try:
        module = native.load()
    except ImportError as error:
        return None, ("compiled module", "missing", str(error))
    archs = ", ".join(f"sm_{arch}" for arch in module.BUILT_ARCHS.split(","))
    toolkit = probe.version_text(module.RUNTIME_VERSION)
    return module, ("compiled module", "ok", f"for {archs}, built with CUDA {toolkit}: {module.__file__}")


def _driver(module: Any) -> Row:
    reason = probe.driver_problem(module)
    if reason is not None:
        return ("driver", "missing", reason)
    version = probe.driver_version()
    assert version is not None  # driver_problem would have said so
    release = driver_release()
    named = f"{release}, " if release else ""
    return ("driver", "ok", f"{named}supports CUDA {probe.version_text(version)}")


def driver_release(file: str = "/proc/driver/nvidia/version") -> str | None:
    """The driver's own release, such as ``580.159.03``; None where the kernel does not tell."""
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text.readline())
    except OSError:
        return None
    return found[0] if found else None


def _devices(module: Any) -> list[Row]:
    import torch

    if torch.version.cuda is None:
        return [("devices", "missing", f"PyTorch {torch.__version__} is built for no NVIDIA device")]
    if probe.driver_version() is None:
        return [("devices", "missing", "none without a driver")]
    count = torch.cuda.device_count()
    if count == 0:
        return [("devices", "missing", "PyTorch sees no NVIDIA device")]
    rows = []
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        state, reason = served(properties.major, properties.minor, module.BUILT_ARCHS if module is not None else "")
        rows.append((f"device {index}", state, f"{properties.name}, {reason}"))
    return rows


def served(major: int, minor: int, archs: str) -> tuple[str, str]:
    """(state, reason) of a chip, for a build that holds code for `archs`, as in ``80,89,90a,100a``."""
    chip = f"sm_{major}{minor}"
    if major < 8:
        return "warning", f"{chip}: this backend starts at sm_80"
    if not archs:
        return "warning", f"{chip}: there is no compiled module"
    if probe.built_for(major, minor, archs):
        return "ok", f"{chip}: this build holds code for it"
    return (
        "warning",
        f"{chip}: this build holds code for {archs} alone; TE_DISPATCH_CUDA_ARCHS={major}{minor} builds for it",
    )


def _packages() -> list[Row]:
    rows = []
    for name, version in packages.versions().items():
        subject, absent = PACKAGES.get(name, (name.removeprefix("version."), "not installed"))
        rows.append((subject, "missing", absent) if version == packages.ABSENT else (subject, "ok", version))
    return rows
