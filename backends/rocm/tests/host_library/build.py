# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Builds the host library: `libamdhip64.so.7` and `libhipblaslt.so.1` that compute on the processor, for tests alone.

    python backends/rocm/tests/host_library/build.py [--headers FOLDER] [--out FOLDER]

prints the folder that holds both. Without AMD's headers it is built from declarations of its own; with FOLDER, whose
`hip/` and `hipblaslt/` are AMD's, against those. settings.h lists the environment variables that choose devices and
answers. Needs a C++17 compiler (CXX, or c++), and Linux.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build" / "host_library"
HIP, HIPBLASLT = "libamdhip64.so.7", "libhipblaslt.so.1"
#: Each library's sources and the name without a version that it is found under, too.
LIBRARIES = {
    HIP: (("hip.cpp", "hip_modules.cpp"), "libamdhip64.so"),
    HIPBLASLT: (("hipblaslt.cpp", "matmul.cpp", "problem.cpp", "algorithms.cpp", "product.cpp"), "libhipblaslt.so"),
}
FLAGS = ("-std=c++17", "-O3", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")


class Unavailable(RuntimeError):
    """What keeps the library from being built here, such as a missing compiler."""


def compiler() -> str:
    """The C++ compiler: CXX, or c++. Raises `Unavailable` where there is none, or no Linux."""
    if sys.platform != "linux":
        raise Unavailable("the host library is built on Linux only")
    name = os.environ.get("CXX", "c++")
    found = shutil.which(name)
    if found is None:
        raise Unavailable(f"no C++ compiler: {name} is not there; install g++, or set CXX")
    return found


def header_flags(headers: Path | None) -> list[str]:
    """The compiler's options for AMD's headers in this folder."""
    if headers is None:
        return []
    return ["-DHOST_LIBRARY_AMD_HEADERS", "-D__HIP_PLATFORM_AMD__", "-isystem", str(headers)]


def program(name: str, out: Path = BUILD, flags: Sequence[str] = ()) -> Path:
    """The executable of a file in `programs/`, as ``transcript.cpp``; `flags` are more options for the compiler. Raises
    as `build` does."""
    cxx = compiler()
    source = HERE / "programs" / name
    options = [cxx, "-std=c++17", "-O1", "-Wall", "-Wextra", "-I", str(HERE), *flags]
    digest = hashlib.sha256(repr(options).encode() + source.read_bytes())
    for header in sorted(HERE.glob("*.h")):
        digest.update(header.read_bytes())
    target = out / f"{source.stem}-{digest.hexdigest()[:16]}"
    if not target.exists():
        out.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=out)) / source.stem
        try:
            subprocess.run([*options, str(source), "-o", str(made), "-ldl"], check=True)
            made.rename(target)
        finally:
            shutil.rmtree(made.parent, ignore_errors=True)
    return target


def build(out: Path = BUILD, headers: Path | None = None) -> Path:
    """The folder with both libraries, in `out`; built unless one of the same sources and options is there. Raises
    `Unavailable` where no compiler is, and CalledProcessError, with the compiler's words on stderr, where it fails."""
    cxx = compiler()
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".cpp", ".h"))
    options = [*FLAGS, *header_flags(headers)]
    digest = hashlib.sha256(repr((cxx, options)).encode())
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    folder = out / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out))
    try:
        for name, (files, plain) in LIBRARIES.items():
            needs = [] if name == HIP else [f"-L{work}", f"-l:{HIP}", "-Wl,-rpath,$ORIGIN"]
            paths = [str(HERE / file) for file in files]
            subprocess.run([cxx, *options, *paths, *needs, f"-Wl,-soname,{name}", "-o", str(work / name)], check=True)
            (work / plain).symlink_to(name)
        work.chmod(0o755)
        try:
            work.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=BUILD)
    parser.add_argument("--headers", type=Path)
    arguments = parser.parse_args()
    try:
        print(build(arguments.out, arguments.headers))
    except Unavailable as reason:
        sys.exit(f"skipped: unavailable: {reason}")


if __name__ == "__main__":
    main()
