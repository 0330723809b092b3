# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The process's OpManager, and its scopes, as functions.

Autograd's device threads and a checkpoint's recomputation see no context variable: an autograd Function keeps
`capture()` from its forward and its backward runs under `reenter` where the two differ.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from te_dispatch.core.bindings import Bindings, Observer
from te_dispatch.core.manager import OpManager
from te_dispatch.core.policy import Policy
from te_dispatch.core.shadow import Comparisons

#: The default manager. `te_dispatch.ops`, which declares the operators, adds them to it and exports their trampolines.
MANAGER = OpManager(label="default")


def capture() -> Bindings:
    """The bindings in force here; compare with ``is``."""
    # `MANAGER.capture()`, spelled out: every module and every backward asks, and a call costs more than the answer.
    return MANAGER.current.get() or MANAGER.bindings


def reenter(bindings: Bindings) -> AbstractContextManager[None]:
    """Run a block under bindings captured elsewhere."""
    return MANAGER.reenter(bindings)


def policy(policy: Policy | str | os.PathLike[str]) -> AbstractContextManager[None]:
    """Scope a policy: a shipped name (``te_dispatch.policy("verify")``), a YAML file, or a `Policy`.

    Raises:
        PolicyError: the policy cannot be used; says where.
    """
    _reload_changed()
    return MANAGER.policy(policy)


def using(*, prefer: Mapping[str, Any] | None = None, **require: Any) -> AbstractContextManager[None]:
    """Scope a choice of implementation.

    ``using(gemm="triton")`` requires it: a call that it cannot serve raises `NoImplementation`.
    ``using(prefer={"gemm": "triton"})`` prefers it. Keys are operators or families, values a backend, an
    implementation id, ``native``, or a list.
    """
    _reload_changed()
    return MANAGER.using(prefer=prefer, **require)


def observe(observer: Observer) -> AbstractContextManager[None]:
    """Call ``observer(operator, accepted, args, result)`` after every operator call in the block."""
    _reload_changed()
    return MANAGER.observe(observer)


def set_policy(policy: Policy | str | os.PathLike[str] | None) -> None:
    """Put a policy in force for the whole process; None goes back to the shipped default."""
    MANAGER.set_policy(policy)


def reload_environment() -> None:
    """Read TE_DISPATCH_POLICY, TE_DISPATCH_PREFER and Transformer Engine's NVTE_* variables again."""
    MANAGER.reload_environment()


def shadow_report(manager: OpManager | None = None) -> list[Comparisons]:
    """What became of every sampled call of this process, one entry per operator, implementation and other backend."""
    return (MANAGER if manager is None else manager).shadows.report()


def _reload_changed() -> None:
    """A scope keeps what it resolved: attention switches that were set before it must act in it."""
    if MANAGER.watched is not None:
        from te_dispatch.core.watched import reload_changed  # loads what reads the environment, which was read already

        reload_changed(MANAGER)
