# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The `shadow` section of policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import te_dispatch
from te_dispatch import ops
from te_dispatch.cli.app import app
from te_dispatch.core import scopes
from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy import Policy, Shadow, merge

from .shadowing import product, shadowing

pytestmark = pytest.mark.usefixtures("counts_from_zero")


MISTAKES = {
    "{fraction: 0.5}": ("2:9", "the key 'against' is missing"),
    "{against: refrence}": ("2:19", "unknown backend 'refrence'; did you mean 'reference'?"),
    "{against: native}": ("2:19", "unknown backend 'native'"),
    "{against: torch.matmul}": ("2:19", "unknown backend 'torch.matmul'"),
    "{against: [torch]}": ("2:19", "against: expected a word, got a list"),
    "{against: reference, fraction: 0}": ("2:40", "fraction: expected a number above 0, got 0"),
    "{against: reference, fraction: -0.5}": ("2:40", "fraction: expected a number above 0, got -0.5"),
    "{against: reference, fraction: 1.01}": ("2:40", "fraction: expected a number of at most 1, got 1.01"),
    "{against: reference, fraction: some}": ("2:40", "fraction: expected a number, got the word 'some'"),
    "{against: reference, fraction: true}": ("2:40", "fraction: expected a number, got true"),
    "{against: reference, on_mismatch: rais}": ("2:43", "expected warn or raise, got 'rais'; did you mean 'raise'?"),
    "{against: reference, ops: gemm}": ("2:35", "ops: expected a list, got the word 'gemm'"),
    "{against: reference, ops: []}": ("2:35", "ops: expected at least one entry"),
    "{against: reference, ops: [gem]}": ("2:36", "'gem' is no operator and no family; did you mean 'gemm'?"),
    "{against: reference, directory: ''}": ("2:41", "directory: expected a word, got an empty one"),
    "{against: reference, limit: -1}": ("2:37", "limit: expected a number of at least 0, got -1"),
    "{against: reference, limit: 1.5}": ("2:37", "limit: expected a whole number, got the number 1.5"),
    "{against: reference, fractoin: 1}": ("2:30", "unknown key 'fractoin'; did you mean 'fraction'?"),
    "of": ("2:9", "shadow: expected off, got 'of'; did you mean 'off'?"),
    "3": ("2:9", "shadow: expected a word or a mapping, got the number 3"),
}


@pytest.mark.parametrize("section", MISTAKES)
def test_a_mistake_in_the_section_is_refused_at_its_place(section: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nshadow: {section}\n")
    place, message = MISTAKES[section]
    with pytest.raises(PolicyError) as raised, te_dispatch.policy(path):
        pass
    assert str(raised.value).startswith(f"{path}:{place}: ") and message in str(raised.value)


def test_the_strongest_section_wins_as_a_whole(tmp_path: Path) -> None:
    weak = Policy(name="weak", shadow=Shadow("reference", 0.5, ops=("gemm",)))
    strong = Policy(name="strong", shadow=Shadow("torch"))
    assert merge([Policy(name="silent"), strong, weak]).shadow == Shadow("torch")
    assert merge([Policy(name="silent"), weak]).shadow == weak.shadow
    assert merge([Policy(name="silent")]).shadow is None
    assert len({weak.digest(), strong.digest(), Policy().digest()}) == 3
    (tmp_path / "weak.yaml").write_text("version: 1\nshadow: {against: torch}\n")
    (tmp_path / "p.yaml").write_text("version: 1\ninclude: [weak.yaml]\n")
    with te_dispatch.policy(tmp_path / "p.yaml"):
        assert scopes.capture().policy.shadow == Shadow("torch")


def test_policy_show_tells_origins(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nshadow:\n  against: reference\n  ops: [gemm, '*_bwd']\n")
    done = CliRunner().invoke(app, ["policy", "show", str(path), "--origin", "--json"])
    shown = json.loads(done.output)
    lines = {line["key"]: (line["value"], line["origin"]) for line in shown["origins"]}
    assert lines["shadow.against"] == ("reference", f"{path}:3:12")
    assert lines["shadow.ops"] == (["gemm", "*_bwd"], f"{path}:4:8")
    assert lines["shadow.fraction"] == (0.001, f"{path}:3:3")
    assert shown["policy"]["shadow"]["on_mismatch"] == "warn"


def test_a_plan_does_not_depend_on_it(tmp_path: Path) -> None:
    with te_dispatch.policy(shadowing(tmp_path)):
        ops.gemm(*product(), layout="NT")
        plan = te_dispatch.freeze()
    assert "shadow" not in plan.policy
    assert not [line for line in plan.differences(scopes.MANAGER) if "shadow" in line]


def test_the_documented_section_is_valid(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    found = 0
    for page in ("policies.md", "conformance.md"):
        for block in (root / "docs" / page).read_text(encoding="utf-8").split("```yaml\n")[1:]:
            text = block.partition("```")[0]
            if "shadow" in (yaml.safe_load(text) or {}):
                (tmp_path / "p.yaml").write_text(text)
                with te_dispatch.policy(tmp_path / "p.yaml"):
                    assert scopes.capture().policy.shadow is not None
                found += 1
    assert found >= 1
