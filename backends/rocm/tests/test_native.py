# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The compiled module beside that of the CUDA backend: a host may have both vendors' devices."""

from __future__ import annotations

import subprocess
import sys

import pytest

_BOTH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name + "._native")
"""


@pytest.mark.parametrize("order", [("te_dispatch_cuda", "te_dispatch_rocm"), ("te_dispatch_rocm", "te_dispatch_cuda")])
def test_both_vendors_modules_load_in_one_process(native, order):
    pytest.importorskip("te_dispatch_cuda._native")
    done = subprocess.run([sys.executable, "-c", _BOTH, *order], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
