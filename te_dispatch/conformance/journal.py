# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What an interrupted run had done: one JSON line per outcome, behind a line that says of which run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from te_dispatch.conformance.outcome import STATES, Outcome
from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.core import files

#: Settings that may differ between a run and its continuation: how it is run, not what.
_FREE = ("jobs", "isolated", "limit_s", "shard")


class Journal:
    """Outcomes by unit id, kept in a file if there is one."""

    def __init__(self, file: TextIO | None, known: dict[str, Outcome]) -> None:
        self._file = file
        self._known = known

    def get(self, unit: str) -> Outcome | None:
        """The outcome that an earlier run kept."""
        return self._known.get(unit)

    def add(self, outcome: Outcome) -> None:
        """Keep an outcome; it is on the disk when this returns."""
        if self._file is not None:
            self._file.write(json.dumps(outcome.as_data()) + "\n")
            self._file.flush()


def known(path: str | Path, settings: Settings, environment: Mapping[str, Any]) -> dict[str, Outcome]:
    """The outcomes of the run that `path` keeps, by unit id.

    Raises:
        UsageError: there is no file, or it is of another run; says what differs.
    """
    return _read(Path(path), _head(settings, environment))


@contextmanager
def opened(
    path: str | Path | None, settings: Settings, environment: Mapping[str, Any], known: dict[str, Outcome]
) -> Iterator[Journal]:
    """A journal in a file, or in memory alone for None, that begins with what is known of an earlier run."""
    if path is None:
        yield Journal(None, {})
        return
    head = _head(settings, environment)
    lines = [head, *(outcome.as_data() for outcome in known.values())]
    # An interruption while what is known is written must not cost it.
    files.replace(path, "".join(json.dumps(line) + "\n" for line in lines))
    with open(path, "a", encoding="utf-8") as file:
        yield Journal(file, known)


def _head(settings: Settings, environment: Mapping[str, Any]) -> dict[str, Any]:
    asked = {name: value for name, value in dataclasses.asdict(settings).items() if name not in _FREE}
    head: dict[str, Any] = json.loads(json.dumps({"settings": asked, "environment": dict(environment)}))
    return head


def _read(path: Path, head: Mapping[str, Any]) -> dict[str, Outcome]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError as error:
        raise UsageError(f"resume: {path} is not there, so there is no run to go on with: leave it away") from error
    except OSError as error:
        raise UsageError(f"resume: {path} cannot be read: {error.strerror}") from error
    try:
        found = json.loads(lines[0])
        known = [Outcome.from_data(json.loads(line)) for line in _whole(lines[1:])]
        strange = next((outcome.state for outcome in known if outcome.state not in STATES), None)
    except (IndexError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"resume: {path} is no journal of a conformance run") from error
    if strange is not None:
        raise UsageError(f"resume: {path} has an outcome of the state {strange!r}, expected one of {', '.join(STATES)}")
    for part in ("settings", "environment"):
        for name, value in head[part].items():
            was = found.get(part, {}).get(name)
            if name == "code" and isinstance(was, dict) and was != value:
                changed = ", ".join(sorted(one for one in {*was, *value} if was.get(one) != value.get(one)))
                raise UsageError(f"resume: {path} is of another run: files of {changed} changed since: leave it away")
            if was != value:
                raise UsageError(f"resume: {path} is of another run: {name} was {was!r}, now {value!r}")
    return {outcome.unit: outcome for outcome in known}


def _whole(lines: list[str]) -> list[str]:
    """Without a last line that a killed process wrote half of."""
    try:
        json.loads(lines[-1]) if lines else None
    except ValueError:
        return lines[:-1]
    return lines
