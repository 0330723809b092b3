# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The guide, followed: its files are written, built and installed, its tests and commands run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .test_public_interface import GUIDE
from .workshop import Environment, build_wheel, create_environment

pytestmark = pytest.mark.slow

_FILE = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    return dict(_FILE.findall(GUIDE.read_text(encoding="utf-8")))


def commands() -> list[tuple[str, list[str]]]:
    """(command, lines that its output must have) of every ``$`` line."""
    found: list[tuple[str, list[str]]] = []
    for block in _CONSOLE.findall(GUIDE.read_text(encoding="utf-8")):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


@pytest.fixture(scope="module")
def breeze(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> tuple[Environment, Path]:
    """An environment with the guide's backend, and the folder of its source."""
    folder = tmp_path_factory.mktemp("guide")
    source = folder / "source"
    for name, text in files().items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    names = ("te-dispatch", "te-dispatch-torch", "te-dispatch-reference")
    wheel = build_wheel(source, folder / "wheel")
    return create_environment(folder / "venv", *(wheels[name] for name in names), wheel), source


def test_the_guide_has_what_it_promises() -> None:
    assert len(files()) == 5
    assert len(commands()) == 5


def test_the_guide_s_own_tests_pass(breeze: tuple[Environment, Path]) -> None:
    environment, source = breeze
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={source}", "-c", "/dev/null")
    done = environment.python("-m", "pytest", *options, str(source / "tests"), BREEZE_DEVICE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout


def _words(text: str) -> str:
    """Without a table's lines, and with one blank between words."""
    return " ".join(re.sub(r"[│┃┏┓┗┛━┳┻┡┩╇├┤┼─┴└┘]", " ", text).split())


@pytest.mark.parametrize(("command", "expected"), commands(), ids=lambda value: str(value)[:60])
def test_the_guide_s_commands_answer_as_it_says(
    breeze: tuple[Environment, Path], command: str, expected: list[str]
) -> None:
    environment, _ = breeze
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TE_DISPATCH_", "NVTE_", "BREEZE_"))}
    path = f"{environment.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=environment.folder,
        env={**kept, "PATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    said = _words(done.stdout)
    assert [line for line in expected if _words(line) not in said] == [], done.stdout
