# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a run of the kit was asked to do."""

from __future__ import annotations

from dataclasses import dataclass

#: smoke: a minute, does it work at all. full: certification. soak: full, with several seeds and huge shapes.
LEVELS = ("smoke", "full", "soak")


class UsageError(ValueError):
    """The kit was asked for something that does not exist. The message says what there is."""


@dataclass(frozen=True)
class Settings:
    """A run.

    Attributes:
        backends: to certify; empty for every installed one but the oracle's.
        against: the backend that is taken to be right.
        operators: names, families or globs; empty for all.
        level: of `LEVELS`.
        seed: of all data.
        shard: (i, n): run the i-th (from 1) of n parts.
        product: every combination instead of every pair.
        checks: names; empty for all.
        device: where subjects run; None for the accelerator if there is one. ``emulated:gfx942`` is a chip that a
            backend emulates on the host (`te_dispatch.conformance.emulated`).
        limit_s: seconds that a single unit may take.
        jobs: worker processes.
        isolated: run units in processes of their own, so that a crash or a hang costs one unit.
        implementations: ids (``torch.matmul``) among those of the backends; empty for all.
    """

    backends: tuple[str, ...] = ()
    against: str = "reference"
    operators: tuple[str, ...] = ()
    level: str = "smoke"
    seed: int = 0
    shard: tuple[int, int] = (1, 1)
    product: bool = False
    checks: tuple[str, ...] = ()
    device: str | None = None
    limit_s: float = 60.0
    jobs: int = 1
    isolated: bool = True
    implementations: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise UsageError(f"level: got {self.level!r}, expected one of {', '.join(LEVELS)}")
        part, parts = self.shard
        if not 1 <= part <= parts:
            raise UsageError(f"shard: got {part}/{parts}, expected i/n with 1 <= i <= n")
        if not 0 < self.limit_s < float("inf"):
            raise UsageError(f"limit: got {self.limit_s}, expected seconds above 0")
        if self.jobs < 1:
            raise UsageError(f"jobs: got {self.jobs}, expected 1 or more")
