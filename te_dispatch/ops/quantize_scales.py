# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The bookkeeping of scales: amaxes, casts of shards that share scales, the update of delayed scales at a step's end.

Part of the quantize family, exported by `te_dispatch.ops.quantize`. An amax ignores NaN and keeps Inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.core.operator import Fact, operator

if TYPE_CHECKING:
    import torch


def _scalar_shape(x: Any, **_: Any) -> torch.Tensor:
    import torch

    return torch.empty((1,), dtype=torch.float32, device=x.device)


@operator(
    family="quantize",
    version=1,
    shape=lambda x, *, out=None: out if out is not None else _scalar_shape(x),
    device="x.device",
    mutates=("out",),
)
def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| as float32 (1,): NaN ignored, Inf kept, 0 for an empty tensor.

    Args:
        x: any shape, float32, bfloat16 or float16.
        out: float32 (1,) to overwrite and return.
    """
    raise NotImplementedError


def _partial_amax_shape(x: Any, amax: torch.Tensor, **_: Any) -> torch.Tensor:
    return amax


@operator(
    family="quantize",
    version=1,
    shape=_partial_amax_shape,
    device="x.device",
    options=("block",),
    sizes={"height": "height", "width": "width", "start": "start"},
    mutates=("amax",),
)
def partial_amax(
    x: torch.Tensor, amax: torch.Tensor, *, height: int, width: int, start: int, block: int
) -> torch.Tensor:
    """Max-accumulate the block amaxes of a shard of a flattened matrix, as sharded optimizers need.

    Args:
        x: (N,), elements ``start .. start + N`` of the row-major (height, width) matrix.
        amax: float32 (ceil(height/block), ceil(width/block)), updated in place; blocks the shard misses keep theirs.
        block: 128 for block_2d; the whole matrix when 0 (then amax is (1, 1)).

    Returns:
        amax.
    """
    raise NotImplementedError


def _partial_cast_shape(x: Any, out: torch.Tensor, scale: Any, **_: Any) -> torch.Tensor:
    return out


@operator(
    family="quantize",
    version=1,
    shape=_partial_cast_shape,
    device="x.device",
    options=("block",),
    dtypes=("encoding",),
    sizes={"height": "height", "width": "width", "start": "start"},
    mutates=("out",),
)
def partial_cast(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    *,
    height: int,
    width: int,
    start: int,
    block: int,
    encoding: str,
) -> torch.Tensor:
    """Cast a shard of a flattened matrix with the blocks' scales.

    Args:
        x: (N,), elements ``start .. start + N`` of the row-major (height, width) matrix.
        out: uint8 (N,), overwritten.
        scale: float32 (ceil(height/block), ceil(width/block)), or (1, 1) when block is 0.
        encoding: target encoding.

    Returns:
        out.
    """
    raise NotImplementedError


def _update_shape(*_: Any, **__: Any) -> None:
    return None


@operator(
    family="quantize",
    version=1,
    shape=_update_shape,
    device="histories[0].device",
    options=("margin",),
    words={"algorithm": ("max", "most_recent")},
    facts=(
        Fact("histories", "len(histories)", "size", "how many histories"),
        Fact("scales", "len(scales)", "size"),
        Fact("max_values", "len(max_values)", "size"),
        Fact("amaxes", "(amaxes is not None)"),
    ),
    mutates=("histories", "scales", "amaxes"),
)
def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> None:
    """End-of-step update of delayed scaling, all histories in as few launches as possible, in place.

    For each tensor (column) of each history: amax = max over the history, NaN ignored (``max``), or row 0
    (``most_recent``); scale = RN32(RN32(max_value * 2^-margin) / amax). An amax of 0, Inf or NaN keeps the old scale;
    an infinite scale becomes the largest float32. Then the history rolls by one (row i takes row i+1, the last takes
    row 0) and row 0 is cleared. A column whose row 0 equals 0 saw no cast: it neither rolls nor rescales.

    Args:
        histories: float32 (length, n_i), at least one; row 0 is what the casts of this step accumulated.
        scales: float32 (n_i,).
        max_values: n_i numbers each: where each tensor's cast saturates.
        algorithm: ``max`` or ``most_recent``.
        margin: power of two the scale backs off by.
        amaxes: float32 (n_i,): receive the amax behind every scale that changes. What crosses between encodings is
            the amax: a scale made for another maximum cannot be rebuilt from its inverse by bits.
    """
    raise NotImplementedError
