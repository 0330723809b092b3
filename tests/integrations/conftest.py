# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Frameworks that import Transformer Engine by name, unmodified, on te_dispatch.

`make test-integrations` runs these tests in an environment of their own. `make test` does not enter this folder
(`norecursedirs` in pyproject.toml): this file changes what `import transformer_engine` means in the whole process, and
it does so before any framework is imported, because frameworks look for Transformer Engine once, at their import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

import te_dispatch

# Models are made from configurations: nothing may be downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

te_dispatch.as_transformer_engine()


@pytest.fixture(autouse=True)
def no_accelerator_is_left() -> Iterator[None]:
    """accelerate keeps what its first Accelerator was told for all later ones of the process, transformers' as well."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
