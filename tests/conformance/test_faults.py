# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The kit on backends whose mistakes are known: it finds all of `te_dispatch_faulty`'s faults, and none in `loopback`.

``-s`` shows the score. ``python -m te_dispatch_faulty.score FAULT`` (with the folder ``faulty`` installed) runs one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .faulty_site import AT_SMOKE, FAULTS, SOURCE, WHOLE, Site, chosen, site  # noqa: F401  # the last is a fixture

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = [one.name for one in FAULTS]
HUNTED = [(one.name, level) for one in FAULTS for level in one.levels]
# The one run of all faults counts towards whichever test asks for it first.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

#: The sound backend's units at smoke take five minutes of one core: a quarter of each operator's, but for
#: `make test-kit`.
_SHARD = (1, 1) if WHOLE else (1, 4)
_CERTIFY = (
    f"shard = {_SHARD}"
    + """
import json, sys
from te_dispatch.conformance import Settings, certify
from te_dispatch.core.operator import OPERATORS
run = dict(backends=("loopback",), level="smoke", device="cpu", isolated=False, shard=shard)
reports = [certify(settings=Settings(operators=(name,), **run)) for name in sorted(OPERATORS)]
failures = [[o.unit, o.message] for report in reports for o in report.failures()]
passed = [name for name, report in zip(sorted(OPERATORS), reports) if report.counts["passed"]]
json.dump({"failures": failures, "operators": passed}, sys.stdout)
"""
)


#: Faults that end or block their process.
DYING = ("crashes", "hangs", "exits", "raises_system_exit")
#: Faults that show as an exception; the others must show as what they are.
RAISING = (
    "raises_unexpectedly", "raises_system_exit", "reads_what_others_do_not_save", "serves_one_thread_at_a_time",
    "product_refuses_weights_that_require_gradients", "refuses_inputs_that_require_gradients",
    "activation_gradient_refuses_nan_in_anomaly_mode", "refuses_parameters", "asks_for_equal_leading_dimensions",
    "dbias_cast_needs_an_amax",
)  # fmt: skip
_ERROR = re.compile(r"(.* too: )?\w+(Error|Exception|Exit): ")


@pytest.fixture(scope="session")
def hunted(request: pytest.FixtureRequest) -> list[str]:
    """The faults of this run: all, where no case is left out."""
    return sorted({*chosen(request, test_the_kit_catches_the_fault, "fault"), *DYING})


@pytest.fixture(scope="session")
def verdicts(site: Site, hunted: list[str]) -> Mapping[tuple[str, str], dict[str, Any]]:  # noqa: F811
    """(Fault, level) -> what became of it."""
    found = site.once("verdicts", "-m", "te_dispatch_faulty.score", *hunted)
    return {(verdict["fault"], verdict["level"]): verdict for verdict in found if "fault" in verdict}


@pytest.mark.parametrize(("fault", "level"), HUNTED)
def test_the_kit_catches_the_fault(fault: str, level: str, verdicts: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    verdict = verdicts[fault, level]
    assert verdict["caught"], f"{verdict['units']} units passed"
    # An error of the fault's own code would be found too, and show nothing.
    assert (fault in RAISING) == bool(_ERROR.match(verdict["message"])), verdict["message"]
    # What caught it passes on the implementation that was spoiled.
    assert verdict["control"] == "passed", f"{verdict['caught']} is {verdict['control']} without the fault"


def test_the_score_is_what_the_readme_says(
    verdicts: Mapping[tuple[str, str], dict[str, Any]], hunted: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    full = [verdict for (_, level), verdict in verdicts.items() if level == "full"]
    caught = sum(bool(verdict["caught"]) for verdict in full)
    seconds = sum(verdict["seconds"] for verdict in verdicts.values())
    with capsys.disabled():
        tried = f"{caught} of {len(full)} that were tried caught, {len(NAMES)} in all"
        print(f"\nseeded faults: {tried}; units took {seconds:.0f} s of one core")
    assert sorted(verdict["fault"] for verdict in full) == hunted
    assert caught == len(full)
    stated = _stated(REPOSITORY / "README.md")
    assert stated == [(len(NAMES), len(NAMES))]
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert all(found == stated[0] for found in _stated(page)), page


def _stated(page: Path) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+)\s+of\s+(\d+)\s+seeded\s+faults", page.read_text())]


def test_every_function_is_a_listed_fault() -> None:
    modules = ("casts", "conduct", "forms", "products", "rows", "scores", "steps")
    trees = [ast.parse((SOURCE / "te_dispatch_faulty" / f"{module}.py").read_text()) for module in modules]
    functions = {node.name for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    partners = {"saves_probabilities"}
    assert {name for name in functions if not name.startswith("_")} - partners <= set(NAMES)


def test_names_are_unique() -> None:
    assert len(NAMES) == len(set(NAMES)) >= 350
    assert set(NAMES) >= AT_SMOKE


def test_a_crash_a_hang_and_an_exit_are_told_apart(verdicts: Mapping[tuple[str, str], dict[str, Any]]) -> None:
    assert "SIGSEGV" in verdicts["crashes", "full"]["message"]
    assert "hung" in verdicts["hangs", "full"]["message"]
    assert "exit code 3" in verdicts["exits", "full"]["message"]
    assert "SystemExit: no licence" in verdicts["raises_system_exit", "full"]["message"]


def test_nothing_is_found_in_the_sound_backend(site: Site) -> None:  # noqa: F811
    found = site.answer("sound", _CERTIFY)
    assert found["failures"] == []
    from te_dispatch.core.operator import OPERATORS

    assert found["operators"] == sorted(OPERATORS)
