# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a dispatcher knows: the facts that matter, what each combination of them resolved to, and who declined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from te_dispatch.core.bounded import BoundedDict
from te_dispatch.core.decision import Accepted, Decision
from te_dispatch.core.errors import Declined
from te_dispatch.core.snapshot import Snapshot
from te_dispatch.core.tables import Atom, Table

#: How many distinct calls one binding remembers declines of before it starts over.
_MEMORY = 4096
#: In elements: as coarse as the alignments that kernels ask for.
_ALIGNMENT = 128


class Declines:
    """Which candidates declined one call, and why; decided again from that call's own facts."""

    __slots__ = ("decision", "last", "reasons", "snapshot")

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.last: Declined | None = None
        self.decision: Decision | None = None
        self.snapshot: Snapshot | None = None

    def add(self, candidate: str, declined: Declined) -> None:
        self.reasons[candidate] = str(declined) or "no reason given"
        # Without its frames, which would keep the call's tensors alive.
        self.last = Declined(*declined.args)


class Entry:
    """What one key resolved to."""

    __slots__ = ("bound", "decision", "memory")

    def __init__(self, decision: Decision, bound: Callable[..., Any]) -> None:
        self.decision = decision
        self.bound = bound
        #: full description of a call -> what declined it
        self.memory: BoundedDict[Any, Declines] = BoundedDict(_MEMORY)

    @property
    def chosen(self) -> Accepted:
        return self.decision.accepted[0]

    def remember(self, call: Any, candidate: str, declined: Declined) -> None:
        declines = self.memory.get(call)
        if declines is None:
            declines = self.memory[call] = Declines()
        declines.add(candidate, declined)


class Lookup(NamedTuple):
    """One key of an operator, and all that is known under it.

    Attributes:
        atoms: the facts of the key.
        by_device: whether the device is part of it.
        key: reads it from a call's arguments.
        table: finds what is bound, from the same facts.
        entries: key -> what it resolved to. Grows, under the manager's lock.
        superseded: entries under smaller keys of the past: their calls were made, so a plan tells of them.
    """

    atoms: tuple[Atom, ...]
    by_device: bool
    key: Callable[..., Any]
    table: Table
    entries: dict[Any, Entry]
    superseded: tuple[Entry, ...]

    @property
    def keyed(self) -> bool:
        """Whether anything about a call can change the winner."""
        return bool(self.atoms) or self.by_device

    def insert(self, args: tuple[Any, ...], device: Any, function: Callable[..., Any]) -> None:
        """Let calls with the same key as this one go to `function`."""
        key = self.key(*args)
        self.table.insert(device if self.by_device else None, key[2:] if self.by_device else key, function)


def describe(args: tuple[Any, ...]) -> Any:
    """Everything about a call's arguments that an implementation may decline for, as a hashable value."""
    return tuple(_describe(a) for a in args)


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return (value.__class__, value)  # True, 1 and 1.0 are equal
    if isinstance(value, (list, tuple)):
        return tuple(_describe(v) for v in value)
    if hasattr(value, "stride"):
        # Implementations decline for alignment too, which views differ in by their offset.
        offset = getattr(value, "storage_offset", None)
        aligned = None if offset is None else offset() % _ALIGNMENT
        return (tuple(value.shape), tuple(value.stride()), value.dtype, value.device, aligned)
    if hasattr(value, "row_data"):
        parts = (value.row_data, value.col_data, value.row_scale_inv, value.col_scale_inv)
        return (tuple(value.shape), value.encoding, value.scaling, value.scale_layout, value.dtype, _describe(parts))
    if dataclasses.is_dataclass(value):  # a quantizer
        return (value.__class__, *(_describe(getattr(value, field.name)) for field in dataclasses.fields(value)))
    if hasattr(value, "implementation"):  # what a forward saved
        return (value.implementation, value.format, _describe(value.tensors), _describe(value.options))
    return str(value)
