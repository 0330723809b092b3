# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The files of configurations: every kernel has one for every chip and every size, of sizes that Triton takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from te_dispatch_triton import archs, probe

FOLDER = Path(probe.__file__).parent / "configs"
CHIPS = {chip for table in archs.ARCHS.values() for chip in table} | {"default", "interpreter"}
FIELDS = {"up_to", "constants", "num_warps", "num_stages", "options"}
#: Tables that are not kernels': what a tuner may try.
CANDIDATES = "candidates"


def _lists(family: str) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """(table, chip, entries) of a file, without the tuner's candidates."""
    for kernel, rows in json.loads((FOLDER / f"{family}.json").read_text()).items():
        if kernel != CANDIDATES:
            yield from ((kernel, chip, entries) for chip, entries in rows.items() if not isinstance(entries, str))


FAMILIES = sorted(file.stem for file in FOLDER.glob("*.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_entries_are_of_the_documented_form(family: str) -> None:
    for kernel, chip, entries in _lists(family):
        where = f"{family}.json: {kernel} for {chip}"
        assert chip in CHIPS, where
        assert entries, where
        for entry in entries:
            assert set(entry) <= FIELDS, where
            assert entry.get("num_warps", 4) in (1, 2, 4, 8, 16, 32), where
            assert 1 <= entry.get("num_stages", 2) <= 8, where
        # The last one serves what no bound names.
        assert "up_to" not in entries[-1], where
        for entry in entries[:-1]:
            assert entry.get("up_to"), f"{where}: an entry before the last that serves all sizes hides the others"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_table_serves_every_chip(family: str) -> None:
    tables: dict[str, set[str]] = {}
    for kernel, chip, _ in _lists(family):
        tables.setdefault(kernel, set()).add(chip)
    for kernel, chips in tables.items():
        assert "default" in chips or CHIPS - {"default"} <= chips, (
            f"{family}.json: {kernel} serves {sorted(chips)} alone"
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_chips_that_borrow_a_list_name_one_that_has_it(family: str) -> None:
    for kernel, rows in json.loads((FOLDER / f"{family}.json").read_text()).items():
        for chip, entries in rows.items():
            if isinstance(entries, str):
                assert chip in CHIPS and isinstance(rows.get(entries), list), f"{family}.json: {kernel} for {chip}"


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_are_powers_of_two(family: str) -> None:
    for kernel, chip, entries in _lists(family):
        for entry in entries:
            for name, value in entry.get("constants", {}).items():
                if name.startswith("BLOCK"):
                    assert value > 0 and value & (value - 1) == 0, f"{family}.json: {kernel} for {chip}: {name}={value}"


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = pytest.importorskip("te_dispatch_triton.configs")
    rows = {
        "kernel": {
            "default": [{"up_to": {"columns": 64}, "constants": {"BLOCK": 64}}, {"constants": {"BLOCK": 512}}],
            "sm_90": [{"constants": {"BLOCK": 1024}, "num_warps": 8, "options": {"maxnreg": 96}}],
            "sm_100": "sm_90",
        },
        "bounded": {"default": [{"up_to": {"columns": 64}, "constants": {}}]},
    }
    (tmp_path / "planted.json").write_text(json.dumps(rows))
    monkeypatch.setattr(found, "FOLDER", tmp_path)
    found.table.cache_clear()
    yield found
    found.table.cache_clear()


def test_the_first_entry_that_serves_is_chosen(configs: Any) -> None:
    from te_dispatch_triton.targets import target_for

    hopper, other = target_for("nvidia", "sm_90"), target_for("amd", "gfx942")
    assert configs.choose("planted", "kernel", other, columns=64).constants == {"BLOCK": 64}
    assert configs.choose("planted", "kernel", other, columns=65).constants == {"BLOCK": 512}
    chosen = configs.choose("planted", "kernel", hopper, True, columns=1)
    assert chosen.constants == {"BLOCK": 1024}
    assert chosen.config == (8, 2, True, (("maxnreg", 96),))
    assert configs.choose("planted", "kernel", target_for("nvidia", "sm_100"), True, columns=1) == chosen


def test_a_size_that_nothing_serves_is_named(configs: Any) -> None:
    from te_dispatch_triton.targets import target_for

    with pytest.raises(KeyError, match=r"configs/planted\.json: bounded for gfx942 has no entry without up_to"):
        configs.choose("planted", "bounded", target_for("amd", "gfx942"), columns=65)
