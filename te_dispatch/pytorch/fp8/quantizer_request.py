# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a factory of Transformer Engine's may return in a quantizer's place; a module here refuses it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from te_dispatch.common.recipe import Format

__all__ = ["DelayedScalingRequest", "QuantizerRequest"]


@dataclass(frozen=True)
class QuantizerRequest:
    """A factory's wish for a quantizer whose state the modules keep. Not supported yet by `CustomRecipe`."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """A factory's wish for delayed scaling. Not supported yet by `CustomRecipe`: a module that gets one raises.

    Attributes:
        fp8_format, margin, amax_history_len, amax_compute_algo, scaling_factor_compute_algo, reduce_amax: as in
            `te_dispatch.common.recipe.DelayedScaling`.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., object] = "max"
    scaling_factor_compute_algo: Callable[..., object] | None = None
    reduce_amax: bool = True
