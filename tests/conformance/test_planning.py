# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""From settings to units: what is claimed is run, pair by pair, and what was not run is told."""

from __future__ import annotations

import dataclasses
import itertools
import pkgutil
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from te_dispatch.conformance import checks, coverage
from te_dispatch.conformance.bench import bench_of
from te_dispatch.conformance.coverage import Coverage, cover, covered, described, goals_of, holds
from te_dispatch.conformance.execute import run_unit
from te_dispatch.conformance.isolation import WorkerError
from te_dispatch.conformance.maker import Maker, Sketch
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.parallel import mapped
from te_dispatch.conformance.planning import Plan, further, plan, plan_of_space, refused, unjudged
from te_dispatch.conformance.planning import covered as covered_by
from te_dispatch.conformance.report.record import Report
from te_dispatch.conformance.selection import cases_of, spread
from te_dispatch.conformance.settings import Settings, UsageError
from te_dispatch.conformance.space import Axis, Space, find, spaces
from te_dispatch.conformance.subject import Claim, Subject, subjects
from te_dispatch.core import scopes
from te_dispatch.core.manifest_check import operator_problems
from te_dispatch.core.operator import OPERATORS

pytestmark = pytest.mark.sampled(6)

FULL = Settings(backends=("torch",), level="full", device="cpu")
GEMM = Settings(backends=("torch",), operators=("gemm",), level="full", device="cpu", checks=("values",))


def test_single_implementations_can_be_asked_for() -> None:
    settings = Settings(backends=("torch",), operators=("gemm",), implementations=("torch.matmul",), device="cpu")
    units = list(plan(scopes.MANAGER, settings).units)
    assert {unit.implementation for unit in units} == {"torch.matmul"}
    assert {unit.case.operator for unit in units} == {"gemm"}


def test_an_unknown_implementation_is_named() -> None:
    for unknown in ("torch.matmull", "acme.matmul", "matmul"):
        with pytest.raises(UsageError, match=f"implementation: '{unknown}' is not installed"):
            plan(scopes.MANAGER, Settings(implementations=(unknown,), device="cpu"))


class Narrow:
    """Claims of an implementation that serves a small part of a space, given as a predicate."""

    def __init__(self, space: Space, refusal: Any) -> None:
        self.space = space
        self.subjects = {"acme.op": type("One", (), {"id": "acme.op"})()}
        self.refusal = refusal
        self.asked = 0

    def claim(self, subject: str, values: Mapping[str, str]) -> Claim:
        self.asked += 1
        return Claim(self.refusal(values), where="call")

    def hopeless(self, subject: str, values: Mapping[str, str]) -> bool:
        return False


AXES = (
    Axis("layout", ("NT", "NN", "TN")),
    Axis("encodings", ("e4m3+e4m3", "e4m3+e5m2", "e5m2+e4m3", "fnuz+fnuz")),
    Axis("scaling", ("tensor", "block", "mx", "nv")),
    Axis("epilogue", ("none", "gelu", "bgrad")),
    Axis("out", ("new", "given", "added")),
    Axis("shape", ("16", "31", "128"), once=("4097",)),
)


def _space(**how: Any) -> Space:
    return Space("gemm", "toy", AXES, lambda values, maker: {}, lambda judged: {}, **how)


def _vendor(values: Mapping[str, str]) -> str | None:
    """Per-tensor OCP products without epilogue: a first release."""
    wrong = [
        f"{name} is {values[name]}"
        for name, served in (("scaling", ("tensor",)), ("epilogue", ("none",)))
        if values[name] not in served
    ]
    wrong += ["encodings are fnuz"] if values["encodings"] == "fnuz+fnuz" else []
    return "; ".join(wrong) or None


def _every(space: Space) -> Iterator[dict[str, str]]:
    for values in itertools.product(*(axis.values for axis in space.axes)):
        yield dict(zip((axis.name for axis in space.axes), values))


def test_every_pair_of_a_narrow_claim_is_planned() -> None:
    """The array over the whole space holds nine tenths of cases that are not claimed, and few of the claimed pairs."""
    space = _space()
    found = cover(Narrow(space, _vendor), "acme.op", [case.values for case in cases_of(space, "full")])
    claimed = [values for values in _every(space) if _vendor(values) is None]
    pairs = {goal for goal in goals_of(space) if len(goal) == 2 and any(holds(values, goal) for values in claimed)}
    assert pairs == {goal for goal in found.goals if len(goal) == 2}
    assert all(_vendor(values) is None for values in found.planned)
    assert not found.left(found.planned)
    general = [case.values for case in cases_of(space, "full") if _vendor(case.values) is None]
    assert len(found.left(general)) > 20, "the general array alone would have done"


def test_a_size_beyond_a_threshold_is_judged_with_the_plainest_of_all_other_values() -> None:
    """The case that is due may be one in which the size shows nothing: an operator stopped by a flag."""
    space = _space()
    base = [case.values for case in cases_of(space, "full")]
    large = [values for values in cover(Narrow(space, _vendor), "acme.op", base).planned if values["shape"] == "4097"]
    assert {axis.name: axis.values[0] for axis in AXES} | {"shape": "4097"} in large

    def unable(values: Mapping[str, str]) -> str | None:
        return "large NT" if values["shape"] == "4097" and values["layout"] == "NT" else _vendor(values)

    large = [values for values in cover(Narrow(space, unable), "acme.op", base).planned if values["shape"] == "4097"]
    assert {axis.name: axis.values[0] for axis in AXES} | {"shape": "4097", "layout": "NN"} in large


def test_pairs_are_judged_in_cases_that_show_something() -> None:
    """A wrong relu of tn is not seen in a case of zeros, of one element, or of a call that a flag stops."""
    axes = (
        Axis("kind", ("gelu", "relu", "silu", "glu")),
        Axis("layout", ("nt", "nn", "tn", "tt")),
        Axis("noop", ("0", "1"), dull=("1",)),
        Axis("shape", ("16x8", "1x1", "0x8", "3x5")),
        Axis("values", ("normal", "zeros", "nan", "inf")),
    )
    space = Space("gemm", "toy", axes, lambda values, maker: {}, lambda judged: {})

    def unable(values: Mapping[str, str]) -> str | None:
        return "silu is served without elements" if values["kind"] == "silu" and values["shape"] != "0x8" else None

    found = cover(Narrow(space, unable), "acme.op", [case.values for case in cases_of(space, "full")])
    dull = {"noop": {"1"}, "shape": {"1x1", "0x8"}, "values": {"zeros", "nan", "inf"}}
    assert {name for name, values in dull.items() for value in values if axis_of(space, name).is_dull(value)} == {*dull}
    assert not axis_of(space, "shape").is_dull("3x5") and not axis_of(space, "values").is_dull("normal")
    for goal in (goal for goal in found.goals if len(goal) == 2):
        names = dict(goal)
        shown = any(
            holds(values, goal) and all(values[n] not in hiding for n, hiding in dull.items() if n not in names)
            for values in found.planned
        )
        assert shown or names.get("kind") == "silu", goal
    assert any(values["kind"] == "silu" for values in found.planned), "what is served only so is judged so"


def axis_of(space: Space, name: str) -> Axis:
    return next(axis for axis in space.axes if axis.name == name)


def test_plans_that_workers_make_are_the_same() -> None:
    operators = ("softmax_fwd", "multi_tensor_scale")
    here = plan(scopes.MANAGER, dataclasses.replace(FULL, operators=operators))
    told: list[tuple[str, int, int]] = []
    there = plan(scopes.MANAGER, dataclasses.replace(FULL, operators=operators, jobs=2), lambda *how: told.append(how))
    assert list(there.units) == list(here.units) and len(list(here.units)) > 100
    assert there.decided.keys() == here.decided.keys() and there.coverage == here.coverage
    assert [done for _, done, _ in told] == list(range(told[0][2]))


def test_the_order_of_checks_does_not_hang_on_what_was_imported_first() -> None:
    """A test module that imported a check before the others gave its process another order of units than workers."""
    names = [module.name for module in pkgutil.iter_modules(checks.__path__)]
    text = "; ".join(f"import te_dispatch.conformance.checks.{name}" for name in reversed(names))
    text += "; from te_dispatch.conformance.checks import checks; print(*(check.name for check in checks()))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [check.name for check in checks.checks()]
    defined = {name for name in names if "\nCHECKS = " in Path(checks.__path__[0], f"{name}.py").read_text("utf-8")}
    assert defined == set(checks._MODULES), "a module whose checks nobody runs"


@pytest.mark.parametrize(
    ("space", "implementation"),
    [
        ("gemm.plain", "torch.matmul"),
        ("rmsnorm_fwd.plain", "torch.rmsnorm_fwd"),
        ("softmax_bwd.plain", "torch.softmax_bwd"),
        ("moe_unpermute_bwd.plain", "torch.moe_unpermute_bwd"),
        ("attention_bwd.eight_bit", "torch.unfused_attention_bwd"),
    ],
)
def test_one_tensor_as_several_operands_is_tried_where_operands_are_alike(space: str, implementation: str) -> None:
    """The most different cases had operands of other shapes and dtypes: the check passed and had judged nothing."""
    operator = space.partition(".")[0]
    settings = dataclasses.replace(FULL, operators=(operator,), implementations=(implementation,), checks=("shared",))
    bench = bench_of(settings)
    units = [one for one in plan(scopes.MANAGER, settings).units if f"{operator}.{one.case.space}" == space]
    outcomes = [run_unit(unit, bench) for unit in units]
    assert len(outcomes) >= 2 and {(outcome.state, *outcome.notes) for outcome in outcomes} == {("passed",)}


def test_what_goes_wrong_in_a_planning_worker_is_told() -> None:
    settings = dataclasses.replace(FULL, jobs=2)
    asked = [("softmax_fwd", "plain"), ("softmax_fwd", "nonsense")]
    with pytest.raises(WorkerError, match="plan_of_space: ValueError: case: softmax_fwd has no space 'nonsense'"):
        list(mapped(plan_of_space, asked, scopes.MANAGER, settings))


def test_an_implementation_of_which_the_general_cases_hold_nothing_is_found() -> None:
    def single(values: Mapping[str, str]) -> str | None:
        wanted = {"layout": "TN", "encodings": "e5m2+e4m3", "scaling": "mx", "epilogue": "bgrad", "out": "added"}
        return "; ".join(f"{n} is {values[n]}" for n, v in wanted.items() if values[n] != v) or None

    space = _space()
    base = [case.values for case in cases_of(space, "full")]
    assert all(single(values) is not None for values in base)
    found = cover(Narrow(space, single), "acme.op", base)
    assert {values["shape"] for values in found.planned} == {"16", "31", "128", "4097"}


def test_pairs_within_a_part_of_a_space_are_goals() -> None:
    """A pair that only casts held said nothing of plain calls, which other kernels serve."""
    space = find("activation_bwd", "plain")
    plain = {"record": "none", "cast": "none"}
    assert space.within == (plain,)
    settings = dataclasses.replace(FULL, operators=("activation_bwd",), checks=("values",))
    ran = [unit.case.values for unit in plan(scopes.MANAGER, settings).units if unit.case.space == "plain"]
    shown = [values for values in ran if values["dy_values"] != "zeros" and values["values"] != "zeros"]
    for shape in axis_of(space, "shape").values:
        assert any(holds(v, tuple({**plain, "shape": shape, "dbias": "yes"}.items())) for v in shown), shape


def test_every_value_is_tried_where_all_others_are_plain() -> None:
    space = find("attention_bwd", "scored")
    settings = dataclasses.replace(
        FULL, operators=("attention_bwd",), implementations=("torch.unfused_attention_bwd",), checks=("values",)
    )
    ran = [unit.case.values for unit in plan(scopes.MANAGER, settings).units if unit.case.space == space.name]
    alone = [{**ran[0], axis.name: value} for axis in space.axes for value in (*axis.values, *axis.once)]
    assert [values for values in alone if space.valid(values) and values not in ran] == []
    assert sum(map(space.valid, alone)) > 20


def test_what_nobody_claims_is_no_goal() -> None:
    claims = Narrow(_space(), lambda values: "not on this chip")
    found = cover(claims, "acme.op", [case.values for case in cases_of(claims.space, "full")])
    assert not found.goals and not found.planned


def test_fixed_cases_groups_and_large_sizes_are_goals() -> None:
    fixed = {"layout": "TN", "encodings": "e5m2+e4m3", "out": "added", "shape": "4097"}
    space = _space(fixed=(fixed,), together=(("layout", "encodings", "out"),))
    found = cover(Narrow(space, _vendor), "acme.op", [case.values for case in cases_of(space, "full")])
    assert any(holds(values, tuple(fixed.items())) for values in found.planned)
    triples = {tuple(v[n] for n in ("layout", "encodings", "out")) for v in found.planned}
    assert len(triples) == 3 * 3 * 3
    assert sum(values["shape"] == "4097" for values in found.planned) in (2, 3), "large sizes are few"


def test_a_space_with_unknown_names_is_refused() -> None:
    with pytest.raises(ValueError, match="together names 'layuot'"):
        _space(together=(("layuot", "out"),))
    with pytest.raises(ValueError, match="forms names 'layuot'"):
        _space(forms=("layuot",))
    with pytest.raises(ValueError, match="fixed has layout=TT"):
        _space(fixed=({"layout": "TT"},))


def test_operands_memory_is_checked_in_every_layout_of_an_epilogue() -> None:
    settings = Settings(backends=("torch",), operators=("gemm",), level="full", device="cpu", checks=("expanded",))
    cases = [unit.case.values for unit in plan(scopes.MANAGER, settings).units if unit.case.space == "epilogue"]
    forms = {(values["epilogue"], values["layout"]) for values in cases}
    assert forms >= {("bgrad_b", "TN"), ("bgrad_b", "NN"), ("bgrad_a", "TN"), ("gelu", "NT"), ("dgelu", "NN")}


def test_smoke_checks_memory_once_where_spaces_have_the_same_kernels() -> None:
    """`varlen_attention` claims no case of the space that stands for ragged dropout elsewhere."""

    def checked(implementation: str) -> set[tuple[str, str]]:
        settings = Settings(
            backends=("torch",), operators=("attention_fwd",), implementations=(implementation,), level="smoke",
            device="cpu",
        )  # fmt: skip
        return {(unit.case.space, unit.check) for unit in plan(scopes.MANAGER, settings).units}

    assert {("dropped_ragged", "values"), ("dropped_ragged", "dropout")} <= checked("torch.unfused_attention")
    assert ("dropped", "strided") in checked("torch.unfused_attention")
    assert ("dropped_ragged", "strided") not in checked("torch.unfused_attention")
    assert ("dropped_ragged", "strided") in checked("torch.varlen_attention")


def test_a_space_is_like_another_one_that_stands_for_itself() -> None:
    alike = [space for operator in OPERATORS for space in spaces(operator) if space.like]
    assert alike
    for space in alike:
        assert not find(space.operator, space.like).like, space.id


def test_what_was_not_judged_is_told() -> None:
    space = _space()
    found = cover(Narrow(space, _vendor), "acme.op", [case.values for case in cases_of(space, "full")])
    ran = [values for values in found.planned if values["layout"] == "NT" and values["out"] != "added"]
    told = covered(found, ran).never_run
    assert {"layout=NN", "layout=TN", "out=added"} <= set(told)
    assert not any("layout=NN," in goal for goal in told), "a value that never ran is told once"
    assert covered(found, found.planned).never_run == ()


def test_calls_that_are_declined_are_planned_again_with_others() -> None:
    """A kernel that declines half of its calls when it is called is judged on the pairs of the other half."""
    planned = plan(scopes.MANAGER, GEMM)
    coverage_of = [one for one in planned.coverage if (one.implementation, one.space) == ("torch.matmul", "gemm.plain")]

    def outcome(unit: Any) -> Outcome:
        declines = unit.case.values.get("alpha") == "1.7" and unit.case.values.get("bias") == "fp32"
        return Outcome(unit.id, "not_claimed" if declines else "passed", "declined: busy" if declines else "")

    units = [u for u in planned.units if u.implementation == "torch.matmul" and u.case.space == "plain"]
    outcomes = [outcome(unit) for unit in units if unit.id not in planned.decided]
    left: tuple[Coverage, ...] = tuple(coverage_of)
    for _ in range(3):
        more: Plan = further(scopes.MANAGER, GEMM, outcomes, left)
        left = more.coverage
        outcomes += [outcome(unit) for unit in more.units]
    told = [goal for one in covered_by(left, outcomes) for goal in one.never_run]
    assert told in ([], ["alpha=1.7, bias=fp32"])


def test_a_plan_holds_every_claimed_pair_of_the_portable_backend() -> None:
    planned = plan(scopes.MANAGER, GEMM)
    assert {"torch.matmul", "torch.emulated_gemm"} <= {one.implementation for one in planned.coverage if one.goals}
    outcomes = [Outcome(u.id, "passed") for u in planned.units if u.id not in planned.decided]
    assert all(not one.never_run for one in covered_by(planned.coverage, outcomes))
    without = [o for o in outcomes if "layout=TN" not in o.unit]
    told = [goal for one in covered_by(planned.coverage, without) for goal in one.never_run]
    assert "layout=TN" in told


def test_a_shard_is_a_part_of_the_same_plan() -> None:
    settings = Settings(backends=("torch",), operators=("softmax",), level="full", device="cpu")
    whole = [unit.id for unit in plan(scopes.MANAGER, settings).units]
    parts = [
        [u.id for u in plan(scopes.MANAGER, Settings(**{**vars(settings), "shard": (part, 3)})).units]
        for part in (1, 2, 3)
    ]
    assert [name for part in parts for name in part] == whole


def test_every_combination_is_streamed() -> None:
    """The whole product of attention's options has more cases than memory holds: the first ones come at once."""
    settings = Settings(backends=("torch",), operators=("attention_fwd",), level="full", device="cpu", product=True)
    units = plan(scopes.MANAGER, settings).units
    assert not hasattr(units, "__len__")
    first = [unit.id for unit in itertools.islice(units, 2000)]
    assert len(set(first)) == 2000
    part = Settings(**{**vars(settings), "shard": (2, 4)})
    assert [u.id for u in itertools.islice(plan(scopes.MANAGER, part).units, 100)] == first[1:400:4]


def test_another_seed_combines_otherwise() -> None:
    space = find("gemm", "plain")
    one, other = ({tuple(c.values.values()) for c in cases_of(space, "full", seed)} for seed in (0, 1))
    assert len(one & other) < len(one) / 2
    assert cases_of(space, "full", 1)[0].values == cases_of(space, "full", 0)[0].values, "the plainest stays first"


def test_chosen_cases_are_the_plainest_then_the_largest() -> None:
    space = _space()
    plain = {axis.name: axis.values[0] for axis in space.axes}
    from te_dispatch.conformance.case import Case

    cases = [Case.of("gemm", "toy", {**plain, "out": out}) for out in ("new", "given", "added")]
    cases += [Case.of("gemm", "toy", {**plain, "shape": "4097"}), Case.of("gemm", "toy", {**plain, "layout": "TN"})]
    chosen = spread(space, cases, 3)
    assert chosen[0] == cases[0] and chosen[1] == cases[3] and chosen[2] in cases


def test_claims_without_a_unit_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch.conformance import checks

    real = Subject.claims.fget
    assert real is not None
    monkeypatch.setattr(
        Subject,
        "claims",
        property(lambda self: real(self) | {"capturable"} if self.id == "torch.softmax_fwd" else real(self)),
    )
    told = unjudged(scopes.MANAGER, Settings(("torch",), operators=("softmax",), device="cpu"), [])
    [one] = [one for one in told if one.claim == "capturable" and one.implementation == "torch.softmax_fwd"]
    judging = [check for check in checks.checks() if check.claim == "capturable"]
    assert judging and one.reason == judging[0].applies(
        _subject("softmax_fwd", "torch.softmax_fwd"), spaces("softmax_fwd")[0]
    )


def _subject(operator: str, candidate: str) -> Subject:
    import torch

    from te_dispatch.conformance.subject import subject
    from te_dispatch.core.operator import OPERATORS

    return subject(scopes.MANAGER, OPERATORS[operator], torch.device("cpu"), candidate)


def test_a_goal_reads_like_the_options_of_a_case() -> None:
    assert described((("kind", "relu"), ("layout", "NN"))) == "kind=relu, layout=NN"
    assert coverage.simplest([(("a", "1"),), (("a", "1"), ("b", "2")), (("b", "2"), ("c", "3"))]) == [
        (("a", "1"),), (("b", "2"), ("c", "3")),
    ]  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_sketch_has_the_facts_of_the_arguments_that_it_stands_for(operator: str) -> None:
    some = subjects(scopes.MANAGER, OPERATORS[operator], torch.device("cpu"))[0]
    for space in spaces(operator):
        cases = () if space.sampled else cases_of(space, "full")
        for case in random.Random(0).sample(cases, min(len(cases), 3)):
            made, sketched = (space.make(case.values, kind(case, scopes.MANAGER)) for kind in (Maker, Sketch))
            assert some.facts(sketched) == some.facts(made), case.id


def _with_manifest(name: str, *more: tuple[str, str]) -> Any:
    """A manager whose backend declares further implementations: names, and the operators that they say they are of."""
    snapshot = scopes.MANAGER.snapshot
    backend = snapshot.backends[name]
    first = backend.manifest.implementations[0]
    added = tuple(dataclasses.replace(first, name=own, op=op) for own, op in more)
    manifest = dataclasses.replace(backend.manifest, implementations=(*backend.manifest.implementations, *added))
    unusable = {**snapshot.unusable, **operator_problems(manifest, OPERATORS)}
    backends = {**snapshot.backends, name: dataclasses.replace(backend, manifest=manifest)}
    return SimpleNamespace(snapshot=dataclasses.replace(snapshot, backends=backends, unusable=unusable))


def test_what_dispatch_never_calls_is_named() -> None:
    """A kernel under a misspelt operator was left out in silence, and the rest of its backend certified."""
    settings = Settings(("torch",), level="full", device="cpu")
    assert refused(scopes.MANAGER, settings) == {}
    manager = _with_manifest("torch", ("mine", "rmsnrom_fwd@1"), ("newer", "rmsnorm_fwd@99"))
    found = refused(manager, settings)
    assert list(found) == ["torch.mine"] and "did you mean 'rmsnorm_fwd'?" in found["torch.mine"]
    assert refused(manager, Settings(("reference",), level="full", device="cpu")) == {}
    assert refused(manager, dataclasses.replace(settings, operators=("gemm",))) == found
    report = Report(settings, {}, [], refused=found)
    assert not report.ok and any("torch.mine is refused: operator 'rmsnrom_fwd'" in why for why in report.uncertified)


@pytest.mark.parametrize(("device", "asked"), [("cpu", True), ("meta", False)])
def test_what_contents_alone_show_is_asked_on_the_host(device: str, asked: bool) -> None:
    """On another device such calls are neither claimed nor missed: a certificate was denied for them."""
    planned = plan(scopes.MANAGER, Settings(("torch",), operators=("moe_unpermute",), level="full", device=device))
    assert any("refused_contents" in unit.id for unit in planned.units) is asked
    assert any("refused_contents" in found.space for found in planned.coverage) is asked
