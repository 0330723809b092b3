# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What every test of the repository answers to, and which of them `make test` runs: the part ``quick``.

That is all but tests marked `slow`, and of the cases of a test marked ``sampled(n)`` one of n, always the same ones,
chosen by their names. ``--part rest`` runs the others. Without ``--part`` all run.

``--slice i/n`` runs the i-th of n shares of what is chosen: some of the cases of each test, chosen by their names. CI
runs the part ``quick`` whole and a slice of the rest, another one for each commit.
"""

from __future__ import annotations

import argparse
import os
import zlib

import pytest

# Every result of every operator is compared with its shape function, unless a test's own process or manager says else.
os.environ.setdefault("TE_DISPATCH_CHECK_RESULTS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", choices=("quick", "rest"), help="run a part of the tests: see conftest.py")
    parser.addoption("--slice", type=_slice, help="i/n: run the i-th of n shares of them")


def _slice(text: str) -> tuple[int, int]:
    first, _, last = text.partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected i/n with 1 <= i <= n")
    return int(first), int(last)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse names that differ from one process to the next, for a set's order or an address: workers that run side by
    side then disagree about what there is to run, and nothing runs."""
    unsteady = [item.nodeid for item in items if "set(" in item.nodeid or " at 0x" in item.nodeid]
    if unsteady:
        raise pytest.UsageError("give these cases ids of their own, theirs may change: " + ", ".join(unsteady))
    part, share = config.getoption("part"), config.getoption("slice")
    if part is not None:
        _keep(config, items, [_is_quick(item) == (part == "quick") for item in items])
    if share is not None:
        # Another number than that which tells quick cases from the others: a slice of these would be empty or whole.
        numbers = [zlib.crc32(b"slice " + item.nodeid.encode()) % share[1] for item in items]
        _keep(config, items, [number == share[0] - 1 for number in numbers])


def _keep(config: pytest.Config, items: list[pytest.Item], kept: list[bool]) -> None:
    config.hook.pytest_deselected(items=[item for item, is_kept in zip(items, kept) if not is_kept])
    items[:] = [item for item, is_kept in zip(items, kept) if is_kept]


def _is_quick(item: pytest.Item) -> bool:
    if item.get_closest_marker("slow") is not None:
        return False
    sampled = item.get_closest_marker("sampled")
    return sampled is None or zlib.crc32(item.nodeid.encode()) % sampled.args[0] == 0
