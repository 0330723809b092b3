# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the softmax operators: rows in one piece and in several, with and without a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from te_dispatch_triton import softmax


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for columns in (128, 2048, 8192, 16384, 40000):
        x = torch.empty(2, 4, 64, columns, dtype=torch.bfloat16)
        yield f"softmax_fwd {columns}", functools.partial(softmax.softmax_fwd, x, scale=0.125)
        yield f"softmax_bwd {columns}", functools.partial(softmax.softmax_bwd, x, x, scale=0.125)
    for columns in (2048, 40000):
        x, mask = torch.empty(2, 4, 64, columns, dtype=torch.float16), torch.empty(2, 1, 64, columns, dtype=torch.bool)
        yield f"softmax_fwd {columns} mask", functools.partial(softmax.softmax_fwd, x, mask, scale=-2.0)
        yield f"softmax_fwd {columns} causal", functools.partial(softmax.softmax_fwd, x.float(), causal=True)
