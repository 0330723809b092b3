# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules that may be parts of a call which is recorded as a whole (`te_dispatch.pytorch.capture.composed`)."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound="type[torch.nn.Module]")

classes: set[type[torch.nn.Module]] = set()


class Composable(torch.nn.Module):
    """A module that may be part of a composed call: of a class with the decorator `composable`, and of no other.

    Attributes:
        changes: how often an attribute was set, but `training`.
    """

    changes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "training":
            self.__dict__["changes"] = self.changes + 1

    def tensors_of_call(self) -> tuple[torch.Tensor | None, ...]:
        """What it gives to its Function beside the input, whatever the call."""
        return ()

    def captured_with(self) -> Any:
        """An object that is replaced when what was captured of its calls is out of date."""
        return None


def composable(cls: Class) -> Class:
    """A class whose calls follow from its attributes, its parts, and what it is called with."""
    classes.add(cls)
    return cls
