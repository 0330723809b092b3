# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A step of an FP8 `Linear` keeps to its budget of Python functions (docs/hot_path.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "python_frames.py"
#: Functions outside the backend in a step that was captured, and in the step in which a layer is captured.
BUDGET = {"hot": 60, "first": 1000}


def test_a_step_keeps_to_its_budget() -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TE_DISPATCH_")}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--device", "cpu", "--json"], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for step, most in BUDGET.items():
        assert 10 < found[step]["outside"] <= most, found
        assert found[step]["backend"] > 10, found
