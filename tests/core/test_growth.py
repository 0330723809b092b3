# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A process that changes its policy, enters scopes and observes for ever does not grow for ever."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable

import pytest
import torch

from te_dispatch.core.bindings import Bindings
from te_dispatch.core.manager import OpManager
from te_dispatch.core.requirements import OneOf
from tests.core.toy import answering, answers, backend, kernel, manager, preferring, rule

pytestmark = [pytest.mark.sampled(6), pytest.mark.usefixtures("toy_operators")]

T = torch.zeros(4, 16)


def two(environ: dict[str, str]) -> OpManager:
    """A manager whose calls of `mix` are looked up by their facts."""
    odd = kernel("mix", "k", answering("mix", "a"), requires=(OneOf("mode", "odd"),))
    return manager(
        backend("a", odd, kernel("pack", "p", answering("pack", "a"))), *answers("mix", ["b"]), environ=environ
    )


def calls(m: OpManager) -> None:
    for mode in ("odd", "plain"):
        m.ops.mix(T, T, mode=mode)
    m.ops.pack(T)


def kept(m: OpManager) -> dict[str, int]:
    gc.collect()
    return {
        "names": len(m.namespace.__dict__),
        "sources": len(linecache.cache),
        "codes": len(m._trampolines._codes),
        "bindings": sum(type(one) is Bindings and one.manager is m for one in gc.get_objects()),
    }


def check_no_growth(m: OpManager, step: Callable[[int], None], settled: int) -> None:
    for i in range(settled):
        step(i)
    before = kept(m)
    for i in range(settled, 2 * settled):
        step(i)
    assert kept(m) == before


def test_policies_that_take_turns() -> None:
    m = two({})

    def step(i: int) -> None:
        m.set_policy(preferring("ab"[i % 2]))
        calls(m)

    check_no_growth(m, step, 10)


def test_environments_that_take_turns() -> None:
    environ: dict[str, str] = {}
    m = two(environ)

    def step(i: int) -> None:
        environ["TE_DISPATCH_PREFER"] = f"mix={'ab'[i % 2]}"
        m.reload_environment()
        calls(m)

    check_no_growth(m, step, 10)


def test_an_environment_that_stays_keeps_what_is_bound() -> None:
    m = two({"TE_DISPATCH_PREFER": "mix=b"})
    m.reload_environment()
    calls(m)
    bindings, code = m.bindings, m.ops.mix.__code__
    m.reload_environment()
    assert m.bindings is bindings and m.ops.mix.__code__ is code


def test_scopes_that_never_come_again() -> None:
    m = two({})

    def step(i: int) -> None:
        with m.policy(preferring("a", rules=(rule("mix", when=(OneOf("k", i),), prefer=("b",)),))):
            calls(m)

    check_no_growth(m, step, 140)


def test_observers() -> None:
    m = two({})

    def step(_: int) -> None:
        with m.observe(lambda *call: None):
            calls(m)

    check_no_growth(m, step, 5)


def test_a_policy_that_comes_again_finds_what_it_bound() -> None:
    m = two({})
    m.set_policy(preferring("a"))
    calls(m)
    bindings = m.bindings
    m.set_policy(preferring("b"))
    assert m.ops.mix(T, T, mode="odd") == "b"
    m.set_policy(preferring("a"))
    assert m.bindings is bindings
    assert [m.ops.mix(T, T, mode=mode) for mode in ("odd", "plain")] == ["a", "b"]
