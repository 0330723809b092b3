# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scoped policies inside a compiled region: entered while tracing, gone from the graph.

The context variable cannot be traced, so a region's scopes live in the mirror alone. What a graph calls outside of it
(`te_dispatch.pytorch.compile.call_outside_graph`) runs under the bindings around the region.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from te_dispatch.core import scopes
from te_dispatch.core.policy import Policy
from te_dispatch.core.scopes import MANAGER
from te_dispatch.pytorch.compile import hook
from te_dispatch.pytorch.compile.dispatch import bindings_in_force
from te_dispatch.pytorch.compile.hook import constant


class _Named:
    """Bindings by name, kept alive for the graphs that know them."""


_bindings = _Named()
_names: dict[str, str] = {}


class _TracedScope:
    """`OpManager.reenter` for bindings named by `_named`."""

    def __init__(self, name: str) -> None:
        self.bindings = getattr(_bindings, name)
        self.previous: Any = None

    def __enter__(self) -> None:
        self.previous = MANAGER.mirror.bindings
        MANAGER.mirror.bindings = self.bindings

    def __exit__(self, *exception: object) -> None:
        MANAGER.mirror.bindings = self.previous


def _using_traced(*, prefer: Mapping[str, Any] | None = None, **require: Any) -> _TracedScope:
    return _TracedScope(_using(bindings_in_force().token, prefer, require))


def _policy_traced(policy: Policy | str | os.PathLike[str]) -> _TracedScope:
    if not isinstance(policy, str):
        raise NotImplementedError("te_dispatch.policy: inside a compiled region policy must be a name or a path (str)")
    return _TracedScope(_policy(bindings_in_force().token, policy))


@constant
def _using(outer: str, prefer: Mapping[str, Any] | None, require: dict[str, Any]) -> str:
    from te_dispatch.core.environment import using_layer

    return _named(outer, using_layer(MANAGER.known(), prefer, **require))


@constant
def _policy(outer: str, policy: str) -> str:
    from te_dispatch.core.policy.file import load_policy

    return _named(outer, load_policy(policy, MANAGER.known()))


def _named(outer: str, layer: Policy) -> str:
    """The name of the bindings that the one with the token `outer` becomes with one more layer."""
    with MANAGER.reenter(MANAGER.tokens[outer]):
        found = MANAGER.scope(layer)
    name = _names.setdefault(found.token, f"scope_{len(_names)}")
    setattr(_bindings, name, found)
    return name


hook.substitute(scopes.using, _using_traced)
hook.substitute(scopes.policy, _policy_traced)
