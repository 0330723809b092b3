# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""An environment in which Transformer Engine loads from a folder beside this project, without being installed.

It must find the cuDNN that PyTorch holds, before the program starts: with another one preloaded by the system, its
fused attention is switched off in silence.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ENTERED = "TE_DISPATCH_BENCHMARK_TE"


def site_of(folder: str) -> Path:
    """The folder, made absolute.

    Raises:
        FileNotFoundError: there is no Transformer Engine in it.
    """
    site = Path(folder).resolve()
    if not (site / "transformer_engine").is_dir():
        raise FileNotFoundError(f"--te: no folder 'transformer_engine' in {folder}")
    return site


def enter(folder: str | None) -> None:
    """Start this program over with Transformer Engine of `folder` importable, once; None does nothing."""
    if folder is None or os.environ.get(_ENTERED) == folder:
        return
    site = site_of(folder)
    import nvidia

    wheels = Path(next(iter(nvidia.__path__)))
    libraries = [wheels / "cudnn/lib", wheels / "cu13/lib", wheels / "nccl/lib"]
    environment = {
        **os.environ,
        _ENTERED: folder,
        "PYTHONPATH": _joined(os.environ.get("PYTHONPATH"), site),
        "LD_LIBRARY_PATH": _joined(os.environ.get("LD_LIBRARY_PATH"), *libraries, first=True),
        "LD_PRELOAD": _joined(os.environ.get("LD_PRELOAD"), wheels / "cudnn/lib/libcudnn.so.9", first=True),
        "CUDNN_HOME": str(wheels / "cudnn"),
        "CUDNN_PATH": str(wheels / "cudnn"),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def _joined(old: str | None, *paths: Path, first: bool = False) -> str:
    new = [str(path) for path in paths]
    kept = [old] if old else []
    return os.pathsep.join(new + kept if first else kept + new)
