# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Steps 6 and 7 of the dispatch contract: call, decline, give up; and what a cached call may rely on."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from te_dispatch.core.decision import Decision
from te_dispatch.core.errors import BindError, Declined, DispatchError, NoImplementation
from te_dispatch.core.manager import OpManager
from te_dispatch.core.policy import Policy, Shadow
from te_dispatch.core.repeating import repeating
from te_dispatch.core.requirements import Compare, MultipleOf, OneOf
from te_dispatch.core.resolve import resolve
from te_dispatch.core.snapshot import InstalledBackend, Snapshot
from te_dispatch.numerics.quantized import FakeQuantized, Quantized
from tests.core import worlds
from tests.core.toy import (
    TOYS,
    answering,
    answers,
    backend,
    kernel,
    manager,
    preferring,
    rule,
    selectors,
    target,
)  # fmt: skip

T = torch.zeros(4, 16)


pytestmark = pytest.mark.usefixtures("toy_operators")


# -- calling ----------------------------------------------------------------------------------------------------------


def test_trampolines_have_their_operators_exact_signatures() -> None:
    m = manager()
    for name, toy in TOYS.items():
        function = getattr(m.ops, name)
        assert inspect.signature(function) == toy.signature
        assert function.__doc__ == toy.doc


def test_wrong_arguments_are_a_type_error_and_mark_nothing() -> None:
    m = manager(*answers("mix", ["a"]))
    for call in (lambda: m.ops.mix(T), lambda: m.ops.mix(T, T, "odd"), lambda: m.ops.mix(T, T, speed=1)):
        with pytest.raises(TypeError):
            call()
    assert m.ops.mix(T, T) == "a"


def test_nothing_installed_is_told() -> None:
    with pytest.raises(NoImplementation, match="no installed backend implements it"):
        manager().ops.mix(T, T)


def test_the_table_is_the_error() -> None:
    m = manager(backend("a", kernel("mix", "k", requires=(OneOf("mode", "odd"),))), *answers("pack", ["b"]))
    with pytest.raises(NoImplementation) as raised:
        m.ops.mix(T, T)
    assert "mix on cpu" in str(raised.value)
    assert re.search("a.k +rejected by call: mode is plain, needs odd", str(raised.value))


# -- declining --------------------------------------------------------------------------------------------------------


def counting(declines: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """An implementation of `mix` that declines by shape, and its calls."""
    seen: list[Any] = []

    def run(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        seen.append((tuple(a.shape), mode))
        if declines(a, mode):
            raise Declined(f"cannot serve {tuple(a.shape)}")
        return "first"

    return run, seen


def test_declined_moves_that_call_alone_to_the_next_candidate() -> None:
    run, seen = counting(lambda a, mode: a.shape[0] == 3)
    m = manager(backend("a", kernel("mix", "k", run)), *answers("mix", ["b"]))
    odd, good = torch.zeros(3, 16), torch.zeros(4, 16)
    with m.policy(preferring("a")):
        assert [m.ops.mix(x, x) for x in (good, odd, good, odd, good, odd)] == ["first", "b"] * 3
    assert seen.count(((3, 16), "plain")) == 1, "remembered for that call"
    assert seen.count(((4, 16), "plain")) == 3, "and for no other"


def test_declined_is_remembered_by_option_too() -> None:
    run, seen = counting(lambda a, mode: mode == "odd")
    m = manager(backend("a", kernel("mix", "k", run)), *answers("mix", ["b"]))
    assert [m.ops.mix(T, T, mode=mode) for mode in ("odd", "plain", "odd", "plain")] == ["b", "first", "b", "first"]
    assert [mode for _, mode in seen] == ["odd", "plain", "plain"]


def test_what_comes_after_the_winner_is_decided_from_the_call_that_was_declined() -> None:
    """Calls of one key share its winner only: the second candidate's requirements were not part of the key."""
    run, _ = counting(lambda a, mode: True)
    m = manager(
        backend("a", kernel("mix", "k", run)),
        backend("b", kernel("mix", "k", answering("mix", "b"), requires=(MultipleOf("k", 16),))),
        *answers("mix", ["c"]),
    )
    with m.policy(preferring("a", "b")):
        assert m.ops.mix(torch.zeros(2, 16), T) == "b"
        assert m.ops.mix(torch.zeros(2, 15), T) == "c"
        assert m.ops.mix(torch.zeros(2, 16), T) == "b"


def test_all_declined_chains_every_reason() -> None:
    def refusing(why: str) -> Callable[..., Any]:
        def run(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
            raise Declined(why)

        return run

    m = manager(*(backend(n, kernel("mix", "k", refusing(f"{n} is busy"))) for n in "abc"))
    for _ in range(2):  # the second time nobody is asked again, and the message is the same
        with pytest.raises(NoImplementation) as raised:
            m.ops.mix(T, T)
        assert all(f"{n}.k  declined: {n} is busy" in str(raised.value) for n in "abc")
        assert isinstance(raised.value.__cause__, Declined)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, ValueError, NotImplementedError, torch.OutOfMemoryError])
def test_any_other_exception_reaches_the_caller_as_it_is(error: type[Exception]) -> None:
    raised, calls = error("kernel fault"), []

    def run(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        calls.append(1)
        raise raised

    m = manager(backend("a", kernel("mix", "k", run)), *answers("mix", ["b"]))
    for attempt in (1, 2):
        with pytest.raises(error) as caught:
            m.ops.mix(T, T)
        assert caught.value is raised and raised.__cause__ is None
        assert len(calls) == attempt, "not retried, and not held against the implementation either"


def test_a_partial_write_in_place_is_never_run_twice() -> None:
    def accumulating(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        out += 1
        if mode == "odd":
            raise RuntimeError("launch failed")
        return out

    m = manager(*(backend(n, kernel("mix", "k", accumulating)) for n in "ab"))
    out = torch.zeros(1)
    with pytest.raises(RuntimeError, match="launch failed"):
        m.ops.mix(T, T, out=out, mode="odd")
    assert out.item() == 1


def test_a_backward_that_declines_is_an_error() -> None:
    def run(dy, *, flip=False):  # type: ignore[no-untyped-def]
        raise Declined("odd stride")

    m = manager(backend("a", kernel("turn_bwd", "k", run)), *answers("turn_bwd", ["b"]))
    for _ in range(2):
        with pytest.raises(DispatchError, match=r"a\.k declined a backward \(odd stride\)") as raised:
            m.ops.turn_bwd(T)
        assert not isinstance(raised.value, NoImplementation)
        assert isinstance(raised.value.__cause__, Declined)


def test_declines_are_forgotten_rather_than_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_dispatch.core.entries._MEMORY", 3)
    run, _ = counting(lambda a, mode: True)
    m = manager(backend("a", kernel("mix", "k", run)), *answers("mix", ["b"]))
    for rows in range(1, 20):
        assert m.ops.mix(torch.zeros(rows, 8), T) == "b"
    (entry,) = m.capture().dispatcher(TOYS["mix"]).entries.values()
    assert len(entry.memory) <= 3


# -- keyed calls ------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TENSORS = [torch.zeros(m, k, dtype=d) for d in DTYPES for m in (8, 15) for k in (16, 24, 15)]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "mode": ("plain", "odd"),
    "fast": (None, True, False),
    "alpha": (1.0, 2.0),
    "cast": (None, "tight", "loose"),
    "kind": ("tight", "loose"),
    "flip": (False, True),
    "causal": (False, True),
    "inference": (False, True),
    "out": (None, TENSORS[0]),
}


class Saved:
    def __init__(self, implementation: str) -> None:
        self.implementation, self.format = implementation, "?"
        self.tensors: tuple[Any, ...] = ()
        self.options = None


def expected(decision: Decision, *, top: bool = True) -> Any:
    chosen = decision.chosen
    assert chosen is not None
    if not chosen.pieces:
        return chosen.id
    return (chosen.id.partition(".")[2], *(expected(p, top=False) for p in chosen.pieces.values()))


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, tuple[Any, ...]]]:
    """Calls of a few operators, arguments by position."""
    out = []
    names = draw(st.lists(st.sampled_from(sorted(TOYS)), min_size=1, max_size=2))
    for _ in range(draw(st.integers(3, 12))):
        name = draw(st.sampled_from(names))
        args = []
        for p in TOYS[name].signature.parameters.values():
            if p.name == "saved":
                args.append(Saved(draw(st.sampled_from((*worlds.IDS[:6], "composite.spelled")))))
            else:
                args.append(draw(st.sampled_from(OPTIONS.get(p.name, TENSORS))))
        out.append((name, tuple(args)))
    return out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(worlds.manifests(real=True), worlds.policies(), programs())
def test_cached_calls_run_what_a_fresh_resolution_chooses(
    manifests: list[Any], policy: Policy, program: list[tuple[str, tuple[Any, ...]]]
) -> None:
    m = OpManager(Snapshot({b.name: InstalledBackend(b, b.name, "1") for b in manifests}), environ={})
    m.set_policy(policy)
    for name, args in program:
        toy = TOYS[name]
        dispatcher = m.capture().dispatcher(toy)
        facts = dispatcher.facts(args)
        fresh = resolve(toy, facts, m.device_facts(torch.device("cpu")), m.capture().policy, m.snapshot)
        keywords = [p.name for p in toy.signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
        given_ = args[: len(args) - len(keywords)], dict(zip(keywords, args[len(args) - len(keywords) :]))
        if fresh.chosen is None:
            with pytest.raises(NoImplementation):
                getattr(m.ops, name)(*given_[0], **given_[1])
        else:
            assert getattr(m.ops, name)(*given_[0], **given_[1]) == expected(fresh), fresh.table()


def test_conditions_on_options_that_are_not_given_do_not_fail_in_the_key() -> None:
    m = manager(
        backend("a", kernel("mix", "k", answering("mix", "a"), requires=(Compare("fast", ">=", 1),))),
        backend("b", kernel("mix", "k", answering("mix", "b"), requires=(Compare("mode", ">=", "2"),))),
        *answers("mix", ["c"]),
    )
    assert [m.ops.mix(T, T, fast=f) for f in (None, 1, 0, None, 3, "x")] == ["c", "a", "c", "c", "a", "c"]
    assert m.ops.mix(T, T, mode="3.1") == "b"


# -- meta and fake tensors --------------------------------------------------------------------------------------------


def opaque(name: str = "a", **fields: Any) -> Any:
    def run(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        assert a.device.type != "meta" and "Fake" not in type(a).__name__, "an imitation reached a backend"
        return "ran"

    return backend(name, kernel("mix", "k", run, **fields))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("requires", [(), (OneOf("a.dtype", "fp32", "e4m3fn"),), (MultipleOf("k", 16),)])
def test_imitations_never_reach_an_opaque_backend(warm: bool, requires: Any) -> None:
    m = manager(opaque(requires=requires))
    data = torch.zeros(4, 16, dtype=torch.uint8)
    scale = torch.ones(1)
    fields = ("e4m3fn", "tensor", "canonical", (4, 16), torch.float32)
    quantized = Quantized(data, None, scale, None, *fields, torch.device("cpu"))
    if warm:
        assert m.ops.mix(T, T) == "ran"
        assert m.ops.mix(quantized, T) == "ran"
    with FakeTensorMode():
        fake = torch.zeros(4, 16)
        fake_data = torch.zeros(4, 16, dtype=torch.uint8)
    meta = torch.device("meta")
    for operand in (
        torch.zeros(4, 16, device="meta"),
        fake,
        FakeQuantized(fake_data, None, fake, None, *fields, torch.device("cpu")),
        FakeQuantized(data.to(meta), None, scale.to(meta), None, *fields, meta),
        Quantized(data.to(meta), None, scale.to(meta), None, *fields, meta),
        Quantized(fake_data, None, fake, None, *fields, torch.device("cpu")),
    ):
        for _ in range(2):
            assert m.ops.mix(operand, T.to(operand.device)) == "shape", operand
    assert m.ops.mix(T, T) == "ran"


def test_a_decline_under_tracing_does_not_lead_an_imitation_to_an_opaque_backend() -> None:
    def traceable(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        raise Declined("always")

    m = manager(backend("a", kernel("mix", "k", traceable, traits={"plain_torch"})), opaque("b"))
    assert m.ops.mix(T, T) == "ran"
    with FakeTensorMode():
        fake = torch.zeros(4, 16)
    assert m.ops.mix(fake, fake) == "shape"


# -- composites -------------------------------------------------------------------------------------------------------


def test_composites_bind_their_pieces_and_show_as_a_tree() -> None:
    m = manager(
        backend("a", kernel("fuse", "f", answering("fuse", "a.f"), requires=(OneOf("cast", None),))),
        backend("b", kernel("pack", "p", answering("pack", "b.p"))),
    )
    assert m.ops.fuse(T, cast="tight") == ("fuse_then_pack", "a.f", "b.p")
    assert m.ops.fuse(T) == "a.f"
    decisions = [e.decision for e in m.capture().dispatcher(TOYS["fuse"]).entries.values()]
    shown = next(d.table() for d in decisions if d.chosen is not None and d.chosen.pieces)
    assert "pack: pack -> b.p" in shown and "fuse: fuse -> a.f" in shown


def test_a_piece_that_declines_falls_to_its_own_next_candidate() -> None:
    def busy(x, *, kind="tight"):  # type: ignore[no-untyped-def]
        if kind == "loose":
            raise Declined("only tight")
        return "a.p"

    m = manager(
        backend(
            "a",
            kernel("fuse", "f", answering("fuse", "a.f"), requires=(OneOf("cast", None),)),
            kernel("pack", "p", busy),
        ),
        *answers("pack", ["b"]),
    )
    for _ in range(2):
        assert m.ops.fuse(T, cast="loose") == ("fuse_then_pack", "a.f", "b")
        assert m.ops.fuse(T, cast="tight") == ("fuse_then_pack", "a.f", "a.p")
        assert m.ops.pack(T, kind="loose") == "b"


def test_a_decline_inside_a_composite_is_its_pieces_even_where_a_direct_call_would_start_elsewhere() -> None:
    """The composite casts from fp32, so its piece is bound for that; a direct call of the same tensor may differ."""

    def busy(x, *, kind="tight"):  # type: ignore[no-untyped-def]
        raise Declined("never")

    m = manager(
        *answers("fuse", ["a"], requires=(OneOf("cast", None),)),
        backend("b", kernel("pack", "p", busy)),
        *answers("pack", ["c"]),
    )
    policy = Policy(rules=(rule("pack", when=(OneOf("kind.default", False),), prefer=("c",)),))
    with m.policy(policy):
        # Under the composite kind.default is unknown, so the rule does not match there and b is bound first.
        assert m.ops.fuse(T, cast="loose") == ("fuse_then_pack", "a", "c")


# -- warnings ---------------------------------------------------------------------------------------------------------


def messages(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if word in r.getMessage()]


@pytest.mark.parametrize("oracle", [False, True])
def test_an_emulated_choice_is_told_once(oracle: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Also beside an oracle, which no policy has to reject."""
    judges = answers("mix", ["judge"], traits={"oracle"}) if oracle else []
    m = manager(*answers("mix", ["slow"], traits={"emulated"}), *judges)
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        for mode in ("plain", "odd", "plain"):
            m.ops.mix(T, T, mode=mode)
        with m.policy(preferring("slow")):
            m.ops.mix(T, T)
    (message,) = messages(caplog, "emulated")
    assert "slow.k" in message and "te-dispatch explain mix" in message


def test_a_tie_is_told_once_and_names_the_key_to_set(caplog: pytest.LogCaptureFixture) -> None:
    m = manager(*answers("mix", ["b", "a"]))
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        for mode in ("plain", "odd"):
            assert m.ops.mix(T, T, mode=mode) == "a"
    (message,) = messages(caplog, "equally placed")
    assert "a.k and b.k" in message and "`prefer`" in message
    with caplog.at_level(logging.WARNING, "te_dispatch"), m.policy(preferring("b")):
        caplog.clear()
        assert m.ops.mix(T, T) == "b"
    assert not messages(caplog, "equally placed")


def test_a_tie_within_a_backend_is_its_author_s_to_break(caplog: pytest.LogCaptureFixture) -> None:
    kernels = (kernel("mix", name, answering("mix", name)) for name in ("one", "two"))
    m = manager(backend("a", *kernels))
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        assert m.ops.mix(T, T) == "one"
    (message,) = messages(caplog, "equally placed")
    assert "`rank`" in message and "`prefer`" not in message


def test_deny_and_require_reach_the_call() -> None:
    m = manager(*answers("mix", ["a", "b", "c"]))
    with m.policy(Policy(name="x", deny=selectors("a"))):
        assert m.ops.mix(T, T) == "b"
        with m.policy(Policy(name="y", deny=selectors("b"))):
            assert m.ops.mix(T, T) == "c", "denies accumulate"
    with m.policy(Policy(name="z", allow=())), pytest.raises(NoImplementation, match="not among the allowed: nothing"):
        m.ops.mix(T, T)


# -- calls that are made again and again ------------------------------------------------------------------------------


def test_a_repeated_call_is_the_call_it_was_made_of() -> None:
    calls: list[Any] = []

    def run(a, b, *, mode="plain", out=None, alpha=1.0, fast=None):  # type: ignore[no-untyped-def]
        calls.append((a, b, mode, out, alpha, fast))
        return "ran"

    m = manager(backend("a", kernel("mix", "k", run)))
    call = repeating(m.capture(), "mix", ("b", "a"), a=T, b=T, mode="odd", fast=True)
    other = torch.ones(4, 16)
    assert call(other, T) == "ran"
    ((a, b, *rest),) = calls
    assert a is T and b is other and rest == ["odd", None, 1.0, True]


def test_a_repeated_call_that_declines_goes_on_as_any_other() -> None:
    run, _ = counting(lambda a, mode: bool(a.sum()))
    m = manager(backend("a", kernel("mix", "k", run)), *answers("mix", ["b"]))
    with m.policy(preferring("a")):
        call = repeating(m.capture(), "mix", ("a",), a=T, b=T)
        assert [call(T), call(T + 1), call(T)] == ["first", "b", "first"]
        assert repeating(m.capture(), "mix", ("a",), a=T, b=T) is None, "from now on each is looked at"


@pytest.mark.parametrize("declared", [True, False], ids=["in the manifest", "as in version 1"])
def test_an_implementation_may_plan_repeated_calls(declared: bool) -> None:
    run, seen = counting(lambda a, mode: False)
    asked: list[Any] = []

    def plan(varying: Any, **given: Any) -> Any:
        asked.append((varying, given))
        return None if given["mode"] == "odd" else lambda a: ("planned", a.sum().item())

    if declared:
        manifest = backend("a", kernel("mix", "k", run, plan=target(plan)))
    else:
        run.prepared = plan  # type: ignore[attr-defined]
        manifest = backend("a", kernel("mix", "k", run), api_version=1)
    m = manager(manifest, *answers("mix", ["b"]))
    with m.policy(preferring("a")):
        assert repeating(m.capture(), "mix", ("a",), a=T, b=T)(T + 1) == ("planned", 64.0)
        assert repeating(m.capture(), "mix", ("a",), a=T, b=T, mode="odd")(T) == "first"
        assert seen == [((4, 16), "odd")]
    assert [varying for varying, _ in asked] == [("a",)] * 2
    assert asked[0][1] == {"a": T, "b": T, "mode": "plain", "out": None, "alpha": 1.0, "fast": None}


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (
            "te_dispatch_toy_nowhere:plan",
            "a.k: its plan te_dispatch_toy_nowhere:plan cannot be imported: ModuleNotFound",
        ),
        ("math:planned", "a.k: its plan math:planned cannot be imported: AttributeError"),
        ("math:pi", "a.k: its plan is float, not callable"),
    ],
)
def test_a_plan_that_is_no_function_is_named(plan: str, reason: str) -> None:
    run, _ = counting(lambda a, mode: False)
    m = manager(backend("a", kernel("mix", "k", run, plan=plan)))
    with pytest.raises(BindError, match=re.escape(reason)):
        repeating(m.capture(), "mix", ("a",), a=T, b=T)


def test_calls_that_must_be_seen_are_not_repeated() -> None:
    m = manager(*answers("mix", ["b"]))
    with m.observe(lambda *told: None):
        assert repeating(m.capture(), "mix", ("a",), a=T, b=T) is None
    with m.policy(Policy(name="compared", shadow=Shadow(against="b"))):
        assert repeating(m.capture(), "mix", ("a",), a=T, b=T) is None
    with m.policy(Policy(name="other")):
        assert repeating(m.capture(), "mix", ("a",), a=T, b=T)(T) == "b"


def test_a_repeated_composite_runs_its_pieces() -> None:
    plain = kernel("fuse", "k", answering("fuse", "fused"), requires=(OneOf("cast", None),))
    m = manager(backend("b", plain, kernel("pack", "l", answering("pack", "packed"))))
    call = repeating(m.capture(), "fuse", ("x",), x=T, cast="tight")
    assert call(T) == m.ops.fuse(T, cast="tight") == ("fuse_then_pack", "fused", "packed")
