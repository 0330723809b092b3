# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which copy of a vendor's library is taken, with libraries of four lines planted in its place."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from te_dispatch_cuda import libraries
from te_dispatch_cuda.libraries import DuplicateLibraryWarning, Library, Wanted, open_library

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler and Linux's map of memory"
)

#: Like cuBLASLt, under a name that no other test of this process looks for.
PLANTED = Wanted("planted", ("libplantedLt.so.13", "libplantedLt.so.12"), ("cu13", "cublas"), "plantedLtGetVersion")


def plant(folder: Path, version: int, name: str = "libplantedLt.so.13") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "planted.c"
    source.write_text(f"unsigned long {PLANTED.version}(void) {{ return {version}ul; }}\n")
    path = folder / name
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return str(path)


def mapped(folder: Path, *paths: str) -> str:
    """A process's map of memory that holds these files."""
    lines = [f"7f{i:010x}-7f{i + 1:010x} r-xp 00000000 08:01 {i}    {path}\n" for i, path in enumerate(paths)]
    file = folder / "maps"
    file.write_text("00400000-00401000 r-xp 00000000 08:01 1    /usr/bin/python3\n" + "".join(lines))
    return str(file)


def test_the_process_s_copy_comes_first(tmp_path):
    held, other = plant(tmp_path / "held", 130203), plant(tmp_path / "wheel", 130100)
    found = open_library(PLANTED, [os.path.dirname(other)], mapped(tmp_path, held))
    assert found == Library(held, "held by the process", (13, 2, 3))


def test_packages_come_before_the_system_and_newer_majors_first(tmp_path):
    old, new = plant(tmp_path / "a", 120905, "libplantedLt.so.12"), plant(tmp_path / "b", 130001)
    found = open_library(PLANTED, [os.path.dirname(old), os.path.dirname(new)], mapped(tmp_path))
    assert found == Library(new, "PyPI package", (13, 0, 1))
    assert found.version_text == "13.0.1"


def test_packages_are_found_without_importing_them(tmp_path):
    for package in ("cu13", "cublas", "cudnn"):
        (tmp_path / "nvidia" / package / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "__init__.py").write_text("raise SystemExit('imported')\n")
    found = libraries.package_directories(PLANTED, [str(tmp_path)])
    assert [Path(folder).parent.name for folder in found] == ["cu13", "cublas"]
    assert libraries.package_directories(PLANTED, [str(tmp_path / "empty")]) == ()


def test_a_broken_copy_is_passed_over_and_a_missing_one_is_a_phrase(tmp_path):
    (tmp_path / "libplantedLt.so.13").write_text("not a library")
    good = plant(tmp_path, 120102, "libplantedLt.so.12")
    assert open_library(PLANTED, [str(tmp_path)], mapped(tmp_path)) == Library(good, "PyPI package", (12, 1, 2))
    reason = open_library(dataclasses.replace(PLANTED, sonames=("libplantedLt.so.14",)), [], mapped(tmp_path))
    assert isinstance(reason, str) and "libplantedLt.so.14 cannot be opened" in reason


def test_two_copies_are_warned_of(tmp_path):
    first, second = plant(tmp_path / "one", 130001), plant(tmp_path / "two", 130001)
    with pytest.warns(DuplicateLibraryWarning, match=r"2 copies of planted.*one.*two"):
        found = open_library(PLANTED, [], mapped(tmp_path, first, second, first))
    assert isinstance(found, Library) and found.path == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_library(PLANTED, [], mapped(tmp_path, first, first))


def test_a_file_is_a_library_only_by_its_whole_name(tmp_path):
    maps = mapped(
        tmp_path,
        "/x/libplantedLt.so.13.1.0.3",
        "/x/mylibplantedLt.so.13",
        "/x/libplantedLt.so.130",
        "/x/libplanted.so.13",
    )
    assert libraries.loaded(PLANTED, maps) == ("/x/libplantedLt.so.13.1.0.3",)
    assert libraries.loaded(PLANTED, str(tmp_path / "no maps")) == ()


def test_facts_and_doctor_agree():
    versions = libraries.versions()
    rows = {subject: (state, reason) for subject, state, reason in libraries.found() if state != "warning"}
    assert set(versions) == {"version.cublaslt", "version.cudnn"}
    for name in ("cublaslt", "cudnn"):
        known = isinstance(versions[f"version.{name}"], str)
        assert rows[name][0] == ("ok" if known else "missing") and rows[name][1]
