# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The plugin's replacement of a native module that records its calls."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")

from te_dispatch.compat.nvte_plugin.seam import Replacement
from tests.compat import native_module


def native() -> Any:
    """A native module of one's own, with its name and its `CALLS`."""
    module = ModuleType("transformer_engine_torch")
    file = Path(native_module.__file__)
    module.__dict__["__file__"] = str(file)
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module


@pytest.fixture
def tex() -> Any:
    """What Transformer Engine's modules import as ``transformer_engine_torch``."""
    return Replacement(native())
