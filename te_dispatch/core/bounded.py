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
