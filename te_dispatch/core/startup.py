# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Keeping start-up short."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector out of a block of imports.

    With torch loaded one full collection walks a million objects and takes longer than all of our imports together,
    and nothing that they allocate is garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
