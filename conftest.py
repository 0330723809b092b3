# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What every test of the repository answers to."""

from __future__ import annotations

import os

import pytest

# Every result of every operator is compared with its shape function, unless a test's own process or manager says else.
os.environ.setdefault("TE_DISPATCH_CHECK_RESULTS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ from one process to the next, for a set's order or an address: workers that run side by
    side then disagree about what there is to run, and nothing runs."""
    unsteady = [item.nodeid for item in items if "set(" in item.nodeid or " at 0x" in item.nodeid]
    if unsteady:
        raise pytest.UsageError("give these cases ids of their own, theirs may change: " + ", ".join(unsteady))
