# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""This project's operators on its triton backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from side_by_side.rivals import dispatched
from side_by_side.rivals.dispatched import OPERATIONS as OPERATIONS

NAME = "triton"


def missing() -> str | None:
    return dispatched.absent("triton") or (None if torch.cuda.is_available() else "no NVIDIA or AMD device")


def scope() -> AbstractContextManager[Any]:
    return dispatched.required("triton")
