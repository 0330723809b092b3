# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The random Hadamard transform of NVFP4 training, as constants.

A block of 16 values x becomes y = x R with R = diag(`SIGNS`) H / 4, where H is Sylvester's 16x16 Hadamard matrix. R is
orthogonal, so a product of two matrices that are both rotated along the dimension that is summed over is the product
itself, while an outlier is spread over its block. The signs are Transformer Engine's: drawn once, the same in every
process, since both operands must have them.
"""

from __future__ import annotations

#: Values of a block.
SIZE = 16

#: What each value of a block is multiplied by first.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def matrix() -> tuple[tuple[float, ...], ...]:
    """R, 16x16, entries 0.25 and -0.25: an entry of H is -1 to the number of ones that its indices share."""
    return tuple(tuple(SIGNS[i] * (-1) ** (i & j).bit_count() / 4 for j in range(SIZE)) for i in range(SIZE))
