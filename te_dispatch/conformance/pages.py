# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Memory of the CPU next to pages that nobody may touch: who reads or writes there is killed by SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable

import torch

_PAGE = mmap.PAGESIZE
_PROT_NONE = 0


def supported(device: torch.device) -> bool:
    """Whether memory of a device lies in pages that a process can close."""
    return device.type == "cpu" and os.name == "posix"


def before_closed_page(size: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for so many elements that ends where a closed page begins."""
    return _allocated(size, like, lambda count, whole: whole - _PAGE - count)


def behind_closed_page(size: int, like: torch.Tensor) -> torch.Tensor:
    """Memory for so many elements that begins where a closed page ends."""
    return _allocated(size, like, lambda count, whole: _PAGE)


def _allocated(size: int, like: torch.Tensor, place: Callable[[int, int], int]) -> torch.Tensor:
    """Between two closed pages; `place` gives the first byte by the count of bytes and the length of all of it.

    The pages are given back when the tensor, which keeps them, is freed.
    """
    count = size * like.element_size()
    whole = (2 + -(-count // _PAGE)) * _PAGE
    pages = mmap.mmap(-1, whole)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    for page in (start, start + whole - _PAGE):
        _close(page)
    return torch.frombuffer(pages, dtype=like.dtype, count=size, offset=place(count, whole))


def _close(address: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), ctypes.c_int(_PROT_NONE)):
        raise OSError(ctypes.get_errno(), "mprotect")
