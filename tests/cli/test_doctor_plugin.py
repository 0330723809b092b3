# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch doctor`` and an installed Transformer Engine: whose functions it calls, as its import shows."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from te_dispatch.compat.nvte_plugin.manifest import MANIFEST, SERVED

pytestmark = pytest.mark.slow

PLUGIN = "te_dispatch.compat.nvte_plugin"
NATIVE = Path(__file__).parents[1] / "compat" / "native_module.py"

#: Loads what NVTE_PLUGIN names as release 2.20 does, then holds native functions in the ways it does.
_PYTORCH = f"""
import importlib, importlib.util, os, sys, warnings

def load():
    spec = importlib.util.spec_from_file_location("transformer_engine_torch", {str(NATIVE)!r})
    solib = importlib.util.module_from_spec(spec)
    sys.modules["transformer_engine_torch"] = solib
    spec.loader.exec_module(solib)
    if os.environ.get("NVTE_PLUGIN"):
        try:
            sys.modules["transformer_engine_torch_nv"] = solib
            importlib.import_module(os.environ["NVTE_PLUGIN"]).load_plugins()
        except Exception as error:
            sys.modules["transformer_engine_torch"] = solib
            warnings.warn(f"NVTE_PLUGIN: plugin loading failed: {{error}}", RuntimeWarning)

load()
import transformer_engine_torch as tex
from transformer_engine_torch import rmsnorm_fwd
"""


@pytest.fixture
def transformer_engine(tmp_path: Path) -> Path:
    """A folder with an installed Transformer Engine."""
    package = tmp_path / "site" / "transformer_engine"
    (package / "pytorch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "pytorch" / "__init__.py").write_text(_PYTORCH)
    information = package.parent / "transformer_engine-2.20.2.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    return package.parent


def test_functions_in_use_are_proven_by_importing_it(transformer_engine, te_process):
    answer = te_process("doctor", "--json", path=transformer_engine, NVTE_PLUGIN=PLUGIN)
    data = answer.json["nvte_plugin"]
    assert answer.code == 0, answer.json["problems"]
    assert data["in_use"] and data["problem"] is None and answer.json["without_effect"] == []
    assert (
        data["reason"] == f"{len(SERVED)} of 161 native functions are te_dispatch's, in 1 modules of Transformer Engine"
    )
    assert set(data["functions"]) | set(data["passed_on"]) == set(MANIFEST)
    one = data["functions"]["rmsnorm_fwd"]
    assert one["operator"] == "rmsnorm_fwd" and "with a quantizer" in one["passes_on"]
    assert one["found"] == "te_dispatch's, also held by transformer_engine.pytorch"
    assert data["functions"]["gelu"]["found"] == "te_dispatch's"
    shown = te_process("doctor", path=transformer_engine, NVTE_PLUGIN=PLUGIN).out
    assert "Operators inside Transformer Engine" in shown and data["reason"] in shown and "rmsnorm_bwd_add" in shown


def test_a_native_function_in_use_is_a_problem(transformer_engine, te_process):
    with (transformer_engine / "transformer_engine" / "pytorch" / "__init__.py").open("a") as file:
        file.write("from transformer_engine_torch_nv import gelu\n")
    answer = te_process("doctor", "--json", path=transformer_engine, NVTE_PLUGIN=PLUGIN)
    assert answer.code == 1 and not answer.json["nvte_plugin"]["in_use"]
    (problem,) = answer.json["problems"]
    assert "transformer_engine.pytorch holds the native gelu as gelu" in problem


def test_a_load_that_fails_is_a_problem_with_its_cause(transformer_engine, te_process):
    metadata = transformer_engine / "transformer_engine-2.20.2.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("2.20.2", "2.19.0"))
    answer = te_process("doctor", "--json", "--traceback", path=transformer_engine, NVTE_PLUGIN=PLUGIN)
    assert answer.code == 1 and not answer.json["nvte_plugin"]["in_use"]
    (problem,) = answer.json["problems"]
    assert "NvtePluginError" in problem and "Transformer Engine is 2.19.0" in problem
    (traceback,) = answer.json["tracebacks"]
    assert "load_plugins" in traceback["traceback"] and PLUGIN in traceback["of"]


@pytest.mark.parametrize("named", [{}, {"NVTE_PLUGIN": "json"}])
def test_without_the_variable_it_says_how_and_imports_nothing(transformer_engine, te_process, named):
    (transformer_engine / "transformer_engine" / "pytorch" / "__init__.py").write_text("raise SystemExit(3)")
    answer = te_process("doctor", "--json", path=transformer_engine, **named)
    data = answer.json["nvte_plugin"]
    assert answer.code == 0 and not data["in_use"]
    assert ("names another plugin" if named else f"NVTE_PLUGIN={PLUGIN} has it call te_dispatch") in data["reason"]


def test_without_transformer_engine_the_variable_concerns_nobody_here(te_process):
    assert te_process("doctor", "--json").json["nvte_plugin"] is None
    answer = te_process("doctor", "--json", NVTE_PLUGIN=PLUGIN)
    assert answer.code == 0 and answer.json["without_effect"] == []
    assert answer.json["nvte_plugin"]["reason"].endswith("concerns Transformer Engine itself, and it is not installed")
