# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The tool that runs Transformer Engine's own tests, on files of tests written here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.slow

TOOL = Path(__file__).resolve().parents[2] / "tools" / "transformer_engine_tests"

NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}

#: Every outcome, and what a file may do with a name that is not here while it is imported.
OUTCOMES = """
import os
import pickle
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as native
from transformer_engine.pytorch import GroupedLinear, MadeUpQuantizer
from transformer_engine.pytorch.made.up import decorator
from transformer_engine.common import recipe
from beside import WIDTH

class Derived(MadeUpQuantizer):
    pass

def annotated(kind: torch.dtype | native.Kind) -> None: ...

@pytest.mark.parametrize("kind", [torch.float32, native.Kind.kFirst])
def test_passes_or_needs(kind):
    assert not isinstance(torch.float32, native.Kind)
    if not isinstance(kind, torch.dtype):
        kind.itemsize

def test_class():
    GroupedLinear(2, 16, 16)

def test_derived():
    Derived(1)

def test_shown():
    assert repr(te.made_up) == "<transformer_engine.pytorch.made_up is not here>"

def test_of_tests_only():
    from transformer_engine.pytorch._extra_state import UNSAFE_PICKLE_EXTRA_STATE_ENV

    assert os.environ.get(UNSAFE_PICKLE_EXTRA_STATE_ENV) is None

def test_attribute():
    native.function.name

def test_given():
    os.environ.get(te.VARIABLE)

def test_assigned():
    te.table["key"] = 1

@decorator(1)
def test_decorated(tmp_path):
    raise AssertionError("the decorator is not here")

def test_swallowed():
    with pytest.raises(Exception):
        te.made_up()

def test_chained():
    try:
        raise ValueError("first")
    except ValueError as error:
        te.made_up()

def test_refused():
    te.Linear(16, 16, tp_size=2)

def test_refused_by_the_compiler():
    def refuse(x):
        raise NotImplementedError("not yet")

    torch.compile(refuse, fullgraph=True, backend="eager")(torch.ones(1))

def test_pickled():
    class Global:  # as some objects of PyTorch: pickle looks for them by name in every module
        __module__ = None

        def __reduce__(self):
            return "torch.made_up"

    with pytest.raises(Exception):
        pickle.dumps(Global())

def test_fails():
    assert WIDTH == 17, "the width | is\\nnot that"

def test_raises():
    raise RuntimeError("\\n  second line")

def test_skips():
    pytest.skip("not today")

@pytest.mark.xfail(reason="known")
def test_expected():
    raise AssertionError

@pytest.fixture
def broken():
    yield
    raise RuntimeError("afterwards")

def test_teardown(broken):
    pass

def test_writes_where_it_runs():
    open("left.txt", "w").close()
    assert not os.path.samefile(".", os.path.dirname(__file__))

class TestGroup:
    @pytest.mark.parametrize("n", range(40))
    def test_many(self, n):
        assert n != 0
"""

CUDA = """
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch import get_cudnn_version, get_device_compute_capability

is_new = get_device_compute_capability() >= (8, 0) and get_cudnn_version() >= (9, 3, 0)

def test_versions():
    assert is_new is False

@torch.no_grad
def test_factories():
    device = torch.device("cuda")
    for x in (torch.empty(2, device="cuda"), torch.zeros(2, device="cuda:0"), torch.randn(2, device=device),
              torch.tensor([1], device=torch.cuda.current_device()), torch.ones_like(torch.ones(2), device="cuda"),
              torch.ones(2).cuda(), torch.ones(2).to("cuda"), torch.ones(2).to(device, torch.float16),
              torch.ones(2).new_empty(3, device="cuda"), torch.nn.Linear(2, 2).cuda().weight,
              torch.nn.Linear(2, 2).to("cuda").weight):
        assert x.device.type == "cpu"
    assert torch.ones(2).to(torch.float16).dtype == torch.float16 and torch.ones(2).to(torch.ones(2)).dtype == x.dtype

def test_random_state():
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="cuda"), first)
    torch.cuda.manual_seed_all(3)
    assert torch.equal(torch.randn(4, device="cuda"), first)
    torch.manual_seed(3)
    assert torch.equal(torch.randn(4, device="cuda"), first)

def test_layer_under_autocast():
    layer = te.Linear(16, 32, device="cuda")
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    with torch.autocast(device_type="cuda", dtype=torch.bfloat16), te.autocast(enabled=True):
        y = layer(x)
    y.sum().backward()
    torch.cuda.synchronize()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32

def test_stream():
    torch.cuda.Stream()

def test_current_stream():
    torch.cuda.current_stream()

def test_graphed():
    te.make_graphed_callables(te.Linear(16, 32), (torch.randn(16, 16, device="cuda"),))

def test_memory():
    assert torch.cuda.memory_allocated(device=0) == 0

def test_most_memory():
    assert torch.cuda.max_memory_allocated() == 0
"""


def run(folder: Path, *arguments: str, ok: tuple[int, ...] = (0, 1)) -> tuple[dict[str, Any], str]:
    """The data and the table of a run."""
    data, table = folder / "report.json", folder / "report.md"
    command = [sys.executable, str(TOOL), str(folder), "--json", str(data), "--markdown", str(table), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=folder.parent, env=NO_GPU)
    assert done.returncode in ok, done.stdout + done.stderr
    return json.loads(data.read_text()), table.read_text()


def outcome(row: dict[str, Any]) -> dict[str, int]:
    return {kind: row[kind] for kind in ("passed", "failed", "not supported", "needs", "skipped") if row[kind]}


def reasons(row: dict[str, Any]) -> list[str]:
    return [entry["reason"] for entry in row["reasons"]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outcomes")
    (folder / "beside.py").write_text("WIDTH = 16\n")
    (folder / "test_outcomes.py").write_text(OUTCOMES)
    data, table = run(folder, "test_outcomes.py", "--cases", "8", "--of", "Tests of ours", ok=(1,))
    return data, table, folder


@pytest.mark.parametrize(
    ("function", "expected", "why"),
    [
        ("test_passes_or_needs", {"passed": 1, "needs": 1}, ["transformer_engine_torch.Kind"]),
        ("test_class", {"needs": 1}, ["transformer_engine.pytorch.GroupedLinear"]),
        ("test_derived", {"needs": 1}, ["transformer_engine.pytorch.MadeUpQuantizer"]),
        ("test_shown", {"passed": 1}, []),
        ("test_of_tests_only", {"passed": 1}, []),
        ("test_attribute", {"needs": 1}, ["transformer_engine_torch.function"]),
        ("test_given", {"needs": 1}, ["transformer_engine.pytorch.VARIABLE"]),
        ("test_assigned", {"needs": 1}, ["transformer_engine.pytorch.table"]),
        ("test_decorated", {"needs": 1}, ["transformer_engine.pytorch.made.up.decorator"]),
        ("test_swallowed", {"needs": 1}, ["transformer_engine.pytorch.made_up"]),
        ("test_chained", {"needs": 1}, ["transformer_engine.pytorch.made_up"]),
        ("test_refused", {"not supported": 1}, ["Linear: tp_size=2 is not supported yet, only tp_size=1"]),
        ("test_refused_by_the_compiler", {"not supported": 1}, ["not yet"]),
        ("test_pickled", {"passed": 1}, []),
        ("test_fails", {"failed": 1}, ["AssertionError: the width | is"]),
        ("test_raises", {"failed": 1}, ["RuntimeError: second line"]),
        ("test_skips", {"skipped": 1}, ["not today"]),
        ("test_expected", {"skipped": 1}, ["expected to fail: known"]),
        ("test_teardown", {"failed": 1}, ["RuntimeError: afterwards"]),
        ("test_writes_where_it_runs", {"passed": 1}, []),
    ],
)
def test_each_outcome_has_its_reason(outcomes, function, expected, why):
    row = outcomes[0]["files"]["test_outcomes.py"][function]
    assert outcome(row) == expected and reasons(row) == why


def test_a_sample_is_counted_and_always_the_same(outcomes):
    data, _, folder = outcomes
    row = data["files"]["test_outcomes.py"]["TestGroup::test_many"]
    assert row["cases"] == 40 and sum(outcome(row).values()) == 8
    again, _ = run(folder, "test_outcomes.py", "--cases", "8", "--", "-k", "test_many")
    assert again["files"]["test_outcomes.py"]["TestGroup::test_many"] == row
    # -k reads names of folders too: a bare 20 selects everything in pytest-20.
    chosen = "test_many[10] or test_many[20] or test_class"
    few, table = run(folder, "test_outcomes.py", "--cases", "8", "--", "-k", chosen)
    row = few["files"]["test_outcomes.py"]["TestGroup::test_many"]
    assert row["cases"] == 40 and outcome(row) == {"passed": 2}, "drawn from what is selected"
    assert "| test_outcomes.py | 2 | 3 | " in table and "\nNot run: `test_passes_or_needs`, " in table


def test_the_table_shows_counts_and_reasons(outcomes):
    lines = outcomes[1].splitlines()
    assert lines[0].startswith("Tests of ours, 20") and "PyTorch" in lines[0]
    assert "| test_outcomes.py | 21 | 29 | " in outcomes[1]
    assert r"| `test_fails` | 1 | 0 | 1 | 0 | 0 | 0 | failed: AssertionError: the width \| is (1) |" in lines
    assert any(line.startswith("| `TestGroup::test_many` | 8 of 40 | ") for line in lines)
    widths = {
        line.replace(r"\|", "").count("|") for line in lines[lines.index("### test_outcomes.py") :] if line[:1] == "|"
    }
    assert widths == {9}


def test_nothing_is_left_in_the_folder(outcomes):
    left = {path.name for path in outcomes[2].iterdir()} - {"__pycache__"}
    assert left == {"beside.py", "test_outcomes.py", "report.json", "report.md"}


#: Files of which not every test runs: source, the function in question, its outcome and how its reason ends.
WHOLE = {
    "test_if.py": (
        "import transformer_engine_torch as t\nif t.flag: pass\n",
        ("(import)", {"needs": 1}, "transformer_engine_torch.flag"),
    ),
    "test_for.py": (
        "import transformer_engine.pytorch as te\nfor _ in te.made_up(): pass\n",
        ("(import)", {"needs": 1}, "transformer_engine.pytorch.made_up"),
    ),
    "test_error.py": ("raise RuntimeError('no luck')\n", ("(import)", {"failed": 1}, "RuntimeError: no luck")),
    "test_skip.py": (
        "import pytest\npytest.skip('whole file', allow_module_level=True)\n",
        ("(import)", {"skipped": 1}, "whole file"),
    ),
    "test_crash.py": (
        "import os\ndef test_first(): pass\ndef test_crash(): os._exit(7)\ndef test_last(): pass\n",
        ("test_crash", {"failed": 1}, "the process ended (7) in test_crash"),
    ),
    "test_empty.py": ("", ("(import)", {"failed": 1}, "no test ran, pytest ended with 5")),
}


def test_a_file_that_does_not_run_to_its_end_is_told(tmp_path):
    for file, (source, _) in WHOLE.items():
        (tmp_path / file).write_text(source)
    files = run(tmp_path, ok=(1,))[0]["files"]
    assert list(files) == sorted(WHOLE)
    for file, (_, (function, expected, why)) in WHOLE.items():
        row = files[file][function]
        assert outcome(row) == expected and [reason.endswith(why) for reason in reasons(row)] == [True], (file, row)
    assert outcome(files["test_crash.py"]["test_first"]) == {"passed": 1}
    assert outcome(files["test_crash.py"]["test_last"]) == {}


def test_cuda_means_the_cpu(tmp_path):
    (tmp_path / "test_cuda.py").write_text(CUDA)
    rows = run(tmp_path, "--cpu")[0]["files"]["test_cuda.py"]
    for function in ("test_versions", "test_factories", "test_random_state", "test_layer_under_autocast"):
        assert outcome(rows[function]) == {"passed": 1}, rows[function]
    for function in ("test_stream", "test_current_stream", "test_graphed", "test_memory", "test_most_memory"):
        assert reasons(rows[function]) == ["CUDA"], rows[function]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "nowhere is not a folder"),
        ((".", "test_no.py"), "not in .: test_no.py"),
        ((".",), "no test_*.py in ."),
        ((".", "--cases", "0"), "0 is not positive"),
        ((".", "--json", "nowhere/report.json"), "nowhere is not a folder"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(tmp_path, arguments, message):
    done = subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=100, cwd=tmp_path
    )
    assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
