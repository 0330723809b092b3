# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls from the kit's spaces with uninitialized arguments, for backends that compile kernels for absent chips.

`calls` makes the calls. `run` runs one with the implementation that dispatch would choose on a described device, while
the backend records its launches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from te_dispatch.conformance import arranging
from te_dispatch.conformance.arranging import Arranged
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.maker import DTYPES, Sketch
from te_dispatch.conformance.space import Arguments, Space, find
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.conformance.transfer import tensors
from te_dispatch.core.devices import describe_device
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.operator import OPERATORS, Operator
from te_dispatch.core.policy import Policy
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer

_HOST = torch.device("cpu")
#: Axes that a space's functions read and that it does not have.
_FREE = frozenset({"dims"})


class NotServed(Exception):
    """No implementation of a backend serves a call; says why each does not."""


class Region(NamedTuple):
    """Combinations of values of some axes of a space; the others have their first value.

    Attributes:
        space: ``operator.space``, as in the ids of cases.
        axes: axis -> values, which need not be the kit's: sizes are those of layers.
        sliced: whether operands are slices of wider tensors.
    """

    space: str
    axes: Mapping[str, tuple[str, ...]]
    sliced: bool = False


class Call(NamedTuple):
    """A call of an operator.

    Attributes:
        name: of its case.
        operator: of it.
        arguments: uninitialized tensors on the CPU, and options. A backward's lack what its forward saves.
        forward: the forward's arguments, for a backward that reads what its forward saves; else None.
    """

    name: str
    operator: Operator
    arguments: Arguments
    forward: Arguments | None


def region(space: str, **axes: str) -> Region:
    """A `Region`; values of an axis are separated by spaces."""
    return Region(space, {name: tuple(values.split()) for name, values in axes.items()})


def calls(regions: Iterable[Region]) -> Iterator[Call]:
    """Make the calls of every region, one at a time, with tensors on the CPU.

    Raises:
        ValueError: a space, an axis or a combination of values that does not exist.
    """
    for one in regions:
        operator, _, name = one.space.partition(".")
        space = find(operator, name)
        for chosen in itertools.product(*one.axes.values()):
            yield _call(space, dict(zip(one.axes, chosen)), one.sliced)


def _call(space: Space, chosen: Mapping[str, str], sliced: bool) -> Call:
    unknown = set(chosen) - {axis.name for axis in space.axes} - _FREE
    if unknown:
        raise ValueError(f"{space.id} has no axis {sorted(unknown)[0]!r}")
    values = {axis.name: axis.values[0] for axis in space.axes} | dict(chosen)
    if not space.valid(values):
        raise ValueError(f"{space.id} has no case with {chosen}")
    case = Case.of(space.operator, space.name, values)
    arguments = space.make(values, _Blank(case, MANAGER))
    if sliced:
        arguments = Arranged(arguments, OPERATORS[space.operator].memory, arranging.sliced).arguments
    shown = ",".join(f"{name}={value}" for name, value in chosen.items())
    forward = None if space.forward is None else space.forward(arguments)
    return Call(f"{space.id}[{shown}]", OPERATORS[space.operator], arguments, forward)


def run(call: Call, backend: str, device: str) -> None:
    """Run a call with the implementation of a backend that dispatch would choose on a device. Run the forward before a
    backward that needs it.

    Args:
        backend: its name.
        device: ``vendor:arch``, as `te-dispatch explain --device` takes it.

    Raises:
        NotServed: there is none.
    """
    facts = describe_device(MANAGER.snapshot, device)
    arguments, operator = call.arguments, call.operator
    if call.forward is not None:
        assert operator.companion is not None
        forward = OPERATORS[operator.companion]
        made = _chosen(forward, call.forward, backend, facts, call.name).call(call.forward)
        arguments = {**arguments, **{name: getattr(made, name) for name in ("out", "lse", "saved")}}
    _chosen(operator, arguments, backend, facts, call.name).call(arguments)


def _chosen(operator: Operator, arguments: Arguments, backend: str, device: DeviceFacts, name: str) -> Subject:
    known = {one.id: one for one in subjects(MANAGER, operator, _HOST, backend)}
    if not known:
        raise NotServed(f"{name}: {backend} has no implementation of it")
    facts = next(iter(known.values())).facts(arguments)
    decision = resolve(operator, facts, device, Policy(), MANAGER.snapshot)
    for accepted in decision.accepted:
        if accepted.id in known:
            return known[accepted.id]
    reasons = "; ".join(f"{one.id}: {one.reason}" for one in decision.rejected if one.id in known)
    raise NotServed(f"{name} on {device.label()}: {reasons}")


class _Blank(Sketch):
    """Makes uninitialized arguments. Memory pages are not allocated until they are written: large shapes are cheap."""

    def tensor(self, *shape: int, dtype: str = "fp32", values: str = "normal") -> torch.Tensor:
        return torch.empty(shape, dtype=DTYPES[dtype])

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, low, dtype=dtype)

    def boolean(self, *shape: int, share: float = 0.5) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bool)

    def quantized(self, x: torch.Tensor, quantizer: Quantizer, usage: str = "both") -> Quantized:
        return _real(super().quantized(x, quantizer, usage))

    def laid_out(self, x: Quantized, scale_layout: str) -> Quantized:
        return _real(super().laid_out(x, scale_layout))

    def reference(self, operator: str) -> Any:
        return _Shaped(OPERATORS[operator])


def _real(x: Quantized) -> Quantized:
    """Convert the `FakeQuantized` of a shape function to a `Quantized`, the class that backends check for."""
    return Quantized(**{name: getattr(x, name) for name in Quantized.__slots__})


class _Shaped(NamedTuple):
    """Replaces the reference: its results have the right shapes and dtypes, and are uninitialized."""

    operator: Operator

    def call(self, arguments: Mapping[str, Any]) -> Any:
        made = self.operator.shape(**arguments)
        for _, tensor in tensors(made):
            if tensor.dtype in (torch.int32, torch.int64):
                tensor.zero_()  # row numbers, which must be valid indices
        return made
