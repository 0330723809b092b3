# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The check of threads finds memory that calls share, reliably, and tells what is wrong without threads apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import forwards
from te_dispatch.conformance.checks import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure

from .trials import case_of, mistaken, trial_of

SOFTMAX = case_of("softmax_fwd", "plain", shape="2x16x16")
GEMM = case_of("gemm", "plain", shape="1x1x1", layout="NT")
ATTENTION_BWD = case_of("attention_bwd", "plain", dtype="fp32")


class _Workspace:
    """A static buffer, per shape or one for all: operands are copied into it and read from there."""

    def __init__(self, argument: str, per_shape: bool) -> None:
        self.argument, self.per_shape = argument, per_shape
        self.buffers: dict[Any, torch.Tensor] = {}

    def __call__(self, right: Subject, arguments: Mapping[str, Any]) -> Any:
        x = arguments[self.argument]
        key = x.shape if self.per_shape else None
        if key not in self.buffers or self.buffers[key].numel() < x.numel():
            self.buffers[key] = torch.empty(x.numel(), dtype=x.dtype)
        workspace = self.buffers[key][: x.numel()].view(x.shape)
        workspace.copy_(x)
        return right.call({**arguments, self.argument: workspace})


@pytest.mark.parametrize("per_shape", (True, False))
@pytest.mark.parametrize(
    "case,implementation,argument", [(SOFTMAX, "torch.softmax_fwd", "x"), (GEMM, "torch.matmul", "a")]
)
def test_a_static_workspace(case: Any, implementation: str, argument: str, per_shape: bool) -> None:
    """Time after time, on cases of one element too."""
    for _ in range(5):
        with pytest.raises(Failure, match="with 4 threads at once: "):
            find("threads").run(trial_of(case, implementation, _Workspace(argument, per_shape)))


@pytest.mark.parametrize("case,implementation", [(SOFTMAX, "torch.softmax_fwd"), (GEMM, "torch.matmul")])
def test_a_sound_implementation(case: Any, implementation: str) -> None:
    find("threads").run(trial_of(case, implementation))


def test_what_is_wrong_alone_is_no_race() -> None:
    with pytest.raises(Failure) as caught:
        find("threads").run(trial_of(SOFTMAX, "torch.softmax_fwd", lambda right, arguments: right.call(arguments) * 2))
    assert "threads" not in str(caught.value)


def test_a_forward_and_another_call_s_backward_that_share_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer: list[torch.Tensor] = [torch.empty(1 << 22)]

    def through(name: str) -> Any:
        def through_buffer(right: Subject, arguments: Mapping[str, Any]) -> Any:
            x = arguments[name]
            workspace = buffer[0][: x.numel()].view(x.shape)
            workspace.copy_(x)
            return right.call({**arguments, name: workspace})

        return through_buffer

    right = forwards.forward_of

    def spoiled(*given: Any) -> Subject:
        return mistaken(right(*given), through("v"))

    sound = trial_of(ATTENTION_BWD, "torch.unfused_attention_bwd")
    find("threads").run(sound)
    monkeypatch.setattr(forwards, "forward_of", spoiled)
    with pytest.raises(Failure, match="with 4 threads at once: "):
        find("threads").run(trial_of(ATTENTION_BWD, "torch.unfused_attention_bwd", through("dout")))
