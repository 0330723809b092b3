# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Ctrl-C, a signal handler that raises and a fork may come before any line: later calls are right all the same."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import Manifest
from te_dispatch.core.requirements import OneOf
from te_dispatch.core.startup import no_collection
from tests.core.interrupting import interrupted, places
from tests.core.toy import answering, backend, installed, kernel, manager, preferring

pytestmark = [pytest.mark.sampled(6), pytest.mark.usefixtures("toy_operators")]

SINGLE = torch.zeros(4, 16)
HALF = SINGLE.bfloat16()


def both(name: str) -> Manifest:
    """A backend of `mix` and `pack` that answers with its name."""
    return backend(name, *(kernel(op, op, answering(op, name)) for op in ("mix", "pack")))


def choosy(environ: dict[str, str] | None = None) -> OpManager:
    """`gamma` comes first, for odd single-precision calls alone; a call in half precision does not ask for the mode."""
    gamma = kernel("mix", "k", answering("mix", "gamma"), requires=(OneOf("a.dtype", "fp32"), OneOf("mode", "odd")))
    made = manager(
        backend("gamma", gamma, kernel("pack", "p", answering("pack", "gamma"))), both("omega"), environ=environ
    )
    made.set_policy(preferring("gamma", "omega"))
    return made


def check_calls(m: OpManager) -> None:
    for _ in range(2):
        assert m.ops.mix(HALF, SINGLE) == "omega"
        assert m.ops.mix(SINGLE, SINGLE, mode="odd") == "gamma"
        assert m.ops.mix(SINGLE, SINGLE) == "omega"
        assert m.ops.mix(HALF, SINGLE, mode="odd") == "omega"


def check_outside(m: OpManager) -> None:
    assert m.capture() is m.bindings
    assert m.mirror.bindings is None
    assert m.namespace.__dict__["_scoped"] is False
    assert gc.isenabled()


def at_every_line(prepare: Callable[[], OpManager], run: Callable[[OpManager], Any], check: Any) -> int:
    """Interrupt `run` at each line that it executes, each time in another manager. How often that was."""
    first = prepare()
    found = places(lambda: run(first))
    hits = 0
    for place in found:
        m = prepare()
        hits += interrupted(lambda m=m: run(m), place)
        try:
            check(m)
            check_outside(m)
        except Exception as error:
            raise AssertionError(f"interrupted at {place}") from error
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("call", [(HALF, SINGLE), (SINGLE, SINGLE)], ids=["half", "single"])
def test_an_interrupted_first_resolution_leaves_calls_right(call: Any) -> None:
    assert at_every_line(choosy, lambda m: m.ops.mix(*call), check_calls) > 200


def test_an_interrupted_growth_of_the_key_leaves_calls_right() -> None:
    def warm() -> OpManager:
        m = choosy()
        assert m.ops.mix(HALF, SINGLE) == "omega"
        return m

    assert at_every_line(warm, lambda m: m.ops.mix(SINGLE, SINGLE), check_calls) > 200


def test_an_interrupted_scope_is_left_altogether() -> None:
    def warm() -> OpManager:
        m = choosy()
        enter(m)
        check_calls(m)
        return m

    def enter(m: OpManager) -> None:
        with m.using(mix="omega"), m.policy(preferring("omega")):
            assert m.ops.mix(SINGLE, SINGLE, mode="odd") == "omega"

    assert at_every_line(warm, enter, check_calls) > 100


def test_an_interrupt_inside_a_scope_does_not_leave_the_outer_one() -> None:
    m = choosy()

    def inner() -> None:
        with m.policy(preferring("gamma")):
            m.ops.mix(SINGLE, SINGLE, mode="odd")

    with m.policy(preferring("omega")):
        inner()
        outer = m.capture()
        for place in places(inner):
            assert interrupted(inner, place)
            assert m.capture() is outer and m.mirror.bindings is outer, place
            assert m.ops.mix(SINGLE, SINGLE, mode="odd") == "omega", place
    check_outside(m)


@pytest.mark.parametrize("change", ["set_policy", "reload_environment", "replace_snapshot"])
def test_a_change_of_the_process_happens_altogether_or_not_at_all(change: str) -> None:
    environ: dict[str, str] = {}

    def warm() -> OpManager:
        environ.clear()
        m = choosy(environ)
        answers_now(m)
        environ["TE_DISPATCH_PREFER"] = "mix=omega;pack=omega"
        return m

    def answers_now(m: OpManager) -> set[str]:
        return {m.ops.mix(SINGLE, SINGLE, mode="odd"), m.ops.pack(SINGLE)}

    def run(m: OpManager) -> None:
        if change == "set_policy":
            m.set_policy(preferring("omega"))
        elif change == "reload_environment":
            m.reload_environment()
        else:
            m.replace_snapshot(installed(both("omega")))

    def check(m: OpManager) -> None:
        found = answers_now(m)
        assert len(found) == 1, found

    assert at_every_line(warm, run, check) > 10


def test_an_interrupt_leaves_the_garbage_collector_on() -> None:
    def block() -> None:
        with no_collection():
            assert not gc.isenabled()

    found = places(block)
    assert len(found) > 4
    for place in found:
        assert interrupted(block, place)
        assert gc.isenabled(), place


_FORK = """
    import gc, os, sys, threading
    from tests.core import interrupting
    from tests.core.test_interrupts import SINGLE, check_calls, choosy
    from tests.core.toy import only_toys

    def stopped_at(m, place):
        # A thread that resolves, and waits before it executes a line.
        there, go_on = threading.Event(), threading.Event()
        def wait(at):
            if at == place:
                there.set()
                go_on.wait(60)
        def resolve():
            with interrupting.watching(wait):
                m.ops.mix(SINGLE, SINGLE)
        thread = threading.Thread(target=resolve)
        thread.start()
        there.wait(60)
        return thread, go_on

    def child_is_right(m):
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        try:
            check_calls(m)
            assert gc.isenabled()
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)

    with only_toys():
        m = choosy()
        found = interrupting.places(lambda: m.ops.mix(SINGLE, SINGLE))
        files = ("dispatcher", "startup", "trampolines")
        found = [p for p in found if os.path.basename(p[0])[:-3] in files and p[2] == 0]
        wrong = []
        for place in found:
            m = choosy()
            thread, go_on = stopped_at(m, place)
            if not child_is_right(m):
                wrong.append(place)
            go_on.set()
            thread.join()
        assert len(found) > 30, len(found)
        sys.exit(str(wrong) if wrong else 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_while_another_thread_resolves_leaves_a_child_that_resolves_anew() -> None:
    root = Path(te_dispatch.__file__).parent.parent
    environ = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(_FORK)],
        env=environ,
        cwd=root,
        timeout=240,
        capture_output=True,
    )
    assert run.returncode == 0, run.stderr.decode()
