# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Stopping a block of code at a chosen line of the dispatch core, as an interrupt or a fork may."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import te_dispatch.core

#: (file, line, how often it was executed before)
Place = tuple[str, int, int]

_CORE = Path(te_dispatch.core.__file__).parent
#: What holds no state: an interrupt there is one at the line that called it.
_STATELESS = ("companions", "composition", "decision", "eligibility", "environment", "facts", "requirements", "resolve")
_WATCHED = frozenset(str(file) for file in _CORE.glob("*.py") if file.stem not in _STATELESS)


@contextmanager
def watching(at_line: Callable[[Place], Any]) -> Iterator[None]:
    """Call `at_line` before each line of the dispatch core's state that this thread executes in the block."""
    seen: Counter[tuple[str, int]] = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in _WATCHED or frame.f_code.co_name == "__del__":  # what a destructor raises reaches nobody
            return None
        if event == "line":
            place = (file, frame.f_lineno)
            seen[place] += 1
            at_line((*place, seen[place] - 1))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def places(run: Callable[[], Any]) -> list[Place]:
    """Every line of the dispatch core that `run` executes, at its first time and at its last."""
    found: dict[tuple[str, int], list[int]] = {}
    with watching(lambda place: found.setdefault(place[:2], []).append(place[2])):
        run()
    return [(*line, time) for line, times in found.items() for time in sorted({times[0], times[-1]})]


def interrupted(run: Callable[[], Any], at: Place) -> bool:
    """Raise KeyboardInterrupt in `run` before a line is executed. Whether it came to that, and reached the caller."""

    def raise_there(place: Place) -> None:
        if place == at:
            raise KeyboardInterrupt

    try:
        with watching(raise_there):
            run()
    except KeyboardInterrupt:
        return True
    except RuntimeError as error:  # a lock that was let go of for a block, and could not be taken again
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return True
    return False
