# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Assignments that belong together."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable
from typing import Any


def assign(changes: Iterable[tuple[Any, str, Any]]) -> None:
    """Set attributes, (object, name, value) each: all of them or none.

    An interrupt, a signal handler that raises, another thread and a fork come between two bytecodes. This is a single
    call into C, so none of them sees, or leaves behind, a part of the changes. Values must be computed before.
    """
    collections.deque(itertools.starmap(setattr, list(changes)), maxlen=0)
