# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Random bits for dropout and stochastic rounding: a counter-based hash of (seed, offset, element) in int32 operations.

Philox costs ten rounds of 64-bit products, each several passes over memory in PyTorch operations. Here the
element's linear index, xored with a key made from seed and offset, goes twice through a 32-bit mixing function with
full avalanche (xor-shift and multiply, constants of C. Wellons' "lowbias32"), of which the upper 24 bits are taken. It
is stateless: equal `rng_state` and index give equal bits, in the forward, the backward and when compiled.
"""

from __future__ import annotations

import torch

_M1, _M2 = 0x7FEB352D, 0x846CA68B - (1 << 32)  # as int32
_GOLDEN = 0x9E3779B9 - (1 << 32)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Bijective mixing of int32 words; products wrap, right shifts are made logical by the masks."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * _M1
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _M2
    return x ^ ((x >> 16) & 0xFFFF)


def _low(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 words as int32."""
    return ((x & 0xFFFFFFFF) ^ 0x80000000).sub(0x80000000).to(torch.int32)


def bits24(count: int, rng_state: torch.Tensor, first: int = 0) -> torch.Tensor:
    """int32 (count,), uniform in [0, 2^24): those of the elements `first`, `first` + 1, and so on.

    Args:
        rng_state: int64 (2,), (seed, offset).
    """
    words = torch.cat((_low(rng_state), _low(rng_state >> 32)))  # seed, offset, then their upper halves
    key = _mix(words[0])
    other = _mix(_mix(words[1] ^ key) + words[2]) ^ _mix(words[3] + _GOLDEN)
    if first + count < 1 << 31:
        counter = torch.arange(first, first + count, dtype=torch.int32, device=rng_state.device)
    else:
        index = torch.arange(first, first + count, device=rng_state.device)
        counter = _low(index) ^ _mix(_low(index >> 32))
    bits = _mix(_mix(counter ^ key) + other)
    return (bits >> 8) & 0xFFFFFF
