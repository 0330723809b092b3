# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What every test of the repository answers to, and which of them `make test` runs: the part ``quick``.

That is all but tests marked `slow`, and of the cases of a test marked ``sampled(n)`` one of n, always the same ones,
chosen by their names. ``--part rest`` runs the others. Without ``--part`` all run.
"""

from __future__ import annotations

import os
import zlib

import pytest

# Every result of every operator is compared with its shape function, unless a test's own process or manager says else.
os.environ.setdefault("TE_DISPATCH_CHECK_RESULTS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("quick", "rest"), help="run a part of the tests: see conftest.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse names that differ from one process to the next, for a set's order or an address: workers that run side by
    side then disagree about what there is to run, and nothing runs."""
    unsteady = [item.nodeid for item in items if "set(" in item.nodeid or " at 0x" in item.nodeid]
    if unsteady:
        raise pytest.UsageError("give these cases ids of their own, theirs may change: " + ", ".join(unsteady))
    part = config.getoption("part")
    if part is not None:
        asked = [_is_quick(item) == (part == "quick") for item in items]
        config.hook.pytest_deselected(items=[item for item, is_asked in zip(items, asked) if not is_asked])
        items[:] = [item for item, is_asked in zip(items, asked) if is_asked]


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is not None:
        return False
    sampled = item.get_closest_marker("sampled")
    return sampled is None or zlib.crc32(item.nodeid.encode()) % sampled.args[0] == 0
