# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The checks of dropout, causality and gradients find what they are for, and let right implementations pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import forwards
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.checks import gradients as gradients_module
from te_dispatch.conformance.execute import _run
from te_dispatch.conformance.families.gradients import PAIRS
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.selection import cases_of
from te_dispatch.conformance.space import spaces
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from te_dispatch.core.errors import Declined

from .trials import case_of, mistaken, trial_of

pytestmark = pytest.mark.sampled(5)

ATTENTION = "torch.unfused_attention"


def _reseeded(right: Subject, arguments: Mapping[str, Any], change: Any) -> Any:
    return right.call({**arguments, "rng_state": change(arguments["rng_state"])})


class _Counting:
    """Another mask at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        self.calls += 1
        return _reseeded(right, arguments, lambda state: state + self.calls)


def _without_scale(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    return result._replace(out=result.out * (1 - arguments["dropout_p"]))


def _one_head_for_all(right: Subject, arguments: Mapping[str, Any]) -> Any:
    """Every pair of heads with equal operands gets one mask: seen through v, whose heads are dropped alike."""
    result = right.call(arguments)
    out = result.out.clone()
    out[..., 1::2, :] = out[..., 0::2, :]
    return result._replace(out=out)


ATTENTION_MISTAKES = {
    "another mask each time": (lambda: _Counting(), "equal rng_state"),
    "too many kept": (lambda: lambda r, a: r.call({**a, "dropout_p": a["dropout_p"] / 2}), "are kept"),
    "the offset is ignored": (
        lambda: lambda r, a: _reseeded(r, a, lambda s: torch.stack((s[0], s[1] * 0))), "offsets that differ",
    ),
    "the seed is ignored": (
        lambda: lambda r, a: _reseeded(r, a, lambda s: torch.stack((s[0] * 0, s[1]))), "seeds that differ",
    ),
    "kept values are not scaled": (lambda: _without_scale, "out"),
    "one mask for two heads": (lambda: _one_head_for_all, "along axis 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(ATTENTION_MISTAKES))
def test_dropout_of_attention(name: str) -> None:
    mistake, message = ATTENTION_MISTAKES[name]
    case = case_of("attention_fwd", "dropped", heads="4/2", dropout="0.5", dtype="fp32")
    find("dropout").run(trial_of(case, ATTENTION))
    with pytest.raises(Failure, match=message):
        find("dropout").run(trial_of(case, ATTENTION, mistake()))


def test_a_backward_that_draws_its_own_mask() -> None:
    case = case_of("attention_bwd", "dropped", dropout="0.5", dtype="fp32")
    find("dropout").run(trial_of(case, f"{ATTENTION}_bwd"))
    with pytest.raises(Failure, match=r"d[qkv]"):
        find("dropout").run(trial_of(case, f"{ATTENTION}_bwd", lambda r, a: _reseeded(r, a, lambda s: s + 1)))


def test_a_forward_that_declines_leaves_its_backward_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch gives such a call to another forward; only a backward that declines itself has failed."""
    trial = trial_of(case_of("attention_bwd", "plain", dtype="fp32"), f"{ATTENTION}_bwd")

    def declines(right: Subject, arguments: Mapping[str, Any]) -> None:
        raise Declined("no engine")

    with monkeypatch.context() as patched:
        declining = mistaken(forwards.forward_of(trial.subject, trial.space.forward(trial.arguments())), declines)
        patched.setattr(forwards, "forward_of", lambda *_: declining)
        with pytest.raises(NotClaimed, match="unfused_attention declined: no engine"):
            find("values").run(trial)
    assert _run(find("values"), trial)[0] == "passed"
    trial = trial_of(trial.case, f"{ATTENTION}_bwd", declines)
    assert _run(find("values"), trial) == (
        "failed", "declined (no engine): a backward must serve every call that it claims"
    )  # fmt: skip


def test_dropout_add_whose_mask_is_not_what_it_dropped() -> None:
    case = case_of("dropout_add_fwd", "dropped", dropout="0.5", shape="67x129")
    find("dropout").run(trial_of(case, "torch.dropout_add_fwd"))

    def other(right: Subject, arguments: Mapping[str, Any]) -> Any:
        result = right.call(arguments)
        return result._replace(mask=result.mask.flip(0))

    with pytest.raises(Failure, match="out"):
        find("dropout").run(trial_of(case, "torch.dropout_add_fwd", other))


def test_an_output_that_sees_a_later_token() -> None:
    case = case_of("attention_fwd", "causal", operands="plain", s="none")
    find("later_tokens").run(trial_of(case, ATTENTION))
    with pytest.raises(Failure, match="what comes earlier moved by up to"):
        find("later_tokens").run(trial_of(case, ATTENTION, lambda r, a: r.call({**a, "mask": "none"})))


@pytest.mark.parametrize("cast,reported", [("current", True), ("delayed", False), ("mxfp8", False), ("plain", False)])
def test_what_a_shared_scale_lets_through_is_reported(cast: str, reported: bool) -> None:
    trial = trial_of(case_of("attention_fwd", "causal", operands=cast, s="none"), ATTENTION)
    find("later_tokens").run(trial)
    assert any("through a shared scale" in note for note in trial.notes) == reported


def test_rows_that_see_other_rows() -> None:
    case = case_of("softmax_fwd", "plain", shape="2x16x16", causal="no", mask="none", values="normal")
    find("later_rows").run(trial_of(case, "torch.softmax_fwd"))

    def across(right: Subject, arguments: Mapping[str, Any]) -> Any:
        x = arguments["x"]
        return right.call({**arguments, "x": x - x.amax(0, keepdim=True)})

    with pytest.raises(Failure, match="what comes earlier moved"):
        find("later_rows").run(trial_of(case, "torch.softmax_fwd", across))


def test_a_current_scale_is_reported_for_rows_too() -> None:
    noted = []
    for space in spaces("quantize"):
        for case in cases_of(space, "full") if space.batch is not None else ():
            trial = trial_of(case, "torch.quantize")
            find("later_rows").run(trial)
            noted += trial.notes
    assert all("through a shared scale" in note for note in noted)


def _halved(right: Subject, arguments: Mapping[str, Any]) -> Any:
    result = right.call(arguments)
    if isinstance(result, torch.Tensor):
        return result * 0.5
    return result._replace(**{result._fields[0]: result[0] * 0.5})


@pytest.mark.parametrize("operator", list(PAIRS))
def test_a_backward_that_is_not_the_derivative(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair: right as it is; found where the first gradient is half of what it must be."""
    implementation = ATTENTION if operator == "attention_fwd" else f"torch.{operator}"
    space = next(space for space in spaces(operator) if find("gradients").applies(None, space) is None)  # type: ignore[arg-type]
    found = 0
    for case in cases_of(space, "full")[:6]:
        trial = trial_of(case, implementation)
        try:
            find("gradients").run(trial)
        except NotClaimed:
            continue
        right = gradients_module._backward
        with monkeypatch.context() as patched:
            patched.setattr(gradients_module, "_backward", lambda *given, right=right: mistaken(right(*given), _halved))
            try:
                find("gradients").run(trial_of(case, implementation))
            except Failure:
                found += 1
    assert found
