# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What became of modules' calls: `te_dispatch.pytorch.capture_stats`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CaptureStats:
    """Counts of this process. Threads that count at the same time may lose some.

    Attributes:
        hits: calls that were replayed.
        misses: calls that were not, by why: ``new signature``, or what was on (``torch.autocast``,
            ``checkpoint``, ...).
        captures: forwards and backwards that were recorded.
        evictions: signatures that had to go for others.
        refusals: forwards and backwards that could not be recorded, by why.
    """

    hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    captures: int = 0
    evictions: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def refuse(self, what: str, why: str) -> None:
        self.refusals[f"{what}: {why}"] += 1


STATISTICS = CaptureStats()


def capture_stats(*, reset: bool = False) -> CaptureStats:
    """How often modules' calls were replayed, and why not.

    Args:
        reset: count from 0 again.

    Returns:
        The counts until now, which go on without this.
    """
    found = CaptureStats(
        STATISTICS.hits, Counter(STATISTICS.misses), STATISTICS.captures, STATISTICS.evictions,
        Counter(STATISTICS.refusals),
    )  # fmt: skip
    if reset:
        STATISTICS.__init__()  # type: ignore[misc]
    return found
