# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tables of lists of tensors that stay in device memory, because an optimizer makes the same step again and again.

What a table holds is a function of the tensors' addresses, sizes and dtypes, and all of these are compared in every
call: tensors that were moved, resized, freed or exchanged are told by that, whichever objects they are. Where only
addresses differ, as those of gradients do that are made anew, the lists that moved are written anew.

A table belongs to one thread and one stream, on which it is written before it is read. While a graph is captured, or
where another allocator is in force, nothing is kept: what a graph reads is written in the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.backend_kit.device import is_capturing
from te_dispatch.ops import alloc
from te_dispatch.ops.checks.guards import PLAIN, guard_for
from te_dispatch_triton import launch
from te_dispatch_triton.training_tables import Layout, Table, Tensors, low_bits, write

#: Kinds of lists that one operator keeps tables of, and tables of a kind: a model and its like, and the addresses that
#: their gradients come back at.
_KINDS, _SETS = 64, 4
#: The index of the first device whose tables are kept; the host's is -1.
_LEAST = 0
_address = torch.Tensor.data_ptr
_capturing = is_capturing


class Kept:
    """Tables that are in device memory, and the addresses that they hold, list by list."""

    __slots__ = ("addresses", "tables", "columns", "low")

    def __init__(self, addresses: list[int], layout: Layout) -> None:
        self.addresses = addresses
        self.columns = _columns(addresses, layout)
        self.low = [*map(low_bits, self.columns)]
        self.tables = layout.tables(self.columns, lasting)

    def move(self, addresses: list[int], layout: Layout) -> None:
        """Hold other addresses."""
        self.addresses = []  # those of nothing, should a launch fail
        for number, column in enumerate(_columns(addresses, layout)):
            if column != self.columns[number]:
                layout.rewrite(self.tables, number, column)
                self.columns[number], self.low[number] = column, low_bits(column)
        for table in self.tables:
            table.aligned = not any(self.low)
        self.addresses = addresses


def _columns(addresses: list[int], layout: Layout) -> list[list[int]]:
    """Addresses list by list; those of a list that is empty are 0."""
    n = layout.length
    found = [addresses[i : i + n] for i in range(0, len(addresses), n)]
    return found + [[0] * n] * (layout.lists - len(found))


class Known:
    """What is kept of lists that look alike.

    Attributes:
        guard: of the metadata of those tensors.
        layout: of their tables.
        ranges: `layout.ranges` in device memory once `starts` was called.
    """

    __slots__ = ("guard", "layout", "ranges", "_sets")

    def __init__(self, tensors: Tensors, layout: Layout) -> None:
        self.guard = guard_for(tensors, [True] * len(tensors))
        self.layout = layout
        self.ranges: torch.Tensor | None = None
        self._sets: list[Kept] = []

    def tables(self, tensors: Tensors) -> list[Table]:
        """Tables of tensors that look like those."""
        addresses = [*map(_address, tensors)]
        sets = self._sets
        for place, kept in enumerate(sets):
            if kept.addresses == addresses:
                if place + 1 < len(sets):  # the last is the last used
                    sets.append(sets.pop(place))
                return kept.tables
        if len(sets) < _SETS:
            kept = Kept(addresses, self.layout)
        else:
            kept = sets.pop(0)
            kept.move(addresses, self.layout)
        sets.append(kept)
        return kept.tables

    def starts(self) -> torch.Tensor:
        if self.ranges is None:
            ranges = self.layout.ranges
            made = lasting(len(ranges), self.layout.device)
            write(ranges, made)
            self.ranges = made
        return self.ranges


class Tables:
    """The tables of one operator. Lists are given as they came: the last one may be None."""

    __slots__ = ("_kinds",)

    def __init__(self) -> None:
        self._kinds: BoundedDict[tuple[Any, ...], list[Known]] = BoundedDict(_KINDS)

    def find(self, lists: Sequence[Any]) -> tuple[Known, list[torch.Tensor]] | None:
        """What is known of lists that look like ones that were kept, and all of their tensors; such lists need no
        checks. None where there are none, or nothing may be kept."""
        try:
            tensors = [*chain.from_iterable(filter(None, lists))]
            for known in self._kinds.get(_key_of(lists, tensors), ()):  # type: ignore[arg-type]  # None is no key
                if known.guard(*tensors):
                    return known, tensors
        except Exception:  # nothing known, or something that was not foreseen: checks shall say what
            pass
        return None

    def keep(self, lists: Sequence[Any], layout: Layout) -> tuple[Known, list[torch.Tensor]] | None:
        """The same of lists of dense tensors that passed the operator's checks, known from now on."""
        tensors: list[Any] = [*chain.from_iterable(filter(None, lists))]
        if not layout.parts or not PLAIN.issuperset(map(type, tensors)):
            return None
        key = _key_of(lists, tensors)
        if key is None:
            return None
        known = Known(tensors, layout)
        self._kinds[key] = [known, *self._kinds.get(key, ())[: _SETS - 1]]
        return known, tensors


def _key_of(lists: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...] | None:
    """What is kept of lists is looked for under it: `place_of` all their tensors, and each list's class and length."""
    place = place_of(tensors)
    return None if place is None else (place, *[(x.__class__, 0 if x is None else len(x)) for x in lists])


def place_of(tensors: Sequence[torch.Tensor]) -> tuple[int, int, int] | None:
    """Thread, device and stream that what is kept belongs to; None where nothing may be kept now."""
    index = tensors[0].get_device()
    if index < _LEAST or alloc.replaced() or launch.recorded() or _capturing():
        return None
    return threading.get_ident(), index, launch._raw_stream(index)


def lasting(count: int, device: torch.device) -> torch.Tensor:
    """Memory for so many words. Not of the allocator that results come from, because it outlives the call."""
    return torch.empty(count, dtype=torch.int64, device=device)
