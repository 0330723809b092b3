# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Claims about CUDA graphs and about waiting: ``capturable`` and ``no_host_sync``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.space import Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import options, overwrite
from te_dispatch.conformance.trial import Failure, Trial

_WARM_UP = 3
_REPLAYS = 2
#: Seeds among which data of the same options are looked for.
_SEEDS = 16


def capture(trial: Trial) -> None:
    """Captured into a graph once, replayed with other operands in the same memory: results are those operands'."""
    static = trial.on_device()
    trial.claim(static)
    side = torch.cuda.Stream(trial.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(trial.device))
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            trial.call(trial.on_device())
    torch.cuda.current_stream(trial.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = trial.call(static)
    except RuntimeError as error:
        raise Failure(f"it claims capturable, and capturing it failed: {str(error).splitlines()[0]}") from error
    for other in _others(trial):
        overwrite(static, other.on_device())
        graph.replay()
        synchronize(trial)
        try:
            other.judge(result, static)
        except Failure as failure:
            raise Failure(f"replayed with new operands: {failure}", failure.findings) from failure


def _others(trial: Trial) -> Iterator[Trial]:
    """The same call with other data. A graph keeps its host arguments, so those of another seed must be the same."""
    wanted, found = options(trial.arguments()), 0
    for seed in range(trial.case.seed + 1, trial.case.seed + 1 + _SEEDS):
        case = dataclasses.replace(trial.case, seed=seed)
        other = Trial(trial.subject, case, trial.oracle, trial.space)
        if found < _REPLAYS and options(other.arguments()) == wanted:
            found += 1
            yield other
    if not found:  # each seed has its own options: at least what the call itself wrote must come again
        yield trial


def no_host_sync(trial: Trial) -> None:
    """A call makes the host wait for nothing: PyTorch's own check raises where it does."""
    arguments = trial.on_device()
    trial.claim(arguments)
    trial.call(trial.on_device())  # the first call may load and plan
    synchronize(trial)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        trial.call(arguments)
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise Failure(f"it claims no_host_sync, and synchronizes: {str(error).splitlines()[0]}") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)
    synchronize(trial)


def _applies(claim: str) -> Any:
    def applies(subject: Subject, space: Space) -> str | None:
        if subject.device.type != "cuda":
            return f"{subject.device.type} has no graphs or streams"
        if claim not in subject.claims:
            return f"does not claim {claim}"
        return None

    return applies


CHECKS = (
    Check(
        "capture", capture, _applies("capturable"), 1, 2, "claim capturable: a CUDA graph, replayed", claim="capturable"
    ),
    Check(
        "no_host_sync",
        no_host_sync,
        _applies("no_host_sync"),
        1,
        2,
        "claim no_host_sync: the host never waits",
        claim="no_host_sync",
    ),
)
