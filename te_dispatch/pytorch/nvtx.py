# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""NVTX ranges that callers mark, where ``NVTE_NVTX_ENABLED=1`` asks for them. Modules here mark none themselves."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["get_nvtx_range_context", "nvtx_range_pop", "nvtx_range_push"]

_VARIABLE = "NVTE_NVTX_ENABLED"

#: Messages of the ranges that are open, the innermost last.
_open: list[str] = []


def _enabled() -> bool:
    value = os.getenv(_VARIABLE, "").strip()
    if value not in ("", "0", "1"):
        raise ValueError(f"{_VARIABLE}={value}: expected 0 or 1, got {value!r}")
    return value == "1"


def nvtx_range_push(msg: str) -> None:
    """Open a range. Nothing unless NVTE_NVTX_ENABLED=1.

    Raises:
        ValueError: the variable is neither 0 nor 1. RuntimeError: PyTorch has no NVTX here.
    """
    if _enabled():
        torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]
        _open.append(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """Close the innermost range. Nothing unless NVTE_NVTX_ENABLED=1.

    Args:
        msg: what it was opened with, to be checked; None for no check.

    Raises:
        RuntimeError: no range is open. ValueError: it was opened with another message; it stays open.
    """
    if not _enabled():
        return
    if not _open:
        raise RuntimeError("nvtx_range_pop: no range is open")
    if msg is not None and msg != _open[-1]:
        raise ValueError(f"nvtx_range_pop: the innermost range is {_open[-1]!r}, not {msg!r}")
    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
    _open.pop()


def get_nvtx_range_context(msg: str) -> AbstractContextManager[None]:
    """A context manager that opens and closes a range. Nothing unless NVTE_NVTX_ENABLED=1."""
    return torch.cuda.nvtx.range(msg) if _enabled() else nullcontext()
