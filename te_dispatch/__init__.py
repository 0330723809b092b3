# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer-Engine-style training on any accelerator: one model file, kernels chosen at run time.

``import te_dispatch`` loads no torch. The drop-in modules are `te_dispatch.pytorch`, the operators `te_dispatch.ops`.

Start with docs/architecture.md, which has the rooms and what each may import. This module may import the rooms when a
name of theirs is asked for, and says where the runtime finds what rooms above it do for it (`te_dispatch.core.hooks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from te_dispatch.core.hooks import HOOKS as _HOOKS

if TYPE_CHECKING:
    from te_dispatch.compat.alias import as_transformer_engine
    from te_dispatch.core.errors import (
        BindError,
        CaptureError,
        Declined,
        DispatchError,
        NoImplementation,
        PlanError,
        PolicyError,
        ShadowMismatch,
    )
    from te_dispatch.core.plan import Plan, freeze
    from te_dispatch.core.scopes import observe, policy, reload_environment, set_policy, shadow_report, using

__version__ = "0.1.0"

_HOMES = {
    "as_transformer_engine": "te_dispatch.compat.alias",
    **dict.fromkeys(
        ("observe", "policy", "reload_environment", "set_policy", "shadow_report", "using"), "te_dispatch.core.scopes"
    ),
    **dict.fromkeys(("Plan", "freeze"), "te_dispatch.core.plan"),
    **dict.fromkeys(
        (
            "BindError",
            "CaptureError",
            "Declined",
            "DispatchError",
            "NoImplementation",
            "PlanError",
            "PolicyError",
            "ShadowMismatch",
        ),
        "te_dispatch.core.errors",
    ),
}

#: Homes whose names act on the operators, which `te_dispatch.ops` declares.
_OF_OPERATORS = frozenset(("te_dispatch.core.plan", "te_dispatch.core.scopes"))

_HOOKS.update(
    traced_call="te_dispatch.pytorch.compile.proxies:call",
    comparison="te_dispatch.conformance.comparing:Comparison",
    declared="te_dispatch.ops.declared:parameters",
)

__all__ = [
    "BindError",
    "CaptureError",
    "Declined",
    "DispatchError",
    "NoImplementation",
    "Plan",
    "PlanError",
    "PolicyError",
    "ShadowMismatch",
    "as_transformer_engine",
    "freeze",
    "observe",
    "policy",
    "reload_environment",
    "set_policy",
    "shadow_report",
    "using",
]


def __getattr__(name: str) -> Any:
    """Load on first use: the bare import stays free of everything but the standard library's lightest parts."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'te_dispatch' has no attribute {name!r}")
    import importlib

    if home in _OF_OPERATORS:
        importlib.import_module("te_dispatch.ops")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
