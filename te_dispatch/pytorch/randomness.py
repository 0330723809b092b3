# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Where dropout gets its randomness."""

from __future__ import annotations

import torch

from te_dispatch.pytorch.step import step

# The sum of an offset and any element count still fits an int64.
_LIMIT = 1 << 62


@step
def draw_rng_state(device: torch.device) -> torch.Tensor:
    """int64 (2,) on `device`: a (seed, offset) pair for the operators that drop elements.

    It is drawn by an ordinary PyTorch operation from the current generator, so that whatever controls that generator
    (`torch.manual_seed`, RNG trackers, activation checkpointing, CUDA graph capture) controls dropout too: a replay
    of the generator replays the dropped elements.
    """
    return torch.randint(_LIMIT, (2,), dtype=torch.int64, device=device)
