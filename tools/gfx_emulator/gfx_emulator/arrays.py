# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arrays' type, and masks of lanes as words."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

#: Lanes of a wave.
LANES = 64


def whole(value: Array, count: int) -> Array:
    """A value for every lane of so many waves: ``[count, 64]``, of what broadcasts to it."""
    return value if value.shape == (count, LANES) else np.broadcast_to(value, (count, LANES))


def pack(mask: Array) -> Array:
    """bool ``[n, 64]`` to uint32 ``[n, 2]``, lane 0 in the lowest bit."""
    return np.packbits(mask, axis=1, bitorder="little").view(np.uint32)


def unpack(words: Array) -> Array:
    """uint32 ``[n, 2]`` to bool ``[n, 64]``."""
    contiguous = np.ascontiguousarray(words)
    return np.unpackbits(contiguous.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
