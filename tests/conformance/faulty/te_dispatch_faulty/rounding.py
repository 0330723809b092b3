# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults of stochastic rounding: what is drawn for whom, and what is made of a draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.encodings import Encoding
from te_dispatch_faulty.binding import Call, swapped
from te_dispatch_faulty.fault import Fault
from te_dispatch_faulty.spoiling import Behaviour, Condition, Memory, remembering, table, when, where
from te_dispatch_torch.random_bits import bits24
from te_dispatch_torch.stochastic import Draws

#: (count, rng_state, first) -> int32 (count,), uniform in [0, 2^24) where it is sound.
Bits = Callable[[int, torch.Tensor, int], torch.Tensor]
#: (draws, y, encoding, max_value) -> values of the encoding.
Rounded = Callable[[Draws, torch.Tensor, Encoding, float], torch.Tensor]

_LOW = 0xFFFFFFFF
_sound = Draws.rounded


def _commonly(call: Call) -> bool:
    quantizer = call["quantizer"]
    return _draws(call) and quantizer.kind == "delayed" and quantizer.common


def _for_itself(call: Call) -> Any:
    return call.sound(quantizer=dataclasses.replace(call["quantizer"], common=False))


def _draws(call: Call) -> bool:
    return call["rng_state"] is not None


def _kinds(*names: str) -> Condition:
    return lambda call: call["quantizer"].kind in names


def _behaving(found: Behaviour, *conditions: Condition) -> Behaviour:
    holds = where(_draws, *conditions)
    return lambda call: found(call) if holds(call) else call.sound()


def _with_bits(bits: Bits, *conditions: Condition) -> Behaviour:
    def behave(call: Call) -> Any:
        with swapped(("stochastic", "bits24", bits)):
            return call.sound()

    return _behaving(behave, *conditions)


def _with_rounding(rounded: Rounded, *conditions: Condition) -> Behaviour:
    def behave(call: Call) -> Any:
        Draws.rounded = rounded  # type: ignore[method-assign,assignment]
        try:
            return call.sound()
        finally:
            Draws.rounded = _sound  # type: ignore[method-assign]

    return _behaving(behave, *conditions)


def _state(change: Callable[[torch.Tensor], torch.Tensor], place: int) -> Bits:
    def bits(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
        words = state.clone()
        words[place] = change(words[place])
        return bits24(count, words, first)

    return bits


def _of_the_sum(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
    return bits24(count, torch.stack((state.sum(), torch.zeros_like(state[0]))), first)


def _middle(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
    return torch.full((count,), 1 << 23, dtype=torch.int32, device=state.device)


def _of_bits(kept: int) -> Bits:
    """Draws whose other bits are 0."""
    return lambda count, state, first=0: bits24(count, state, first) >> (24 - kept) << (24 - kept)


def _biased(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
    """All draws a sixteenth smaller."""
    bits = bits24(count, state, first)
    return bits - (bits >> 4)


def _repeated(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
    piece = bits24(1024, state, first)
    return piece.repeat(-(-count // 1024))[:count]


def _in_pairs(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
    return bits24(-(-count // 2), state, first).repeat_interleave(2)[:count]


def _same_copies(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
    return bits24(count, state, 0)


def _negatives_towards_zero(draws: Draws, y: torch.Tensor, info: Encoding, max_value: float) -> torch.Tensor:
    up = _sound(draws, y, info, max_value)
    down = _inner(y, info, max_value)
    return torch.where(y < 0, down, up)


def _subnormals_towards_zero(draws: Draws, y: torch.Tensor, info: Encoding, max_value: float) -> torch.Tensor:
    up = _sound(draws, y, info, max_value)
    return torch.where(y.abs() < 2.0 ** (1 - info.bias), _inner(y, info, max_value), up)


def _inner(y: torch.Tensor, info: Encoding, max_value: float) -> torch.Tensor:
    """Never away from zero: as if every draw were the largest."""
    with swapped(
        ("stochastic", "bits24", lambda count, state, first=0: torch.full((count,), 1 << 24, device=y.device))
    ):
        return _sound(Draws(torch.zeros(2, dtype=torch.int64, device=y.device)), y, info, max_value)


def _column_apart(call: Call) -> Any:
    """The column-wise copy of one matrix has draws of its own."""
    made = call.sound()
    if made.row_data is not None and made.col_data is not None and call["out"] is None:
        other = call.sound(usage="column", rng_state=call["rng_state"] + 1)
        made.col_data.copy_(other.col_data)
    return made


def _by_threads(call: Call) -> Any:
    return call.sound(rng_state=call["rng_state"] + (torch.get_num_threads() > 1))


def _without_sign(call: Call) -> Any:
    state = call["rng_state"]
    return call.sound(rng_state=None if state is None else state.abs())


def _advancing(call: Call, memory: Memory) -> Any:
    state = call["rng_state"]
    return call.sound(rng_state=None if state is None else state + memory.calls)


FAULTS: tuple[Fault, ...] = table(
    "quantize",
    {
        "rounds_to_nearest_for_a_draw": ("rounds to nearest where it is to draw", _with_bits(_middle)),
        "rounds_with_eight_bits": ("compares eight random bits with a value's position", _with_bits(_of_bits(8))),
        "rounds_with_twelve_bits": ("compares twelve random bits with a value's position", _with_bits(_of_bits(12))),
        "column_copy_rounds_with_sixteen_bits": (
            "compares 16 random bits with a value's position where it makes a column-wise copy alone",
            when(lambda call: call["usage"] == "column", _with_bits(_of_bits(16)))),
        "rounds_up_too_often": ("draws numbers that are a sixteenth too small", _with_bits(_biased)),
        "rounding_repeats_after_1024": ("repeats its draws every 1,024 elements", _with_bits(_repeated)),
        "rounding_draws_for_two": ("draws once for two neighbours", _with_bits(_in_pairs)),
        "rounding_ignores_low_seed": ("leaves out the seed's last bit", _with_bits(_state(lambda w: w & ~1, 0))),
        "rounding_ignores_high_seed": ("reads the seed's low 32 bits", _with_bits(_state(lambda w: w & _LOW, 0))),
        "rounding_ignores_offset": ("does not read the offset", _with_bits(_state(lambda w: w & 0, 1))),
        "rounding_ignores_high_offset": ("reads the offset's low 32 bits", _with_bits(_state(lambda w: w & _LOW, 1))),
        "rounding_reads_the_sum": ("adds the offset to the seed and reads the sum alone", _with_bits(_of_the_sum)),
        "copies_share_draws": (
            "draws the same for both copies, which have blocks of their own",
            _with_bits(_same_copies, _kinds("block", "mxfp8", "nvfp4")),
        ),
        "copies_of_one_matrix_draw_apart": (
            "draws anew for the column-wise copy of one matrix",
            _behaving(_column_apart, _kinds("delayed", "current")),
        ),
        "negative_values_do_not_draw": ("rounds negative values towards 0", _with_rounding(_negatives_towards_zero)),
        "subnormal_values_do_not_draw": (
            "rounds subnormal values towards 0", _with_rounding(_subnormals_towards_zero, _kinds("block", "mxfp8"))
        ),
        "rounding_draws_by_thread": ("draws otherwise with several threads", _behaving(_by_threads)),
        "rounding_forgets_common": (
            "saturates where the encoding does, although `common` asks for less", when(_commonly, _for_itself)),
        "rounding_ignores_signs": ("draws the same for a seed and its negative", _without_sign),
        "rounding_advances_by_itself": ("draws anew at every call, whatever the state", remembering(_advancing)),
    },
)  # fmt: skip
