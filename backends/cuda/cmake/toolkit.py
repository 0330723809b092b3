# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where nvcc is. CMake runs this file; the build backend imports it. It needs the standard library alone.

Searched in this order: CUDACXX; CUDA_HOME and CUDA_PATH; PATH; /usr/local/cuda; PyPI's NVIDIA packages in the Python
environment. ``TE_DISPATCH_CUDA_TOOLKIT=wheels`` keeps to the packages, ``=system`` to everything else.
"""

from __future__ import annotations

import os
import shutil
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

#: What compiles CUDA C++ without a toolkit: the driver programs, their headers, the optimizer, the runtime that is
#: linked in statically, and the headers that its own include. About 110 MB to fetch.
WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
#: A build serves drivers of its toolkit's major release and newer ones, so the oldest minor release serves most.
WHEELS_VERSION = "13.0.*"
#: The first release that knows sm_100a.
OLDEST = (12, 8)

NOT_FOUND = (
    "te-dispatch-cuda needs nvcc, CUDA {oldest} or newer, and found none: looked at CUDACXX, CUDA_HOME, CUDA_PATH, "
    "PATH, /usr/local/cuda and the Python environment (TE_DISPATCH_CUDA_TOOLKIT={chosen!r}). Install a CUDA toolkit, "
    "or these packages: {wheels}"
)


def requirements() -> list[str]:
    """What pip installs where no toolkit is found."""
    return [f"{name}=={WHEELS_VERSION}" for name in WHEELS]


def chosen() -> str:
    """``wheels``, ``system``, or empty for both."""
    value = os.environ.get("TE_DISPATCH_CUDA_TOOLKIT", "")
    if value not in ("", "wheels", "system"):
        raise SystemExit(f"TE_DISPATCH_CUDA_TOOLKIT: got {value!r}, expected 'wheels', 'system' or nothing")
    return value


def system_nvcc() -> str | None:
    """nvcc of an installed toolkit."""
    if os.environ.get("CUDACXX"):
        return shutil.which(os.environ["CUDACXX"])
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found = shutil.which("nvcc", path=os.path.join(os.environ[variable], "bin"))
            if found:
                return found
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def wheel_nvcc() -> str | None:
    """nvcc of the packages `WHEELS`, with its parts beside it; the highest major release where there are several.

    An isolated build sees its own packages in sys.path, and the environment it was started from in sysconfig.
    """
    for folder in _site_folders():
        for nvcc in sorted((folder / "nvidia").glob("cu*/bin/nvcc"), reverse=True):
            root = nvcc.parent.parent
            parts = ("nvvm/bin/cicc", "include/crt/host_runtime.h", "include/cuda_runtime.h", "lib/libcudart_static.a")
            if os.access(nvcc, os.X_OK) and all((root / part).exists() for part in parts):
                return str(nvcc)
    return None


def _site_folders() -> Iterator[Path]:
    names = [*sys.path, sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), site.getusersitepackages()]
    for name in dict.fromkeys(n for n in names if n):
        yield Path(name)


def nvcc() -> str | None:
    """The compiler to use, None where there is none."""
    kind = chosen()
    found = system_nvcc() if kind != "wheels" else None
    return found or (wheel_nvcc() if kind != "system" else None)


def main() -> int:
    """Print nvcc's path, or with ``--packages`` what pip installs to get one."""
    if "--packages" in sys.argv[1:]:
        print(" ".join(requirements()))
        return 0
    found = nvcc()
    if found is None:
        oldest = ".".join(map(str, OLDEST))
        print(NOT_FOUND.format(oldest=oldest, chosen=chosen(), wheels=" ".join(requirements())), file=sys.stderr)
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
