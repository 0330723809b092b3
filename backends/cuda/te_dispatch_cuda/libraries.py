# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where cuBLASLt and cuDNN come from: one file of each, opened at run time (`te_dispatch.backend_kit.libraries`).

The places are PyPI's packages: ``nvidia/cu13``, ``nvidia/cublas``, ``nvidia/cudnn`` beside this Python's other
packages. Opening creates no CUDA context.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from te_dispatch.backend_kit import libraries
from te_dispatch.backend_kit.libraries import MAPS, DuplicateLibraryWarning, Library, duplicate_text, loaded
from te_dispatch.core.facts import UNKNOWN, FactValue

__all__ = [
    "CUBLASLT", "CUDNN", "DuplicateLibraryWarning", "Library", "Wanted", "duplicate_text", "loaded", "open_library",
]  # fmt: skip


@dataclass(frozen=True)
class Wanted(libraries.Wanted):
    """A library that this backend can use.

    Attributes:
        packages: folders of PyPI packages, below ``site-packages/nvidia``.
        version: its function that tells ``10000 * major + 100 * minor + patch``.
    """

    packages: tuple[str, ...]
    version: str


CUBLASLT = Wanted("cublaslt", ("libcublasLt.so.13", "libcublasLt.so.12"), ("cu13", "cublas"), "cublasLtGetVersion")
CUDNN = Wanted("cudnn", ("libcudnn.so.9",), ("cudnn",), "cudnnGetVersion")
WANTED = (CUBLASLT, CUDNN)


def package_directories(wanted: Wanted, search: Iterable[str] | None = None) -> tuple[str, ...]:
    """The folders of a library's PyPI packages; `search` stands in for ``sys.path``. Imports nothing."""
    path = list(sys.path if search is None else search)
    spec = importlib.machinery.PathFinder.find_spec("nvidia", path)
    if spec is None or spec.submodule_search_locations is None:
        return ()
    roots = list(spec.submodule_search_locations)
    folders = (os.path.join(root, package, "lib") for package in wanted.packages for root in roots)
    return tuple(folder for folder in folders if os.path.isdir(folder))


def open_library(wanted: Wanted, directories: Sequence[str] | None = None, maps: str = MAPS) -> Library | str:
    """Open a library, or say in one phrase why there is none.

    Args:
        directories: instead of `package_directories`.
        maps: a file to read instead of the process's own map of memory.
    """
    folders = package_directories(wanted) if directories is None else directories
    places = [(folder, "PyPI package") for folder in folders]
    return libraries.open_library(wanted, places, functools.partial(_version, wanted), maps)


def _version(wanted: Wanted, handle: ctypes.CDLL) -> tuple[int, int, int]:
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
    return [*libraries.rows(CUBLASLT, cublaslt()), *libraries.rows(CUDNN, cudnn())]
