# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What becomes of the names that frameworks import from Transformer Engine is on record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from .framework_names import RECORD, used

RESOLVE = """
import json, sys
import te_dispatch
te_dispatch.as_transformer_engine()
sys.path.insert(0, {folder!r})
from framework_names import RECORD, resolved
names = {{name for outcomes in RECORD.values() for names in outcomes.values() for name in names}}
print(json.dumps({{name: resolved(name) for name in names}}))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What becomes of every name, in a process of its own."""
    code = RESOLVE.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("framework", RECORD)
def test_the_record_is_what_happens(framework: str, outcomes: dict[str, str]) -> None:
    found = {name: outcomes[name] for names in RECORD[framework].values() for name in names}
    recorded = {name: outcome for outcome, names in RECORD[framework].items() for name in names}
    moved = {name: (was, found[name]) for name, was in recorded.items() if found[name] != was}
    assert not moved, f"move these in framework_names.json: {moved}"


def test_names_are_found_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import transformer_engine as te, transformer_engine.common.recipe as recipes, os.path
import transformer_engine.pytorch
from transformer_engine.pytorch import Linear as L, fp8
from .transformer_engine import other
try:
    import transformer_engine_torch as tex
except ImportError:
    tex = None
class A(te.pytorch.LayerNorm):
    def forward(self, x):
        return fp8.FP8GlobalStateManager.is_fp8_enabled(), recipes.Format.E4M3.value, L.forward, tex.gemm, os.path.sep
""")
    assert used(tmp_path) == {
        "transformer_engine",
        "transformer_engine.common.recipe",
        "transformer_engine.common.recipe.Format",
        "transformer_engine.common.recipe.Format.E4M3",
        "transformer_engine.common.recipe.Format.E4M3.value",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.LayerNorm",
        "transformer_engine.pytorch.Linear",
        "transformer_engine.pytorch.Linear.forward",
        "transformer_engine.pytorch.fp8",
        "transformer_engine.pytorch.fp8.FP8GlobalStateManager",
        "transformer_engine.pytorch.fp8.FP8GlobalStateManager.is_fp8_enabled",
        "transformer_engine_torch",
        "transformer_engine_torch.gemm",
    }
