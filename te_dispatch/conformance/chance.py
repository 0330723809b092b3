# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Statistics of random choices: shares, independence and repetition.

Of n choices that are made with probability q each, a binomial number is made: n q with standard deviation
sqrt(n q (1 - q)). A right implementation leaves `SIGMAS` standard deviations once in 5 x 10^8 cases.

The sum over i of c_i c_(i + lag), c choices less their probability over their deviation, has mean 0 and variance 1 for
each of the pairs summed, for every lag: choices that repeat themselves, by rows, tiles, heads or blocks of any length,
have a lag where each pair adds 1. There are as many lags as elements, so `LAG_SIGMAS` standard deviations are allowed.
Choices that are the others' in reverse order, or their opposites, have no such lag: these are summed as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from te_dispatch.conformance.trial import Failure

SIGMAS = 6.0
LAG_SIGMAS = 8.0
#: Lags with fewer pairs are not looked at: their sums are far from normal.
LAG_PAIRS = 1024
#: Bits of a seed, and of an offset, that are changed: one of each range, another one in each case.
LOW_BITS, HIGH_BITS = range(32), range(32, 63)
#: Number of CPU threads of a repeated call, whose choices must be the same.
THREADS = 3


def changed_states(state: torch.Tensor, choice: int) -> Iterator[tuple[torch.Tensor, str]]:
    """States that choose otherwise: by the next seed and offset, by each with a low or high bit or its sign changed,
    and by both with the same sum.

    Args:
        state: int64 (2,), (seed, offset).
        choice: says which bits.

    Yields:
        The state, and what the two are of, such as ``seeds that differ in bit 5``.
    """
    for place, name in enumerate(("seed", "offset")):
        number, shift = int(state[place]), choice >> (8 * place)
        changes = [(number + 1, "by 1")]
        for bits in (LOW_BITS, HIGH_BITS):
            bit = bits[shift % len(bits)]
            changes.append((number ^ (1 << bit), f"in bit {bit}"))
        changes += [(-number, "in sign")] if number else []
        for changed, what in changes:
            other = state.clone()
            other[place] = changed
            yield other, f"{name}s that differ {what}"
    yield state + torch.tensor([1, -1]), "seeds and offsets of the same sum"


def require_share(what: str, found: torch.Tensor, share: float) -> None:
    """Raise unless about `share` of the choices are True."""
    n, count = found.numel(), int(found.sum())
    if abs(count - n * share) > SIGMAS * math.sqrt(n * share * (1 - share)) + 1:
        raise Failure(f"{what}: {count} of {n}, expected {n * share:.0f}, +- {SIGMAS:g} standard deviations")


def next_state(state: torch.Tensor) -> torch.Tensor:
    """The state with the next offset: a generator that counts elements from there gives most of the numbers again."""
    return state + torch.tensor([0, 1], dtype=state.dtype, device=state.device)


def require_no_repetition(what: str, choices: torch.Tensor, known: torch.Tensor) -> None:
    """Raise where a part of the choices, in memory's order, is like one further on.

    Args:
        what: whose elements they are.
        choices: with mean 0 and variance 1, of any shape. known: bool, which of them to look at.
    """
    if choices.numel() <= LAG_PAIRS:
        return
    seen = torch.where(known, choices.double(), 0.0).flatten()
    products, pairs = _autocorrelation(seen), _autocorrelation(known.double().flatten())
    enough = pairs >= LAG_PAIRS
    enough[0] = False
    if not bool(enough.any()):
        return
    sigmas = torch.where(enough, products / pairs.clamp_min(1).sqrt(), 0.0)
    lag = int(sigmas.abs().argmax())
    if abs(float(sigmas[lag])) > LAG_SIGMAS:
        raise Failure(
            f"elements of {what} that are {lag} apart are not independent: their correlation is "
            f"{float(products[lag] / pairs[lag]):.3g}, {float(sigmas[lag]):.0f} standard deviations from 0"
        )
    half = seen.numel() // 2
    both = float((known.flatten() & known.flatten().flip(0))[:half].sum())
    total = float((seen * seen.flip(0))[:half].sum())
    if both >= LAG_PAIRS and abs(total) > SIGMAS * math.sqrt(both):
        raise Failure(
            f"elements of {what} as far from its beginning as others from its end are not independent: their "
            f"correlation is {total / both:.3g}, {total / math.sqrt(both):.0f} standard deviations from 0"
        )


def _autocorrelation(x: torch.Tensor) -> torch.Tensor:
    """The sum over i of x_i x_(i + lag), for lags from 0 to n - 1."""
    spectrum = torch.fft.rfft(x, 2 * x.numel())
    found: torch.Tensor = torch.fft.irfft(spectrum * spectrum.conj(), 2 * x.numel())[: x.numel()]
    return found
