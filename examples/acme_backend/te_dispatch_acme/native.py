# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled kernels, through ctypes, which releases the GIL for the length of a call."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

#: As the kernels number them.
DTYPES = {torch.float32: 0, torch.bfloat16: 1}

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIZES = ctypes.POINTER(_SIZE)


def load(file: Path) -> ctypes.CDLL:
    """The library, with its signatures.

    Raises:
        OSError: it cannot be loaded, because it is of another platform, for one.
    """
    library = ctypes.CDLL(str(file))
    library.acme_softmax_fwd.argtypes = [
        _POINTER, _INT, _POINTER, _POINTER, _INT, _SIZE, _SIZES, _SIZES, _SIZES, ctypes.c_float, _INT,
    ]  # fmt: skip
    library.acme_softmax_fwd.restype = None
    return library


def sizes(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Sizes or strides, as a kernel takes them."""
    return (_SIZE * len(values))(*values)
