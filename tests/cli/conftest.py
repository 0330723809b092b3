# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running the command: in this process where that tells the same, else in one of its own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from te_dispatch.cli.app import app


class Answer:
    """What a run of the command left: exit code, standard output, standard error."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """The one document on standard output; anything else there fails."""
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


Command = Callable[..., Answer]


@pytest.fixture
def te() -> Command:
    """Run a verb in this process."""

    def run(*arguments: str) -> Answer:
        result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Answer(result.exit_code, result.stdout, result.stderr)

    return run


def _run_process(
    folder: Path, *arguments: str, path: Path | None = None, program: str | None = None, **environ: str
) -> Answer:
    """Run a verb in a process of its own.

    Args:
        folder: where it runs.
        path: a folder of extra distributions. program: Python to run instead of the command. environ: variables.
    """
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TE_DISPATCH_", "NVTE_"))}
    extra = [str(path)] if path else []
    clean["PYTHONPATH"] = os.pathsep.join([*extra, *(p for p in sys.path if p)])
    start = ["-c", program] if program else ["-m", "te_dispatch.cli"]
    done = subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**clean, "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environ},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Answer(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="session")
def run_process() -> Command:
    """Run a verb in a process of its own, in a folder that is given first."""
    return _run_process


@pytest.fixture
def te_process(tmp_path: Path) -> Command:
    """Run a verb in a process of its own, in a temporary folder."""
    return functools.partial(_run_process, tmp_path)
