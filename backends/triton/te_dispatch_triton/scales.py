# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The end of a step of delayed scaling. Contract: `te_dispatch.ops.update_delayed_scales`."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.ops.checks import quantize as checks
from te_dispatch_triton import configs
from te_dispatch_triton.argument_facts import NUMBER, NUMBER_LISTS, OPERANDS
from te_dispatch_triton.kernels import cast_scales as kernels
from te_dispatch_triton.launch import Config, Grid, Kernel
from te_dispatch_triton.memory import address, dense
from te_dispatch_triton.prepared import prepared
from te_dispatch_triton.targets import target_of

_update = Kernel(kernels.update_scales)
_choices: dict[str, configs.Choice] = {}
#: Entries of a launch: as many as there are, up to one of these.
_SIZES = (2, 8, 32)
_WIDEST = 1 << 31
Entry = tuple[int, int, int, int, int]


@prepared(histories=OPERANDS, scales=OPERANDS, max_values=NUMBER_LISTS, margin=NUMBER, amaxes=OPERANDS)
def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> None:
    """End-of-step update of delayed scaling, in place: one launch for every 32 runs of columns with one maximum."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    aside: list[tuple[torch.Tensor, torch.Tensor]] = []  # (what does not lie dense, its copy that is worked on)
    held = [_lying_dense(xs, aside) for xs in (histories, scales, amaxes or ())]
    for launch in _launches(held, max_values, algorithm, margin):
        _update(*launch)
    for original, copy in aside:
        original.copy_(copy)


def _repeated_update(
    varying: tuple[str, ...],
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    algorithm: str,
    margin: int,
    amaxes: Sequence[torch.Tensor] | None,
) -> Callable[[], None] | None:
    """The update of these very tensors (`te_dispatch.core.repeating`): looked at once, because they stay. Whether they
    lie where they did is looked at every time."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    held = (*histories, *scales, *(amaxes or ()))
    if varying or not held or not all(map(torch.Tensor.is_contiguous, held)):
        return None
    launches = _launches([histories, scales, amaxes or ()], max_values, algorithm, margin)
    addresses = [*map(torch.Tensor.data_ptr, held)]

    def update() -> None:
        if [*map(torch.Tensor.data_ptr, held)] == addresses:
            for launch in launches:
                _update(*launch)
        else:
            update_delayed_scales(histories, scales, max_values, algorithm=algorithm, margin=margin, amaxes=amaxes)

    return update


update_delayed_scales.prepared = _repeated_update  # type: ignore[attr-defined]


def _launches(
    held: list[Sequence[torch.Tensor]], max_values: Sequence[Sequence[float]], algorithm: str, margin: int
) -> list[tuple[torch.device, Grid, tuple[Any, ...], tuple[Any, ...], Config]]:
    """What `_update` is called with, for tensors that lie dense."""
    entries, widest = _entries(held, max_values, margin)
    device = held[0][0].device
    target = target_of(device)
    choice = _choices.get(target.arch)
    if choice is None:
        choice = _choices[target.arch] = configs.choose("quantize", "update", target)
    how = (algorithm == "most_recent", choice.constants["BR"], choice.constants["BC"])
    across = -(-widest // choice.constants["BC"])
    size = next((size for size in _SIZES if size >= len(entries)), _SIZES[-1])
    launches = []
    for first in range(0, len(entries), size):
        part = entries[first : first + size]
        words = [word for entry in part for word in entry]
        words += part[0] * (size - len(part))
        launches.append((device, (across, len(part), 1), (tuple(words),), (size, *how), choice.config))
    return launches


def _lying_dense(
    tensors: Sequence[torch.Tensor], aside: list[tuple[torch.Tensor, torch.Tensor]]
) -> Sequence[torch.Tensor]:
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return tensors
    copies = [dense(x) for x in tensors]
    aside += [(x, copy) for x, copy in zip(tensors, copies, strict=True) if copy is not x]
    return copies


def _entries(
    held: list[Sequence[torch.Tensor]], max_values: Sequence[Sequence[float]], margin: int
) -> tuple[list[Entry], int]:
    """Entries, of runs that are not empty, and the columns of the widest run."""
    histories, scales, amaxes = held
    entries: list[Entry] = []
    widest = 0
    for i, history in enumerate(histories):
        length, columns = history.shape
        if length >= _WIDEST or columns >= _WIDEST:
            raise Declined(f"histories[{i}]: {length}x{columns}, at most 2^31 - 1 either way")
        base, scale = address(history), address(scales[i])
        amax = address(amaxes[i]) if amaxes else scale
        for first, count, maximum in _runs(tuple(max_values[i])):
            offset = 4 * first
            entries.append((
                base + offset, scale + offset, amax + offset, length << 32 | columns,
                _numerator(maximum, margin) << 32 | 1 << 31 | count,
            ))  # fmt: skip
            if count > widest:
                widest = count
    return entries, widest


@functools.lru_cache(256)
def _runs(values: tuple[float, ...]) -> list[tuple[int, int, float]]:
    """(first, count, value) of equal neighbours."""
    runs: list[tuple[int, int, float]] = []
    first = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[first]:
            runs.append((first, i - first, values[first]))
            first = i
    return runs


@functools.lru_cache(256)
def _numerator(maximum: float, margin: int) -> int:
    """The fp32 bits of maximum * 2^-margin, as a signed integer."""
    try:
        packed = struct.pack("<f", math.ldexp(float(maximum), -margin))
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, maximum))
    bits: int = struct.unpack("<i", packed)[0]
    return bits
