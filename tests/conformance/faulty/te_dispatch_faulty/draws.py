# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of dropout: which elements are kept, and what of the state they depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Memory, remembering, table
from te_dispatch_torch.dropout import keep_mask

#: (shape, p, rng_state) -> bool, True where kept.
Draw = Callable[[tuple[int, ...], float, torch.Tensor], torch.Tensor]

_LOW = 0xFFFFFFFF


def _state(change: Callable[[torch.Tensor], torch.Tensor]) -> Draw:
    return lambda shape, p, state: keep_mask(shape, p, change(state))


def _word(place: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Draw:
    def changed(state: torch.Tensor) -> torch.Tensor:
        words = state.clone()
        words[place] = change(words[place])
        return words

    return _state(changed)


def _repeated(shape: tuple[int, ...], p: float, state: torch.Tensor, first: int) -> torch.Tensor:
    """The mask of the first elements, over and over."""
    total = 1
    for size in shape:
        total *= size
    piece = keep_mask((min(first, max(total, 1)),), p, state)
    return piece.repeat(-(-total // piece.numel()))[:total].view(shape)


def _every(period: int) -> Draw:
    return lambda shape, p, state: _repeated(shape, p, state, period)


def _same_rows(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
    return keep_mask(shape[-1:], p, state).expand(shape).contiguous()


def _same_pairs(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
    """One draw for two neighbours."""
    whole = keep_mask((*shape[:-1], -(-shape[-1] // 2)), p, state)
    return whole.repeat_interleave(2, -1)[..., : shape[-1]].contiguous()


def _same_along(axis: int) -> Draw:
    """One mask for all heads or batches."""

    def draw(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
        if len(shape) < 3:
            return keep_mask(shape, p, state)
        return keep_mask(tuple(1 if i == axis else size for i, size in enumerate(shape)), p, state).expand(shape)

    return draw


def _in_eight_bits(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
    return keep_mask(shape, int(p * 256) / 256, state)


def _checkered(shape: tuple[int, ...], p: float, state: torch.Tensor) -> torch.Tensor:
    """Keeps the right share, but neighbouring rows drop opposite elements where p is 0.5."""
    keep = keep_mask(shape, p, state)
    if p == 0.5 and len(shape) > 1 and shape[-2] > 1:
        odd = keep[..., 1::2, :]
        odd.copy_(~keep[..., 0 : 2 * odd.shape[-2] : 2, :])
    return keep


def _drawing(draw: Draw) -> Behaviour:
    """A sound implementation with other draws."""

    def behave(call: Call) -> Any:
        if not call["dropout_p"] or call["rng_state"] is None:
            return call.sound()
        with swapped(("dropout", "keep_mask", draw)):
            return call.sound()

    return behave


def _advancing(call: Call, memory: Memory) -> Any:
    """Counts calls by itself instead of reading the offset."""
    state = call["rng_state"]
    return call.sound(rng_state=None if state is None else state + memory.calls)


_DRAWS: dict[str, tuple[str, Draw]] = {
    "compares_8_bits": ("compares 8 bits with p", _in_eight_bits),
    "ignores_high_seed": ("reads the seed's low 32 bits", _word(0, lambda w: w & _LOW)),
    "ignores_high_offset": ("reads the offset's low 32 bits", _word(1, lambda w: w & _LOW)),
    "ignores_low_seed": ("leaves out the seed's last bit", _word(0, lambda w: w & ~1)),
    "ignores_offset": ("does not read the offset", _word(1, lambda w: w & 0)),
    "repeats_after_4096": ("repeats the mask every 4,096 elements", _every(4096)),
    "repeats_rows": ("draws one row for all", _same_rows),
    "draws_for_two": ("draws once for two neighbours", _same_pairs),
    "mirrors_rows": ("drops in odd rows what it keeps in even ones, for p = 0.5", _checkered),
}

_FORWARD = table(
    "dropout_add_fwd",
    {
        **{f"dropout_{name}": (wrong, _drawing(draw)) for name, (wrong, draw) in _DRAWS.items()},
        "dropout_advances_by_itself": ("draws anew at every call, whatever the state", remembering(_advancing)),
        "dropout_repeats_after_256": ("repeats the mask every 256 elements", _drawing(_every(256))),
    },
)


def _otherwise_for_inference(call: Call) -> Any:
    state = call["rng_state"]
    return call.sound(rng_state=state + 1) if call["inference"] and state is not None else call.sound()


_ATTENTION = table(
    "attention_fwd",
    {
        **{
            f"attention_dropout_{name}": (_DRAWS[name][0], _drawing(_DRAWS[name][1]))
            for name in ("compares_8_bits", "ignores_high_seed", "ignores_high_offset", "ignores_offset")
        },
        "attention_dropout_repeats_heads": ("draws one mask for all heads", _drawing(_same_along(1))),
        "attention_dropout_repeats_batches": ("draws one mask for all batches", _drawing(_same_along(0))),
        "attention_dropout_repeats_queries": ("draws one row for all queries", _drawing(_same_rows)),
        "attention_dropout_by_inference": ("drops other elements where no backward follows", _otherwise_for_inference),
    },
    on="unfused_attention",
    also="faulty.unfused_attention_bwd",
)

FAULTS: tuple[Fault, ...] = (*_FORWARD, *_ATTENTION)
