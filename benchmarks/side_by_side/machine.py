# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where and with what a benchmark ran: written into every record, because a figure without it says nothing."""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

#: Names the commit where there is no repository, as on a machine that was sent the tree alone.
COMMIT_VARIABLE = "TE_DISPATCH_COMMIT"


def facts(commit: str | None, device: torch.device) -> dict[str, Any]:
    """Date, chip, driver, versions, commit: plain data for a record's head."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or os.environ.get(COMMIT_VARIABLE) or _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "te_dispatch": _version("te-dispatch"),
    }
    if device.type != "cuda":
        return {**found, "device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        **found,
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_mib": properties.L2_cache_size / 2**20,
        "driver": _smi("driver_version"),
        "clocks": _smi("clocks.sm,clocks.mem,power.limit"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "cublaslt": _cublaslt(),
        "transformer_engine": _version("transformer-engine"),
        "triton": _version("triton"),
    }


def l2_bytes(device: torch.device) -> int:
    """Size of the device's last cache; what rotates must be larger."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).L2_cache_size


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str, cwd: str | None = None) -> str | None:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20, cwd=cwd).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str | None:
    here = str(Path(__file__).parent)
    commit = _output("git", "rev-parse", "HEAD", cwd=here)
    return f"{commit} and changes" if commit and _output("git", "status", "--porcelain", cwd=here) else commit


def _smi(query: str) -> str | None:
    found = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0")
    return found.splitlines()[0] if found else None


def _cublaslt() -> int | None:
    """Version of the cuBLASLt that this process holds."""
    try:
        paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcublasLt" in line}
        return int(ctypes.CDLL(min(paths)).cublasLtGetVersion()) if paths else None
    except (OSError, AttributeError):
        return None
