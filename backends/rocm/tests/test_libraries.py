# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which installation of ROCm is taken, and what is said where there is none that serves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from te_dispatch.backend_kit.libraries import Library, Wanted
from te_dispatch_rocm import libraries

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs a C compiler and Linux's map of memory"
)

#: Like HIP's runtime, under a name that no other test of this process looks for.
PLANTED = Wanted("hip", ("libplantedhip64.so.7", "libplantedhip64.so.6", "libplantedhip64.so"))


def plant(folder: Path, version: int, name: str = "libplantedhip64.so.7") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "planted.c"
    source.write_text(f"int hipRuntimeGetVersion(int *version) {{ *version = {version}; return 0; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(folder / name), str(source)], check=True)
    return str(folder / name)


def mapped(folder: Path, *paths: str) -> str:
    """A process's map of memory that holds these files."""
    file = folder / "maps"
    file.write_text("".join(f"7f{i:010x}-7f{i + 1:010x} r-xp 0 08:01 {i}    {path}\n" for i, path in enumerate(paths)))
    return str(file)


def find(folders, maps, named=False):
    return libraries.find(PLANTED, libraries._hip_version, [(str(folder), "test") for folder in folders], named, maps)


def test_the_first_place_that_has_one_is_taken_whatever_its_names_say(tmp_path):
    # PyTorch's folder has a file without a number; an installation's newer one must not be mixed with it.
    bundled = plant(tmp_path / "torch", 60342134, "libplantedhip64.so")
    plant(tmp_path / "opt", 70253211)
    found = find([tmp_path / "torch", tmp_path / "opt"], mapped(tmp_path))
    assert found == Library(bundled, "test", (6, 3, 42134))


def test_the_process_s_copy_comes_first_under_a_name_without_a_number_too(tmp_path):
    held = plant(tmp_path / "torch", 60342134, "libplantedhip64.so")
    plant(tmp_path / "opt", 70253211)
    found = find([tmp_path / "opt"], mapped(tmp_path, held))
    assert isinstance(found, Library) and (found.path, found.source) == (held, "held by the process")


def test_a_release_of_an_unknown_major_is_not_taken_for_a_known_one(tmp_path):
    maps = mapped(tmp_path, "/x/libplantedhip64.so.8", "/x/libplantedhip64.so.7.2.1", "/x/mylibplantedhip64.so")
    assert libraries.loaded(PLANTED, maps) == ("/x/libplantedhip64.so.7.2.1",)


def test_a_broken_copy_is_passed_over_and_told_of_where_there_is_no_other(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "libplantedhip64.so.7").write_text("not a library")
    reason = find([tmp_path / "first"], mapped(tmp_path))
    assert isinstance(reason, str) and "first/libplantedhip64.so.7" in reason and libraries.PATH in reason
    good = plant(tmp_path / "second", 70253211)
    found = find([tmp_path / "first", tmp_path / "second"], mapped(tmp_path))
    assert found == Library(good, "test", (7, 2, 53211))


def test_folders_that_were_named_are_the_only_ones(tmp_path, monkeypatch):
    monkeypatch.setenv(libraries.PATH, str(tmp_path))
    reason = find([tmp_path], mapped(tmp_path), named=True)
    assert (
        isinstance(reason, str)
        and f"no folder that {libraries.PATH} names has libplantedhip64.so: {tmp_path}" in reason
    )
    environ = {libraries.PATH: os.pathsep.join((str(tmp_path), "/nowhere")), "ROCM_PATH": "/elsewhere"}
    (tmp_path / "lib").mkdir()
    assert libraries.places(environ, []) == [
        (str(tmp_path), libraries.PATH),
        (str(tmp_path / "lib"), libraries.PATH),
    ]


def test_the_usual_places_in_order(tmp_path):
    for folder in (
        "site/torch/lib",
        "site/_rocm_sdk_core/lib",
        "site/_rocm_sdk_libraries_gfx94X_dcgpu/lib",
        "rocm/lib",
    ):
        (tmp_path / folder).mkdir(parents=True)
    found = libraries.places({"ROCM_PATH": str(tmp_path / "rocm")}, [str(tmp_path / "site")])
    named = [
        (os.path.relpath(folder, tmp_path), source) for folder, source in found if folder.startswith(str(tmp_path))
    ]
    assert named == [
        ("site/torch/lib", "PyTorch's folder"),
        ("site/_rocm_sdk_core/lib", "ROCm package"),
        ("site/_rocm_sdk_libraries_gfx94X_dcgpu/lib", "ROCm package"),
        ("rocm/lib", "ROCM_PATH"),
    ]


def test_nothing_at_all_says_what_to_do(tmp_path):
    reason = find([], mapped(tmp_path))
    assert isinstance(reason, str)
    assert reason.startswith("HIP's runtime is not here:") and f"name its folder in {libraries.PATH}" in reason


def test_both_versions_are_named_where_one_is_too_old():
    reason = libraries.too_old("hipblaslt", (0, 8, 0), "/opt/rocm-6.2/lib/libhipblaslt.so.0")
    assert reason is not None and "hipBLASLt 0.8.0 is too old, needs 0.10" in reason and "/opt/rocm-6.2" in reason
    assert libraries.too_old("hipblaslt", (0, 10, 0), "") is None
    assert libraries.too_old("hipblaslt", (1, 0, 0), "") is None
    assert libraries.too_old("hipblaslt", (0, 0, 0), "") is None  # it does not tell


def test_two_installations_in_one_process_are_told_of(tmp_path):
    one, two = (f"/opt/rocm-{release}/lib/libamdhip64.so.7" for release in ("7.1", "7.2"))
    (problem,) = libraries.problems(mapped(tmp_path, one, two), {})
    assert one in problem and two in problem and libraries.PATH in problem
    (problem,) = libraries.problems(mapped(tmp_path, one), {libraries.PATH: "/opt/rocm-7.2"})
    assert one in problem and "/opt/rocm-7.2" in problem
    assert libraries.problems(mapped(tmp_path, one), {libraries.PATH: "/opt/rocm-7.1"}) == []


_OPENED = """
import sys
from te_dispatch_rocm.native import load
native = load()
for open in (native.open_hip, native.open_hipblaslt):
    for path in sys.argv[1:]:
        try: open(path)
        except RuntimeError as error: print(error)
"""


def test_functions_that_a_library_lacks_are_named(native, tmp_path):
    path = plant(tmp_path, 70253211)
    command = [sys.executable, "-c", _OPENED, path, str(tmp_path / "nowhere.so")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(rf"HIP's runtime lacks hip\w+, it is too old: {re.escape(path)}", said[0])
    assert said[1].startswith("HIP's runtime does not open: ") and "nowhere.so" in said[1]
    assert re.fullmatch(rf"hipBLASLt lacks hipblasLt\w+, it is too old: {re.escape(path)}", said[2])
    assert said[3].startswith("hipBLASLt does not open: ") and "nowhere.so" in said[3]
