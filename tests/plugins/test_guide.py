# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The guide, followed: its files are written, built and installed, its tests and commands run."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from .test_public_interface import GUIDE
from .workshop import REPOSITORY, Environment, build_wheel, create_environment, needs_a_compiler

pytestmark = pytest.mark.slow

_FILE = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"^```\w+ from=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    return dict(_FILE.findall(GUIDE.read_text(encoding="utf-8")))


def commands(kind: str = "console") -> list[tuple[str, list[str]]]:
    """(command, lines that its output must have) of every ``$`` line in the blocks of one kind."""
    found: list[tuple[str, list[str]]] = []
    blocks = re.compile(rf"^```{kind}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    for block in blocks.findall(GUIDE.read_text(encoding="utf-8")):
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
    _answers(breeze[0], command, expected)


def _answers(environment: Environment, command: str, expected: list[str]) -> None:
    dropped = ("PYTHON", "TE_DISPATCH_", "NVTE_", "BREEZE_", "ACME_", "PIP_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
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


@needs_a_compiler
def test_what_the_guide_says_of_native_code_is_so(tmp_path: Path, wheels: dict[str, Path]) -> None:
    """One command after the other: each builds on those before."""
    names = ("te-dispatch", "te-dispatch-torch", "te-dispatch-reference")
    environment = create_environment(tmp_path / "venv", *(wheels[name] for name in names))
    example = REPOSITORY / "examples" / "acme_backend"
    ignored = shutil.ignore_patterns("build", "*.egg-info", "*.so")
    shutil.copytree(example, environment.folder / "examples" / "acme_backend", ignore=ignored)
    found = commands("console native")
    assert len(found) == 6
    for command, expected in found:
        lines = [line.replace("x86_64", platform.machine()) for line in expected]
        _answers(environment, command, lines)


def test_code_that_the_guide_quotes_is_the_examples() -> None:
    quoted = _QUOTED.findall(GUIDE.read_text(encoding="utf-8"))
    assert [name for name, _ in quoted] == ["examples/acme_backend/setup.py"]
    assert all(text in (REPOSITORY / name).read_text(encoding="utf-8") for name, text in quoted)
