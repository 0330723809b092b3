# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the releases that these tests run use of Transformer Engine is what tests/compat has on record."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "compat" / "framework_names.py"


@pytest.mark.parametrize("distribution", ["accelerate", "lightning", "megatron-core", "peft"])
def test_every_name_is_on_record(distribution: str) -> None:
    try:
        installed = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed")
    spec = importlib.util.spec_from_file_location("framework_names", RECORD)
    assert spec is not None and spec.loader is not None
    names = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(names)
    files = installed.files or []
    folders = {Path(str(installed.locate_file(file.parts[0]))) for file in files if file.suffix == ".py"}
    recorded = names.RECORD[f"{distribution} {installed.version}"]
    found = set().union(*(names.used(folder) for folder in folders))
    assert found == {name for of_outcome in recorded.values() for name in of_outcome}
