# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Keeping start-up short."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: Whether some thread is inside `no_collection` and the collector ran before.
_paused = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a block of imports.

    With torch loaded one full collection walks a million objects and takes longer than all of our imports together,
    and nothing that they allocate is garbage.
    """
    global _paused
    if not gc.isenabled():
        yield
        return
    # Twice: an interrupt may hit the inner one, and the collector must not stay off for the rest of the process.
    try:
        try:
            _paused = True
            gc.disable()
            yield
        finally:
            gc.enable()
    finally:
        gc.enable()
        _paused = False


def _after_fork() -> None:
    """In a forked child the thread that would have switched the collector on again does not exist."""
    if _paused:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
