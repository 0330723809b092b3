# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Contestants of the layer's benchmark: one transformer layer each, in some modes, behind one interface.

A module has `CONTESTANTS`. To add one: write such a module and name it in `MODULES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

MODULES = ("this_project", "transformer_engine", "plain_torch")
MODES = ("bf16", "delayed", "current", "block")


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and of its input, (sequence, batch, hidden)."""

    hidden: int
    ffn: int
    heads: int
    sequence: int
    batch: int

    def __str__(self) -> str:
        return f"hidden {self.hidden}, ffn {self.ffn}, {self.heads} heads, sequence {self.sequence}, batch {self.batch}"


#: Of the design's targets.
SHAPES = {
    "A": Shape(4096, 16384, 32, 256, 32),
    "A2": Shape(4096, 16384, 32, 2048, 4),
    "S": Shape(768, 3072, 12, 128, 4),
}
#: Whether everything runs, not how fast.
QUICK = Shape(64, 128, 2, 16, 2)


@dataclass
class Layer:
    """Something that trains: `run` is the forward in its mode, `module` holds what receives gradients."""

    module: torch.nn.Module
    run: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Contestant:
    """Attributes:
    name: unique among contestants.
    modes: of `MODES` that it has.
    missing: why it cannot run here, or None.
    layer: (shape, mode, device, dropout) -> a transformer layer.
    linear: (features, mode, device) -> one linear layer with bias; None where it has none of its own.
    default: whether it runs when nobody names it.
    """

    name: str
    modes: tuple[str, ...]
    missing: Callable[[], str | None]
    layer: Callable[[Shape, str, torch.device, float], Layer]
    linear: Callable[[int, str, torch.device], Layer] | None = None
    default: bool = True


def contestants() -> list[Contestant]:
    """In the table's order."""
    modules = [importlib.import_module(f"side_by_side.layers.{name}") for name in MODULES]
    return [contestant for module in modules for contestant in module.CONTESTANTS]
