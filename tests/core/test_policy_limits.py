# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Policy files that include each other, that the system refuses, or that are larger than any policy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import ClassVar

import pytest

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy import Policy, Rule, Selector
from te_dispatch.core.policy.check import check_contradictions
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.policy.known import Known
from te_dispatch.core.requirements import Compare


def test_include_cycle_shows_the_chain(known: Known, tmp_path: Path) -> None:
    for name, next_name in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"version: 1\ninclude: [{next_name}.yaml]\n")
    with pytest.raises(PolicyError) as caught:
        load_policy(tmp_path / "a.yaml", known)
    chain = " -> ".join(str(tmp_path / f"{name}.yaml") for name in "abca")
    assert str(caught.value).splitlines() == [
        f"{tmp_path / 'c.yaml'}:2:11: include cycle: {chain}",
        f"  included at {tmp_path / 'b.yaml'}:2:11",
        f"  included at {tmp_path / 'a.yaml'}:2:11",
    ]


def test_error_in_an_included_file_names_that_file(known: Known, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("version: 1\ninclude: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("version: 1\nprefer: [trition]\n")
    with pytest.raises(PolicyError) as caught:
        load_policy(tmp_path / "a.yaml", known)
    assert str(caught.value).startswith(f"{tmp_path / 'b.yaml'}:2:10: ")
    assert str(caught.value).endswith(f"\n  included at {tmp_path / 'a.yaml'}:2:11")


def test_a_long_chain_of_includes_is_refused_where_it_is_too_long(known: Known, tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"p{i}.yaml").write_text(f"version: 1\ninclude: [p{i + 1}.yaml]\n")
    with pytest.raises(PolicyError, match=r"p15\.yaml:2:11: include: more than 16 files include each other in turn"):
        load_policy(tmp_path / "p0.yaml", known)


def test_what_is_included_twice_counts_once(known: Known, tmp_path: Path) -> None:
    """A diamond of 30 storeys has 2^30 paths through it."""
    (tmp_path / "p15.yaml").write_text("version: 1\ndeny: [torch]\n")
    for i in range(15):
        below = f"p{i + 1}.yaml"
        (tmp_path / f"p{i}.yaml").write_text(f"version: 1\ninclude: [{below}, ./{below}]\n")
    assert [s.text for s in load_policy(tmp_path / "p0.yaml", known).deny] == ["torch"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("~nobody-of-that-name/p.yaml", "~nobody-of-that-name/p.yaml: cannot read the policy file: .*home"),
        ("x" * 5000 + ".yaml", "cannot read the policy file: File name too long"),
        ("nul\0.yaml", "policy file"),
    ],
)
def test_a_name_that_the_system_refuses(known: Known, name: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(name, known)


def test_a_folder_that_may_not_be_read(known: Known, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)  # root may read everything
    with pytest.raises(PolicyError, match=r"p\.yaml: cannot read the policy file: Permission denied"):
        load_policy(tmp_path / "p.yaml", known)


def test_a_file_larger_than_any_policy_is_refused_unread(known: Known, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\n#" + "x" * (1 << 20))
    with pytest.raises(PolicyError, match=r"p\.yaml: more than 1 MiB, so it is no policy"):
        load_policy(path, known)


def test_a_message_does_not_repeat_a_foreign_file(known: Known, tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    path.write_text("root:$6$secret:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n")
    with pytest.raises(PolicyError) as caught:
        load_policy(path, known)
    assert "secret" not in str(caught.value)


def test_a_message_about_a_long_value_is_short(known: Known, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(f"version: 1\nprefer: [{'x' * 100_000}]\n")
    with pytest.raises(PolicyError, match=r":2:10: prefer: unknown backend") as caught:
        load_policy(path, known)
    assert len(str(caught.value)) < 1000


class _CountingKnown(Known):
    """Counts how often the operators of a pattern are looked for."""

    asked: ClassVar[Counter[str]] = Counter()

    def matched(self, pattern: str) -> tuple[str, ...]:
        self.asked[pattern] += 1
        return super().matched(pattern)


def test_rules_are_not_compared_each_with_each(known: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0
    real = Compare.__eq__

    def counted(one: Compare, other: object) -> bool:
        nonlocal compared
        compared += 1
        return real(one, other)

    rules = tuple(
        Rule("gemm", when=(Compare("k", ">=", i),), prefer=(Selector("torch"),), allow=(Selector("torch"),))
        for i in range(500)
    )
    counting = _CountingKnown(**{f.name: getattr(known, f.name) for f in dataclasses.fields(known)})
    monkeypatch.setattr(Compare, "__eq__", counted)
    check_contradictions(Policy(rules=rules), counting)
    assert counting.asked["gemm"] == 1
    assert compared < 5 * len(rules)
    with pytest.raises(PolicyError, match="never reached"):
        check_contradictions(Policy(rules=(*rules, Rule("gemm", rules[7].when, prefer=rules[7].prefer))), counting)
