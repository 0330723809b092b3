# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A backend's page shows what its manifest says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "manifest_table.py"


@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_the_documentation_shows_this_manifest(backend: str) -> None:
    pytest.importorskip(f"te_dispatch_{backend}")
    spec = importlib.util.spec_from_file_location("te_dispatch_manifest_table", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    page = tool.page_of(backend).read_text()
    assert tool.BEGIN in page and tool.END in page
    assert tool.replaced(backend, page) == page, f"python tools/manifest_table.py {backend} --write"
