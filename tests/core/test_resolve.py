# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The laws of resolution, over generated registries, policies, devices and calls."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from te_dispatch.core.decision import Decision
from te_dispatch.core.facts import UNKNOWN, CallFacts, DeviceFacts, FactValue
from te_dispatch.core.manifest import Implementation, Manifest
from te_dispatch.core.operator import Operator
from te_dispatch.core.policy import Policy, Selector
from te_dispatch.core.requirements import Compare, MultipleOf, OneOf
from te_dispatch.core.resolve import resolve, resolve_recorded
from te_dispatch.core.snapshot import InstalledBackend, Snapshot
from tests.core import worlds
from tests.core.toy import TOYS, preferring, selectors

STEPS = {"policy", "device", "call", "companion", "pieces", "backend", "bind", "absence"}


pytestmark = pytest.mark.usefixtures("toy_operators")


laws = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def snapshot_of(manifests: list[Any]) -> Snapshot:
    return Snapshot({m.name: InstalledBackend(m, m.name, "1") for m in manifests})


def ids(decision: Decision) -> list[str]:
    return [a.id for a in decision.accepted]


@st.composite
def cases(
    draw: st.DrawFn, complete: bool = False
) -> tuple[Operator, dict[str, FactValue], DeviceFacts, Policy, list[Any]]:
    operator = draw(worlds.operators())
    return (
        operator,
        draw(worlds.calls(operator, complete)),
        draw(worlds.devices),
        draw(worlds.policies()),
        draw(worlds.manifests()),
    )


@laws
@given(cases(), st.randoms(use_true_random=False))
def test_registration_order_does_not_matter(case: Any, random: Any) -> None:
    operator, call, device, policy, manifests = case
    before = resolve(operator, call, device, policy, snapshot_of(manifests))
    shuffled = [
        dataclasses.replace(m, implementations=tuple(random.sample(m.implementations, len(m.implementations))))
        for m in random.sample(manifests, len(manifests))
    ]
    after = resolve(operator, call, device, policy, snapshot_of(shuffled))
    assert after.as_data() == before.as_data()


@laws
@given(cases())
def test_equal_arguments_give_equal_decisions_and_none_is_changed(case: Any) -> None:
    operator, call, device, policy, manifests = case
    kept = dict(call)
    snapshot = snapshot_of(manifests)
    first = resolve(operator, call, device, policy, snapshot)
    assert resolve(operator, call, device, policy, snapshot).as_data() == first.as_data()
    assert call == kept


@laws
@given(cases(), st.lists(st.sampled_from((*worlds.BACKENDS, *worlds.IDS, "native", "trait:flash")), max_size=3))
def test_denying_more_only_takes_away(case: Any, more: list[str]) -> None:
    operator, call, device, policy, manifests = case
    snapshot = snapshot_of(manifests)
    before = ids(resolve(operator, call, device, policy, snapshot))
    stricter = dataclasses.replace(policy, deny=(*policy.deny, *map(Selector, more)))
    after = ids(resolve(operator, call, device, stricter, snapshot))
    assert set(after) <= set(before)
    # A preference may name a backward: denying that very one takes the forward's place away too.
    named = any("." in s.text for s in (*policy.prefer, *(s for r in policy.rules for s in r.prefer)))
    if operator.companion is None or not named:
        # A composite stands where its pieces stand, so it may move; real implementations never do.
        left = [name for name in after if not name.startswith("composite.")]
        assert left == [name for name in before if name in left]


@laws
@given(cases())
def test_every_candidate_is_accounted_for_with_a_reason(case: Any) -> None:
    operator, call, device, policy, manifests = case
    decision = resolve(operator, call, device, policy, snapshot_of(manifests))
    for rejected in decision.rejected:
        assert rejected.reason.strip() and rejected.where in STEPS, rejected
    candidates = {f"{m.name}.{i.name}" for m in manifests for i in m.implementations if i.operator == operator.name}
    accepted, rejected_ids = ids(decision), [r.id for r in decision.rejected]
    assert len(set(accepted)) == len(accepted)
    assert candidates <= {*accepted, *rejected_ids}
    assert not set(accepted) & set(rejected_ids)
    table = decision.table()
    assert all(name in table for name in (*accepted, *rejected_ids))


@laws
@given(cases())
def test_allow_nothing_accepts_nothing(case: Any) -> None:
    operator, call, device, policy, manifests = case
    nothing = dataclasses.replace(
        policy, allow=(), rules=tuple(dataclasses.replace(r, allow=None) for r in policy.rules)
    )
    assert resolve(operator, call, device, nothing, snapshot_of(manifests)).accepted == ()


@laws
@given(cases())
def test_emulated_and_materializing_come_last_unless_named(case: Any) -> None:
    operator, call, device, policy, manifests = case
    decision = resolve(operator, call, device, policy, snapshot_of(manifests))
    named = {s.text for s in (*policy.prefer, *(s for r in policy.rules for s in r.prefer))}

    def tier(accepted: Any) -> int | None:
        if accepted.id in named or accepted.companion in named:
            return None  # placed by name
        if accepted.id == "composite.spelled":
            return 2
        if accepted.id.startswith("composite."):
            return None  # as its pieces; checked elsewhere
        return 1 if "emulated" in accepted.traits else 0

    # Backends that are neither native nor preferred come last, and in the same order among themselves.
    foreign = ["no preference names it" in accepted.place for accepted in decision.accepted]
    assert foreign == sorted(foreign)
    for group in (False, True):
        members = [a for a, stands_last in zip(decision.accepted, foreign) if stands_last is group]
        tiers = [t for t in map(tier, members) if t is not None]
        assert tiers == sorted(tiers)


def backward_call(operator: Operator, call: CallFacts, forward: str) -> dict[str, FactValue]:
    assert operator.companion_facts is not None
    derived = operator.companion_facts(call)
    facts = {name: derived[name] for name in derived}
    if TOYS[str(operator.companion)].saved is not None:
        facts["saved"] = forward
    return facts


@laws
@given(st.data())
def test_companions_never_split(data: st.DataObject) -> None:
    operator = TOYS[data.draw(st.sampled_from(("scan_fwd", "turn_fwd")))]
    call = data.draw(worlds.calls(operator))
    call["inference"] = False
    device, policy = data.draw(worlds.devices), data.draw(worlds.policies())
    snapshot = snapshot_of(data.draw(worlds.manifests()))
    backward_operator = TOYS[str(operator.companion)]
    for accepted in resolve(operator, call, device, policy, snapshot).accepted:
        assert accepted.companion is not None
        backward = resolve(backward_operator, backward_call(operator, call, accepted.id), device, policy, snapshot)
        assert accepted.companion in ids(backward), backward.table()
        if backward_operator.saved is not None:
            # Whatever runs as the backward reads what this forward saved.
            assert {b.saved_format for b in backward.accepted} == {accepted.saved_format}


@laws
@given(st.data())
def test_native_is_what_manifests_declare(data: st.DataObject) -> None:
    operator = data.draw(worlds.operators())
    manifests, device = data.draw(worlds.manifests()), data.draw(worlds.devices)
    call = data.draw(worlds.calls(operator))
    decision = resolve(operator, call, device, preferring("native"), snapshot_of(manifests))
    declared = {m.name for m in manifests if device.vendor in m.vendors}
    real = [a for a in decision.accepted if not a.id.startswith("composite.") and "emulated" not in a.traits]
    order = [a.id.partition(".")[0] not in declared for a in real]
    assert order == sorted(order)
    required = dataclasses.replace(Policy(), require=(selectors("native"),))
    kept = ids(resolve(operator, call, device, required, snapshot_of(manifests)))
    assert {name.partition(".")[0] for name in kept} <= {*declared, "composite"}


@laws
@given(cases())
def test_unknown_facts_are_assumed_and_shown(case: Any) -> None:
    operator, call, device, policy, manifests = case
    decision = resolve(operator, call, device, policy, snapshot_of(manifests))
    by_id = {f"{m.name}.{i.name}": i for m in manifests for i in m.implementations}
    for accepted in decision.accepted:
        if accepted.id in by_id:
            verdicts = [c.check(call, device) for c in by_id[accepted.id].requires]
            assert all(v.holds is not False for v in verdicts)
            assert list(accepted.assumed) == [v.reason for v in _device_first(by_id[accepted.id], call, device)]
            assert all(reason in decision.table() for reason in accepted.assumed)


def _device_first(implementation: Any, call: CallFacts, device: DeviceFacts) -> list[Any]:
    def of_device(condition: Any) -> bool:
        return all(name.startswith("device.") for name in condition.reads())

    ordered = sorted(implementation.requires, key=lambda c: not of_device(c))
    return [v for v in (c.check(call, device) for c in ordered) if v.holds is None]


def agree(one: CallFacts, other: CallFacts, reads: frozenset[tuple[str, object]]) -> bool:
    """Whether the runtime would put two calls under one key."""

    def raw(call: CallFacts, name: str, condition: object) -> Any:
        value = call.get(name, UNKNOWN)
        if isinstance(condition, (Compare, MultipleOf)) and value is not UNKNOWN:
            return eval(condition.expression("value"), {"value": value})
        return (type(value), value)

    return all(raw(one, name, condition) == raw(other, name, condition) for name, condition in reads)


def test_what_a_backward_of_an_unknown_forward_read_is_kept() -> None:
    """A preference names what saved, which is no forward of this operator, and so places the backward that reads it."""
    operator = TOYS["scan_bwd"]
    needs = OneOf("dy.dtype", "bf16")
    manifests = [
        Manifest("beta", 1, (Implementation("fuse@1", "one", "nowhere:nothing"),)),
        Manifest("delta", 1, (Implementation("scan_bwd@1", "one", "nowhere:nothing", (needs,)),)),
    ]
    call: dict[str, FactValue] = {"dy.dtype": "bf16", "x.dtype": "bf16", "causal": True, "k": 8, "saved": "beta.one"}
    policy = Policy(prefer=(Selector("beta.one"),))
    device = DeviceFacts("cpu", "cpu", "cpu")
    decision, reads = resolve_recorded(operator, call, device, policy, snapshot_of(manifests))
    assert ids(decision) == ["delta.one"] and ("dy.dtype", None) in reads


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_calls_that_agree_on_what_was_read_have_one_winner(data: st.DataObject) -> None:
    operator = data.draw(worlds.operators())
    policy, device = data.draw(worlds.policies()), data.draw(worlds.devices)
    snapshot = snapshot_of(data.draw(worlds.manifests()))
    call = data.draw(worlds.calls(operator, complete=True))
    if operator.saved is not None:
        call["saved"] = data.draw(st.sampled_from((*worlds.IDS, "composite.spelled")))
    decision, reads = resolve_recorded(operator, call, device, policy, snapshot)
    assert decision.as_data() == resolve(operator, call, device, policy, snapshot).as_data()
    facts = [name for name in operator.facts if name != "saved"]
    for changed in itertools.chain(itertools.combinations(facts, 1), itertools.combinations(facts, 2)):
        for values in itertools.product(*(worlds.values_of(operator, name) for name in changed)):
            other = {**call, **dict(zip(changed, values))}
            if agree(call, other, reads):
                there = resolve(operator, other, device, policy, snapshot)
                assert ids(there)[:1] == ids(decision)[:1], (changed, values, sorted(reads, key=repr))
