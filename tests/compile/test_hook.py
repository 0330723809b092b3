# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Substitutions wait for dynamo and take effect whoever comes first. Each in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import te_dispatch
from te_dispatch.pytorch.compile import state as compile_state

pytestmark = pytest.mark.sampled(40)

PROGRAM = """
import sys
import torch
import numpy as np
{before}
from te_dispatch.pytorch.compile import hook

def opaque(x):
    return torch.from_numpy(np.negative(x.numpy()))

hook.substitute(opaque, lambda x: x * 7)
assert ("torch._dynamo" in sys.modules) == {loaded}
one = torch.ones(1)
{between}
compiled = torch.compile(lambda x: opaque(x) + 1, fullgraph=True, backend="eager")
assert compiled(one).item() == 8, compiled(one)
assert opaque(one).item() == -1

def later(x):
    return torch.from_numpy(np.negative(x.numpy()))

hook.substitute(later, lambda x: x * 9)
compiled = torch.compile(lambda x: later(x) + 0, fullgraph=True, backend="eager")
assert compiled(one).item() == 9
assert not any(type(finder).__module__.startswith("te_dispatch") for finder in sys.meta_path)
assert type(torch._dynamo.__spec__.loader).__module__ != hook.__name__
"""


@pytest.mark.parametrize(
    ("before", "loaded", "between"),
    [
        ("", False, ""),
        ("", False, "assert opaque(one).item() == -1"),
        ("import torch._dynamo", True, ""),
        ("", False, "import importlib.util; importlib.util.find_spec('torch._dynamo')"),
    ],
    ids=["compile first", "eager first", "dynamo already there", "spec asked for without importing"],
)
def test_substitution(before, loaded, between):
    program = PROGRAM.format(before=before, loaded=loaded, between=between)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_program_that_never_compiles_loads_no_dynamo():
    program = """
import sys
import torch
import te_dispatch.pytorch as te
module = te.Linear(16, 16, device="cpu")
with te.autocast():
    y = module(torch.ones(16, 16))
y.sum().backward()
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_whether_a_program_is_exported_is_asked_in_one_place():
    """Dynamo before PyTorch 2.12 takes `torch.compiler.is_exporting()` for True in every graph: compiled training with
    delayed scaling then updated no scale. `exporting` is called instead of traced."""
    root = Path(te_dispatch.__file__).parent
    found = [file.relative_to(root).as_posix() for file in root.rglob("*.py") if "is_exporting()" in file.read_text()]
    assert found == ["pytorch/compile/state.py"]
    assert getattr(compile_state.exporting, "_dynamo_marked_constant", False)
