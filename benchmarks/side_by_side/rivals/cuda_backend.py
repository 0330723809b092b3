# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""This project's operators on its cuda backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from side_by_side.rivals import dispatched
from side_by_side.rivals.dispatched import OPERATIONS as OPERATIONS

NAME = "cuda"


def missing() -> str | None:
    return dispatched.absent("cuda")


def scope() -> AbstractContextManager[Any]:
    return dispatched.required("cuda")
