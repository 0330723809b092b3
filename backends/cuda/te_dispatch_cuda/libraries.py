# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where cuBLASLt and cuDNN come from: one file of each, opened at run time.

In this order, the first that opens:

1. the copy that the process already holds (PyTorch brings one),
2. PyPI's packages: ``nvidia/cu13``, ``nvidia/cublas``, ``nvidia/cudnn`` beside this Python's other packages,
3. the system's, by the name that the dynamic linker knows.

Two copies of one library in a process do harm (two cuDNNs switch its fused attention off), so this module never opens
a second one, and warns with `DuplicateLibraryWarning` where somebody else did. Opening creates no CUDA context.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from te_dispatch.core.facts import UNKNOWN, FactValue

_MAPS = "/proc/self/maps"


class DuplicateLibraryWarning(UserWarning):
    """Two different files of one NVIDIA library are loaded into this process."""


@dataclass(frozen=True)
class Wanted:
    """A library that this backend can use.

    Attributes:
        name: as in facts: ``version.<name>``.
        sonames: majors that this backend knows the interface of, the newest first.
        packages: folders of PyPI packages, below ``site-packages/nvidia``.
        version: its function that tells ``10000 * major + 100 * minor + patch``.
    """

    name: str
    sonames: tuple[str, ...]
    packages: tuple[str, ...]
    version: str


CUBLASLT = Wanted("cublaslt", ("libcublasLt.so.13", "libcublasLt.so.12"), ("cu13", "cublas"), "cublasLtGetVersion")
CUDNN = Wanted("cudnn", ("libcudnn.so.9",), ("cudnn",), "cudnnGetVersion")
WANTED = (CUBLASLT, CUDNN)


@dataclass(frozen=True)
class Library:
    """An open library.

    Attributes:
        path: the file.
        source: which of this module's steps found it.
        version: three numbers, ``(0, 0, 0)`` where the library does not tell.
    """

    path: str
    source: str
    version: tuple[int, int, int]

    @property
    def version_text(self) -> str:
        return ".".join(map(str, self.version))


def loaded(wanted: Wanted, maps: str = _MAPS) -> tuple[str, ...]:
    """The files of a library that a process has mapped, each once, in the order of their addresses."""
    pattern = re.compile(rf"/({'|'.join(map(re.escape, wanted.sonames))})(\.\d+)*( \(deleted\))?$")
    found: dict[str, None] = {}
    try:
        with open(maps, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                start = line.find("/")
                if start >= 0 and pattern.search(path := line[start:].rstrip("\n")):
                    found[os.path.realpath(path.removesuffix(" (deleted)"))] = None
    except OSError:  # not Linux
        return ()
    return tuple(found)


def package_directories(wanted: Wanted, search: Iterable[str] | None = None) -> tuple[str, ...]:
    """The folders of a library's PyPI packages; `search` stands in for ``sys.path``. Imports nothing."""
    path = list(sys.path if search is None else search)
    spec = importlib.machinery.PathFinder.find_spec("nvidia", path)
    if spec is None or spec.submodule_search_locations is None:
        return ()
    roots = list(spec.submodule_search_locations)
    folders = (os.path.join(root, package, "lib") for package in wanted.packages for root in roots)
    return tuple(folder for folder in folders if os.path.isdir(folder))


def candidates(wanted: Wanted, directories: Sequence[str], held: Sequence[str]) -> list[tuple[str, str]]:
    """(file or name to open, where it comes from), in the order of this module's steps."""
    if held:
        return [(held[0], "held by the process")]
    files = [os.path.join(folder, name) for name in wanted.sonames for folder in directories]
    packages = [(path, "PyPI package") for path in files if os.path.isfile(path)]
    return packages + [(name, "system") for name in wanted.sonames]


def open_library(wanted: Wanted, directories: Sequence[str] | None = None, maps: str = _MAPS) -> Library | str:
    """Open a library, or say in one phrase why there is none.

    Args:
        directories: instead of `package_directories`.
        maps: a file to read instead of the process's own map of memory.
    """
    held = loaded(wanted, maps)
    if len(held) > 1:
        warnings.warn(duplicate_text(wanted, held), DuplicateLibraryWarning, stacklevel=2)
    folders = package_directories(wanted) if directories is None else directories
    errors = []
    for target, source in candidates(wanted, folders, held):
        try:
            handle = ctypes.CDLL(target)
        except OSError as error:
            errors.append(str(error))
            continue
        now = loaded(wanted, maps)
        path = target if os.path.isabs(target) or not now else now[0]
        return Library(path, source, _version(handle, wanted))
    return f"{' or '.join(wanted.sonames)} cannot be opened: {'; '.join(dict.fromkeys(errors))}"


def duplicate_text(wanted: Wanted, paths: Sequence[str]) -> str:
    return (
        f"this process holds {len(paths)} copies of {wanted.name}: {', '.join(paths)}; the first is used. "
        "Two copies work against each other: leave one on the library path"
    )


def _version(handle: ctypes.CDLL, wanted: Wanted) -> tuple[int, int, int]:
    function = getattr(handle, wanted.version, None)
    if function is None:
        return (0, 0, 0)
    function.restype, function.argtypes = ctypes.c_size_t, []
    number = int(function())
    return number // 10000, number // 100 % 100, number % 100


@functools.cache
def cublaslt() -> Library | str:
    """The process's cuBLASLt, or why there is none."""
    return open_library(CUBLASLT)


@functools.cache
def cudnn() -> Library | str:
    """The process's cuDNN, or why there is none."""
    return open_library(CUDNN)


def versions() -> dict[str, FactValue]:
    """Device facts: ``version.cublaslt`` and ``version.cudnn``; unknown where the library is not found."""
    found = {"cublaslt": cublaslt(), "cudnn": cudnn()}
    return {
        f"version.{name}": UNKNOWN if isinstance(library, str) else library.version_text
        for name, library in found.items()
    }


def found() -> list[tuple[str, str, str]]:
    """(subject, state, reason) of each library, for ``te-dispatch doctor``."""
    rows = []
    for wanted, library in ((CUBLASLT, cublaslt()), (CUDNN, cudnn())):
        if isinstance(library, str):
            rows.append((wanted.name, "missing", library))
        else:
            rows.append((wanted.name, "ok", f"{library.version_text}, {library.source}: {library.path}"))
        if len(paths := loaded(wanted)) > 1:
            rows.append((wanted.name, "warning", duplicate_text(wanted, paths)))
    return rows
