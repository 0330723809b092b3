# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""docs/conformance.md, followed by somebody who has nothing else: its commands certify the example of a backend."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from te_dispatch.conformance import checks

from ..plugins.workshop import REPOSITORY, create_environment

pytestmark = pytest.mark.slow

DOC = (REPOSITORY / "docs" / "conformance.md").read_text(encoding="utf-8")
#: Only what installing the four distributions reads: a checkout also holds environments and build outputs.
_PARTS = ("te_dispatch", "policies", "backends", "examples", "pyproject.toml", "README.md", "LICENSE")
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXPORT = "export "


def commands() -> list[tuple[str, list[str]]]:
    """(command, lines that its output must have) of every ``$`` line."""
    found: list[tuple[str, list[str]]] = []
    for block in _CONSOLE.findall(DOC):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found and block.startswith("$ "):
                found[-1][1].append(line)
    return found


INSTALL, EXPORT, *FOLLOWING = commands()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose environment, beside it, has what the documented installation needs but nothing of ours."""
    folder = tmp_path_factory.mktemp("follow") / "te_dispatch"
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info", ".venv*")
    for name in _PARTS:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder)
    for name, text in _FILE.findall(DOC):
        (folder / name).write_text(text, encoding="utf-8")
    create_environment(folder.parent / "venv")
    # Without a network: what the four need is there already.
    done = _run(f"{INSTALL[0]} --no-index --no-build-isolation", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    dropped = ("PYTHON", "PIP_", "TE_DISPATCH_", "NVTE_", "ACME_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = f"{folder.parent / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**kept, "PATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=580,
    )


def _words(text: str) -> str:
    """Without a table's lines, and with one blank between words."""
    return " ".join(re.sub(r"[│┃┏┓┗┛━┳┻┡┩╇├┤┼─┴└┘]", " ", text).split())


def test_the_page_has_what_it_promises() -> None:
    assert INSTALL[0].startswith("python -m pip install -e ") and EXPORT[0].startswith(_EXPORT)
    assert len(FOLLOWING) == 7 and all(expected for _, expected in FOLLOWING)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "expected"), FOLLOWING, ids=[command for command, _ in FOLLOWING])
def test_the_page_s_commands_answer_as_it_says(checkout: Path, command: str, expected: list[str]) -> None:
    done = _run(f"{EXPORT[0]} && {command}", checkout)
    said = _words(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in expected if _words(line) not in said] == [], done.stdout


@pytest.mark.slow
def test_without_its_chip_nothing_is_certified(checkout: Path) -> None:
    for command in (
        "te-dispatch conformance --backend acme --op softmax_fwd --check values",
        "python -m pytest --pyargs te_dispatch.conformance --te-backend acme --te-op softmax_fwd --te-check values",
    ):
        done = _run(command, checkout)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "nothing was claimed, so nothing is certified" in _words(done.stdout)


@pytest.mark.slow
def test_certifying_in_a_script_runs_the_script_once(checkout: Path) -> None:
    """As a notebook's cell would be written: no guard for workers that import the caller's module."""
    script = checkout / "cell.py"
    script.write_text(
        "from te_dispatch.conformance import certify\n"
        "print('started')\n"
        "report = certify('acme', op='softmax_fwd')\n"
        "assert report.ok and report.counts['passed'] == report.counts['claimed'] > 0, report.failures()\n"
    )
    done = _run("ACME_DEVICE=1 python cell.py", checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "started\n"


def test_every_check_is_explained_and_no_other() -> None:
    table = DOC.partition("## Checks")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(told) == sorted(check.name for check in checks.checks())


def test_options_that_the_page_names_exist(pytestconfig: pytest.Config) -> None:
    from typer.main import get_command

    from te_dispatch.cli.app import app

    verb = get_command(app).commands["conformance"]  # type: ignore[attr-defined]
    known = {option for parameter in verb.params for option in parameter.opts}
    of_others = {"--pyargs", "--junitxml", "--help", "--replay", "--no-deps", "--target", "--remember"}
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]*\w(?![\w-])", DOC)) - of_others:
        if option.startswith("--te-"):
            pytestconfig.getoption(option)
        else:
            assert option in known, option


def test_the_workflow_is_one() -> None:
    [text] = re.findall(r"^```yaml\n(name: .*?)^```$", DOC, re.MULTILINE | re.DOTALL)
    [job] = yaml.safe_load(text)["jobs"].values()
    [line] = [step["run"] for step in job["steps"] if step.get("run", "").startswith("te-dispatch")]
    assert shlex.split(line)[:2] == ["te-dispatch", "conformance"]


def test_the_page_s_python_runs(tmp_path: Path) -> None:
    [code] = re.findall(r"^```python\n(from te_dispatch\.conformance import certify\n.*?)^```$", DOC, re.M | re.S)
    (tmp_path / "page.py").write_text(code)
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("True ") and "\n" not in done.stdout.strip()
