# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What is assigned to attributes of modules: it holds for later calls, or it is refused.

An attribute of a GEMM module or a norm that calls rest on is a property, whose setter forgets what was captured.
Attention and layers read plain attributes in every call, for which a property costs too much: they check in
``__setattr__`` (`CheckedAttributes`). Attributes of parallelism, which are read rarely, are descriptors (`Only`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from te_dispatch.pytorch.arguments import require_choice, require_probability

#: (module, what is assigned) -> what the attribute becomes; it raises for what the module cannot become.
Check = Callable[[Any, Any], Any]


class CheckedAttributes(torch.nn.Module):
    """A module whose attributes are checked when they are assigned, first by the constructor."""

    #: By attribute.
    _checks: ClassVar[Mapping[str, Check]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        check = self._checks.get(name)
        super().__setattr__(name, value if check is None else check(self, value))


def fixed(name: str, made: str) -> Check:
    """A check of an attribute that keeps the constructor's value.

    Args:
        name: of the attribute, and of the constructor's argument.
        made: what was made for that value, for the error.
    """

    def check(module: Any, value: Any) -> Any:
        known = getattr(module, name, value)
        if value is not known and value != known:
            raise AttributeError(
                f"{type(module).__name__}: {name} cannot become {value!r}, {made} for {name}={known!r}; construct a "
                f"module with {name}={value!r}"
            )
        return value

    return check


def one_of(name: str, choices: tuple[str, ...]) -> Check:
    """A check of an attribute that has one of several values."""

    def check(module: Any, value: Any) -> Any:
        require_choice(name, value, choices)
        return value

    return check


def probability(name: str) -> Check:
    """A check of an attribute that is a probability below 1."""

    def check(module: Any, value: Any) -> Any:
        require_probability(name, value)
        return value

    return check


def for_parts(name: str, *parts: str) -> Check:
    """A check that sets the attribute `name` of a module's parts, too, as far as it has them."""

    def check(module: Any, value: Any) -> Any:
        for part in parts:
            if part in module._modules:
                setattr(getattr(module, part), name, value)
        return value

    return check


class Only:
    """An attribute with one value: of an argument that supports no other. Another value cannot be assigned."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self.value

    def __set__(self, module: Any, value: Any) -> None:
        if value != self.value:
            raise NotImplementedError(
                f"{type(module).__name__}: {self.name}={value!r} is not supported yet, only {self.name}={self.value!r}"
            )
