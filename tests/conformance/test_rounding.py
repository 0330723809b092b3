# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The check `rounding`: sound draws pass in every kind of quantizer, and its cases show what they are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.conformance import chance, checks
from te_dispatch.conformance.case import Case
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.space import find
from te_dispatch.conformance.subject import subjects
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS
from te_dispatch_torch import stochastic
from te_dispatch_torch.random_bits import bits24

CASTS = {
    "delayed": "e4m3fn", "current": "e5m2", "block_1d": "e4m3fnuz", "block_2d": "e4m3fn", "mxfp8": "e4m3fn",
    "mxfp8_2d": "e5m2", "nvfp4": "e2m1", "nvfp4_2d": "e2m1", "nvfp4_rht": "e2m1",
}  # fmt: skip


def trial(cast: str, backend: str = "torch", usage: str = "both") -> Trial:
    values = {"cast": cast, "encoding": CASTS[cast], "dtype": "fp32", "shape": "128x96", "usage": usage}
    found = next(iter(subjects(scopes.MANAGER, OPERATORS["quantize"], torch.device("cpu"), backend)))
    return Trial(found, Case.of("quantize", "drawn", values), Oracle(scopes.MANAGER), find("quantize", "drawn"))


@pytest.mark.parametrize("backend", ("torch", "reference"))
@pytest.mark.parametrize("cast", CASTS)
def test_sound_draws_pass(cast: str, backend: str) -> None:
    """The reference drew apart for the two copies of 128x128 blocks."""
    one = trial(cast, backend)
    checks.find("values").run(one)
    checks.find("rounding").run(one)


@pytest.mark.parametrize("cast, usage", [("delayed", "both"), ("mxfp8", "column"), ("nvfp4", "row")])
@pytest.mark.parametrize("bits", [12, 16])
def test_draws_of_few_bits_are_found(bits: int, cast: str, usage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shares are right to 2^-12 and 2^-16, which no number of elements shows that a case can have."""

    def coarse(count: int, state: torch.Tensor, first: int = 0) -> torch.Tensor:
        return bits24(count, state, first) >> (24 - bits) << (24 - bits)

    monkeypatch.setattr("te_dispatch_torch.stochastic.bits24", coarse)
    with pytest.raises(Failure, match=f"draws have fewer than {bits + 1} bits"):
        checks.find("rounding").run(trial(cast, usage=usage))


def test_draws_that_depend_on_values_are_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that is keyed by a tensor's contents, too, is as random."""
    cast = stochastic.Draws.rounded

    def keyed(draws: stochastic.Draws, y: torch.Tensor, *rest: Any) -> torch.Tensor:
        contents = y.contiguous().view(torch.int32).sum(dtype=torch.int64)
        other = stochastic.Draws(draws.rng_state + contents)
        return cast(other, y, *rest)

    monkeypatch.setattr(stochastic.Draws, "rounded", keyed)
    checks.find("rounding").run(trial("delayed", usage="row"))


@pytest.mark.parametrize("cast", CASTS)
def test_values_lie_between_codes_with_scales_of_1(cast: str) -> None:
    one = trial(cast)
    arguments = one.arguments()
    assert one.space.rounding is not None
    drawn = one.space.rounding.recover(arguments, one.call(arguments))
    assert set(drawn) == ({"row"} if cast == "nvfp4_rht" else {"row", "column"})
    for copy in drawn.values():
        for low, high, least in ((0.0, 1 / 64, 3000), (1 / 64, 63 / 64, 4000), (63 / 64, 1.0, 1500)):
            assert int((copy.known & (copy.position > low) & (copy.position < high)).sum()) > least
        assert int((copy.known & copy.negative).sum()) > 4000
        assert bool((copy.known & copy.subnormal).any())


def test_states_differ_in_one_word_or_have_one_sum() -> None:
    state = torch.tensor([5, 7])
    states = [(other.tolist(), what) for other, what in chance.changed_states(state, 0x0102)]
    assert len(states) == 9 and len({tuple(other) for other, _ in states}) == 9
    assert [sum(a != b for a, b in zip(other, [5, 7])) for other, _ in states] == [1] * 8 + [2]
    assert sum(states[-1][0]) == 12 and state.tolist() == [5, 7]


def test_repetition_is_found_and_independence_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    choices = torch.randn(4096, generator=generator)
    known = torch.ones(4096, dtype=torch.bool)
    chance.require_no_repetition("the choices", choices, known)
    with pytest.raises(Failure, match="elements of the choices that are 1024 apart are not independent"):
        chance.require_no_repetition("the choices", choices[:1024].repeat(4), known)
    chance.require_share("half", choices > 0, 0.5)
    with pytest.raises(Failure, match="half: 0 of 4096, expected 2048"):
        chance.require_share("half", choices > 100, 0.5)
