# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The distribution of the folder ``faulty``: installed where only processes of its own see it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parent / "faulty"
# Its modules can be imported here; it is not installed here, and no backend of this process.
sys.path.append(str(SOURCE))
from te_dispatch_faulty.catalogue import FAULTS  # noqa: E402
from te_dispatch_faulty.fault import AT_SMOKE  # noqa: E402
from te_dispatch_faulty.variations import VARIATIONS  # noqa: E402

__all__ = ["AT_SMOKE", "FAULTS", "JOBS", "SOURCE", "VARIATIONS", "WHOLE", "Site", "chosen", "locked", "site"]

#: Whether everything is to run, as ``make test-kit`` asks for; else a quarter of what no fault is sought in.
WHOLE = os.environ.get("TE_DISPATCH_TEST_KIT") == "1"
#: Processes that work is spread over.
JOBS = 2
#: Seconds for a run: many times what one takes on two free cores.
LIMIT_S = 3000

_PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")


@dataclass(frozen=True)
class Site:
    """A folder with the distribution installed.

    Attributes:
        folder: that all processes of pytest-xdist share.
    """

    folder: Path

    @property
    def packages(self) -> Path:
        return self.folder / "site"

    def once(self, name: str, *arguments: str) -> list[dict[str, Any]]:
        """What processes of a module print as JSON, one object a line; run once, whoever asks first.

        Args:
            name: of the run.
            arguments: of Python; ``--share`` and a folder are added, by which the processes share the work.

        Raises:
            AssertionError: the run failed, here or for whoever asked before.
        """
        kept = self.folder / f"{name}.jsonl"
        with locked(self.folder, name):
            if not kept.exists():
                share = self.folder / f"{name}.share"
                assert not share.exists(), f"{name} was run before, and failed: {share}"
                share.mkdir()
                kept.write_text(self._run(name, [*arguments, "--share", str(share)]))
        return [json.loads(line) for line in kept.read_text().splitlines()]

    def _run(self, name: str, arguments: Sequence[str], jobs: int = JOBS) -> str:
        environ = {**os.environ, "PYTHONPATH": str(self.packages), "OMP_NUM_THREADS": "1"}
        # Files, not pipes: who waits for one process must not stop the other.
        files = [(self.folder / f"{name}.{i}.out", self.folder / f"{name}.{i}.err") for i in range(jobs)]
        started = []
        try:
            for out, err in files:
                with out.open("w") as stdout, err.open("w") as stderr:
                    command = [sys.executable, *arguments]
                    started.append(subprocess.Popen(command, env=environ, stdout=stdout, stderr=stderr))
            for process, (_, err) in zip(started, files):
                assert process.wait(timeout=LIMIT_S) == 0, err.read_text()[-4000:]
        finally:
            for process in started:
                process.kill()
        return "".join(out.read_text() for out, _ in files)

    def answer(self, name: str, program: str) -> Any:
        """What a program prints as JSON."""
        return json.loads(self._run(name, ["-c", program], jobs=1))


def chosen(request: pytest.FixtureRequest, test: Callable[..., Any], parameter: str) -> set[str]:
    """The values of a parameter in those cases of a test that this run has, on whichever worker."""
    cases = (item for item in request.session.items if getattr(item, "obj", None) is test)
    return {case.callspec.params[parameter] for case in cases}  # type: ignore[attr-defined]


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """A block that one process at a time is in."""
    with (folder / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "faulty"
    folder.mkdir(exist_ok=True)
    found = Site(folder)
    with locked(folder, "site"):
        if not found.packages.exists():
            # A copy: setuptools builds in the folder it is given.
            source = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
            options = ("--no-deps", "--no-index", "--no-build-isolation", "--target", str(found.packages))
            done = subprocess.run([*_PIP, *options, str(source)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return found
