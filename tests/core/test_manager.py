# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Policies in force: layers, scopes, threads, tasks, backward passes, forks, and registries that change."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch.core.errors import NoImplementation, PolicyError
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.manager import OpManager
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import OneOf
from te_dispatch.core.snapshot import Snapshot
from tests.core.toy import (
    answering,
    answers,
    backend,
    installed,
    kernel,
    manager,
    preferring,
    rule,
    selectors,
    target,
)  # fmt: skip

T = torch.zeros(4, 16)
ABC = ["a", "b", "c"]


pytestmark = pytest.mark.usefixtures("toy_operators")


def three(environ: dict[str, str] | None = None) -> OpManager:
    return manager(*answers("mix", ABC), environ=environ)


# -- scopes -----------------------------------------------------------------------------------------------------------


def test_scopes_nest_and_end() -> None:
    m = three()
    assert m.ops.mix(T, T) == "a"
    with m.policy(preferring("b")):
        assert m.ops.mix(T, T) == "b"
        with m.using(mix="c"):
            assert m.ops.mix(T, T) == "c"
        assert m.ops.mix(T, T) == "b"
        with m.using(prefer={"mix": "c"}):
            assert m.ops.mix(T, T) == "c"
            with m.policy(Policy(deny=selectors("c"))):
                assert m.ops.mix(T, T) == "b"
    assert m.ops.mix(T, T) == "a"


def test_a_scope_ends_with_an_exception_too() -> None:
    m = three()
    with pytest.raises(ZeroDivisionError), m.using(mix="b"), m.policy(preferring("c")):
        raise ZeroDivisionError
    assert m.ops.mix(T, T) == "a"
    assert m.namespace.__dict__["_scoped"] is False, "the hot path must not read the context variable any longer"


def test_a_scope_that_cannot_be_entered_changes_nothing() -> None:
    m = three()
    with pytest.raises(PolicyError, match="did you mean 'mix'"), m.using(mixx="a"):
        raise AssertionError("entered")
    with pytest.raises(PolicyError), m.policy("no-such-policy"):
        raise AssertionError("entered")
    assert m.namespace.__dict__["_scoped"] is False and m.ops.mix(T, T) == "a"


def test_the_strongest_allow_wins_and_denies_accumulate() -> None:
    m = three()
    with m.policy(Policy(name="outer", allow=selectors("a"), deny=selectors("b"))):
        with m.policy(Policy(name="inner", allow=selectors("b", "c"))):
            assert m.ops.mix(T, T) == "c"
        assert m.ops.mix(T, T) == "a"


def test_using_requires() -> None:
    m = manager(
        backend("a", kernel("mix", "k", answering("mix", "a"), requires=(OneOf("mode", "odd"),))),
        *answers("mix", ["b"]),
    )
    with m.using(mix="a"):
        assert m.ops.mix(T, T, mode="odd") == "a"
        with pytest.raises(NoImplementation, match=r"b\.k +rejected by policy: required: a \(using\(mix='a'\)\)"):
            m.ops.mix(T, T)
    with m.using(prefer={"mix": "a"}):
        assert m.ops.mix(T, T) == "b"


def test_using_a_family_speaks_of_its_operators_only() -> None:
    m = manager(
        *(backend(n, kernel("mix", "m", answering("mix", n)), kernel("pack", "p", answering("pack", n))) for n in ABC)
    )
    with m.using(mix="c"):
        assert (m.ops.mix(T, T), m.ops.pack(T)) == ("c", "a")


def test_equal_scopes_share_what_they_bound() -> None:
    m = three()
    with m.using(mix="b"):
        first = m.capture()
    with m.using(mix="b"):
        assert m.capture() is first
    with m.using(mix="c"):
        assert m.capture() is not first


def test_a_scope_that_was_never_left_ends_no_later_one_of_the_same_policy() -> None:
    m = manager(*answers("mix", ["a", "b"]))
    preferred = preferring("b")
    lost = m.policy(preferred)
    before = m.current.get()
    lost.__enter__()
    m.current.set(before)  # as by whoever leaves an outer scope first
    with m.policy(preferred):
        del lost
        assert m.ops.mix(T, T) == "b"
        assert m.mirror.bindings is m.current.get()
        with m.observe(lambda *told: None):
            assert m.ops.mix(T, T) == "b"


def test_an_observer_sees_what_ran_also_in_scopes_inside_its_block() -> None:
    m = manager(*answers("mix", ABC), backend("d", kernel("fuse", "f", answering("fuse", "d"))))
    seen: list[tuple[str, str, Any]] = []
    with m.observe(lambda operator, ran, args, result: seen.append((operator.name, ran.id, result))):
        m.ops.mix(T, T)
        with m.using(mix="c"):
            m.ops.mix(T, T)
        m.ops.fuse(T)
    m.ops.mix(T, T)
    assert seen == [("mix", "a.k", "a"), ("mix", "c.k", "c"), ("fuse", "d.f", "d")]


# -- threads, tasks, passes -------------------------------------------------------------------------------------------


def test_threads_see_their_own_scopes_only() -> None:
    names = [f"b{i}" for i in range(16)]
    m = manager(*answers("mix", names, requires=(OneOf("mode", "plain", "odd"),)))
    barrier, wrong = threading.Barrier(16), []

    def work(name: str) -> None:
        barrier.wait()
        for i in range(60):
            mode = ("plain", "odd")[i % 2]
            with m.using(mix=name):
                got = m.ops.mix(T, T, mode=mode)
            if got != name or m.ops.mix(T, T, mode=mode) != "b0":
                wrong.append((name, got))

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    assert m.namespace.__dict__["_scoped"] is False


def test_calls_stay_right_while_other_threads_grow_the_key() -> None:
    """Every new fact makes a new lookup; threads that are inside the old one must not meet halves of both."""
    for _ in range(8):
        m = manager(
            backend("a", kernel("mix", "k", answering("mix", "a"), requires=(OneOf("a.dtype", "fp32"),))),
            backend("b", kernel("mix", "k", answering("mix", "b"), requires=(OneOf("mode", "odd"),))),
            backend("c", kernel("mix", "k", answering("mix", "c"), requires=(OneOf("fast", True),))),
            *answers("mix", ["d"]),
        )
        half = T.half()
        calls = [
            (T, {}, "a"), (half, {"mode": "odd"}, "b"), (half, {"fast": True}, "c"), (half, {}, "d"),
            (T, {"fast": True}, "a"),
        ]  # fmt: skip
        wrong: list[Any] = []
        barrier = threading.Barrier(5)

        def work(shift: int, m: OpManager = m, calls: Any = calls, wrong: Any = wrong, barrier: Any = barrier) -> None:
            barrier.wait()
            for i in range(40):
                x, options, name = calls[(i + shift) % len(calls)]
                try:
                    if m.ops.mix(x, x, **options) != name:
                        wrong.append((shift, i))
                except Exception as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(shift,)) for shift in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong


def test_tasks_see_their_own_scopes_only() -> None:
    m = three()

    async def work(name: str) -> None:
        with m.using(mix=name):
            for _ in range(20):
                await asyncio.sleep(0)
                assert m.ops.mix(T, T) == name

    async def both() -> None:
        await asyncio.gather(work("b"), work("c"), work("a"))
        assert m.ops.mix(T, T) == "a"

    asyncio.run(both())


def test_a_backward_in_another_thread_runs_under_its_forwards_policy() -> None:
    m = manager(
        *(
            backend(
                n, kernel("turn_fwd", "f", answering("turn_fwd", n)), kernel("turn_bwd", "b", answering("turn_bwd", n))
            )
            for n in ABC
        )
    )
    ran: list[str] = []

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.bindings = m.capture()
            ran.append("forward " + m.ops.turn_fwd(x))
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            with m.reenter(ctx.bindings):
                ran.append("backward " + m.ops.turn_bwd(dy))
            return dy

    x = torch.zeros(2, requires_grad=True)
    m.set_policy(preferring("b"))
    process_wide = Turn.apply(x)
    with m.using(turn="c"):
        scoped = Turn.apply(x)
    m.set_policy(preferring("a"))
    for y in (scoped, process_wide):
        thread = threading.Thread(target=lambda y=y: y.sum().backward())
        thread.start()
        thread.join(30)
    assert ran == ["forward b", "forward c", "backward c", "backward b"]
    assert m.ops.turn_bwd(x) == "a"


def test_what_was_captured_before_the_first_resolution_keeps_its_policy() -> None:
    m = manager(*answers("mix", ABC), *answers("pack", ["d"]))
    m.ops.pack(T)
    with m.policy(preferring("b")):
        scope = m.capture()
    here = m.capture()
    m.set_policy(preferring("c"))
    for bindings, expected in ((here, "a"), (scope, "b"), (m.capture(), "c")):
        with m.reenter(bindings):
            assert m.ops.mix(T, T) == expected


_FORK = """
    import os, sys, threading
    import torch
    from tests.core.toy import answers, manager, only_toys, preferring
    with only_toys():
        m = manager(*answers("mix", ["a", "b"]))
        x = torch.zeros(2, 2)
        held, done = threading.Event(), threading.Event()
        def hold():
            with m.lock:
                held.set()
                done.wait(20)
        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            ok = m.ops.mix(x, x) == "a"              # resolves, which takes the lock
            with m.policy(preferring("b")):
                ok = ok and m.ops.mix(x, x) == "b"
            os._exit(0 if ok else 1)
        _, status = os.waitpid(child, 0)
        done.set()
        thread.join()
        assert m.ops.mix(x, x) == "a"
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_holds_the_lock_does_not_hang_the_child() -> None:
    root = Path(te_dispatch.__file__).parent.parent
    path = os.pathsep.join([str(root), *(p for p in sys.path if p)])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORK)],
        env=environ,
        cwd=root,
        timeout=60,
        capture_output=True,
    )
    assert run.returncode == 0, run.stderr.decode()


# -- registries -------------------------------------------------------------------------------------------------------


def test_a_late_registration_is_visible_to_cached_calls() -> None:
    m = manager(*answers("mix", ["b"]))
    assert m.ops.mix(T, T) == "b"
    with m.using(mix="b"):
        scope = m.capture()
    m.replace_snapshot(installed(*answers("mix", ["a", "b"])))
    assert m.ops.mix(T, T) == "a"
    with m.using(mix="a"):
        assert m.ops.mix(T, T) == "a", "the new backend's name is known to policies"
    with m.reenter(scope):
        assert m.ops.mix(T, T) == "b"
    m.replace_snapshot(Snapshot())
    with pytest.raises(NoImplementation):
        m.ops.mix(T, T)


def test_an_unavailable_backend_says_why_and_a_broken_check_is_its_own_failure() -> None:
    def crash() -> str:
        raise SystemExit("no driver")

    asked: list[int] = []

    def ask() -> str | None:
        asked.append(1)
        return "no ACME device"

    m = manager(
        *answers("mix", ["z"]),
        backend("a", kernel("mix", "k", answering("mix", "a")), unavailable=target(ask)),
        backend("b", kernel("mix", "k", answering("mix", "b")), unavailable=target(crash)),
        backend("c", kernel("mix", "k", answering("mix", "c"), rank=999), unavailable=target(lambda: None)),
    )
    assert m.ops.mix(T, T) == m.ops.mix(T, T, mode="odd") == "z"
    assert asked == [1]
    assert m.snapshot.unavailable == {
        "a": "no ACME device", "b": "its check of this machine raised SystemExit: no driver",
    }  # fmt: skip


def test_probes_are_asked_once_and_a_broken_one_costs_its_facts_only() -> None:
    asked: list[int] = []

    def probe(index: int) -> DeviceFacts:
        asked.append(index)
        return DeviceFacts("cpu", "ACME", "x1", extra={"version.lib": "2.1"})

    def crash(index: int) -> DeviceFacts:
        raise SystemExit(1)

    requires = (OneOf("device.vendor", "Acme"), OneOf("device.arch", "x1"))
    m = manager(
        backend(
            "a",
            kernel("mix", "k", answering("mix", "a"), requires=requires),
            vendors=("acme",),
            devices={"cpu": target(probe)},
        ),
        backend("b", devices={"cpu": target(crash)}),
        backend("c", devices={"cpu": target(lambda index: None)}),
    )
    assert m.ops.mix(T, T) == m.ops.mix(T, T, mode="odd") == "a"
    assert asked == [0] and len(m.probe_problems) == 1 and "'b'" in m.probe_problems[0]
    denying = Policy(rules=(rule("mix", when=(OneOf("device.vendor", "ACME"),), deny=("a",)),))
    with m.policy(denying), pytest.raises(NoImplementation):
        m.ops.mix(T, T)


def test_a_probe_need_not_repeat_the_row_of_its_manifest() -> None:
    row = Arch(encodings=("e4m3fn",))
    probe = target(lambda index: DeviceFacts("cpu", "acme", "x1"))
    m = manager(backend("a", vendors=("acme",), archs={"acme": {"x1": row}}, devices={"cpu": probe}))
    assert m.device_facts(SimpleNamespace(type="cpu", index=None)).table == row


def test_what_a_probe_answers_after_its_registry_was_replaced_is_not_kept() -> None:
    def later(index: int) -> DeviceFacts:
        return DeviceFacts("cpu", "later", "y1")

    def probe(index: int) -> DeviceFacts:
        m.replace_snapshot(installed(backend("b", vendors=("later",), devices={"cpu": target(later)})))
        return DeviceFacts("cpu", "acme", "x1")

    m = manager(backend("a", vendors=("acme",), devices={"cpu": target(probe)}))
    cpu = SimpleNamespace(type="cpu", index=None)
    assert [m.device_facts(cpu).vendor for _ in range(3)] == ["acme", "later", "later"]
