# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Contexts in which modules would be made with quantized parameters, which are not there yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from te_dispatch.common.recipe import Recipe
from te_dispatch.pytorch.arguments import reject_unsupported

__all__ = ["fp8_model_init", "quantized_model_init"]


@contextlib.contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Context manager: modules made inside have parameters of `params_dtype`, as outside.

    Programs enter it whatever their settings are, with ``enabled=False`` where parameters stay in high precision. That
    is the only value so far.

    Args:
        enabled: whether parameters are quantized.
        recipe: how. Only matters with `enabled`.
        preserve_high_precision_init_val: keep the values from before the cast. Only matters with `enabled`.

    Raises:
        NotImplementedError: with `enabled`, on entering.
    """
    reject_unsupported("quantized_model_init", {"enabled": bool(enabled)}, {"enabled": False})
    yield


@contextlib.contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """`quantized_model_init` under its earlier name."""
    with quantized_model_init(enabled, recipe, preserve_high_precision_init_val):
        yield
