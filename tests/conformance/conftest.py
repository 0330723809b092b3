# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Fixtures of the tests of shadow mode."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

import pytest

import te_dispatch.ops  # noqa: F401  # before scopes
from te_dispatch.core import scopes, shadow

from .shadowing import WRONG


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install `WRONG`, for this process and for those that units run in."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "te_dispatch_wrong.py").write_text(textwrap.dedent(WRONG), encoding="utf-8")
    info = folder / "te_dispatch_wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: te-dispatch-wrong\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[te_dispatch.backends]\nwrong = te_dispatch_wrong:BACKEND\n")
    sys.path.insert(0, str(folder))
    scopes.MANAGER.replace_snapshot()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        scopes.MANAGER.replace_snapshot()


@pytest.fixture
def counts_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings of earlier tests may be shared: theirs ask the manager anew, so new counts are enough."""
    monkeypatch.setattr(scopes.MANAGER, "shadows", shadow.Shadows(scopes.MANAGER))
