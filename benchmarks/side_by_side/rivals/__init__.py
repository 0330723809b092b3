# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rivals of the operators' benchmark, each in its own module behind one interface.

A module has `NAME`, `missing()` (why it cannot run here, or None), `scope()` (a context in which its calls are made)
and `OPERATIONS`: operation -> function (row, inputs) -> `Prepared`. To add one: write such a module and name it in
`MODULES`. An operation that is absent there, or whose preparation raises, shows up in the table with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

#: In the table's order: the copy first, what is measured, then whom it is measured against.
MODULES = ("device_copy", "cuda_backend", "triton_backend", "torch_backend", "plain_torch", "transformer_engine")


class Refused(Exception):
    """A rival does not do this; the message says why."""


@dataclass
class Prepared:
    """Work that is ready to be timed.

    Attributes:
        call: does it once.
        values: names to tensors of what a call returned, to be compared with `inputs.expected`; None where results
            mean nothing.
        note: what a reader should know about how it is done.
    """

    call: Callable[[], Any]
    values: Callable[[Any], dict[str, torch.Tensor]] | None
    note: str = ""


def load(name: str) -> ModuleType | str:
    """The rival's module, or why it is missing."""
    module = importlib.import_module(f"side_by_side.rivals.{name}")
    return module.missing() or module


def prepare(rival: ModuleType, row: Any, data: Any) -> Prepared:
    """Raises Refused, or whatever the rival raises."""
    operation = rival.OPERATIONS.get(row.operation)
    if operation is None:
        raise Refused(f"has no {row.operation}")
    return operation(row, data)
