# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The kit on implementations that differ in what the contracts leave open: it finds nothing.

``python -m te_dispatch_faulty.accept --level full NAME`` (with the folder ``faulty`` installed) runs one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from .faulty_site import FAULTS, VARIATIONS, WHOLE, Site, chosen, site  # noqa: F401  # the last is a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: Level full takes some 20 minutes of one core, smoke some 10: they are asked for by the variable, as ``make test-kit``
#: does. Without it each variation gets a quarter of its units at smoke.
LEVELS, PART = (("smoke", "full"), "1/1") if WHOLE else (("smoke",), "1/4")


@pytest.fixture(scope="session")
def accepted(site: Site, request: pytest.FixtureRequest) -> Mapping[tuple[str, str], dict[str, Any]]:  # noqa: F811
    """(Variation, level) -> what the kit made of it; of the variations that are asked for."""
    names = sorted(chosen(request, test_the_kit_finds_nothing, "variation"))
    program = ("-m", "te_dispatch_faulty.accept", "--part", PART)
    found = [told for level in LEVELS for told in site.once(f"accepted-{level}", *program, "--level", level, *names)]
    return {(told["variation"], told["level"]): told for told in found if "variation" in told}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("variation", [one.name for one in VARIATIONS])
def test_the_kit_finds_nothing(variation: str, level: str, accepted: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    told = accepted[variation, level]
    assert told["failures"] == []
    assert told["passed"] > 0


def test_there_are_enough() -> None:
    names = [one.name for one in (*FAULTS, *VARIATIONS)]
    assert len(set(names)) == len(names)
    assert len(VARIATIONS) >= 25
