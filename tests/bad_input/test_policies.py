# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Bad policy files through the public ways in: the scope, the process, the environment and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import te_dispatch
from te_dispatch.core import scopes

#: name -> (the file's text, what the message must say after the file's name)
FILES = {
    "empty": ("", "version"),
    "only a comment": ("# nothing\n", "version"),
    "a list": ("- torch\n", "mapping"),
    "a word": ("torch\n", "mapping"),
    "unknown key": ("version: 1\nprefers: [torch]\n", "2:1: .*'prefers'.*did you mean 'prefer'"),
    "duplicate key": ("version: 1\nprefer: [torch]\nprefer: [torch]\n", "3:1: .*'prefer'"),
    "unknown operator": ("version: 1\nrules:\n- {op: gem, prefer: [torch]}\n", "3:8: .*'gem'.*did you mean 'gemm'"),
    "unknown operator version": ("version: 1\nrules:\n- {op: gemm@7, prefer: [torch]}\n", "3:8: .*gemm@1"),
    "unknown schema version": ("version: 99\n", "1:10: .*99"),
    "tag that constructs an object": ("version: 1\nprefer: !!python/object/apply:os.system ['true']\n", "2:9: .*tag"),
    "tag of a class": ("version: 1\ndescription: !!python/name:os.system\n", "2:14: .*tag"),
    "cyclic include": ("version: 1\ninclude: [cyclic_include.yaml]\n", "2:11: include cycle"),
    "an anchor that holds itself": ("version: 1\nprefer: &a [*a]\n", "2:"),
    "broken YAML": ("version: 1\nprefer: [torch\n", "[23]:"),
    "NUL byte": ("version: 1\nprefer: [\0]\n", ""),
    "backend that is not there": ("version: 1\nprefer: [trition]\n", "2:10: .*'trition'"),
}


@pytest.mark.parametrize("entry", ["policy", "set_policy"])
@pytest.mark.parametrize("name", FILES)
def test_a_bad_file_is_refused_and_nothing_changes(name: str, entry: str, tmp_path: Path) -> None:
    text, message = FILES[name]
    path = tmp_path / f"{name.replace(' ', '_')}.yaml"
    path.write_text(text)
    before = scopes.capture()
    with pytest.raises(te_dispatch.PolicyError, match=f"(?s){path.name}.*{message}"):
        if entry == "policy":
            with te_dispatch.policy(path):
                pytest.fail("entered a scope with a bad policy")
        else:
            te_dispatch.set_policy(path)
    assert scopes.capture() is before


@pytest.mark.parametrize("entry", ["missing file", "directory", "misspelt name"])
def test_what_is_no_file(entry: str, tmp_path: Path) -> None:
    what = {"missing file": tmp_path / "gone.yaml", "directory": tmp_path, "misspelt name": "portabel"}[entry]
    with pytest.raises(te_dispatch.PolicyError, match=r"no such policy file|neither a shipped policy nor a file"):
        te_dispatch.set_policy(what)


def test_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TE_DISPATCH_POLICY", str(tmp_path / "gone.yaml"))
    manager = scopes.OpManager(environ={"TE_DISPATCH_POLICY": str(tmp_path / "gone.yaml")})
    with pytest.raises(te_dispatch.PolicyError, match=r"(?s)(TE_DISPATCH_POLICY.*gone\.yaml|gone\.yaml)"):
        manager.process_layers()


@pytest.mark.parametrize(
    ("given", "message"),
    [({"gem": "torch"}, "'gem'"), ({"gemm": "torhc"}, "'torhc'"), ({"gemm": "torch.sdpa_flash_fwd"}, "sdpa_flash_fwd"),
     ({"gemm": 3}, "gemm"), ({"gemm": None}, "gemm"), ({"gemm": []}, "gemm")],
    ids=["operator", "backend", "implementation of another operator", "number", "None", "empty list"],
)  # fmt: skip
def test_using(given: dict[str, object], message: str) -> None:
    with pytest.raises((te_dispatch.PolicyError, TypeError), match=message), te_dispatch.using(**given):
        pytest.fail("entered a scope with a bad choice")


def test_neither_name_nor_path() -> None:
    for value in (3, ["a"], {"version": 1}, object()):
        with pytest.raises((te_dispatch.PolicyError, TypeError), match="policy"), te_dispatch.policy(value):  # type: ignore[arg-type]
            pytest.fail("entered a scope with no policy")
