# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Targets of the manifests, made when they are asked for: ``<backend>__<implementation>``.

A fault is a function of a `Call`: it calls the sound implementation, with other arguments or other parts, or spoils
what that gives. Where no fault of it is switched on, an implementation is sound.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from te_dispatch.conformance.transfer import mapped, tensors
from te_dispatch.core.autograd import below_autograd
from te_dispatch.core.bind import import_target
from te_dispatch.core.operator import OPERATORS
from te_dispatch.ops import alloc
from te_dispatch.ops.results import Saved
from te_dispatch_faulty import MANIFESTS, OTHER_NAMES
from te_dispatch_torch.implementations import IMPLEMENTATIONS

if TYPE_CHECKING:
    from te_dispatch_faulty.fault import Fault

#: Names the fault that a process is to have.
VARIABLE = "TE_DISPATCH_FAULT"

_TORCH = {one.name: one for one in IMPLEMENTATIONS}
_SWAPPING = threading.RLock()
_switched_on: list[Fault | None] = []


class Call:
    """One call of an operator.

    Attributes:
        arguments: by name, defaults filled in.
        name, format: of the implementation that was called, for what it saves.
    """

    def __init__(self, base: str, name: str, saved_format: str, arguments: Mapping[str, Any]) -> None:
        self._sound = below_autograd(import_target(_TORCH[base].target))
        self.arguments = arguments
        self.name = name
        self.format = saved_format

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """An argument, None where the operator has no such parameter."""
        return self.arguments.get(name)

    def sound(self, **changes: Any) -> Any:
        """What the torch backend makes of these arguments, or of changed ones."""
        return self.delivered(self._sound(**{**self.arguments, **changes}))

    def delivered(self, result: Any) -> Any:
        """A result in memory from the allocator, strides and shared storages kept; arguments stay what they are.

        As workspace: what becomes of it, and whether it is a result at last, is the fault's affair.
        """
        given = {t.untyped_storage().data_ptr() for _, t in tensors(dict(self.arguments)) if t.numel()}
        made: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not tensor.numel():
                return alloc.empty("workspace", tuple(tensor.shape), tensor.dtype, tensor.device)
            if storage.data_ptr() in given:
                return tensor
            if storage.data_ptr() not in made:
                size = storage.nbytes() // tensor.element_size()
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))
                made[storage.data_ptr()] = alloc.empty("workspace", (size,), tensor.dtype, tensor.device).copy_(whole)
            flat = made[storage.data_ptr()]
            return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset() + tensor.storage_offset())

        found = mapped(result, copied)
        saved = getattr(found, "saved", None)
        if saved is not None:
            found = found._replace(saved=Saved(self.name, self.format, saved.tensors, saved.options))
        return found


@contextmanager
def swapped(*parts: tuple[str, str, Any]) -> Iterator[None]:
    """The torch backend with other parts: (module, attribute, replacement) each. One thread at a time."""
    with _SWAPPING, ExitStack() as stack:
        for module, attribute, replacement in parts:
            stack.enter_context(mock.patch(f"te_dispatch_torch.{module}.{attribute}", replacement))
        yield


@contextmanager
def fault(one: Fault | None) -> Iterator[None]:
    """A block in which one fault is switched on in all threads, or none; in processes started there, too."""
    before = list(_switched_on)
    environ = {} if one is None else {VARIABLE: one.name}
    try:
        with mock.patch.dict(os.environ, environ):
            _switched_on[:] = [one]
            yield
    finally:
        _switched_on[:] = before


def current() -> Fault | None:
    """The fault that is switched on."""
    if not _switched_on:
        from te_dispatch_faulty.catalogue import by_name  # imports this module

        name = os.environ.get(VARIABLE)
        _switched_on.append(by_name(name) if name else None)
    return _switched_on[0]


def _loopback(call: Call) -> Any:
    return call.sound()


def _sound(name: str) -> Callable[[Call], Any]:
    if name == "saving_attention":
        from te_dispatch_faulty.scores import saves_probabilities

        return saves_probabilities
    return _loopback


def __getattr__(target: str) -> Any:
    backend, separator, name = target.partition("__")
    if backend not in MANIFESTS or not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {target!r}")
    entry = next(one for one in MANIFESTS[backend].implementations if one.name == name)
    signature = OPERATORS[entry.operator].signature
    candidate, base, sound = f"{backend}.{name}", OTHER_NAMES.get(name, name), _sound(name)

    def implementation(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        there = current()
        spoiled = there is not None and candidate in (there.implementation, there.also)
        behave = there.behave if there is not None and spoiled else sound
        return behave(Call(base, candidate, entry.saved_format, bound.arguments))

    implementation.__signature__ = inspect.Signature(list(signature.parameters.values()))  # type: ignore[attr-defined]
    implementation.__name__ = name
    return implementation
