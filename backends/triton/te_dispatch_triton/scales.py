# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The end of a step of delayed scaling. Contract: `te_dispatch.ops.update_delayed_scales`."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.backend_kit.call_plans import Planned, launching, planned
from te_dispatch.core.errors import Declined
from te_dispatch.ops.checks import quantize as checks
from te_dispatch_triton import configs
from te_dispatch_triton.kept_tables import lasting, place_of
from te_dispatch_triton.kernels import cast_scales as kernels
from te_dispatch_triton.launch import Config, Grid, Kernel
from te_dispatch_triton.memory import address, dense
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import target_of
from te_dispatch_triton.training_tables import workspace, write

_update, _update_of = Kernel(kernels.update_scales), Kernel(kernels.update_scales_of)
#: Entries that a launch takes by value: as many as there are, up to one of these; and histories whose entries it takes.
_SIZES, _FEW = (2, 8), 2
_WIDEST = 1 << 31
Tensors = Sequence[torch.Tensor]
Maxima = Sequence[Sequence[float]]
#: What a kernel is called with.
Arguments = tuple[torch.device, Grid, tuple[Any, ...], tuple[Any, ...], Config]


class Run(NamedTuple):
    """Neighbouring columns with one maximum: addresses, rows of their history and elements between them, how many
    columns, their numerator's bits."""

    history: int
    scale: int
    amax: int
    rows: int
    stride: int
    columns: int
    numerator: int


def update_delayed_scales(
    histories: Tensors,
    scales: Tensors,
    max_values: Maxima,
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Tensors | None = None,
) -> None:
    """End-of-step update of delayed scaling, in place: one launch, and where there are many histories those that write
    a table of them, which stays for later updates of the same tensors."""
    many = histories.__class__ in (list, tuple) and len(histories) > _FEW
    (_update_there if many else _update_few)(histories, scales, max_values, algorithm, margin, amaxes)


@replayed("update_delayed_scales")
def _update_few(
    histories: Tensors, scales: Tensors, max_values: Maxima, algorithm: str, margin: int, amaxes: Tensors | None
) -> None:
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    aside: list[tuple[torch.Tensor, torch.Tensor]] = []
    held = [_lying_dense(xs, aside) for xs in (histories, scales, amaxes or ())]
    for launch in _launches(held, max_values, algorithm, margin):
        _update(*launch)
    _back(aside)


@planned("update_delayed_scales")
def _update_there(
    histories: Tensors, scales: Tensors, max_values: Maxima, algorithm: str, margin: int, amaxes: Tensors | None
) -> Planned | None:
    """The update with a launch for tensors that lie where these do."""
    checks.update_delayed_scales(histories, scales, max_values, algorithm, margin, amaxes)
    aside: list[tuple[torch.Tensor, torch.Tensor]] = []
    held = [_lying_dense(xs, aside) for xs in (histories, scales, amaxes or ())]
    tensors = [*chain.from_iterable(held)]
    if len(histories) <= _FEW:
        kernel, place, launches = _update, None, _launches(held, max_values, algorithm, margin)
    else:
        place = None if aside else place_of(tensors)
        memory = workspace if place is None else lasting
        kernel, launches = _update_of, _listed(held, max_values, algorithm, margin, memory)
    if aside or (kernel is _update_of and place is None):
        for launch in launches:
            kernel(*launch)
        _back(aside)
        return None
    addresses = [*map(torch.Tensor.data_ptr, tensors)]

    def update(*given: torch.Tensor) -> Any:
        if [*map(torch.Tensor.data_ptr, given)] != addresses or (place is not None and place_of(given) != place):
            return NotImplemented
        for launch in launches:
            kernel(*launch)
        return None

    return launching(update, *tensors)


def plan_update(varying: Sequence[str], **given: Any) -> Any:
    """The update of these very tensors (`te_dispatch.core.repeating`): checked once, because they stay."""
    held = (*given["histories"], *given["scales"], *(given["amaxes"] or ()))
    if varying or not held or not all(map(torch.Tensor.is_contiguous, held)):
        return None
    if len(given["histories"]) > _FEW and place_of(held) is None:
        return None
    return _update_there.plans.ahead(**given)  # type: ignore[attr-defined]


def _listed(
    held: list[Tensors], max_values: Maxima, algorithm: str, margin: int,
    memory: Callable[[int, torch.device], torch.Tensor],
) -> list[Arguments]:  # fmt: skip
    """What `_update_of` is called with, once or never, for tensors that lie dense; their table is in `memory`."""
    runs, widest = _runs_of(held, max_values, margin)
    if not runs:
        return []
    device = held[0][0].device
    choice = _choice(device)
    table = memory(len(runs) * len(Run._fields), device)
    write([word for run in runs for word in run], table)
    c = choice.constants
    grid = (-(-widest // c["BC"]), len(runs), 1)
    return [(device, grid, (table,), (algorithm == "most_recent", c["BR"], c["BC"]), choice.config)]


def _launches(held: list[Tensors], max_values: Maxima, algorithm: str, margin: int) -> list[Arguments]:
    """What `_update` is called with, for tensors that lie dense."""
    runs, widest = _runs_of(held, max_values, margin)
    device = held[0][0].device
    choice = _choice(device)
    how = (algorithm == "most_recent", choice.constants["BR"], choice.constants["BC"])
    across = -(-widest // choice.constants["BC"])
    size = next((size for size in _SIZES if size >= len(runs)), _SIZES[-1])
    launches = []
    for first in range(0, len(runs), size):
        part = [_words(run) for run in runs[first : first + size]]
        words = [*chain.from_iterable(part), *part[0] * (size - len(part))]
        launches.append((device, (across, len(part), 1), (tuple(words),), (size, *how), choice.config))
    return launches


def _words(run: Run) -> tuple[int, ...]:
    """An entry by value."""
    return (
        run.history, run.scale, run.amax, run.rows << 32 | run.stride,
        (run.numerator - (run.numerator >> 31 << 32)) << 32 | 1 << 31 | run.columns,
    )  # fmt: skip


@cached()
def _choice(device: torch.device) -> configs.Choice:
    return configs.choose("quantize", "update", target_of(device))


def _back(aside: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for original, copy in aside:
        original.copy_(copy)


def _lying_dense(
    tensors: Sequence[torch.Tensor], aside: list[tuple[torch.Tensor, torch.Tensor]]
) -> Sequence[torch.Tensor]:
    if all(map(torch.Tensor.is_contiguous, tensors)):
        return tensors
    copies = [dense(x) for x in tensors]
    aside += [(x, copy) for x, copy in zip(tensors, copies, strict=True) if copy is not x]
    return copies


def _runs_of(held: list[Tensors], max_values: Maxima, margin: int) -> tuple[list[Run], int]:
    """Runs that are not empty, and the columns of the widest."""
    histories, scales, amaxes = held
    runs: list[Run] = []
    widest = 0
    for i, history in enumerate(histories):
        rows, stride = history.shape
        if rows >= _WIDEST or stride >= _WIDEST:
            raise Declined(f"histories[{i}]: {rows}x{stride}, at most 2^31 - 1 either way")
        base, scale = address(history), address(scales[i])
        amax = address(amaxes[i]) if amaxes else scale
        for first, count, maximum in _runs(tuple(max_values[i])):
            offset = 4 * first
            runs.append(
                Run(base + offset, scale + offset, amax + offset, rows, stride, count, _numerator(maximum, margin))
            )
            widest = max(widest, count)
    return runs, widest


@cached()
def _runs(values: tuple[float, ...]) -> list[tuple[int, int, float]]:
    """(first, count, value) of equal neighbours."""
    runs: list[tuple[int, int, float]] = []
    first = 0
    for i in range(1, len(values) + 1):
        if i == len(values) or values[i] != values[first]:
            runs.append((first, i - first, values[first]))
            first = i
    return runs


@cached()
def _numerator(maximum: float, margin: int) -> int:
    """The fp32 bits of maximum * 2^-margin."""
    try:
        packed = struct.pack("<f", math.ldexp(float(maximum), -margin))
    except OverflowError:
        packed = struct.pack("<f", math.copysign(math.inf, maximum))
    bits: int = struct.unpack("<I", packed)[0]
    return bits
