# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where HIP's runtime and hipBLASLt come from: one file of each, opened at run time.

The first place that has one (`te_dispatch.backend_kit.libraries` says why there must not be two):

1. the copy that the process already holds, such as PyTorch's,
2. with ``TE_DISPATCH_ROCM_PATH``, the folders that it names (``FOLDER``, ``FOLDER/lib``, ``FOLDER/lib64``; several with
   ``:`` between them) and no others: that is how one of two installations is chosen,
3. PyTorch's own folder and AMD's ROCm packages beside this Python's other packages,
4. ``ROCM_PATH``, ``/opt/rocm``, ``/opt/rocm-*``,
5. the system's, by the names that the dynamic linker knows.

hipBLASLt is looked for first where HIP's runtime was found, so that both are of one release.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from te_dispatch.backend_kit.libraries import (
    MAPS,
    Library,
    Place,
    Version,
    Wanted,
    duplicate_text,
    loaded,
    open_library,
)

#: Names the folders of one installation.
PATH = "TE_DISPATCH_ROCM_PATH"

HIP = Wanted("hip", ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"))
HIPBLASLT = Wanted("hipblaslt", ("libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"))
WANTED = (HIP, HIPBLASLT)
#: The oldest releases whose interface this backend knows: those of ROCm 6.3, which brought the data types of OCP's FP8.
OLDEST: Mapping[str, tuple[int, int]] = {"hip": (6, 3), "hipblaslt": (0, 10)}
TITLES = {"hip": "HIP's runtime", "hipblaslt": "hipBLASLt"}

#: Folders below this Python's packages that hold ROCm's libraries.
_PACKAGES = (("torch/lib", "PyTorch's folder"), ("_rocm_sdk_*/lib", "ROCm package"))


def named_folders(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What ``TE_DISPATCH_ROCM_PATH`` names; empty where it is not set."""
    return tuple(folder for folder in environ.get(PATH, "").split(os.pathsep) if folder.strip())


def places(environ: Mapping[str, str] | None = None, search: Iterable[str] | None = None) -> list[Place]:
    """The folders to look in, in this order.

    Args:
        environ: stands in for ``os.environ``.
        search: stands in for ``sys.path``.
    """
    environ = os.environ if environ is None else environ
    named = named_folders(environ)
    found: Iterator[Place]
    if named:
        found = ((os.path.join(folder, part), PATH) for folder in named for part in ("", "lib", "lib64"))
    else:
        found = _usual(environ, sys.path if search is None else search)
    there = ((os.path.normpath(folder), source) for folder, source in found if os.path.isdir(folder))
    return list({folder: (folder, source) for folder, source in there}.values())


def _usual(environ: Mapping[str, str], search: Iterable[str]) -> Iterator[Place]:
    for root in search:
        for pattern, source in _PACKAGES:
            for folder in sorted(glob.glob(os.path.join(glob.escape(root or "."), pattern))):
                yield folder, source
    if environ.get("ROCM_PATH"):
        yield os.path.join(environ["ROCM_PATH"], "lib"), "ROCM_PATH"
    yield "/opt/rocm/lib", "installation"
    for folder in sorted(glob.glob("/opt/rocm-*/lib"), key=_numbers, reverse=True):
        yield folder, "installation"


def _numbers(folder: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder)]


def find(
    wanted: Wanted,
    version: Callable[[ctypes.CDLL], Version],
    folders: Sequence[Place],
    named: bool = False,
    maps: str = MAPS,
) -> Library | str:
    """Open a library from the first place that has it, or say in one phrase why there is none.

    Args:
        folders: of `places`. All names of a file are tried in one before the next.
        named: whether the user named them: nothing else is looked at then.
        maps: a file to read instead of the process's own map of memory.
    """
    if loaded(wanted, maps):
        return open_library(wanted, [], version, maps)
    broken = []
    for place in folders:
        if not any(os.path.isfile(os.path.join(place[0], name)) for name in wanted.sonames):
            continue
        found = open_library(wanted, [place], version, maps, system=False)
        if isinstance(found, Library):
            return found
        broken.append(found)
    last = sorted(wanted.sonames)[0]
    if named:
        reason = f"no folder that {PATH} names has {last}: {os.environ.get(PATH, '')}"
    else:
        found = open_library(wanted, [], version, maps)
        if isinstance(found, Library):
            return found
        absent = found.count("No such file") == len(wanted.sonames)
        reason = f"neither a ROCm package, nor /opt/rocm, nor the linker has {last}" if absent else found
    reason = "; ".join(broken) or reason  # a copy that does not open is what the user should hear of
    return f"{TITLES[wanted.name]} is not here: {reason}; install ROCm, or name its folder in {PATH}"


def _hip_version(handle: ctypes.CDLL) -> Version:
    number = ctypes.c_int()
    function = getattr(handle, "hipRuntimeGetVersion", None)
    if function is None or function(ctypes.byref(number)) != 0:
        return (0, 0, 0)
    return number.value // 10_000_000, number.value // 100_000 % 100, number.value % 100_000


def _hipblaslt_version(handle: ctypes.CDLL) -> Version:
    """Not known: the library tells it to those alone who have a handle of it (`te_dispatch_rocm.devices`)."""
    return (0, 0, 0)


@functools.cache
def hip() -> Library | str:
    """The process's HIP runtime, or why there is none."""
    found = find(HIP, _hip_version, places(), bool(named_folders(os.environ)))
    if isinstance(found, Library) and (reason := too_old("hip", found.version, found.path)):
        return reason
    return found


@functools.cache
def hipblaslt() -> Library | str:
    """The process's hipBLASLt, or why there is none."""
    runtime = hip()
    if isinstance(runtime, str):
        return f"hipBLASLt is not looked for without HIP's runtime ({runtime})"
    beside: list[Place] = [(os.path.dirname(runtime.path), runtime.source)] if os.path.isabs(runtime.path) else []
    named = bool(named_folders(os.environ))
    return find(HIPBLASLT, _hipblaslt_version, [*places(), *beside] if named else [*beside, *places()], named)


def too_old(name: str, version: Version, path: str) -> str | None:
    """Why a release cannot be used, None if it can or does not tell what it is."""
    oldest = OLDEST[name]
    if version == (0, 0, 0) or version[:2] >= oldest:
        return None
    has, needs = ".".join(map(str, version)), ".".join(map(str, oldest))
    return f"{TITLES[name]} {has} is too old, needs {needs} (ROCm 6.3): {path}; {PATH} names another installation"


def problems(maps: str = MAPS, environ: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with the copies that this process holds: several of one library, or one of another installation
    than the user named."""
    found = []
    named = named_folders(os.environ if environ is None else environ)
    roots = [os.path.realpath(folder) for folder in named]
    for wanted in WANTED:
        held = loaded(wanted, maps)
        if len(held) > 1:
            found.append(f"{duplicate_text(wanted, held)}, or name one installation in {PATH}")
        if held and roots and not any(path.startswith(os.path.join(root, "")) for path in held for root in roots):
            found.append(
                f"{PATH} names {os.pathsep.join(named)}, but this process had loaded {held[0]} before, which is used"
            )
    return found
