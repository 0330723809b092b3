# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dtypes, encodings, scalings and epilogues as the integers that csrc/gemm/plan.h defines."""

from __future__ import annotations

import torch

NONE = -1
DTYPES: dict[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ENCODINGS: dict[str, int] = {"e4m3fn": 16, "e5m2": 17, "e4m3fnuz": 18, "e5m2fnuz": 19}
SCALINGS: dict[str, int] = {"none": 0, "tensor": 1, "mxfp8": 2}
EPILOGUES: dict[str | None, int] = {None: 0, "gelu": 1, "dgelu": 2, "bgrad_a": 3, "bgrad_b": 4}


def type_code(kind: torch.dtype | str) -> int:
    """Of a dtype, or of an encoding's name."""
    return ENCODINGS[kind] if isinstance(kind, str) else DTYPES[kind]
