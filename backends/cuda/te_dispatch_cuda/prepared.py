# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Native calls that are prepared once for each kind of call and then take tensors alone (csrc/common/prepared.h).

`launch` is a prepared call as a planned host function returns it (`te_dispatch.backend_kit.call_plans`), which is kept
under the signature of the operator's call.

`prepare` lists the native function's arguments as they would be passed, `Given(i)` for the address of the i-th tensor
of a call, `Made(...)` for that of an output or workspace, and what the operator returns. The call then reads the
current stream and allocates its outputs anew every time, through `te_dispatch.ops.alloc`. Nothing else of a call is
kept, so nothing of it goes stale: what the signature does not say must not be among the arguments.

What is `Made` as "workspace" lies in memory that the calls on a stream share, up to 8 MiB, and that is kept. It is
allocated anew for a call that is captured into a graph, and where another allocator is in force or another device
current.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.call_plans import Planned
from te_dispatch.backend_kit.memory import contiguous_strides
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch_cuda import memory
from te_dispatch_cuda.native import load

_native = load()

#: release_workspaces() -> bytes: frees the workspace that is kept for all streams. Calls make it again.
release_workspaces: Any = _native.release_workspaces
#: What an address's place holds until a call.
_EMPTY = 0


class Given(NamedTuple):
    """The `index`-th tensor that a call gets; None, address 0, where it is absent."""

    index: int


class Made:
    """A tensor that every call allocates, as `te_dispatch.ops.alloc.empty` takes it; each is of its own. A "workspace"
    is no result, and may lie in what is kept.
    """

    __slots__ = ("dtype", "role", "shape")

    def __init__(self, role: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.role, self.shape, self.dtype = role, tuple(shape), dtype


class Record(NamedTuple):
    """A `Quantized` that a call returns: tensors are `Made`, `Given` or None."""

    row_data: Any
    col_data: Any
    row_scale_inv: Any
    col_scale_inv: Any
    encoding: str
    scaling: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    global_scale_inv: Any = None
    scale_layout: str = CANONICAL_SCALES


def launch(
    name: str,
    device: torch.device,
    arguments: Sequence[Any],
    result: Any,
    tensors: Sequence[torch.Tensor | None],
) -> Planned:
    """The native call `name` as a plan (`te_dispatch.backend_kit.call_plans`).

    Args:
        arguments, result: as `prepare` takes them.
        tensors: what each `Given` means, by index.
    """

    def placed(places: Sequence[int | None], count: int) -> Any:
        return prepare(name, device, arguments, result, tensors=count, places=places)

    return Planned(placed, tuple(tensors))


def prepare(
    name: str,
    device: torch.device,
    arguments: Sequence[Any],
    result: Any,
    *,
    tensors: int,
    aligned: Sequence[tuple[Any, int]] = (),
    keep: Any = None,
    places: Sequence[int | None] | None = None,
) -> Any:
    """A call of the native function `name`: takes so many `tensors`, each a tensor or None, and returns `result`.

    Args:
        arguments: what follows device and stream: numbers, `Given` and `Made`.
        result: `Made`, `Given`, `Record`, a NamedTuple of such, or a constant.
        aligned: arguments, and the powers of two that their addresses have to be multiples of; where one is not, the
            call does nothing and returns NotImplemented.
        keep: lives as long as the call.
        places: of each index of a `Given`, which of the `tensors` it means, None for an absent one. By default itself.
    """
    if places is not None:
        arguments = [_moved(x, places) for x in arguments]
        aligned = [(_moved(x, places), multiple) for x, multiple in aligned]
    given: list[list[int]] = [[] for _ in range(tensors)]
    made: list[Made] = []
    written: list[list[int]] = []
    constants: list[Any] = [device.index, _EMPTY]
    checked: list[tuple[int, int]] = []
    for position, argument in enumerate(arguments, 2):
        checked += [(position, multiple) for x, multiple in aligned if _same(argument, x)]
        if isinstance(argument, Given):
            given[argument.index].append(position)
            argument = _EMPTY
        elif isinstance(argument, Made):
            index = _place(made, argument)
            if index == len(written):
                written.append([])
            written[index].append(position)
            argument = _EMPTY
        constants.append(argument)
    spec = _result(result, made, places)
    written += [[] for _ in range(len(made) - len(written))]  # what is returned without being written: of no elements
    outputs = [
        (x.role, x.shape, contiguous_strides(x.shape), x.dtype, device, at) for x, at in zip(made, written, strict=True)
    ]
    around = (memory.stream_of, memory.direct, memory.empty)
    return _native.prepare(name, around, constants, given, outputs, spec, checked, keep)


def _same(argument: Any, other: Any) -> bool:
    """Whether two arguments are one output, or one tensor that is given."""
    return argument is other or (isinstance(other, Given) and isinstance(argument, Given) and argument == other)


def _moved(argument: Any, places: Sequence[int | None]) -> Any:
    if not isinstance(argument, Given):
        return argument
    place = places[argument.index]
    return _EMPTY if place is None else Given(place)


def _place(made: list[Made], x: Made) -> int:
    for index, known in enumerate(made):
        if known is x:
            return index
    made.append(x)
    return len(made) - 1


def _result(result: Any, made: list[Made], places: Sequence[int | None] | None) -> tuple[Any, ...]:
    """What csrc/common/prepared.cpp reads as a result."""
    if isinstance(result, Made):
        return "made", _place(made, result)
    if isinstance(result, Given):
        place = result.index if places is None else places[result.index]
        return ("constant", None) if place is None else ("given", place)
    if isinstance(result, Record):
        parts = tuple(_result(part, made, places) for part in result)
        return "record", Quantized, parts, Record._fields
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return "tuple", type(result), tuple(_result(part, made, places) for part in result)
    return "constant", result
