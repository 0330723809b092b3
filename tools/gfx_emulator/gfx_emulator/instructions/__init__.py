# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Instructions by family. Each module fills the table of `registry`; importing this package fills it wholly."""

from __future__ import annotations

from gfx_emulator.instructions import (
    atomics,
    compare,
    convert,
    division,
    flow,
    lanes,
    lds_access,
    matrix,
    packed,
    scalar,
    vector_float,
    vector_integer,
    vector_memory,
)

__all__ = [
    "atomics", "compare", "convert", "division", "flow", "lanes", "lds_access", "matrix", "packed", "scalar",
    "vector_float", "vector_integer", "vector_memory",
]  # fmt: skip
