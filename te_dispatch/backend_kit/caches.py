# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Caches of what host code works out once for each kind of call, all of them bounded.

A function that is `cached` answers from its arguments alone, which are hashable and hold no tensor. Whoever changes
what such a function reads besides (a tuned choice, what a device stands for) calls `clear`.

Where the arguments are not all that makes a kind of call, `BoundedDict` is a dict with a bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from te_dispatch.core.bounded import BoundedDict as BoundedDict

Function = TypeVar("Function", bound=Callable[..., Any])

#: Kinds of calls that a cache keeps unless it says otherwise: a model makes some tens.
CAPACITY = 512

_caches: dict[str, Any] = {}


class CacheStatistics(NamedTuple):
    """Of one cache: calls that it answered, calls that it did not, what it holds and may hold."""

    hits: int
    misses: int
    size: int
    capacity: int


def cached(capacity: int = CAPACITY) -> Callable[[Function], Function]:
    """Decorator of a function of hashable arguments, given by position, that keeps its answers, and drops the one that
    was asked for least recently.

    Equal arguments of different classes, such as 1 and True, are one kind of call.

    Args:
        capacity: how many answers it keeps.
    """

    def wrap(function: Function) -> Function:
        wrapper = functools.lru_cache(capacity)(function)
        _caches[f"{function.__module__}.{function.__qualname__}"] = wrapper
        return wrapper  # type: ignore[return-value]

    return wrap


def clear(package: str = "") -> None:
    """Forget every answer, or those of the modules of one package."""
    for name, cache in _caches.items():
        if name.startswith(package):
            cache.cache_clear()


def statistics() -> dict[str, CacheStatistics]:
    """Of every cache, by the name of its function."""
    found = {}
    for name, cache in _caches.items():
        info = cache.cache_info()
        found[name] = CacheStatistics(info.hits, info.misses, info.currsize, info.maxsize)
    return found
