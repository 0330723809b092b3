# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A run's outcomes, what they add up to, and the machine they are true of."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch

import te_dispatch
from te_dispatch.conformance.code import digests
from te_dispatch.conformance.coverage import Covered, Unjudged
from te_dispatch.conformance.outcome import JUDGED, STATES, Outcome, counts, failed
from te_dispatch.conformance.planning import backends_of, device_of
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import files
from te_dispatch.core.manager import OpManager

#: Of the JSON document.
FORMAT = 2


@dataclass(frozen=True)
class Cell:
    """One operator of one backend.

    Attributes:
        outcomes: of all its implementations.
        added_up: (state, number) of units that were counted and not kept.
    """

    operator: str
    backend: str
    outcomes: tuple[Outcome, ...]
    added_up: tuple[tuple[str, int], ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        return _plus(counts(self.outcomes), self.added_up)

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
        coverage: of a whole run at level full or soak, what was judged of what is claimed; empty for others.
        unjudged: claims without a unit behind them.
        added_up: (implementation, operator, state) -> units of which nothing but their number is kept: the passed and
            the not claimed ones of a run of every combination, of which there are more than memory holds.
        single: whether the units were named one by one.
        partial: why not all units of the plan were run, where a program chose among them.
        refused: implementations that dispatch never calls, and why.
        declining: implementations that declined every call of the cases that they claim, and what they said.
        unclaimed: implementations that claim nothing of what was run on this device, and the most frequent reason.
        seconds: the run took, planning included.
    """

    settings: Settings
    environment: dict[str, Any]
    outcomes: list[Outcome]
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.timezone.utc).isoformat("T", "seconds"))
    coverage: list[Covered] = field(default_factory=list)
    unjudged: list[Unjudged] = field(default_factory=list)
    added_up: dict[tuple[str, str, str], int] = field(default_factory=dict)
    single: bool = False
    partial: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    declining: dict[str, str] = field(default_factory=dict)
    unclaimed: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add_up(self, outcome: Outcome) -> None:
        """Count an outcome without keeping it."""
        unit = outcome.parsed
        key = (unit.implementation, unit.case.operator, outcome.state)
        self.added_up[key] = self.added_up.get(key, 0) + 1

    @property
    def counts(self) -> dict[str, int]:
        return _plus(counts(self.outcomes), ((state, n) for (_, _, state), n in self.added_up.items()))

    @property
    def ok(self) -> bool:
        """Whether something was claimed, nothing of it failed, and nothing was refused, left out or always declined."""
        without = self.never_run or self.refused or self.declining
        return not any(map(failed, self.outcomes)) and self.counts["claimed"] > 0 and not without

    @property
    def never_run(self) -> dict[str, list[str]]:
        """Implementation -> what it claims and no judged unit holds."""
        found: dict[str, list[str]] = {}
        for one in self.coverage:
            if one.never_run:
                found.setdefault(one.implementation, []).extend(f"{one.space}: {goal}" for goal in one.never_run)
        return found

    @property
    def uncertified(self) -> list[str]:
        """Why this run is no certificate; nothing where it is one."""
        asked, found = self.settings, self.counts
        reasons = []
        if "emulated by" in self.environment:
            reasons.append(f"the device was emulated, which does not prove {self.environment['not proven']}")
        if self.single:
            reasons.append("single units were run")
        elif self.partial:
            reasons.append(self.partial)
        elif asked.level == "smoke":
            reasons.append("level smoke leaves most of what is claimed out: certificates are given at level full")
        if asked.product:
            reasons.append("a run of every combination is a search for failures")
        if asked.shard != (1, 1):
            reasons.append("only part {} of {} was run: run all, then the whole with --resume".format(*asked.shard))
        for what, names in (("operators", asked.operators), ("", asked.implementations), ("checks", asked.checks)):
            if names:
                reasons.append(f"only {what} {', '.join(names)}".replace("  ", " "))
        if not found["claimed"]:
            reasons.append("nothing was claimed")
        reasons += [f"{name} is refused: {why}" for name, why in self.refused.items()]
        reasons += [f"{name} declines every call that it claims ({why})" for name, why in self.declining.items()]
        bad = found["failed"] + found["unexpected_pass"]
        for number, words in (
            (bad, "units failed"), (found["expected_failure"], "units are known to fail"),
            (found["skipped"], "units were skipped"),
            (sum(map(len, self.never_run.values())), "combinations are claimed but were never run"),
        ):  # fmt: skip
            if number:
                reasons.append(f"{number} {words}")
        return reasons

    @property
    def certificate(self) -> str:
        """One line: whether the run certifies its backends, or why not."""
        reasons = self.uncertified
        if reasons:
            return f"no certificate: {'; '.join(reasons)}"
        backends = ", ".join(dict.fromkeys(cell.backend for cell in self.cells()))
        judged, claimed = _sum(one.pairs for one in self.coverage)
        return f"certified: {backends}; {judged} of {claimed} claimed pairs of values were judged"

    def covered(self) -> list[Covered]:
        """`coverage` of each implementation, its spaces added up."""
        grouped: dict[str, list[Covered]] = {}
        for one in self.coverage:
            grouped.setdefault(one.implementation, []).append(one)
        return [
            Covered(
                name, "", _sum(one.pairs for one in found), _sum(one.groups for one in found),
                _sum(one.values for one in found), _sum(one.triples for one in found),
            )
            for name, found in grouped.items()
        ]  # fmt: skip

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
        added: dict[tuple[str, str], list[tuple[str, int]]] = {}
        for (implementation, operator, state), number in self.added_up.items():
            added.setdefault((operator, implementation.partition(".")[0]), []).append((state, number))
        for operator, backend in dict.fromkeys((*grouped, *added)):
            key = (operator, backend)
            yield Cell(operator, backend, tuple(grouped.get(key, ())), tuple(added.get(key, ())))

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
            "certified": not self.uncertified,
            "uncertified": self.uncertified,
            "counts": self.counts,
            "units": sum(self.counts[state] for state in STATES),
            "seconds": self.seconds,
            "coverage": [dataclasses.asdict(one) for one in self.coverage],
            "never_run": self.never_run,
            "claims_not_judged": [dataclasses.asdict(one) for one in self.unjudged],
            "added_up": [[*key, number] for key, number in self.added_up.items()],
            "single": self.single,
            "partial": self.partial,
            "refused": self.refused,
            "declining": self.declining,
            "not_claimed_on_device": self.unclaimed,
            "not_claimed": self.not_claimed(),
            "outcomes": [outcome.as_data() for outcome in self.outcomes],
        }

    def save(self, path: str | Path) -> None:
        """Write the JSON document."""
        files.replace(path, json.dumps(self.as_data(), indent=1, allow_nan=False) + "\n")

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
        covered = [Covered.from_data(one) for one in data["coverage"]]
        return cls(
            Settings(**asked),
            data["environment"],
            outcomes,
            data["date"],
            covered,
            [Unjudged(**one) for one in data["claims_not_judged"]],
            {(one, operator, state): number for one, operator, state, number in data["added_up"]},
            data["single"],
            data["partial"],
            data.get("refused", {}),
            data.get("declining", {}),
            data.get("not_claimed_on_device", {}),
            data.get("seconds", 0.0),
        )


def _sum(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    judged, claimed = zip(*parts)
    return sum(judged), sum(claimed)


def _plus(found: dict[str, int], more: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Counts by state with further ones."""
    for state, number in more:
        found[state] += number
        found["claimed"] += number if state in JUDGED else 0
    return found


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
        **(
            {}
            if manager.emulation is None
            else {
                "emulated by": manager.emulation.by,
                "not proven": "; ".join(manager.emulation.unproven),
            }
        ),
        "backends": {b.name: f"{b.distribution} {b.version}" for b in manager.snapshot.backends.values()},
        "code": digests(manager, sorted({*backends_of(manager, settings), settings.against})),
    }
