# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bounded caches for host code: of functions of hashable arguments, and a dict.

The result of a `cached` function depends on its arguments, which hold no tensor. Code that changes anything else that
the result depends on (a tuned configuration, the target of a device) calls `clear`.

`BoundedDict` is for caches whose key is not a function's arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from te_dispatch.core.bounded import BoundedDict as BoundedDict

Function = TypeVar("Function", bound=Callable[..., Any])

#: Default capacity. A model makes some tens of different calls.
CAPACITY = 512


class Cache(Protocol):
    """What `clear` and `statistics` ask of a cache."""

    def clear(self) -> None: ...

    def statistics(self) -> CacheStatistics: ...


class CacheStatistics(NamedTuple):
    """Of one cache: hits, misses, the number of entries, its bound, and how many entries were dropped for others."""

    hits: int
    misses: int
    size: int
    capacity: int
    evictions: int


_caches: dict[str, Cache] = {}


def register(name: str, cache: Cache) -> None:
    """Have `clear` and `statistics` know a cache by the name of its function: module, dot, qualified name."""
    _caches[name] = cache


class _OfFunction:
    """functools' cache of a function."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.clear = wrapper.cache_clear

    def statistics(self) -> CacheStatistics:
        hits, misses, capacity, size = self._wrapper.cache_info()
        # Counted since the last `clear`, as hits and misses are.
        return CacheStatistics(hits, misses, size, capacity, misses - size)


def cached(capacity: int = CAPACITY) -> Callable[[Function], Function]:
    """Decorator that caches the results of a function of hashable positional arguments, and evicts the least recently
    used.

    Equal arguments of different classes, such as 1 and True, share an entry.

    Args:
        capacity: how many results are cached.
    """

    def wrap(function: Function) -> Function:
        wrapper = functools.lru_cache(capacity)(function)
        register(f"{function.__module__}.{function.__qualname__}", _OfFunction(wrapper))
        return wrapper  # type: ignore[return-value]

    return wrap


def clear(package: str = "") -> None:
    """Empty every cache, or those of one package's modules, such as ``acme.``."""
    for name, cache in _caches.items():
        if name.startswith(package):
            cache.clear()


def statistics() -> dict[str, CacheStatistics]:
    """Of every cache, by the name of its function."""
    return {name: cache.statistics() for name, cache in _caches.items()}
