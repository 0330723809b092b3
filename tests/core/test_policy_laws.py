# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Laws of layers: merging, and a policy written to a file and read back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from te_dispatch.core.errors import PolicyError
from te_dispatch.core.policy import Numerics, Policy, Rule, Selector, merge
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.policy.known import Known
from te_dispatch.core.policy.parse import parse_document

WORDS = ("native", "torch", "triton", "cuda", "torch.matmul", "triton.flash_fwd", "trait:flash")
selectors = st.lists(st.sampled_from(WORDS), unique=True, max_size=4).map(lambda ws: tuple(Selector(w) for w in ws))
layers = st.builds(
    Policy,
    prefer=selectors,
    allow=st.none() | selectors,
    deny=selectors,
    require=selectors.map(lambda group: (group,) if group else ()),
    rules=st.lists(st.builds(Rule, op=st.sampled_from(("gemm", "attention")), deny=selectors), max_size=2).map(tuple),
    numerics=st.builds(Numerics, st.sampled_from((None, "native", "common")), st.sampled_from((None, True, False))),
)
stacks = st.lists(layers, min_size=1, max_size=4)


@given(stacks, layers)
def test_deny_and_require_only_grow(stack: list[Policy], weaker: Policy) -> None:
    before, after = merge(stack), merge([*stack, weaker])
    assert set(before.deny) | set(weaker.deny) == set(after.deny)
    assert after.require == before.require + weaker.require


@given(stacks)
def test_the_strongest_allow_wins(stack: list[Policy]) -> None:
    given_ = [layer.allow for layer in stack if layer.allow is not None]
    assert merge(stack).allow == (given_[0] if given_ else None)


@given(stacks)
def test_prefer_concatenates_stronger_first(stack: list[Policy]) -> None:
    everything = [s for layer in stack for s in layer.prefer]
    assert merge(stack).prefer == tuple(s for i, s in enumerate(everything) if s not in everything[:i])


@given(stacks)
def test_the_strongest_promise_wins(stack: list[Policy]) -> None:
    promised = [layer.numerics.deterministic for layer in stack if layer.numerics.deterministic is not None]
    assert merge(stack).numerics.deterministic == (promised[0] if promised else False)


@given(stacks, stacks)
def test_merging_in_two_steps_is_merging_in_one(strong: list[Policy], weak: list[Policy]) -> None:
    """Of all but promises: a merger closes those, so it can only be the weak end of another one."""
    assert merge([*strong, merge(weak)]).digest() == merge([*strong, *weak]).digest()


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    """Data of a policy file whose parts cannot contradict each other: each key draws from words of its own."""
    data: dict[str, Any] = {"version": 1}
    for key, words in (
        ("prefer", WORDS[:3]),
        ("deny", ("cuda", "trait:flash")),
        ("optional_backends", ("ini", "tech")),
    ):
        if draw(st.booleans()):
            data[key] = draw(st.lists(st.sampled_from(words), unique=True))
    if draw(st.booleans()):
        data["description"] = draw(st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=9))
    if draw(st.booleans()):
        data["numerics"] = {"deterministic": draw(st.booleans())}
    if draw(st.booleans()):
        when = draw(st.dictionaries(st.sampled_from(("k", "device.index")), st.integers(0, 9999)))
        data["rules"] = [{"op": "gemm", "when": when, "prefer": ["torch"]}]
    return data


@settings(deadline=None)
@given(files(), st.booleans())
def test_file_reads_back_as_it_was_written(known: Known, data: dict[str, Any], flow: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "p.yaml")
        path.write_text(yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True), encoding="utf-8")
        policy = load_policy(path, known)
        lines = path.read_text(encoding="utf-8").split("\n")
    assert [s.text for s in policy.prefer] == data.get("prefer", [])
    assert [s.text for s in policy.deny] == data.get("deny", [])
    assert policy.optional_backends == tuple(data.get("optional_backends", ()))
    assert policy.description == data.get("description", "")
    assert policy.numerics.deterministic == data.get("numerics", {}).get("deterministic")
    (when,) = [{c.fact: c.values for c in rule.when} for rule in policy.rules] or [{}]  # type: ignore[union-attr]
    assert when == {fact: (v,) for rule in data.get("rules", []) for fact, v in rule["when"].items()}
    for selector in (*policy.prefer, *policy.deny):
        line, column = selector.origin.line, selector.origin.column
        assert line is not None and column is not None
        assert lines[line - 1][column - 1 :].lstrip("'\"").startswith(selector.text)


@given(st.text(alphabet=" \n\t:-[]{},&*!|>'\"%@`#?~.<=ab1\x00\ufeff\u2028", max_size=40))
def test_no_text_breaks_the_reader(text: str) -> None:
    """Whatever stands in a file, it is plain data or a PolicyError with a place."""
    try:
        document = parse_document(text, "p.yaml")
    except PolicyError as error:
        where = str(error).split(":")
        assert where[0] == "p.yaml" and where[1].isdigit() and where[2].isdigit()
    else:
        assert () in document.values
