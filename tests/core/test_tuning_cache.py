# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Tuning caches: what several processes add, and files that are not as this release wrote them."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import warnings
from pathlib import Path
from typing import Any

import pytest

from te_dispatch.core import tuning_cache
from te_dispatch.core.tuning_cache import TuningCacheWarning


def check(key: str, entry: Any) -> None:
    if not isinstance(entry.get("size"), int):
        raise ValueError(f"{key}: size is {entry.get('size')!r}")


def write(path: Path, **sizes: Any) -> None:
    tuning_cache.write(path, {key: {"size": size} for key, size in sizes.items()}, check)


def writer(path: str, name: str, count: int) -> None:
    for i in range(count):
        write(Path(path), **{f"{name}{i}": i})


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=writer, args=(str(tmp_path / "x.json"), name, 40)) for name in "ab"]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0, 0]
    assert len(tuning_cache.read(tmp_path / "x.json", check)) == 80


@pytest.mark.parametrize(
    "text",
    ["", "3", "[]", '{"format": 1}', '{"format": 1, "entries": []}', '{"format": 1, "entries": {"k": 3}}',
     '{"format": 1, "entries": {"k": {"size": "x"}}}', '{"format": 1, "entries": ' + '{"a":' * 100_000],
)  # fmt: skip
def test_what_cannot_be_read_is_told_and_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.warns(TuningCacheWarning, match="x.json: ignored, because it cannot be read"):
        assert tuning_cache.read(path, check) == {}
    write(path, a=1)
    assert tuning_cache.read(path, check) == {"a": {"size": 1}}


def test_a_file_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"format": 2, "entries": {"a": "in words"}}')
    before = path.read_bytes()
    with pytest.raises(OSError, match="a newer te_dispatch wrote it"):
        write(path, b=1)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
def test_a_shared_cache_stays_shared(tmp_path: Path) -> None:
    """The file keeps its mode, and a link to it stays one."""
    shared, path = tmp_path / "shared.json", tmp_path / "x.json"
    write(shared, a=1)
    shared.chmod(0o664)
    path.symlink_to(shared)
    write(path, b=2)
    assert path.is_symlink() and stat.S_IMODE(shared.stat().st_mode) == 0o664
    assert set(tuning_cache.read(shared, check)) == {"a", "b"}


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_cache_that_everyone_may_change_is_told(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write(path, a=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning_cache.read(path, check)
    path.chmod(0o666)
    with pytest.warns(TuningCacheWarning, match="every user of this machine may change it"):
        assert json.loads(path.read_text())["entries"] == tuning_cache.read(path, check)


def test_the_folder_may_begin_with_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(tuning_cache.DIRECTORY, "~/caches")
    assert tuning_cache.cache_file("x.json") == tmp_path / "caches" / "x.json"
