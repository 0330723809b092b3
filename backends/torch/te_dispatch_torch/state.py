# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The bookkeeping of the quantize family: amax, delayed scales, shards of sharded optimizers, FNUZ conversion."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from te_dispatch.numerics.encodings import encoding as find_encoding
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks import quantize as checks
from te_dispatch_torch.encodings import encode_
from te_dispatch_torch.scaling import amax_of, block_amax


def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| as float32 (1,)."""
    checks.compute_amax(x, out)
    amax = amax_of(x)
    return amax if out is None else out.copy_(amax)


def partial_amax(
    x: torch.Tensor, amax: torch.Tensor, *, height: int, width: int, start: int, block: int
) -> torch.Tensor:
    """Max-accumulate the block amaxes of a shard."""
    checks.partial_amax(x, amax, height, width, start, block)
    if x.numel() == 0:
        return amax
    if block == 0:
        return amax.copy_(torch.maximum(amax, amax_of(x).view(1, 1)))
    index = _block_index(x.numel(), start, width, block, amax.shape[1], x.device)
    found = block_amax(x.reshape(-1, 1), 1).view(-1)
    flat = amax.reshape(-1).scatter_reduce(0, index, found, "amax", include_self=True)
    return amax.copy_(flat.view(amax.shape))


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
    """Cast a shard with the blocks' scales."""
    checks.partial_cast(x, out, scale, height, width, start, block, encoding)
    info = find_encoding(encoding)
    flat = scale.reshape(-1)
    if block:
        flat = flat[_block_index(x.numel(), start, width, block, scale.shape[1], x.device)]
    return out.copy_(encode_(x * flat, encoding, info.max, info.negative_zero))


def _block_index(count: int, start: int, width: int, block: int, per_row: int, device: torch.device) -> torch.Tensor:
    element = torch.arange(start, start + count, device=device)
    return (element // width) // block * per_row + (element % width) // block


def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> None:
    """End-of-step update of delayed scaling, in place, without reading anything back."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    for i, (history, scale, maxima) in enumerate(zip(histories, scales, max_values, strict=True)):
        _update(history, scale, maxima, algorithm, margin, None if amaxes is None else amaxes[i])


def _update(
    history: torch.Tensor,
    scale: torch.Tensor,
    maxima: Sequence[float],
    algorithm: str,
    margin: int,
    used: torch.Tensor | None,
) -> None:
    recent = history[0]
    amax = block_amax(history, 0).squeeze(0) if algorithm == "max" else recent
    cast_seen = recent != 0
    new_scale = _row(maxima, margin, scale) / amax
    new_scale = new_scale.clamp_max(torch.finfo(torch.float32).max)
    usable = cast_seen & (amax > 0) & (amax < float("inf"))
    scale.copy_(torch.where(usable, new_scale, scale))
    if used is not None:
        used.copy_(torch.where(usable, amax, used))
    rolled = torch.cat((torch.zeros_like(history[:1]), history[2:], history[:1]))[: history.shape[0]]
    history.copy_(torch.where(cast_seen, rolled, history))


def _row(maxima: Sequence[float], margin: int, like: torch.Tensor) -> torch.Tensor:
    """RN32(maxima * 2^-margin), filled on the device: a host tensor would be copied, which no CUDA graph captures."""
    runs = [
        torch.full((len(list(run)),), value * 2.0**-margin, dtype=torch.float32, device=like.device)
        for value, run in itertools.groupby(maxima)
    ]
    return torch.cat(runs) if runs else torch.empty_like(like)


def convert_encoding(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """Rewrite codes between the OCP and FNUZ forms, saturating."""
    checks.convert_encoding(x, encoding, overflow, count)
    source, target = x.encoding, encoding
    to_fnuz = encoding.endswith("fnuz")
    data = [
        None if d is None else (_to_fnuz(d, source) if to_fnuz else _to_ocp(d, target))
        for d in (x.row_data, x.col_data)
    ]
    if count is not None and not to_fnuz:
        counted = x.row_data if x.row_data is not None else x.col_data
        if counted is not None:
            count.add_(_beyond(counted, target).sum().view(1))
    factor = 2.0 if to_fnuz else 0.5
    row_scale = None if x.row_scale_inv is None else x.row_scale_inv * factor
    shared = x.col_scale_inv is x.row_scale_inv
    col_scale = row_scale if shared or x.col_scale_inv is None else x.col_scale_inv * factor
    return Quantized(
        data[0], data[1], row_scale, None if x.col_scale_inv is None else col_scale, encoding, x.scaling,
        x.scale_layout, x.shape, x.dtype, x.device,
    )  # fmt: skip


def convert_encoding_checked(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """`convert_encoding` that also serves ``error``, by reading back whether any code is beyond the target's range."""
    checks.convert_encoding(x, encoding, overflow, count)
    source, target = x.encoding, encoding
    counted = x.row_data if x.row_data is not None else x.col_data
    if overflow == "error" and counted is not None and not encoding.endswith("fnuz"):
        beyond = int(_beyond(counted, target).sum())
        if beyond:
            raise ValueError(f"x has {beyond} codes in {source} that {target} cannot represent (overflow='error')")
    return convert_encoding(x, encoding=encoding, overflow="saturate", count=count)


def _to_fnuz(codes: torch.Tensor, source: str) -> torch.Tensor:
    first_special = 0x7F if source == "e4m3fn" else 0x7C  # NaN; in e5m2 Inf too
    special = (codes & 0x7F) >= first_special
    return torch.where(special, 0x80, torch.where(codes == 0x80, 0, codes)).to(torch.uint8)


def _beyond(codes: torch.Tensor, target: str) -> torch.Tensor:
    return ((codes & 0x7F) > find_encoding(target).max_code) & (codes != 0x80)


def _to_ocp(codes: torch.Tensor, target: str) -> torch.Tensor:
    largest = find_encoding(target).max_code
    finite = torch.where(_beyond(codes, target), (codes & 0x80) | largest, codes)
    return torch.where(codes == 0x80, find_encoding(target).nan_code, finite).to(torch.uint8)
