# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Environments of their own: virtual ones, with te_dispatch and plugins installed by pip, without a network.

An environment sees every distribution of the interpreter that runs the tests except te_dispatch's own, which are
installed into it from wheels: so it can lack any of them.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

#: Distribution -> where its source is.
SOURCES = {
    "te-dispatch": REPOSITORY,
    "te-dispatch-reference": REPOSITORY / "backends" / "reference",
    "te-dispatch-torch": REPOSITORY / "backends" / "torch",
    "te-dispatch-acme": REPOSITORY / "examples" / "acme_backend",
}
_BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "policies")
_PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
_OFFLINE = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
_OURS = ("te_dispatch", "__editable__.te_dispatch", "__editable___te_dispatch")


needs_a_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="the kernels are compiled: needs a C compiler")


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        return _site_packages(self.folder)

    def install(self, *wheels: Path) -> None:
        self._checked(*_PIP, "install", *_OFFLINE, "--no-compile", *map(str, wheels))

    def uninstall(self, *distributions: str) -> None:
        self._checked(*_PIP, "uninstall", "--quiet", "--yes", *distributions)

    def python(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with nothing of ours in its surroundings but `environ`."""
        dropped = ("PYTHON", "PIP_", "TE_DISPATCH_", "NVTE_", "ACME_", "BREEZE_", "PYTEST_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return subprocess.run(
            [str(self.interpreter), *arguments],
            cwd=self.folder,
            env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **environ},
            capture_output=True,
            text=True,
            timeout=300,
        )

    def command(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run ``te-dispatch``."""
        return self.python(str(self.folder / "bin" / "te-dispatch"), *arguments, **environ)

    def doctor(self, **environ: str) -> dict[str, Any]:
        """What ``te-dispatch doctor --json`` says."""
        done = self.command("doctor", "--json", **environ)
        if not done.stdout:
            raise AssertionError(f"doctor said nothing (exit code {done.returncode}): {done.stderr}")
        found: dict[str, Any] = json.loads(done.stdout)
        # 1 says that something is broken; anything else would be doctor's own failure.
        assert done.returncode == bool(found["problems"]), done.stderr
        return found

    def run(self, script: Path, *arguments: str, **environ: str) -> tuple[dict[str, Any], str]:
        """Run a script that prints one JSON document; returns it, and standard error."""
        done = self.python(str(script), *arguments, **environ)
        if done.returncode != 0:
            raise AssertionError(f"{script.name} failed ({done.returncode}):\n{done.stderr}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer, done.stderr

    def _checked(self, *arguments: str) -> None:
        done = self.python(*arguments)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")


def create_environment(folder: Path, *wheels: Path) -> Environment:
    """A new environment with the wheels installed."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    site_packages = _site_packages(folder)
    # Links and not a path file, which could only show all of a folder: te_dispatch's distributions must stay out.
    for place in sys.path:
        if not place or not any(Path(place).glob("*.dist-info")):
            continue
        for entry in Path(place).iterdir():
            link = site_packages / entry.name
            if not entry.name.startswith((*_OURS, "__pycache__")) and not link.exists():
                link.symlink_to(entry)
    environment = Environment(folder)
    if wheels:
        environment.install(*wheels)
    return environment


def _site_packages(folder: Path) -> Path:
    return folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def build_wheels(folder: Path) -> dict[str, Path]:
    """Wheels of `SOURCES`, by distribution; built once however many processes ask."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        finished = folder / "finished"
        if not finished.exists():
            _build([_copied(name, folder) for name in SOURCES], folder)
            finished.touch()
    return {name: next(folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")) for name in SOURCES}


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel of one source folder, which the build is free to write into."""
    _build([source], folder)
    return next(folder.glob("*.whl"))


def _build(sources: Sequence[Path], folder: Path) -> None:
    command = [sys.executable, *_PIP, "wheel", *_OFFLINE, "--wheel-dir", str(folder), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise AssertionError(f"pip wheel failed:\n{done.stdout}{done.stderr}")


def _copied(name: str, folder: Path) -> Path:
    """A copy of a distribution's source: setuptools builds in the folder it is given."""
    source, copy = SOURCES[name], folder / "sources" / name
    copy.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.is_dir() and (entry.name in _BUILT_FROM or entry.name == name.replace("-", "_")):
            shutil.copytree(entry, copy / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.is_file() and entry.name in _BUILT_FROM:
            shutil.copy(entry, copy)
    return copy


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_wheel(folder: Path, distribution: str, modules: Mapping[str, str], entry_points: Mapping[str, str]) -> Path:
    """A wheel, version 1.0, of single-file modules (name -> source) and backends (name -> ``module:attribute``).

    Written directly, because a build takes seconds and there are many plugins.
    """
    stem = f"{distribution.replace('-', '_')}-1.0"
    backends = "".join(f"{name} = {target}\n" for name, target in entry_points.items())
    files = {f"{name}.py": source for name, source in modules.items()} | {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": f"[te_dispatch.backends]\n{backends}",
    }
    record = f"{stem}.dist-info/RECORD"
    rows = [f"{name},sha256={_digest(text)},{len(text.encode())}" for name, text in files.items()]
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "\n".join([*rows, f"{record},,"]) + "\n")
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
