# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A dict with a bound, for what is kept of earlier calls."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

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


class RecentDict(dict[Key, Value]):
    """A dict that drops the entries that were neither set nor read for the longest time.

    It holds two generations. An entry is set in the younger one, and comes back to it when it is read by ``[]``; where
    the younger is full it becomes the older one, and what was in that is dropped. So reading a recent entry is a plain
    dict's and counts nothing, and an entry in use stays, however many others are set. Other methods than ``[]``, `get`
    for one, see the younger generation alone. Threads may read and set at once.

    Args:
        capacity: how many entries both hold at most.

    Attributes:
        evicted: how many entries were dropped.
    """

    __slots__ = ("_older", "evicted", "half")

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.half = max(capacity // 2, 1)
        self.evicted = 0
        self._older: dict[Key, Value] = {}

    @property
    def size(self) -> int:
        """Entries in both generations."""
        return len(self) + len(self._older)

    def __missing__(self, key: Key) -> Value:
        value = self._older.pop(key)
        self[key] = value
        return value

    def __setitem__(self, key: Key, value: Value) -> None:
        self._older.pop(key, None)
        if len(self) >= self.half and key not in self:
            self.evicted += len(self._older)
            self._older = dict(self)
            super().clear()
        super().__setitem__(key, value)

    def clear(self) -> None:
        super().clear()
        self._older = {}
