# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Versions that facts and certificates state."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_dispatch.core.facts import UNKNOWN
from te_dispatch_rocm import probe


@pytest.fixture(autouse=True)
def asked_anew():
    probe.aiter_version.cache_clear()
    yield
    probe.aiter_version.cache_clear()


def test_the_drivers_release_is_read_where_it_has_one(tmp_path):
    release = tmp_path / "version"
    assert probe.driver_version(str(release)) is UNKNOWN
    release.write_text("6.12.12\n")
    assert probe.driver_version(str(release)) == "6.12.12"
    release.write_text("\n")
    assert probe.driver_version(str(release)) is UNKNOWN


def test_aiters_release_is_read_of_its_metadata_alone(monkeypatch):
    assert probe.aiter_version() == "not installed"
    probe.aiter_version.cache_clear()
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_in"))
    assert probe.aiter_version() == "0.1.0"
