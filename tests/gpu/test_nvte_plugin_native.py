# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The plugin inside an installed Transformer Engine with its native module: layers train, and operators serve them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PLUGIN = "te_dispatch.compat.nvte_plugin"
PROGRAM = Path(__file__).with_name("nvte_plugin_steps.py")
#: Recipe -> functions that serve a layer of this kind in every step. Calls with a quantizer are passed on, and so are
#: products of blocks.
SERVED = {
    "none": {"rmsnorm_fwd", "rmsnorm_bwd", "swiglu", "dswiglu", "generic_gemm"},
    "DelayedScaling": {"rmsnorm_bwd", "dswiglu", "generic_gemm", "fused_amax_and_scale_update_after_reduction"},
    "Float8CurrentScaling": {"rmsnorm_bwd", "dswiglu", "generic_gemm"},
    "Float8BlockScaling": {"rmsnorm_bwd", "swiglu", "dswiglu"},
}


def _python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "NVTE_PLUGIN"} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@functools.cache
def _missing() -> str:
    """Why no Transformer Engine 2.20 with a native module can be used here; empty where one can."""
    program = (
        "import transformer_engine.pytorch, transformer_engine_torch, importlib.metadata as m\n"
        "assert transformer_engine_torch.__file__.endswith('.so'), 'another project under this name'\n"
        "v = m.version('transformer_engine'); assert v.startswith('2.20.'), f'release {v}'"
    )
    done = _python("-c", program)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def _steps(recipe: str, **variables: str) -> dict[str, Any]:
    done = _python(str(PROGRAM), recipe, **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(autouse=True)
def _installed() -> None:
    if _missing():
        pytest.skip(f"no Transformer Engine 2.20 with its native module: {_missing()}")


@pytest.mark.parametrize("recipe", SERVED)
def test_a_layer_trains_alike_with_and_without_the_plugin(recipe: str) -> None:
    native, here = _steps(recipe), _steps(recipe, NVTE_PLUGIN=PLUGIN)
    assert here["losses"] == pytest.approx(native["losses"], rel=5e-3)
    assert here["losses"][-1] < here["losses"][0]
    served = {name for name, calls in here["calls"].items() if calls["served"]}
    assert served >= SERVED[recipe], here["calls"]
    assert served <= set(here["functions"])


def test_doctor_finds_every_function_in_use() -> None:
    done = _python("-m", "te_dispatch.cli", "doctor", "--json", NVTE_PLUGIN=PLUGIN)
    data = json.loads(done.stdout)["nvte_plugin"]
    assert data["in_use"] and data["problem"] is None, data
    assert all(function["found"] for function in data["functions"].values())
