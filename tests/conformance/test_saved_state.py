# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a forward saves for its backward is a state of its own: a second backward, and one behind other forwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import forwards
from te_dispatch.conformance.checks import dropout as dropout_module
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.checks import saved as saved_module
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.subject import Subject, subjects
from te_dispatch.conformance.trial import Failure
from te_dispatch.core.errors import Declined
from te_dispatch.ops.results import Saved

from .trials import Mistake, case_of, mistaken, trial_of

PLAIN = case_of("attention_bwd", "plain", dtype="fp32")
BACKWARD = "torch.unfused_attention_bwd"
#: Reads the log-sum-exps that its forward saved.
FUSED = "torch.sdpa_cpu_bwd"


def _with_forward(monkeypatch: pytest.MonkeyPatch, mistake: Mistake) -> None:
    right = forwards.forward_of
    for module in (forwards, saved_module, dropout_module):
        monkeypatch.setattr(module, "forward_of", lambda *given: mistaken(right(*given), mistake))


def test_sound_backwards() -> None:
    for case in (PLAIN, case_of("attention_bwd", "eight_bit")):
        find("saved_state").run(trial_of(case, BACKWARD))
    find("saved_state").run(trial_of(PLAIN, FUSED))


def test_a_backward_that_uses_up_what_was_saved() -> None:
    def consuming(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        arguments["saved"].tensors[0].fill_(0)
        return made

    with pytest.raises(Failure, match="a second time on what one forward saved: "):
        find("saved_state").run(trial_of(PLAIN, FUSED, consuming))


def test_forwards_that_save_into_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: dict[Any, torch.Tensor] = {}

    def static(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        saved = made.saved
        kept = tuple(buffers.setdefault(x.shape, x).copy_(x) for x in saved.tensors)
        return made._replace(saved=Saved(saved.implementation, saved.format, kept, saved.options))

    _with_forward(monkeypatch, static)
    with pytest.raises(Failure, match="behind a forward whose scales moved on: "):
        find("saved_state").run(trial_of(PLAIN, FUSED))


def test_a_forward_that_saves_its_quantizer_s_scale_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("attention_bwd", "eight_bit", s="delayed")
    find("saved_state").run(trial_of(case, BACKWARD))

    def late(right: Subject, arguments: Mapping[str, Any]) -> Any:
        made = right.call(arguments)
        scale = arguments["s_quantizer"].scale
        return made._replace(saved=_Late(made.saved, made.lse, scale))

    class _Late(Saved):
        """Stands for a kernel that reads the scale when the backward runs."""

        __slots__ = ("at", "lse", "scale")

        def __init__(self, saved: Saved, lse: torch.Tensor, scale: torch.Tensor) -> None:
            super().__init__(saved.implementation, saved.format, saved.tensors, saved.options)
            self.lse, self.scale, self.at = lse, scale, scale.clone()

    def reading(right: Subject, arguments: Mapping[str, Any]) -> Any:
        saved = arguments["saved"]
        factor = saved.scale / saved.at if isinstance(saved, _Late) else 1.0
        made = right.call(arguments)
        return made._replace(dv=(made.dv * factor).to(made.dv.dtype)) if isinstance(made.dv, torch.Tensor) else made

    _with_forward(monkeypatch, late)
    with pytest.raises(Failure, match="behind a forward whose scales moved on: dv"):
        find("saved_state").run(trial_of(case, BACKWARD, reading))


def _declines(right: Subject, arguments: Mapping[str, Any]) -> Any:
    raise Declined("no engine")


@pytest.mark.parametrize("check", ["saved_state", "values", "dropout"])
def test_a_forward_that_declines_leaves_no_call_for_its_backward(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("attention_bwd", "dropped", dropout="0.5") if check == "dropout" else PLAIN
    find(check).run(trial_of(case, BACKWARD))
    _with_forward(monkeypatch, _declines)
    with pytest.raises(NotClaimed, match="unfused_attention declined: no engine"):
        find(check).run(trial_of(case, BACKWARD))


def test_the_mask_is_not_looked_for_with_a_forward_that_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may decline only what the mask is recovered with."""
    right = forwards.forward_of
    monkeypatch.setattr(dropout_module, "forward_of", lambda *given: mistaken(right(*given), _declines))
    with pytest.raises(NotClaimed, match="unfused_attention declined: no engine"):
        find("dropout").run(trial_of(case_of("attention_bwd", "dropped", dropout="0.5"), BACKWARD))


@pytest.mark.parametrize("declining", [(), (0,), (1,), (0, 1)])
def test_forwards_of_one_format_of_which_some_decline(
    declining: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are run all the same; only where none is left there is no call."""
    trial = trial_of(PLAIN, BACKWARD)

    def some(*given: Any) -> list[Subject]:
        wanted = trial.subject.implementation.saved_format
        one = next(each for each in subjects(*given) if each.implementation.saved_format == wanted)
        return [mistaken(one, _declines) if i in declining else one for i in (0, 1)]

    monkeypatch.setattr(saved_module, "subjects", some)
    if len(declining) == 2:
        with pytest.raises(NotClaimed, match=r"serves this call: its forward .* declined: no engine"):
            find("saved_format").run(trial)
    else:
        find("saved_format").run(trial)
        assert trial.notes[0].count("torch.unfused_attention") == 2 - len(declining)
