# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Fetches AMD's own headers and libraries, as Debian packages them, into a folder: for tests, on machines without them.

    python backends/rocm/tools/amd_packages.py headers      # HIP's and hipBLASLt's headers: 12 MB to load
    python backends/rocm/tools/amd_packages.py libraries    # these, libhipblaslt, libamdhip64 and what they need:
                                                            # 340 MB to load, 1.2 GB unpacked

It asks the Debian mirror that this machine's own apt uses, for the suites that AMD's packages appear in first; the
newest hipBLASLt of them is taken, whatever its version. The package manager's state is one of its own, so the system is
left as it is, and nothing is installed; no privileges are needed. The folder is `build/amd_packages/` of this backend
(--folder), which git ignores; what is there already is kept (--again fetches anew).

Exits with 0 and prints the folder; where nothing can be had, exits with 75 and prints `skipped: unavailable: <reason>`.
The reason is kept in the folder, for tests that skip.

The libraries need a newer glibc than most systems have. `command(folder, program)` runs a program with the one that
came along.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "amd_packages"
KINDS = ("headers", "libraries")
#: Where Debian's maintainers put new packages, most recent first.
SUITES = ("experimental", "sid")
NEWEST = "libhipblaslt-dev"
HEADERS = (NEWEST, "libhipblas-common-dev", "libamdhip64-dev")
#: Seconds that apt and the unpacking may take.
LIMITS = {"headers": 300, "libraries": 1200}
EXIT_UNAVAILABLE = 75  # EX_TEMPFAIL of sysexits.h
RUN = "python backends/rocm/tools/amd_packages.py"


class Unavailable(RuntimeError):
    """Why AMD's packages are not there."""


def found(kind: str, folder: Path = FOLDER) -> Path:
    """The folder of what was fetched, whose `usr/` is a system's; `kind` is of `KINDS`. Raises `Unavailable`, with how
    to fetch or why that failed."""
    for one in ("libraries", "headers") if kind == "headers" else (kind,):
        if (folder / one).is_dir():
            return folder / one
    reason = folder / f"{kind}.reason"
    if reason.is_file():
        raise Unavailable(f"skipped: unavailable: {reason.read_text().strip()}")
    raise Unavailable(f"AMD's {kind} were not fetched: {RUN} {kind}")


def include(folder: Path) -> Path:
    """The folder for the compiler's -isystem."""
    return folder / "usr" / "include"


def library_folder(folder: Path) -> Path:
    """The folder that holds the unpacked libhipblaslt. Raises `Unavailable` if none does."""
    for path in sorted(folder.glob("usr/lib/*/libhipblaslt.so.*")):
        return path.parent
    raise Unavailable(f"no libhipblaslt below {folder}")


def command(folder: Path, program: Path, before: Sequence[Path] = (), after: Sequence[Path] = ()) -> list[str]:
    """The command that runs a program of this machine with the unpacked libraries and their glibc; append the program's
    arguments. The linker looks in `before`, then among the unpacked libraries, then in `after`."""
    libraries = library_folder(folder)
    loader = next(libraries.glob("ld-linux*.so.*"), None) or next(folder.glob("**/ld-linux*.so.*"), None)
    if loader is None:
        raise Unavailable(f"no dynamic linker below {folder}")
    path = os.pathsep.join(str(one) for one in (*before, libraries, *after))
    return [str(loader), "--library-path", path, str(program)]


def versions(folder: Path) -> dict[str, str]:
    """Version by name of each package that was unpacked."""
    lines = (folder / "versions").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def fetch(kind: str, folder: Path = FOLDER, again: bool = False, suites: tuple[str, ...] = SUITES) -> Path:
    """`found`, after fetching what is not there. Raises `Unavailable` where that fails."""
    if kind not in KINDS:
        raise ValueError(f"kind: got {kind!r}, expected one of {KINDS}")
    target, reason = folder / kind, folder / f"{kind}.reason"
    if again:
        shutil.rmtree(target, ignore_errors=True)
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    reason.unlink(missing_ok=True)
    work = Path(tempfile.mkdtemp(prefix="fetching-", dir=folder))
    try:
        root = _Apt(work, suites, LIMITS[kind]).unpack(kind)
        try:
            root.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    except Unavailable as error:
        reason.write_text(f"{error}\n")
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def mirror() -> tuple[str, str]:
    """(address, keyring or "") of the Debian archive among this machine's own apt sources. Raises `Unavailable`."""
    for tool in ("apt-get", "apt-cache", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} is not on this machine")
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(ORIGIN)|$(SIGNED_BY)", "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    rows = [line.split("|") for line in listed.stdout.splitlines() if line.count("|") == 2]
    # The origin is known once apt has updated; before, the path says what the archive is.
    for uri, origin, keyring in rows:
        known = origin == "Debian" or (origin.startswith("$") and uri.rstrip("/").endswith("/debian"))
        if known and "security" not in uri:
            return uri, "" if keyring.startswith("$") else keyring
    raise Unavailable("this machine's apt sources name no Debian archive")


class _Apt:
    """apt with a state of its own, below `work`."""

    def __init__(self, work: Path, suites: tuple[str, ...], limit: int) -> None:
        self.work, self.suites, self.limit = work, suites, limit
        uri, keyring = mirror()
        for name in ("state/lists/partial", "cache/archives/partial", "debs", "root"):
            (work / name).mkdir(parents=True)
        (work / "status").touch()
        signed = f"[signed-by={keyring}] " if keyring else ""
        (work / "sources.list").write_text("".join(f"deb {signed}{uri} {suite} main\n" for suite in suites))
        settings = {
            "Dir::Etc::sourcelist": work / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferences": "-",
            "Dir::Etc::preferencesparts": "-",
            "Dir::State": work / "state",
            "Dir::State::status": work / "status",
            "Dir::Cache": work / "cache",
            "APT::Install-Recommends": "false",
            "Acquire::Retries": 2,
            "Acquire::http::Timeout": 30,
        }
        if os.geteuid() == 0:
            settings["APT::Sandbox::User"] = "root"  # apt's own user may not enter this folder
        (work / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))

    def run(self, *arguments: str, folder: Path | None = None) -> str:
        environment = {**os.environ, "APT_CONFIG": str(self.work / "apt.conf"), "LC_ALL": "C"}
        try:
            done = subprocess.run(
                arguments, env=environment, cwd=folder, capture_output=True, text=True, timeout=self.limit, check=True
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"{arguments[0]} {arguments[1]} took more than {self.limit} s") from error
        except subprocess.CalledProcessError as error:
            words = (error.stderr or error.stdout or "no message").strip().splitlines()
            raise Unavailable(f"{arguments[0]} {arguments[1]}: {words[-1]}") from error
        return done.stdout

    def unpack(self, kind: str) -> Path:
        self.run("apt-get", "update", "-o", "APT::Update::Error-Mode=any")
        suite = self._newest()
        self.run("apt-get", "download", "-t", suite, *HEADERS, folder=self.work / "debs")
        if kind == "libraries":
            wanted = self._library(suite)
            self.run("apt-get", "install", "--download-only", "--yes", "-t", suite, wanted)
        root = self.work / "root"
        packages = sorted([*self.work.glob("debs/*.deb"), *self.work.glob("cache/archives/*.deb")])
        for package in packages:
            self.run("dpkg-deb", "--extract", str(package), str(root))
        # Files are named NAME_VERSION_ARCHITECTURE.deb.
        named = dict(package.name.split("_")[:2] for package in packages)
        (root / "versions").write_text("".join(f"{name}={version}\n" for name, version in sorted(named.items())))
        if kind == "headers":
            shutil.rmtree(root / "usr" / "lib", ignore_errors=True)  # links to libraries that did not come along
        return root

    def _newest(self) -> str:
        """The suite with the newest hipBLASLt. Versions of one package are listed newest first."""
        for line in self.run("apt-cache", "madison", NEWEST).splitlines():
            for suite in self.suites:
                if f" {suite}/" in line.rpartition("|")[2]:
                    return suite
        raise Unavailable(f"the archive has no {NEWEST} in {' or '.join(self.suites)}")

    def _library(self, suite: str) -> str:
        """The package of the library itself, whose name ends with its ABI's number."""
        shown = self.run("apt-cache", "show", "-t", suite, NEWEST)
        match = re.search(r"^Depends:.*?\b(libhipblaslt\d+)\b", shown, re.MULTILINE)
        if match is None:
            raise Unavailable(f"{NEWEST} names no library that it is for")
        return match[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--again", action="store_true", help="fetch anew what is there")
    parser.add_argument("--suite", action="append", help="look in this suite, instead of " + ", ".join(SUITES))
    arguments = parser.parse_args()
    try:
        target = fetch(arguments.kind, arguments.folder, arguments.again, tuple(arguments.suite or SUITES))
    except Unavailable as reason:
        print(f"skipped: unavailable: {reason}")
        sys.exit(EXIT_UNAVAILABLE)
    print(target, *(f"{name} {version}" for name, version in versions(target).items() if "hip" in name), sep="\n  ")


if __name__ == "__main__":
    main()
