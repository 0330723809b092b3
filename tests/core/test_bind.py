# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Step 5 of the dispatch contract: what is imported, what its signature may be, and who pays for a failure."""

from __future__ import annotations

import functools
import logging
import operator as python_operator
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from te_dispatch.core.errors import Declined, NoImplementation
from te_dispatch.core.resolve import resolve
from tests.core.toy import (
    CPU,
    TOYS,
    answering,
    answers,
    backend,
    kernel,
    manager,
    preferring,
)  # fmt: skip

T = torch.zeros(4, 16)


pytestmark = pytest.mark.usefixtures("toy_operators")


def module(source: str) -> str:
    """The target of a module that is executed when it is imported, like a plugin's."""

    class Loader:
        def create_module(self, spec: Any) -> ModuleType | None:
            return None

        def exec_module(self, made: ModuleType) -> None:
            exec(source, made.__dict__)

    class Finder:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
            import importlib.machinery

            return importlib.machinery.ModuleSpec(name, Loader()) if name == made_up else None  # type: ignore[arg-type]

    made_up = f"te_dispatch_toy_plugin_{len(sys.meta_path)}"
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    return f"{made_up}:run"


# -- bind -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import te_dispatch_no_such_library", "ModuleNotFoundError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise AssertionError('no driver')", "AssertionError: no driver"),
        ("raise OSError('libacme.so: cannot open')", "libacme.so"),
        ("walk = 1", "AttributeError"),
        ("run = 7", "not callable"),
    ],
)
def test_an_implementation_that_cannot_be_imported_becomes_a_rejection(
    source: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    m = manager(backend("a", kernel("mix", "k", target=module(source))), *answers("mix", ["b"]))
    with caplog.at_level(logging.WARNING, "te_dispatch"), m.policy(preferring("a")):
        assert m.ops.mix(T, T) == "b"
        assert m.ops.mix(T, T) == "b"
    assert sum(reason in r.getMessage() for r in caplog.records) == 1, "said once, where someone may see it"
    decision = resolve(TOYS["mix"], {}, CPU, preferring("a"), m.snapshot)
    (rejected,) = decision.rejected
    assert (rejected.id, rejected.where) == ("a.k", "bind") and reason in rejected.reason


def test_an_import_failure_leaves_the_backends_other_implementations_alone() -> None:
    m = manager(
        backend(
            "a", kernel("mix", "k", target=module("raise ImportError")), kernel("pack", "p", answering("pack", "a"))
        ),
        *answers("mix", ["b"]),
    )
    with m.policy(preferring("a")):
        assert (m.ops.mix(T, T), m.ops.pack(T)) == ("b", "a")


def test_nothing_is_imported_that_would_not_win() -> None:
    m = manager(*answers("mix", ["a"]), backend("b", kernel("mix", "k", target=module("raise RuntimeError"))))
    assert m.ops.mix(T, T) == "a"
    assert not m.snapshot.unusable


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("a, c, *, mode='plain', out=None, alpha=1.0, fast=None", "unknown parameter 'c'"),
        ("b, a, *, mode='plain', out=None, alpha=1.0, fast=None", "another order"),
        ("a, b, *, mode='odd', out=None, alpha=1.0, fast=None", "the default of 'mode' differs"),
        ("a, b, *, mode='plain', out=None, alpha=1, fast=None", "the default of 'alpha' differs"),
        ("a, b, *, mode, out=None, alpha=1.0, fast=None", "the default of 'mode' differs"),
        ("a, b, *, mode='plain', out=None, alpha=1.0, fast=None, more=1", "unknown parameter 'more'"),
        ("a, *, mode='plain', out=None, alpha=1.0, fast=None", "missing parameter 'b'"),
        ("a, *, b, mode='plain', out=None, alpha=1.0, fast=None", "declared keyword-only"),
        ("a, b, /, *, mode='plain', out=None, alpha=1.0, fast=None", "'a' must be nameable"),
        ("*args, **kwargs", "unknown parameter 'args'"),
    ],
)
def test_a_signature_that_differs_is_refused_quoting_both(signature: str, reason: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def run({signature}): return 'a'", scope)
    m = manager(backend("a", kernel("mix", "k", scope["run"])), *answers("mix", ["b"]))
    with m.policy(preferring("a")):
        assert m.ops.mix(T, T) == "b"
    told = m.snapshot.unusable["a.k"]
    assert reason in told
    assert "operator:       (a, b, *, mode='plain'" in told and "implementation: (" in told


def test_keyword_only_parameters_may_be_declared_positional_or_keyword() -> None:
    def run(a, b, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        return mode, alpha, fast

    m = manager(backend("a", kernel("mix", "k", run)))
    assert m.ops.mix(T, T, fast=True, mode="odd") == ("odd", 1.0, True)


def test_an_older_implementation_serves_calls_that_leave_newer_keywords_alone() -> None:
    def older(a, b, *, mode="plain", out=None):  # type: ignore[no-untyped-def]
        return "older", mode

    m = manager(backend("a", kernel("mix", "k", older)), *answers("mix", ["b"]))
    with m.policy(preferring("a")):
        assert m.ops.mix(T, T, mode="odd") == ("older", "odd")
        assert m.ops.mix(T, T, fast=True) == "b"
        assert m.ops.mix(T, T, alpha=2.0) == "b"
        assert m.ops.mix(T, T, fast=None, alpha=1.0) == ("older", "plain")
    only = manager(backend("a", kernel("mix", "k", older)))
    with pytest.raises(NoImplementation, match=r"fast\.default is False"):
        only.ops.mix(T, T, fast=True)
    assert only.ops.mix(T, T) == ("older", "plain")


def test_an_older_implementation_reached_by_declining_still_sees_its_own_calls_only() -> None:
    def older(a, b, *, mode="plain", out=None, alpha=1.0):  # type: ignore[no-untyped-def]
        return "older"

    def picky(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        raise Declined("not today")

    m = manager(
        backend("a", kernel("mix", "k", picky)), backend("b", kernel("mix", "k", older)), *answers("mix", ["c"])
    )
    with m.policy(preferring("a", "b", "c")):
        assert m.ops.mix(T, T, fast=True) == "c", "dropping an argument that is set would change the result in silence"
        assert m.ops.mix(T, T) == "older"


class Callable_:
    def __call__(self, a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        return mode, alpha, fast

    def method(self, a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        return mode, alpha, fast


def plain(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
    return mode, alpha, fast


@functools.wraps(plain)
def variadic(*args: Any, **kwargs: Any) -> Any:
    return plain(*args, **kwargs)


@functools.wraps(plain)
def reordered(a, b, *, fast=None, out=None, alpha=1.0, mode="plain"):  # type: ignore[no-untyped-def]
    """A wrapper that shows another function's signature: only its keywords tell which argument is which."""
    return plain(a, b, mode=mode, out=out, alpha=alpha, fast=fast)


@pytest.mark.parametrize(
    "function",
    [plain, variadic, reordered, Callable_(), Callable_().method, functools.partial(plain), functools.lru_cache(plain)],
    ids=["function", "variadic", "reordered", "object", "method", "partial", "builtin wrapper"],
)
def test_every_kind_of_callable_gets_every_argument_in_its_place(function: Callable[..., Any]) -> None:
    m = manager(backend("a", kernel("mix", "k", function)))
    assert m.ops.mix(T, T) == ("plain", 1.0, None)
    assert m.ops.mix(T, b=T, alpha=2.0, mode="odd", fast=False) == ("odd", 2.0, False)


def test_a_callable_without_a_signature_is_refused() -> None:
    m = manager(backend("a", kernel("mix", "k", getattr)), backend("b", kernel("mix", "k", python_operator.itemgetter)))
    with pytest.raises(NoImplementation, match="bind"):
        m.ops.mix(T, T)
