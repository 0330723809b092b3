# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dicts with a bound, for what is kept of earlier calls."""

from __future__ import annotations

import contextlib
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedDict(dict[Key, Value]):
    """A dict that drops the entry that was set first where a new one would be too many.

    Reading is a plain dict's, and counts nothing. Entries are set by ``[]`` alone: `setdefault` and `update` go past
    the bound. Threads may read and set at once.

    Args:
        capacity: how many entries it holds at most.
    """

    __slots__ = ("capacity",)

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self.capacity and key not in self:
            with contextlib.suppress(RuntimeError, StopIteration):  # another thread set or dropped one meanwhile
                self.pop(next(iter(self)), None)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        # A dict's own would set the entries of a copy before it has a capacity.
        return type(self), (self.capacity,), None, None, iter(self.items())


class RecentDict(Generic[Key, Value]):
    """Values by key, without those that were neither set nor read for the longest time.

    It holds two generations. An entry is set in the younger one, and comes back to it when it is read; where
    the younger is full it becomes the older one, and what was in that is dropped. So an entry in use stays, however
    many others are set. Threads may read and set at once.

    Code that runs at every call reads `recent` first, whose lookups CPython specializes because it is exactly a dict,
    and this object where a key is not there.

    Args:
        capacity: how many entries both hold at most.

    Attributes:
        recent: the younger generation, always the same object. To be read only.
        evicted: how many entries were dropped.
    """

    __slots__ = ("_older", "evicted", "half", "recent")

    def __init__(self, capacity: int) -> None:
        self.half = max(capacity // 2, 1)
        self.evicted = 0
        self.recent: dict[Key, Value] = {}
        self._older: dict[Key, Value] = {}

    @property
    def size(self) -> int:
        """Entries in both generations."""
        return len(self.recent) + len(self._older)

    def get(self, key: Key, default: Value) -> Value:
        """The value of a key in either generation."""
        try:
            return self.recent[key]
        except KeyError:
            pass
        try:
            value = self._older.pop(key)
        except KeyError:
            return default
        self[key] = value
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self._older.pop(key, None)
        if len(self.recent) >= self.half and key not in self.recent:
            self.evicted += len(self._older)
            self._older = dict(self.recent)
            self.recent.clear()
        self.recent[key] = value

    def clear(self) -> None:
        self.recent.clear()
        self._older = {}
