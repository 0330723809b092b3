# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Targets of both manifests, made when they are asked for: `loopback__<name>`, `faulty__<name>`, `partner__<name>`.

A fault is a function of a `Call`: it calls the sound implementation, with other arguments or other parts, or spoils
what that gives.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from te_dispatch.conformance.transfer import mapped, tensors
from te_dispatch.core.bind import import_target
from te_dispatch.core.operator import OPERATORS
from te_dispatch.ops import alloc
from te_dispatch.ops.results import Saved
from te_dispatch_faulty import FAULTY, LOOPBACK
from te_dispatch_faulty.catalogue import FAULTS
from te_dispatch_torch.implementations import IMPLEMENTATIONS

_TORCH = {one.name: one for one in IMPLEMENTATIONS}
_SWAPPING = threading.RLock()


class Call:
    """One call of an operator.

    Attributes:
        arguments: by name, defaults filled in.
        name, format: of the implementation that was called, for what it saves.
    """

    def __init__(self, base: str, name: str, saved_format: str, arguments: Mapping[str, Any]) -> None:
        self._sound = import_target(_TORCH[base].target)
        self.arguments = arguments
        self.name = name
        self.format = saved_format

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def sound(self, **changes: Any) -> Any:
        """What the torch backend makes of these arguments, or of changed ones."""
        return self.delivered(self._sound(**{**self.arguments, **changes}))

    def delivered(self, result: Any) -> Any:
        """A result in memory from the allocator, strides and shared storages kept; arguments stay what they are."""
        given = {t.untyped_storage().data_ptr() for _, t in tensors(dict(self.arguments)) if t.numel()}
        made: dict[int, torch.Tensor] = {}

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if not tensor.numel():
                return alloc.empty("out", tuple(tensor.shape), tensor.dtype, tensor.device)
            if storage.data_ptr() in given:
                return tensor
            if storage.data_ptr() not in made:
                size = storage.nbytes() // tensor.element_size()
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, (size,), (1,))
                made[storage.data_ptr()] = alloc.empty("out", (size,), tensor.dtype, tensor.device).copy_(whole)
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


def _loopback(call: Call) -> Any:
    return call.sound()


def _behaviour(kind: str, name: str) -> Callable[[Call], Any]:
    if kind == "loopback":
        return _loopback
    if kind == "faulty":
        module = next(fault.module for fault in FAULTS if fault.name == name)
        found: Callable[[Call], Any] = getattr(importlib.import_module(f"te_dispatch_faulty.{module}"), name)
        return found
    partner = next(p for fault in FAULTS for p in fault.partners if p.name == name)
    if partner.module is None:
        return _loopback
    found = getattr(importlib.import_module(f"te_dispatch_faulty.{partner.module}"), name)
    return found


def _base(kind: str, name: str) -> str:
    if kind == "loopback":
        return name
    faults = {fault.name: fault.base for fault in FAULTS}
    partners = {partner.name: partner.base for fault in FAULTS for partner in fault.partners}
    return (faults if kind == "faulty" else partners)[name]


def __getattr__(target: str) -> Any:
    kind, separator, name = target.partition("__")
    if kind not in ("loopback", "faulty", "partner") or not separator:
        raise AttributeError(f"module {__name__!r} has no attribute {target!r}")
    manifest = LOOPBACK if kind == "loopback" else FAULTY
    entry = next(one for one in manifest.implementations if one.name == name)
    signature = OPERATORS[entry.operator].signature
    behave, base = _behaviour(kind, name), _base(kind, name)

    def implementation(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        return behave(Call(base, f"{manifest.name}.{name}", entry.saved_format, bound.arguments))

    implementation.__signature__ = inspect.Signature(list(signature.parameters.values()))  # type: ignore[attr-defined]
    implementation.__name__ = name
    return implementation
