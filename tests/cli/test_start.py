# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How the command starts: fast, without PyTorch where it can, and readably where an extra is missing."""

from __future__ import annotations

import importlib.metadata
import json
import re

import pytest

import te_dispatch
from te_dispatch.cli import doctor

pytestmark = pytest.mark.sampled(8)

_WITHOUT = """
import importlib.util, runpy, sys
absent = {absent!r}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in absent else find(name, *rest)
class Absent:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from te_dispatch.cli import main
main()
"""

_LOADS_TORCH = """
import sys
from te_dispatch.cli import main
try:
    main()
finally:
    sys.stderr.write("torch was loaded" if "torch" in sys.modules else "torch was not loaded")
"""


def test_version(te):
    answer = te("--version")
    assert answer.code == 0 and answer.out == f"te-dispatch {te_dispatch.__version__}\n"


def test_help_lists_every_verb(te):
    out = te("--help").out
    assert all(verb in out for verb in ("doctor", "ops", "explain", "policy", "plan", "demo"))


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_missing_libraries_of_the_command(te_process, absent):
    answer = te_process("doctor", program=_WITHOUT.format(absent=[absent]))
    assert answer.code == 2 and answer.out == ""
    assert answer.err == f"te-dispatch needs {absent}: pip install {absent}\n"


def test_the_command_needs_no_extra():
    plain = [line for line in importlib.metadata.requires("te-dispatch") if "extra ==" not in line]
    assert {re.match(r"[\w-]+", line)[0].lower() for line in plain} >= {"typer", "rich"}


def test_doctor_without_pytorch_says_so(te, monkeypatch):
    installed = doctor._installed
    monkeypatch.setattr(doctor, "_installed", lambda name: None if name == "torch" else installed(name))
    answer = te("doctor", "--json")
    assert answer.code == 1
    document = json.loads(answer.out)
    assert document["torch"] is None
    assert document["problems"] == ["PyTorch is not installed, and operators take its tensors: pip install torch"]


@pytest.mark.parametrize("absent", ["torch", "matplotlib", "numpy"])
def test_missing_demo_extra(te_process, absent):
    answer = te_process("demo", program=_WITHOUT.format(absent=[absent]))
    assert answer.code == 2 and answer.out == ""
    assert answer.err == f"te-dispatch: this needs {absent}: pip install 'te-dispatch[demo]'\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("doctor", "--json"),
        ("ops", "--json"),
        ("ops", "gemm"),
        ("policy", "show", "--origin"),
        ("explain", "gemm", "dtype=bf16", "--device", "nvidia:sm_90"),
    ],
    ids=" ".join,
)
def test_pytorch_is_not_loaded(te_process, arguments):
    assert te_process(*arguments, program=_LOADS_TORCH).err.endswith("torch was not loaded")


def test_verbs_work_without_pytorch(te_process):
    program = _WITHOUT.format(absent=["torch"])
    answer = te_process("explain", "gemm", "dtype=bf16", "--device", "amd:gfx942", "--json", program=program)
    assert answer.code == 0 and answer.json["device"] == "amd:gfx942"


def test_an_unexpected_error_is_one_message(te_process):
    program = (
        "import te_dispatch.cli.policy as p\n"
        "def broken(as_json): raise KeyError('inner')\n"
        "p.listing = broken\nfrom te_dispatch.cli import main\nmain()\n"
    )
    answer = te_process("policy", "list", "--json", program=program)
    assert answer.code == 2 and "unexpected KeyError: 'inner'" in answer.json["error"]
