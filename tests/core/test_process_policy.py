# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The policy of the whole process: `set_policy`, the environment, and files that are named again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.manager import OpManager
from te_dispatch.core.policy import file
from tests.core.toy import answers, manager, preferring

T = torch.zeros(4, 16)


pytestmark = pytest.mark.usefixtures("toy_operators")


def three(environ: dict[str, str] | None = None) -> OpManager:
    return manager(*answers("mix", ["a", "b", "c"]), environ=environ)


def test_set_policy_reaches_calls_that_are_cached_and_none_goes_back() -> None:
    m = three()
    assert m.ops.mix(T, T) == "a"
    m.set_policy(preferring("c"))
    assert m.ops.mix(T, T) == "c"
    m.set_policy(None)
    assert m.ops.mix(T, T) == "a"


def test_a_policy_that_cannot_be_set_changes_nothing() -> None:
    m = three()
    m.set_policy(preferring("c"))
    with pytest.raises(PolicyError):
        m.set_policy("no-such-policy")
    assert m.ops.mix(T, T) == "c"


def test_layers_strongest_first(tmp_path: Path) -> None:
    """using > TE_DISPATCH_PREFER > TE_DISPATCH_POLICY > set_policy > default."""
    file = tmp_path / "own.yaml"
    file.write_text("version: 1\nprefer: [c]\n")
    environ: dict[str, str] = {}
    m = manager(*answers("mix", ["a", "b", "c", "d", "e"]), environ=environ)
    assert m.ops.mix(T, T) == "a"
    m.set_policy(preferring("b"))
    assert m.ops.mix(T, T) == "b"
    environ["TE_DISPATCH_POLICY"] = str(file)
    assert m.ops.mix(T, T) == "b", "read at the first resolution, and again only when asked to"
    m.reload_environment()
    assert m.ops.mix(T, T) == "c"
    environ["TE_DISPATCH_PREFER"] = "mix=d"
    m.reload_environment()
    assert m.ops.mix(T, T) == "d"
    with m.using(mix="e"):
        assert m.ops.mix(T, T) == "e"
    environ.clear()
    m.reload_environment()
    assert m.ops.mix(T, T) == "b"


def test_a_debug_variable_that_cannot_be_read_is_an_error_every_time() -> None:
    m = three({"NVTE_DEBUG": "true"})
    for _ in range(2):
        with pytest.raises(PolicyError, match="NVTE_DEBUG"):
            m.ops.mix(T, T)


def test_an_environment_that_cannot_be_read_again_changes_nothing() -> None:
    environ = {"TE_DISPATCH_PREFER": "mix=c"}
    m = three(environ)
    assert m.ops.mix(T, T) == "c"
    environ["TE_DISPATCH_PREFER"] = "mix"
    with pytest.raises(PolicyError, match="TE_DISPATCH_PREFER=mix"):
        m.reload_environment()
    assert m.ops.mix(T, T) == "c"
    environ["TE_DISPATCH_PREFER"] = "mix=b"
    m.reload_environment()
    assert m.ops.mix(T, T) == "b"


def test_a_file_that_is_named_again_is_read_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    real = file.read_document

    def counted(raw: bytes, name: str) -> Any:
        reads.append(Path(name).name)
        return real(raw, name)

    monkeypatch.setattr(file, "read_document", counted)
    m = three()
    (tmp_path / "own.yaml").write_text("version: 1\ninclude: [base.yaml]\n")
    (tmp_path / "base.yaml").write_text("version: 1\nprefer: [b]\n")

    def winner() -> Any:
        with m.policy(tmp_path / "own.yaml"):
            return m.ops.mix(T, T)

    assert [winner() for _ in range(3)] == ["b"] * 3
    assert sorted(reads) == ["base.yaml", "default.yaml", "own.yaml"]
    (tmp_path / "base.yaml").write_text("version: 1\nprefer: [c]\n")
    assert [winner() for _ in range(3)] == ["c"] * 3
    assert len(reads) == 5
    (tmp_path / "base.yaml").unlink()
    with pytest.raises(PolicyError, match=r"base\.yaml: no such policy file"):
        winner()


def test_an_unreadable_environment_is_an_error_every_time() -> None:
    m = three({"TE_DISPATCH_PREFER": "mix"})
    for _ in range(2):
        with pytest.raises(PolicyError, match="TE_DISPATCH_PREFER=mix"):
            m.ops.mix(T, T)
