# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A run's outcomes, what they add up to, and the machine they are true of."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

import te_dispatch
from te_dispatch.conformance.outcome import Outcome, counts, failed
from te_dispatch.conformance.planning import device_of
from te_dispatch.conformance.settings import Settings
from te_dispatch.core.manager import OpManager

#: Of the JSON document.
FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """One operator of one backend.

    Attributes:
        outcomes: of all its implementations.
    """

    operator: str
    backend: str
    outcomes: tuple[Outcome, ...]

    @property
    def counts(self) -> dict[str, int]:
        return counts(self.outcomes)

    @property
    def state(self) -> str:
        """``failed``, ``passed``, or ``not_claimed`` where nothing ran."""
        if any(map(failed, self.outcomes)):
            return "failed"
        return "passed" if self.counts["claimed"] else "not_claimed"

    @property
    def worst(self) -> Outcome | None:
        """The outcome with the largest error over its bound, a failed one first."""
        ran = [outcome for outcome in self.outcomes if outcome.state != "not_claimed"]
        return max(ran, key=lambda outcome: (failed(outcome), outcome.ratio), default=None)


@dataclass
class Report:
    """What a run found.

    Attributes:
        settings: what was asked.
        environment: the machine: device, driver, versions, distributions.
        outcomes: in the plan's order.
        date: ISO, UTC, when the run began.
    """

    settings: Settings
    environment: dict[str, Any]
    outcomes: list[Outcome]
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"))

    @property
    def counts(self) -> dict[str, int]:
        return counts(self.outcomes)

    @property
    def ok(self) -> bool:
        """Whether nothing claimed failed, and something was claimed."""
        return not any(map(failed, self.outcomes)) and self.counts["claimed"] > 0

    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if failed(outcome)]

    def reproducer(self, outcome: Outcome) -> str:
        """A shell line that runs one unit as this run did: against the same backend, on the same device."""
        asked = self.settings
        line = outcome.reproducer
        line += f" --against {shlex.quote(asked.against)}" if asked.against != Settings.against else ""
        return line + (f" --device {shlex.quote(asked.device)}" if asked.device is not None else "")

    def cells(self) -> Iterator[Cell]:
        """One per operator and backend that has units."""
        grouped: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            unit = outcome.parsed
            grouped.setdefault((unit.case.operator, unit.backend), []).append(outcome)
        for (operator, backend), outcomes in grouped.items():
            yield Cell(operator, backend, tuple(outcomes))

    def not_claimed(self) -> dict[str, dict[str, int]]:
        """Implementation -> reason -> cases that were not claimed for it."""
        found: dict[str, dict[str, int]] = {}
        for outcome in self.outcomes:
            if outcome.state == "not_claimed":
                reasons = found.setdefault(outcome.parsed.implementation, {})
                reasons[outcome.message] = reasons.get(outcome.message, 0) + 1
        return found

    def as_data(self) -> dict[str, Any]:
        """One JSON document."""
        return {
            "format": FORMAT,
            "date": self.date,
            "settings": dataclasses.asdict(self.settings),
            "environment": self.environment,
            "ok": self.ok,
            "counts": self.counts,
            "not_claimed": self.not_claimed(),
            "outcomes": [outcome.as_data() for outcome in self.outcomes],
        }

    def save(self, path: str | Path) -> None:
        """Write the JSON document."""
        Path(path).write_text(json.dumps(self.as_data(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read what `save` wrote.

        Raises:
            ValueError: it is of another format.
        """
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        if data.get("format") != FORMAT:
            raise ValueError(f"{path}: format {data.get('format')!r}, expected {FORMAT}")
        asked: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in data["settings"].items()}
        outcomes = [Outcome.from_data(outcome) for outcome in data["outcomes"]]
        return cls(Settings(**asked), data["environment"], outcomes, data["date"])


def environment(manager: OpManager, settings: Settings) -> dict[str, Any]:
    """What a result holds for: device, versions, distributions. Plain data."""
    device = device_of(settings)
    facts = manager.device_facts(device)
    versions = {name: str(value) for name, value in facts.extra.items() if name.startswith("version.")}
    return {
        "device": facts.name or facts.label(),
        "arch": facts.label(),
        "te_dispatch": te_dispatch.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        **versions,
        "backends": {b.name: f"{b.distribution} {b.version}" for b in manager.snapshot.backends.values()},
    }
