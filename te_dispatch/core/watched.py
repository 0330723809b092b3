# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The environment variables that Transformer Engine reads again whenever it chooses attention.

Programs set them after the first call, as Megatron does before it builds a model. All other variables are read once,
and again where there are more or fewer than there were: one that is new may be an ``NVTE_*`` to warn of.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from te_dispatch.core.environment import (
    ATTENTION_SWITCHES,
    FUSED_BACKEND,
    LIBRARY_SWITCHES,
    NONDETERMINISTIC,
    PACKAGE_SWITCHES,
)

if TYPE_CHECKING:
    from te_dispatch.core.manager import OpManager

NAMES = (*ATTENTION_SWITCHES, *PACKAGE_SWITCHES, *LIBRARY_SWITCHES, FUSED_BACKEND, NONDETERMINISTIC)


def values() -> tuple[Any, ...]:
    """How many variables there are and what these are set to, in a form that is good for comparisons alone.

    os.environ's own table, where CPython has one on this system, gives it in a tenth of the time of `os.environ.get`,
    and every call of attention asks.
    """
    if os.environ is not _environ or _table is None:
        return len(os.environ), *(os.environ.get(name) for name in NAMES)
    get = _table.get
    return (
        len(_table), get(_FLASH), get(_FUSED), get(_UNFUSED), get(_V2), get(_V3), get(_V4), get(_CK),
        get(_AOTRITON), get(_BACKEND), get(_NONDETERMINISTIC),
    )  # fmt: skip


def reload_changed(manager: OpManager) -> None:
    """`OpManager.reload_environment`, where `values` has changed since the environment was read.

    Raises:
        PolicyError: a value that cannot be read; at every call, until it is corrected.
    """
    known = manager.watched
    if known is not None and known != values():
        manager.reload_environment()


_environ = os.environ
_table: dict[Any, Any] | None = getattr(os.environ, "_data", None)
if not isinstance(_table, dict) or not hasattr(os.environ, "encodekey"):
    _table = None
_FLASH, _FUSED, _UNFUSED, _V2, _V3, _V4, _CK, _AOTRITON, _BACKEND, _NONDETERMINISTIC = (
    NAMES if _table is None else [os.environ.encodekey(name) for name in NAMES]
)
