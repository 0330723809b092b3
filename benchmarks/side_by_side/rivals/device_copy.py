# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A plain copy that moves as many bytes as a row must: what memory allows."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from side_by_side.inputs import OPERATIONS as ALL
from side_by_side.rivals import Prepared, Refused
from side_by_side.rows import Row

NAME = "copy"
scope = contextlib.nullcontext


def missing() -> str | None:
    return None


def _copy(row: Row, data: SimpleNamespace) -> Prepared:
    if not row.moved:
        raise Refused("arithmetic decides")
    # Half of the bytes are read, half are written. Random ones: equal bytes can move faster.
    moved = row.moved if data.shape == row.shape else 4096
    source = torch.randint(-(2**31), 2**31 - 1, (moved // 8,), dtype=torch.int32, device=data.device)
    target = torch.empty_like(source)
    return Prepared(lambda: target.copy_(source), None)


OPERATIONS = dict.fromkeys(ALL, _copy)
