# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Without tinygrad's tables or Triton's AMD compiler nothing here can run: every test says so."""

from __future__ import annotations

import pytest

from gfx_emulator import testing


@pytest.fixture(autouse=True)
def _possible() -> None:
    reason = testing.missing()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(params=testing.ARCHS)
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)
