# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Freezing: what a plan holds, and every way in which a lock file does not fit."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch.core import plan
from te_dispatch.core.discovery import register
from te_dispatch.core.errors import PlanError
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.manager import OpManager
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.plan import Plan, freeze
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import MultipleOf, OneOf
from tests.core.interrupting import Place, watching
from tests.core.toy import answering, backend, extension, kernel, only_toys, preferring, selectors, target

T = torch.zeros(4, 16)


pytestmark = pytest.mark.usefixtures("toy_operators")


def world(
    version: str = "1.0", kernel_version: str = "1", lib: str = "9.1", without: str = "", fuse: bool = True
) -> OpManager:
    def probe(index: int) -> DeviceFacts:
        return DeviceFacts("cpu", "cpu", "cpu", extra={"version.lib": lib})

    manifests = [
        backend(
            "a",
            kernel("mix", "k", answering("mix", "a"), requires=(MultipleOf("k", 16),), version=kernel_version),
            devices={"cpu": target(probe)},
        ),
        backend("b", kernel("mix", "k", answering("mix", "b"), rank=200)),
        backend("c", kernel("fuse", "f", answering("fuse", "c"), requires=(OneOf("cast", None),))),
        backend("d", kernel("pack", "p", answering("pack", "d"), rank=1)),
        backend("e", kernel("pack", "p", answering("pack", "e"))),
    ]
    found = [extension(m, version=version) for m in manifests if m.name != without]
    return OpManager(register(found, OPERATORS), environ={})


def step(m: OpManager) -> OpManager:
    m.ops.mix(T, T)
    m.ops.mix(torch.zeros(4, 15), T)
    m.ops.fuse(T, cast="tight")
    return m


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    freeze(step(world())).save(tmp_path / "plan.lock")
    return tmp_path / "plan.lock"


def test_a_plan_tells_what_runs_where_it_comes_from_and_under_what() -> None:
    plan = freeze(step(world()))
    assert {(c.operator, c.chosen) for c in plan.choices} >= {("mix", "a.k"), ("mix", "b.k")}
    (fused,) = [c for c in plan.choices if c.operator == "fuse"]
    assert fused.chosen == "composite.fuse_then_pack" and fused.pieces == {"fuse": "c.f", "pack": "d.p"}
    assert {"te-dispatch-a", "te-dispatch-b", "te-dispatch-c", "te-dispatch-d", "te-dispatch"} == set(
        plan.distributions
    )
    assert plan.kernels == {"a.k": "1", "b.k": "1", "c.f": "1", "d.p": "1"}
    assert plan.devices["cpu"]["version.lib"] == "9.1"
    assert plan.policy["prefer"] == ["native", "trait:aotriton", "triton", "torch"]


def test_a_plan_keeps_calls_that_were_made_before_the_key_grew() -> None:
    """The first call reads less than the second; its choice was made all the same."""
    m = OpManager(
        register(
            [
                extension(backend("a", kernel("mix", "k", answering("mix", "a"), requires=(OneOf("mode", "plain"),)))),
                extension(backend("b", kernel("mix", "k", answering("mix", "b"), requires=(OneOf("fast", True),)))),
                extension(backend("c", kernel("mix", "k", answering("mix", "c")))),
            ],
            OPERATORS,
        ),
        environ={},
    )
    assert m.ops.mix(T, T) == "a"
    assert m.ops.mix(T, T, mode="odd", fast=True) == "b"
    assert {c.chosen for c in freeze(m).choices} == {"a.k", "b.k"}


def test_the_digest_is_stable_and_tells_plans_apart() -> None:
    digest = freeze(step(world())).digest
    assert freeze(step(step(world()))).digest == digest
    other_order = world()
    other_order.ops.fuse(T, cast="tight")
    other_order.ops.mix(torch.zeros(4, 15), T)
    other_order.ops.mix(T, T)
    assert freeze(other_order).digest == digest
    others = [world(version="1.1"), world(kernel_version="2"), world(lib="9.2"), world(without="d")]
    assert len({digest, *(freeze(step(m)).digest for m in others)}) == 5
    fewer = world()
    fewer.ops.mix(T, T)
    assert freeze(fewer).digest != digest


def test_a_plan_is_of_the_scope_it_is_frozen_in() -> None:
    m = step(world())
    with m.using(mix="b"):
        m.ops.mix(T, T)
        assert {c.chosen for c in freeze(m).choices} == {"b.k"}
    assert "a.k" in {c.chosen for c in freeze(m).choices}


def test_a_plan_is_frozen_while_another_thread_resolves() -> None:
    """Before each line of `freeze` another thread makes a call that nobody made before."""
    odd = kernel("mix", "k", answering("mix", "a"), requires=(OneOf("mode", "odd"),))
    others = [kernel(op, op, answering(op, "b")) for op in ("mix", "pack", "fuse")]
    m = OpManager(register([extension(backend("a", odd, *others))], OPERATORS), {})
    first_calls = iter((m.ops.pack, m.ops.fuse))
    numbers = itertools.count()

    def resolve() -> None:
        assert m.ops.mix(T, T, mode=f"mode {next(numbers)}") == "b"
        if threads:
            next(first_calls, len)(T)

    def resolve_elsewhere(place: Place) -> None:
        if place[0] == plan.__file__ and place[2] < 3:
            thread = threading.Thread(target=resolve)
            thread.start()
            thread.join(0.2)  # it waits for the lock where `freeze` holds it
            threads.append(thread)

    threads: list[threading.Thread] = []
    for _ in range(3):
        resolve()
    with watching(resolve_elsewhere):
        frozen = freeze(m)
    for thread in threads:
        thread.join()
    assert len(threads) > 10 and len(frozen.choices) >= 3
    assert len(freeze(m).choices) == next(numbers) + 2


def test_a_lock_file_comes_back_equal_on_a_machine_that_agrees(lock: Path) -> None:
    loaded = Plan.load(lock, world())
    assert loaded.digest == freeze(step(world())).digest
    assert loaded.as_data() == freeze(step(world())).as_data()
    assert [p.name for p in lock.parent.iterdir()] == [lock.name], "no temporary file is left"


@pytest.mark.parametrize(
    ("there", "policy", "difference"),
    [
        ({"version": "1.1"}, None, "te-dispatch-a is 1.1, the plan has 1.0"),
        ({"kernel_version": "2"}, None, "a.k is version 2, the plan has 1"),
        ({"lib": "9.2"}, None, "cpu: version.lib is '9.2', the plan has '9.1'"),
        ({"without": "a"}, None, "te-dispatch-a 1.0 is not installed"),
        ({"without": "a"}, None, "mix would run on b.k, the plan has a.k"),
        ({"without": "d"}, None, "fuse: pack would run on e.p, the plan has d.p"),
        ({}, Policy(deny=selectors("a")), "the effective policy differs: deny is ['a'], the plan has []"),
        ({}, preferring("b"), "mix would run on b.k, the plan has a.k"),
    ],
)
def test_a_lock_file_is_refused_with_the_difference(
    lock: Path, there: Any, policy: Policy | None, difference: str
) -> None:
    m = world(**there)
    if policy is not None:
        m.set_policy(policy)
    with pytest.raises(PlanError) as refused:
        Plan.load(lock, m)
    assert difference in str(refused.value) and str(lock) in str(refused.value)


def test_an_operator_that_does_not_exist_here_is_a_difference(lock: Path) -> None:
    read = Plan._read(lock)
    with only_toys():
        m = world()
        del OPERATORS["fuse"]
        assert "operator 'fuse' does not exist here" in read.differences(m)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d["choices"][0].update(chosen="b.other"), "digest does not match"),
        (lambda d: d["distributions"].clear(), "digest does not match"),
        (lambda d: d.pop("digest"), "digest does not match"),
        (lambda d: d.update(format=99), "format 99"),
        (lambda d: d.pop("choices"), "is not a lock file"),
    ],
)
def test_an_edited_lock_file_is_refused(lock: Path, edit: Any, message: str) -> None:
    data = json.loads(lock.read_text())
    edit(data)
    lock.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        Plan.load(lock, world())


@pytest.mark.parametrize("content", ["", "not json", "[]", "3", "null", '{"format": 1}', "\x00"])
def test_what_is_no_lock_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.lock"
    path.write_text(content)
    with pytest.raises(PlanError, match=r"plan\.lock"):
        Plan.load(path, world())


_WRONG = {
    "devices": (None, [], 5, {"cpu": None}, {"cpu": {"arch": {}}}, {"cpu": {"encodings": [[]]}}),
    "kernels": (5, None, ["a.k"], {"a.k": 1}),
    "distributions": (None, [], {"te-dispatch": None}),
    "policy": (None, [], "x"),
    "choices": (None, {}, 5, [5], [None], [{}]),
    "format": (None, True, "1", 1.0),
}
_WRONG_CHOICE = {
    "operator": (None, 5, []), "device": (None, {}), "facts": (None, [], 5, {"k": {}}, {"k": [[]]}),
    "chosen": (None, 5), "pieces": (None, [], {"fuse": None}),
}  # fmt: skip


def _with_right_digest(lock: Path, edit: Any) -> None:
    data = json.loads(lock.read_text())
    edit(data)
    content = {key: value for key, value in data.items() if key != "digest"}
    lock.write_text(json.dumps({**content, "digest": hashlib.sha256(json.dumps(content).encode()).hexdigest()}))


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in _WRONG.items() for value in values])
def test_a_value_of_a_wrong_type_is_named(lock: Path, key: str, value: Any) -> None:
    _with_right_digest(lock, lambda data: data.update({key: value}))
    with pytest.raises(PlanError, match=rf"plan\.lock is not a lock file: {key}"):
        Plan.load(lock, world())


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in _WRONG_CHOICE.items() for value in values])
def test_a_value_of_a_wrong_type_in_a_choice_is_named(lock: Path, key: str, value: Any) -> None:
    _with_right_digest(lock, lambda data: data["choices"][1].update({key: value}))
    with pytest.raises(PlanError, match=rf"plan\.lock is not a lock file: choices\[1\]\.{key}"):
        Plan.load(lock, world())


@pytest.mark.parametrize("depth", [400, 900, 100_000])
def test_a_lock_file_that_is_nested_deeply_is_refused(lock: Path, depth: int) -> None:
    text = lock.read_text()
    lock.write_text(text.replace('"kernels": {', '"kernels": ' + '{"a":' * depth + "1" + "}" * depth + ', "x": {', 1))
    with pytest.raises(PlanError, match="is not a lock file"):
        Plan.load(lock, world())


def test_another_version_of_te_dispatch_is_a_difference(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = te_dispatch.__version__
    monkeypatch.setattr(te_dispatch, "__version__", "9.9")
    with pytest.raises(PlanError, match=rf"te-dispatch is 9\.9, the plan has {re.escape(ours)}"):
        Plan.load(lock, world())


@pytest.mark.skipif(os.name != "posix", reason="modes and links of POSIX")
def test_a_lock_file_is_written_as_any_other_file(tmp_path: Path, lock: Path) -> None:
    """Mode by umask, or as it was; a link is followed; what is no file is left alone."""
    frozen = Plan._read(lock)
    before = os.umask(0o027)
    try:
        frozen.save(tmp_path / "fresh.lock")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "fresh.lock").stat().st_mode) == 0o640
    lock.chmod(0o664)
    link = tmp_path / "link.lock"
    link.symlink_to(lock)
    lock.write_text("old")
    frozen.save(link)
    assert link.is_symlink() and stat.S_IMODE(lock.stat().st_mode) == 0o664
    assert Plan._read(lock).digest == frozen.digest
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        frozen.save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh.lock", "link.lock", "pipe", "plan.lock"]


def test_a_missing_lock_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read: No such file"):
        Plan.load(tmp_path / "none.lock", world())
