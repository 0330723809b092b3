# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the rotary embedding: both pairings, both directions, every layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from te_dispatch_triton import position


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    freqs = torch.empty(4096, 1, 1, 128)
    x = torch.empty(256, 4, 32, 128, dtype=torch.bfloat16)
    # The check looks into what is on the host.
    offsets, ends = torch.zeros(4, dtype=torch.int32), torch.tensor([0, 100, 256], dtype=torch.int32)
    for interleaved in (False, True):
        how = "interleaved" if interleaved else "halves"
        yield f"rope_fwd {how}", functools.partial(position.rope_fwd, x, freqs, interleaved=interleaved)
        yield f"rope_bwd {how}", functools.partial(position.rope_bwd, x, freqs, interleaved=interleaved)
    yield "rope_fwd half", functools.partial(position.rope_fwd, x, freqs[..., :64], layout="sbhd", offsets=offsets)
    yield (
        "rope_fwd thd",
        functools.partial(position.rope_fwd, x[:, 0].float(), freqs, layout="thd", cu_seqlens=ends),
    )
