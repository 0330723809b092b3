# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The arguments of `make_graphed_callables` that say how to capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from te_dispatch.common.recipe import Recipe
from te_dispatch.pytorch.arguments import reject_unsupported

NAME = "make_graphed_callables"

#: Deprecated arguments, and what they are called now.
RENAMED = {
    "fp8_enabled": "enabled",
    "fp8_calibrating": "calibrating",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
}

_UNSUPPORTED = {"_reuse_graph_input_output_buffers": False, "capture_time_hooks": None}


@dataclass(frozen=True)
class Settings:
    """Attributes:
    enabled: by callable. calibrating, recipe, amax_reduction_group: of `te_dispatch.pytorch.autocast`.
    caches: whether weights are quantized only in the first microbatch.
    warmups: iterations before the capture.
    allow_unused: whether an input may have no gradient.
    retain_graph: of the backward passes.
    clones: whether gradients of parameters are copied out of the graph's memory.
    pool: of memory, None for a new one.
    before, after: called around the warm-up, None for nothing.
    """

    enabled: tuple[bool, ...]
    calibrating: bool
    recipe: Recipe | None
    amax_reduction_group: Any
    caches: bool
    warmups: int
    allow_unused: bool
    retain_graph: bool
    clones: bool
    pool: Any
    before: Callable[[], Any] | None
    after: Callable[[], Any] | None

    def quantizes(self, callable_: int) -> bool:
        """Whether a callable runs in an autocast that quantizes or calibrates."""
        return self.enabled[callable_] or self.calibrating


def resolve_settings(given: Mapping[str, Any], callables: int) -> Settings:
    """Check what `make_graphed_callables` was given, by name, for so many callables.

    Raises:
        NotImplementedError, TypeError, ValueError: an argument that cannot be honoured; the message names it.
    """
    reject_unsupported(NAME, given, _UNSUPPORTED)
    given = _renamed(given)
    warmups = given["num_warmup_iters"]
    if isinstance(warmups, bool) or not isinstance(warmups, int) or warmups < 1:
        raise ValueError(
            f"{NAME}: num_warmup_iters must be an int of at least 1, because operators are resolved and tuned in the "
            f"warm-up, got {warmups!r}"
        )
    for name in ("pre_warmup_hook", "post_warmup_hook"):
        if given[name] is not None and not callable(given[name]):
            raise TypeError(f"{NAME}: {name} must be a function without arguments or None, got {given[name]!r}")
    return Settings(
        enabled=_per_callable(given["enabled"], callables),
        calibrating=bool(given["calibrating"]),
        recipe=given["recipe"],
        amax_reduction_group=given["amax_reduction_group"],
        caches=bool(given["cache_quantized_params"]),
        warmups=warmups,
        allow_unused=bool(given["allow_unused_input"]),
        retain_graph=bool(given["retain_graph_in_backward"]),
        clones=bool(given["clone_param_grads_on_return"]),
        pool=given["pool"],
        before=given["pre_warmup_hook"],
        after=given["post_warmup_hook"],
    )


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments under their present names; one warning for all deprecated ones."""
    found = dict(given)
    used = [old for old in RENAMED if found[old] is not None]
    for old in used:
        new = RENAMED[old]
        if found[new] is not None:
            raise ValueError(f"{NAME}: {old} is the deprecated name of {new}, and both were given: pass {new} only")
        found[new] = found[old]
    if used:
        names = ", ".join(f"{old} is now {RENAMED[old]}" for old in used)
        warnings.warn(f"{NAME}: deprecated arguments: {names}", DeprecationWarning, stacklevel=4)
    return found


def _per_callable(enabled: Any, callables: int) -> tuple[bool, ...]:
    if not isinstance(enabled, tuple):
        return (bool(enabled),) * callables
    if len(enabled) != callables:
        raise ValueError(f"{NAME}: enabled has {len(enabled)} entries for {callables} callables")
    return tuple(map(bool, enabled))
