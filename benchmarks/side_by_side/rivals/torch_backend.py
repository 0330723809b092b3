# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""This project's operators on its torch backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from side_by_side.rivals import dispatched
from side_by_side.rivals.dispatched import OPERATIONS as OPERATIONS

NAME = "torch_backend"


def missing() -> str | None:
    return dispatched.absent("torch")


def scope() -> AbstractContextManager[Any]:
    return dispatched.required("torch")
