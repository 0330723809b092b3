# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls that the contracts refuse: each mistake is one, and who does not raise, or writes first, fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import execute
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.checks import find as find_check
from te_dispatch.conformance.execute import Bench, run_unit
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import Space, spaces
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.conformance.trial import Failure
from te_dispatch.core import scopes
from te_dispatch.core.operator import OPERATORS
from tests.conformance.trials import Mistake, case_of, trial_of

pytestmark = pytest.mark.sampled(5)

REFUSED = [space for space in spaces() if space.raises is not None]


@pytest.mark.parametrize("space", REFUSED, ids=lambda space: space.id)
def test_every_mistake_is_refused_by_who_serves_the_right_call(space: Space) -> None:
    """By the backends here, and by at least one of them, so that each is a mistake that can be seen."""
    bench = Bench(scopes.MANAGER, torch.device("cpu"), Oracle(scopes.MANAGER))
    judged: set[str] = set()
    mistakes = {case.values.get("mistake", "") for case in cases_of(space, "full")}
    for one in subjects(scopes.MANAGER, OPERATORS[space.operator], torch.device("cpu")):
        if one.id.partition(".")[0] not in ("torch", "reference"):
            continue
        for case in cases_of(space, "full"):
            outcome = run_unit(Unit(one.id, "raises", case), bench)
            assert outcome.state in ("passed", "not_claimed"), (outcome.unit, outcome.message)
            if outcome.state == "passed":
                judged.add(case.values.get("mistake", ""))
    assert judged == mistakes


def _raises(operator: str, implementation: str, kernel: Mistake, **values: str) -> None:
    find_check("raises").run(trial_of(case_of(operator, "refused", **values), implementation, kernel))


def test_accumulation_without_out_that_is_ignored() -> None:
    def ignores(right: Subject, given: Mapping[str, Any]) -> Any:
        return right.call({**given, "accumulate": False})

    with pytest.raises(Failure, match="asks for ValueError"):
        _raises("gemm", "torch.matmul", ignores, mistake="accumulate_without_out")


def test_another_exception_is_told_with_what_was_expected() -> None:
    def fails(right: Subject, given: Mapping[str, Any]) -> Any:
        raise RuntimeError("expanded size must match the existing size")

    wanted = "raised RuntimeError, where the contract asks for ValueError that names attn_mask: expanded size"
    with pytest.raises(Failure, match=wanted):
        _raises("attention_fwd", "reference.attention_fwd", fails, mistake="wide_mask")


def test_an_error_without_the_name_of_an_argument_is_told_with_what_was_expected() -> None:
    def complains(right: Subject, given: Mapping[str, Any]) -> Any:
        raise ValueError("wrong")

    with pytest.raises(Failure, match="names no argument, expected ValueError that names attn_mask: wrong"):
        _raises("attention_fwd", "reference.attention_fwd", complains, mistake="wide_mask")


def test_an_error_after_the_output_was_written() -> None:
    def writes_first(right: Subject, given: Mapping[str, Any]) -> Any:
        given["out"].add_(1)
        return right.call(given)

    with pytest.raises(Failure, match="had changed out"):
        _raises("gemm", "torch.matmul", writes_first, mistake="wide_out")


def test_k_that_is_cut_to_the_smaller() -> None:
    def cuts(right: Subject, given: Mapping[str, Any]) -> Any:
        k = min(given["a"].shape[-1], given["b"].shape[-1])
        return right.call({**given, "a": given["a"][..., :k], "b": given["b"][..., :k]})

    with pytest.raises(Failure, match="asks for ValueError"):
        _raises("gemm", "torch.matmul", cuts, mistake="other_k")


def test_a_mask_that_is_cut_to_the_scores() -> None:
    def cuts(right: Subject, given: Mapping[str, Any]) -> Any:
        return right.call({**given, "attn_mask": given["attn_mask"][..., : given["k"].shape[0]]})

    with pytest.raises(Failure, match="asks for ValueError"):
        _raises("attention_fwd", "reference.attention_fwd", cuts, mistake="wide_mask")


def test_who_raises_not_implemented_is_told_how_to_leave_a_call_to_others() -> None:
    def refuses(right: Subject, given: Mapping[str, Any]) -> Any:
        raise NotImplementedError("not yet on this chip")

    trial = trial_of(case_of("softmax_fwd", "plain"), "torch.softmax_fwd", refuses)
    state, message = execute._run(find_check("values"), trial)
    assert state == "failed" and message.startswith("NotImplementedError: not yet on this chip [")
    assert message.endswith("by its requirements or by raising te_dispatch.core.errors.Declined")
