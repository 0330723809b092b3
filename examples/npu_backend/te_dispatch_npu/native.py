# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled kernels, through ctypes: raw pointers and sizes, so that one build serves every PyTorch and Python.

ctypes releases the GIL for the length of a call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


def _file() -> Path | None:
    return next(Path(__file__).parent.glob("_kernels*.so"), None)


def missing() -> str | None:
    """Why there are no kernels, None if there are."""
    if _file() is None:
        return "installed without kernels, for lack of a C compiler: install gcc or clang, then te-dispatch-npu again"
    return None


@cache
def library() -> ctypes.CDLL:
    """The kernels, with their signatures."""
    found = ctypes.CDLL(str(_file()))
    found.tide_rmsnorm_fwd.argtypes = [*[_POINTER] * 4, _SIZE, _SIZE, ctypes.c_float, ctypes.c_float]
    found.tide_rmsnorm_bwd.argtypes = [*[_POINTER] * 7, _SIZE, _SIZE, ctypes.c_float]
    for kernel in (found.tide_rmsnorm_fwd, found.tide_rmsnorm_bwd):
        kernel.restype = None
    return found
