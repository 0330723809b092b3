# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The generator of dropout and stochastic rounding: Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
1, 2, 3", SC 2011).

It is counter based, so any backend can reproduce any element without drawing those before it. For the element of
linear index i under rng_state (seed, offset):

    counter = (i mod 2^32, i div 2^32, offset mod 2^32, offset div 2^32), key = (seed mod 2^32, seed div 2^32)
    u = first output word / 2^32; the element is dropped where u < p, else scaled by 1 / (1 - p).

Negative int64 seeds and offsets read as their two's complement. In attention the linear index is
((b H + h) S_q + i) S_kv + j, S being the dense sequence length, or max_seqlen for thd; in dropout_add_fwd it is the
element's of x, row-major. In casts it is the element's of the row-wise copy, and of the column-wise one behind it; the
larger of the two values that it lies between is taken where its position between them exceeds u.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[U64, U64, U64, U64], key: tuple[int, int]) -> tuple[U64, U64, U64, U64]:
    """Four output words for every counter, words as uint64 below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]  # 32 x 32 bits fit in 64
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ np.uint64(k0),
            second & _LOW,
            (first >> _HALF) ^ c3 ^ np.uint64(k1),
            first & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, offset: int, index: NDArray[np.int64]) -> NDArray[np.float64]:
    """The module's u for every linear index, in [0, 1)."""
    seed, offset = seed % 2**64, offset % 2**64
    wide = index.astype(np.uint64)
    words = philox4x32(
        (
            wide & _LOW,
            wide >> _HALF,
            np.full_like(wide, offset & 0xFFFFFFFF),
            np.full_like(wide, offset >> 32),
        ),
        (seed & 0xFFFFFFFF, seed >> 32),
    )
    return words[0].astype(np.float64) / 2.0**32


def keep_scale(p: float, seed: int, offset: int, index: NDArray[np.int64]) -> NDArray[np.float64]:
    """What dropout multiplies each element with: 0 or 1 / (1 - p)."""
    if p >= 1.0:
        return np.zeros(index.shape)
    return np.where(uniform(seed, offset, index) < p, 0.0, 1 / (1 - p))
