# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""tools/amd_packages.py, with stand-ins for apt and dpkg: nothing is fetched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: One program under three names. It writes what it is asked, and stands for an archive with two suites.
STAND_IN = """#!{python}
import os, pathlib, sys
name, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open({log!r}, "a") as log:
    print(name, *arguments, file=log)
failing = os.environ.get("FAILING", "").split()
if any(word in arguments for word in failing):
    sys.exit("E: " + " ".join(failing) + " did not work")
if arguments[0] == "indextargets":
    print(os.environ.get("TARGETS", "http://archive.example/debian/|Debian|$(SIGNED_BY)"))
elif arguments[0] == "madison":
    print(os.environ.get("MADISON", ""))
elif arguments[0] == "show":
    print("Package: libhipblaslt-dev\\nDepends: libamdhip64-dev, libhipblaslt1 (= 7.2.4)")
elif arguments[0] == "download":
    for one in arguments[3:]:
        pathlib.Path(one + "_7.2.4-1_amd64.deb").touch()
elif arguments[0] == "install":
    config = dict(line.rstrip(';').split(' ', 1) for line in open(os.environ["APT_CONFIG"]).read().splitlines())
    archives = pathlib.Path(config["Dir::Cache"].strip('"')) / "archives"
    (archives / (arguments[-1] + "_7.2.4-1_amd64.deb")).touch()
elif arguments[0] == "--extract":
    root, package = pathlib.Path(arguments[2]), pathlib.Path(arguments[1]).name
    for path in ("usr/include/hip/" + package, "usr/lib/x86_64-linux-gnu/" + package):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
"""

NEWEST_FIRST = (
    "libhipblaslt-dev | 7.2.4-1 | http://archive.example/debian experimental/main amd64 Packages\n"
    "libhipblaslt-dev | 7.1.1-4 | http://archive.example/debian sid/main amd64 Packages"
)


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """calls() lists what apt and dpkg were called with."""
    log, tools = tmp_path / "log", tmp_path / "bin"
    tools.mkdir()
    for name in ("apt-get", "apt-cache", "dpkg-deb"):
        (tools / name).write_text(STAND_IN.format(python=sys.executable, log=str(log)))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools) + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("MADISON", NEWEST_FIRST)
    return lambda: log.read_text().splitlines() if log.exists() else []


def test_headers_come_from_the_suite_with_the_newest(calls, packages, tmp_path):
    folder = packages.fetch("headers", tmp_path / "amd")
    assert packages.found("headers", tmp_path / "amd") == folder
    assert "apt-get download -t experimental libhipblaslt-dev libhipblas-common-dev libamdhip64-dev" in calls()
    assert not any(" install " in call for call in calls())
    assert packages.versions(folder)["libhipblaslt-dev"] == "7.2.4-1"
    assert (packages.include(folder) / "hip").is_dir()
    assert [path.name for path in (tmp_path / "amd").iterdir()] == ["headers"]


def test_the_suite_with_the_newest_may_be_the_second(calls, packages, tmp_path, monkeypatch):
    monkeypatch.setenv("MADISON", "\n".join(reversed(NEWEST_FIRST.splitlines())))
    packages.fetch("headers", tmp_path)
    assert any(call.startswith("apt-get download -t sid ") for call in calls())


def test_libraries_come_with_headers(calls, packages, tmp_path):
    folder = packages.fetch("libraries", tmp_path)
    assert "apt-get install --download-only --yes -t experimental libhipblaslt1" in calls()
    assert packages.found("headers", tmp_path) == packages.found("libraries", tmp_path) == folder
    assert set(packages.versions(folder)) == {
        "libhipblaslt-dev", "libhipblas-common-dev", "libamdhip64-dev", "libhipblaslt1",
    }  # fmt: skip


def test_what_is_there_is_kept_unless_it_is_wanted_again(calls, packages, tmp_path):
    packages.fetch("headers", tmp_path)
    before = len(calls())
    packages.fetch("headers", tmp_path)
    assert len(calls()) == before
    packages.fetch("headers", tmp_path, again=True)
    assert len(calls()) > before


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"FAILING": "update"}, "apt-get update: E: update did not work"),
        ({"FAILING": "download"}, "apt-get download: E: download did not work"),
        ({"FAILING": "--extract"}, "dpkg-deb --extract: E: --extract did not work"),
        ({"MADISON": ""}, "the archive has no libhipblaslt-dev in experimental or sid"),
        ({"TARGETS": "http://archive.example/other/|Other|"}, "this machine's apt sources name no Debian archive"),
    ],
)
def test_what_cannot_be_had_says_why_and_keeps_it_for_tests(calls, packages, tmp_path, monkeypatch, variables, reason):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(packages.Unavailable, match=f"^{reason}$"):
        packages.fetch("headers", tmp_path)
    with pytest.raises(packages.Unavailable, match=f"^skipped: unavailable: {reason}$"):
        packages.found("headers", tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "bin"] == []
    for name in variables:
        monkeypatch.setenv(name, NEWEST_FIRST if name == "MADISON" else "")
    if "TARGETS" not in variables:
        packages.fetch("headers", tmp_path)
        assert not (tmp_path / "headers.reason").exists()


def test_the_command_exits_with_75_where_nothing_can_be_had(calls, packages, tmp_path):
    command = [sys.executable, packages.__file__, "headers", "--folder", str(tmp_path / "amd")]
    good = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "libhipblaslt-dev 7.2.4-1" in good
    environment = {**os.environ, "FAILING": "update"}
    bad = subprocess.run([*command, "--again"], env=environment, capture_output=True, text=True, check=False)
    assert bad.returncode == 75
    assert bad.stdout == "skipped: unavailable: apt-get update: E: update did not work\n"


def test_tests_are_told_how_to_fetch(packages, tmp_path):
    with pytest.raises(
        packages.Unavailable, match=r"were not fetched: python backends/rocm/tools/amd_packages.py headers"
    ):
        packages.found("headers", tmp_path)


def test_an_archive_before_apt_has_updated_is_known_by_its_path(calls, packages, monkeypatch):
    lines = ("http://other.example/x/|$(ORIGIN)|$(SIGNED_BY)", "http://archive.example/debian-security/|$(ORIGIN)|$(SIGNED_BY)",
             "http://archive.example/debian/|$(ORIGIN)|/usr/share/keyrings/some.gpg")  # fmt: skip
    monkeypatch.setenv("TARGETS", "\n".join(lines))
    assert packages.mirror() == ("http://archive.example/debian/", "/usr/share/keyrings/some.gpg")


def test_programs_run_with_the_unpacked_linker_and_libraries(packages, tmp_path):
    libraries = tmp_path / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    for name in ("libhipblaslt.so.1", "ld-linux-x86-64.so.2"):
        (libraries / name).touch()
    loader = str(libraries / "ld-linux-x86-64.so.2")
    command = packages.command(tmp_path, Path("/a/program"), [Path("/first")], [Path("/last")])
    assert command == [loader, "--library-path", f"/first:{libraries}:/last", "/a/program"]
