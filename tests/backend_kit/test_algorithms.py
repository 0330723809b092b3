# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuned algorithms in a file: kept, read again, and nothing lost where the file is damaged."""

from __future__ import annotations

import json
import os
import sys

import pytest

from te_dispatch.backend_kit.algorithms import AlgorithmFile, TuningCacheWarning

FILE = AlgorithmFile("acme_gemm.json", 64)
ENTRY = {"algorithm": "ab" * 64, "words": "algorithm 66", "first_us": 10.0, "best_us": 9.0}


def test_what_is_kept_is_read_again_and_other_entries_stay(tmp_path):
    path = tmp_path / "deep" / "acme_gemm.json"
    assert FILE.read(path) == {}
    FILE.write({"one": ENTRY}, path)
    FILE.write({"two": {**ENTRY, "algorithm": None}}, path)
    found = FILE.read(path)
    assert set(found) == {"one", "two"}
    assert FILE.algorithm_of(found["one"]) == bytes.fromhex("ab" * 64)
    assert FILE.algorithm_of(found["two"]) is None
    left = {file.name for file in path.parent.iterdir()}
    assert left == {path.name, f".{path.name}.lock"}  # no temporary file


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 0, "entries": {}}', '{"format": 1}', '{"format": 1, "entries": {"a": {}}}',
     '{"format": 1, "entries": {"a": {"algorithm": "ab"}}}', '{"format": 1, "entries": {"a": {"algorithm": "xy"}}}',
     '{"format": 1, "entries": ["a"]}'],
)  # fmt: skip
def test_a_corrupt_file_is_warned_of_ignored_and_rewritten(tmp_path, text):
    path = tmp_path / "acme_gemm.json"
    path.write_text(text)
    with pytest.warns(TuningCacheWarning, match="acme_gemm.json: ignored"):
        assert FILE.read(path) == {}
    FILE.write({"one": ENTRY}, path)
    assert json.loads(path.read_text())["entries"] == {"one": ENTRY}


def test_the_cache_s_place(monkeypatch, tmp_path):
    monkeypatch.setenv("TE_DISPATCH_CACHE_DIR", str(tmp_path))
    assert FILE.path() == tmp_path / "acme_gemm.json"
    monkeypatch.delenv("TE_DISPATCH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert FILE.path() == tmp_path / "cache" / "te_dispatch" / "acme_gemm.json"


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        FILE.write({"one": ENTRY}, tmp_path / "acme_gemm.json")
