# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Resolution by example: order, companions, composites, devices."""

from __future__ import annotations

from typing import Any

import pytest

from te_dispatch.core.decision import Decision
from te_dispatch.core.devices import describe_device
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.policy import Policy
from te_dispatch.core.requirements import Compare, OneOf
from te_dispatch.core.resolve import resolve, resolve_recorded
from tests.core.toy import CPU, TOYS, backend, installed, kernel, preferring, rule, selectors

H200 = DeviceFacts("cuda", "nvidia", "sm_90", table=Arch(("e4m3fn", "e5m2"), True))


pytestmark = pytest.mark.usefixtures("toy_operators")


def ids(decision: Decision) -> list[str]:
    return [a.id for a in decision.accepted]


@pytest.mark.parametrize(
    ("forward_needs", "expected"),
    [((), "b.fwd"), ((OneOf("causal", True),), "a.fwd")],
)
def test_a_winner_that_hangs_on_a_companion_named_in_a_preference_is_recorded(
    forward_needs: Any, expected: str
) -> None:
    """The preference names b's backward, so b's forward may come first for another call although it is rejected now."""
    manifests = [
        backend("a", kernel("scan_fwd", "fwd", rank=1), kernel("scan_bwd", "bwd")),
        backend("b", kernel("scan_fwd", "fwd", requires=forward_needs), kernel("scan_bwd", "bwd")),
    ]
    call = {"causal": False, "inference": False, "x.dtype": "bf16", "k": 8}
    decision, reads = resolve_recorded(TOYS["scan_fwd"], call, CPU, preferring("b.bwd"), installed(*manifests))
    assert ids(decision)[0] == expected
    assert ("causal", None) in reads or not forward_needs


@pytest.mark.parametrize("named", ["b.fwd", "b.bwd"])
@pytest.mark.parametrize("word", ["require", "allow"])
def test_requiring_or_allowing_one_of_two_companions_admits_both(word: str, named: str) -> None:
    manifests = [backend(name, kernel("scan_fwd", "fwd"), kernel("scan_bwd", "bwd")) for name in ("a", "b")]
    policy = Policy(rules=(rule("scan_fwd", **{word: (named,)}),))
    snapshot, call = installed(*manifests), {"causal": False, "inference": False, "x.dtype": "bf16", "k": 8}
    for operator, expected in (("scan_fwd", "b.fwd"), ("scan_bwd", "b.bwd")):
        assert ids(resolve(TOYS[operator], call, CPU, policy, snapshot)) == [expected]


# -- examples: order --------------------------------------------------------------------------------------------------


def test_order_is_rule_then_policy_then_rank_then_name() -> None:
    snapshot = installed(
        backend("a", kernel("mix", "k", rank=50)),
        backend("b", kernel("mix", "k", rank=10)),
        backend("c", kernel("mix", "k", rank=50)),
        backend("d", kernel("mix", "k", rank=99)),
        backend("e", kernel("mix", "k", rank=99)),
    )
    policy = preferring("d", rules=(rule("mix", when=(OneOf("mode", "odd"),), prefer=("e",)),))
    assert ids(resolve(TOYS["mix"], {"mode": "odd"}, CPU, policy, snapshot)) == ["e.k", "d.k", "b.k", "a.k", "c.k"]
    plain = resolve(TOYS["mix"], {"mode": "plain"}, CPU, policy, snapshot)
    assert ids(plain) == ["d.k", "b.k", "a.k", "c.k", "e.k"]
    assert plain.tie == ()
    assert resolve(TOYS["mix"], {}, CPU, Policy(deny=selectors("b", "d", "e")), snapshot).tie == ("a.k", "c.k")


def test_the_first_matching_rule_decides_the_order_and_every_matching_rule_filters() -> None:
    snapshot = installed(*(backend(name, kernel("mix", "k")) for name in "abcd"))
    policy = Policy(
        rules=(
            rule("mix", when=(OneOf("mode", "odd"),), prefer=("d",)),
            rule("mix", prefer=("c",)),
            rule("*", prefer=("b",), deny=("a",)),
        )
    )
    assert ids(resolve(TOYS["mix"], {"mode": "plain"}, CPU, policy, snapshot)) == ["c.k", "b.k", "d.k"]
    assert ids(resolve(TOYS["mix"], {"mode": "odd"}, CPU, policy, snapshot)) == ["d.k", "b.k", "c.k"]


def test_a_rule_on_an_unknown_fact_does_not_match() -> None:
    snapshot = installed(backend("a", kernel("mix", "k")), backend("b", kernel("mix", "k")))
    policy = Policy(rules=(rule("mix", when=(OneOf("mode", "odd"),), prefer=("b",)),))
    assert ids(resolve(TOYS["mix"], {}, CPU, policy, snapshot)) == ["a.k", "b.k"]


@pytest.mark.parametrize("named", ["b.fwd", "b.bwd"])
@pytest.mark.parametrize("family", ["scan", "turn"])
def test_a_preference_that_names_one_companion_places_both(family: str, named: str) -> None:
    forward, backward = TOYS[f"{family}_fwd"], TOYS[f"{family}_bwd"]
    snapshot = installed(
        *(
            backend(n, kernel(forward.name, "fwd", rank=r), kernel(backward.name, "bwd", rank=r))
            for n, r in (("a", 1), ("b", 9))
        )
    )
    for operator in (forward, backward):
        assert ids(resolve(operator, {}, CPU, preferring(named), snapshot))[0].startswith("b."), operator.name


def test_a_preference_for_a_backends_second_forward_places_its_backward() -> None:
    snapshot = installed(
        backend("a", kernel("turn_fwd", "fwd", rank=1), kernel("turn_bwd", "bwd", rank=1)),
        backend("b", kernel("turn_fwd", "aaa"), kernel("turn_fwd", "zzz"), kernel("turn_bwd", "bwd")),
    )
    assert ids(resolve(TOYS["turn_bwd"], {}, CPU, preferring("b.zzz"), snapshot))[0] == "b.bwd"
    assert ids(resolve(TOYS["turn_bwd"], {}, CPU, preferring("a.fwd"), snapshot))[0] == "a.bwd"


def test_a_rule_that_speaks_of_one_companion_speaks_of_both() -> None:
    snapshot = installed(*(backend(n, kernel("scan_fwd", "f"), kernel("scan_bwd", "b")) for n in "ab"))
    policy = Policy(rules=(rule("scan_bwd", deny=("a",)),))
    assert ids(resolve(TOYS["scan_fwd"], {"causal": True}, CPU, policy, snapshot)) == ["b.f"]
    assert ids(resolve(TOYS["scan_bwd"], {"causal": True}, CPU, policy, snapshot)) == ["b.b"]


def test_a_forward_without_a_backward_serves_inference_alone() -> None:
    snapshot = installed(backend("a", kernel("scan_fwd", "f", inference=True)))
    training = resolve(TOYS["scan_fwd"], {"causal": True}, CPU, Policy(), snapshot)
    assert training.accepted == () and training.rejected[0].where == "companion"
    assert ids(resolve(TOYS["scan_fwd"], {"causal": True, "inference": True}, CPU, Policy(), snapshot)) == ["a.f"]


def test_backward_requirements_are_checked_at_the_forward() -> None:
    snapshot = installed(
        backend("a", kernel("scan_fwd", "f"), kernel("scan_bwd", "b", requires=(OneOf("dy.dtype", "bf16"),))),
    )
    assert ids(resolve(TOYS["scan_fwd"], {"x.dtype": "bf16", "causal": True}, CPU, Policy(), snapshot)) == ["a.f"]
    refused = resolve(TOYS["scan_fwd"], {"x.dtype": "fp32", "causal": True}, CPU, Policy(), snapshot)
    (rejected,) = refused.rejected
    assert rejected.where == "companion" and "dy.dtype is fp32, needs bf16" in rejected.reason


def test_a_backward_runs_on_another_of_the_same_saved_format_only() -> None:
    snapshot = installed(
        backend("a", kernel("scan_fwd", "f", saved_format="lse"), kernel("scan_bwd", "b", saved_format="lse")),
        backend("b", kernel("scan_bwd", "b", saved_format="lse", rank=1), kernel("scan_bwd", "c", saved_format="p")),
        backend("c", kernel("scan_fwd", "f", saved_format="p")),
    )
    # Its own backend's backward is the companion, whatever the rank of another that could read as well.
    assert resolve(TOYS["scan_fwd"], {"causal": True}, CPU, Policy(), snapshot).accepted[0].companion == "a.b"
    read = resolve(TOYS["scan_bwd"], {"causal": True, "saved": "a.f"}, CPU, Policy(), snapshot)
    assert ids(read) == ["b.b", "a.b"]
    assert "reads 'p', but a.f saved 'lse'" in read.table()
    assert ids(resolve(TOYS["scan_bwd"], {"causal": True, "saved": "c.f"}, CPU, Policy(), snapshot)) == ["b.c"]


# -- examples: composites ---------------------------------------------------------------------------------------------


def test_a_composite_stands_at_its_last_placed_piece_behind_a_real_one_of_that_place() -> None:
    plain = (OneOf("cast", None),)
    snapshot = installed(
        backend("a", kernel("fuse", "k", requires=plain), kernel("pack", "p")),
        backend("b", kernel("fuse", "k"), kernel("pack", "p")),
        backend("c", kernel("fuse", "k")),
    )
    decision = resolve(TOYS["fuse"], {"cast": "tight"}, CPU, preferring("a", "b", "c"), snapshot)
    assert ids(decision) == ["composite.fuse_then_pack", "b.k", "c.k"]
    pieces = decision.accepted[0].pieces
    assert {n: p.chosen.id for n, p in pieces.items() if p.chosen} == {"fuse": "a.k", "pack": "a.p"}
    assert "fuse: fuse -> a.k" in decision.table()
    without = preferring("a", "b", "c", rules=(rule("pack", deny=("a",)),))
    assert ids(resolve(TOYS["fuse"], {"cast": "tight"}, CPU, without, snapshot)) == [
        "b.k", "composite.fuse_then_pack", "c.k",
    ]  # fmt: skip


def test_a_composite_of_an_emulated_piece_is_emulated() -> None:
    snapshot = installed(
        backend("a", kernel("fuse", "k", requires=(OneOf("cast", None),)), kernel("pack", "p", traits={"emulated"})),
        backend("z", kernel("fuse", "k")),
    )
    assert ids(resolve(TOYS["fuse"], {"cast": "tight"}, CPU, preferring("a", "z"), snapshot)) == [
        "z.k", "composite.fuse_then_pack",
    ]  # fmt: skip


def test_a_composite_without_its_pieces_says_which() -> None:
    snapshot = installed(backend("a", kernel("fuse", "k", requires=(OneOf("cast", None),))))
    decision = resolve(TOYS["fuse"], {"cast": "tight"}, CPU, Policy(), snapshot)
    assert [(r.id, r.where) for r in decision.rejected] == [("a.k", "call"), ("composite.fuse_then_pack", "pieces")]
    assert "pack: no pack here" in decision.table()


@pytest.mark.parametrize(
    "policy",
    [
        Policy(deny=selectors("composite")),
        Policy(deny=selectors("composite.spelled")),
        Policy(rules=(rule("scan", require=("a",)),)),
        Policy(rules=(rule("scan", allow=("a",)),)),
        Policy(rules=(rule("scan", deny=("trait:unfused",)),)),
    ],
)
def test_a_filter_is_not_got_around_by_taking_the_operator_apart(policy: Policy) -> None:
    snapshot = installed(backend("a", kernel("scan_fwd", "f")), backend("b", kernel("mix", "k")))
    assert ids(resolve(TOYS["scan_fwd"], {"causal": False}, CPU, Policy(), snapshot)) == ["composite.spelled"]
    assert resolve(TOYS["scan_fwd"], {"causal": False}, CPU, policy, snapshot).accepted == ()


def test_a_composite_that_consists_of_what_is_required_serves() -> None:
    snapshot = installed(backend("b", kernel("mix", "k")))
    policy = Policy(rules=(rule("scan", require=("b",)),))
    assert ids(resolve(TOYS["scan_fwd"], {"causal": False}, CPU, policy, snapshot)) == ["composite.spelled"]


def test_a_materializing_composite_named_as_composite_still_comes_last() -> None:
    kernels = kernel("mix", "k"), kernel("scan_fwd", "f"), kernel("scan_bwd", "b")
    snapshot = installed(backend("b", *kernels, vendors=("cpu",)))
    for named, first in (("composite", "b.f"), ("composite.spelled", "composite.spelled")):
        assert ids(resolve(TOYS["scan_fwd"], {"causal": False}, CPU, preferring(named), snapshot))[0] == first


def test_a_composite_forward_and_a_real_one_keep_their_own_backwards() -> None:
    snapshot = installed(backend("a", kernel("mix", "k"), kernel("scan_fwd", "f")))
    forward = resolve(TOYS["scan_fwd"], {"causal": False}, CPU, Policy(), snapshot)
    assert ids(forward) == ["composite.spelled"], "a real forward has no reader: a composite cannot read its state"
    assert forward.accepted[0].companion == "composite.spelled"


# -- examples: devices ------------------------------------------------------------------------------------------------


def test_a_device_that_is_not_here_is_resolved_from_the_manifests() -> None:
    manifest = backend(
        "acme",
        kernel("mix", "k", requires=(Compare("device.arch", ">=", "x1"), Compare("device.version.lib", ">=", "2"))),
        vendors=("ACME",),
        archs={"Acme": {"X1": Arch(), "x2": Arch(("acme8",), True)}},
    )
    snapshot = installed(manifest, backend("z", kernel("mix", "k", rank=1)))
    for text, arch in (("acme:x1", "X1"), ("Acme:X2", "x2")):
        device = describe_device(snapshot, text)
        assert (device.vendor, device.arch) == ("acme", arch)
        decision = resolve(TOYS["mix"], {}, device, preferring("native"), snapshot)
        assert ids(decision)[0] == "acme.k"
        assert decision.accepted[0].assumed == ("device.version.lib is unknown",)


def test_absent_backends_that_a_policy_names_are_shown() -> None:
    snapshot = installed(backend("a", kernel("mix", "k")))
    decision = resolve(TOYS["mix"], {}, H200, preferring("zeta", "a", "beta.k"), snapshot)
    assert {(r.id, r.where) for r in decision.rejected} == {("zeta", "absence"), ("beta.k", "absence")}
