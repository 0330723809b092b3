# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results do not depend on PyTorch's default dtype, its grad mode, or whether it is to refuse operators whose results
differ from run to run: these belong to the caller."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import default_dtype, deterministic_algorithms, synchronize
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.failures import phrase, place


class _Passing(TorchFunctionMode):
    """Sees all functions of PyTorch that are called, and changes none."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def defaults(trial: Trial) -> None:
    """Results are right with other defaults. Two are not asked about: torch.autocast (see `below_autograd`), and the
    default device."""
    for dtype in (torch.bfloat16, torch.float64):  # programs that train in 16 bits set the first for all that they make
        _called(trial, f"where the default dtype is {dtype}", default_dtype(dtype))
    _called(trial, "under torch.no_grad()", torch.no_grad())
    _called(trial, "under torch.inference_mode()", torch.inference_mode())
    _called(trial, "under torch.autograd.detect_anomaly()", torch.autograd.set_detect_anomaly(True))
    _called(trial, "in a mode of __torch_function__", _Passing())
    if "deterministic" in trial.subject.claims:
        _called(trial, "under torch.use_deterministic_algorithms(True)", deterministic_algorithms())


def _called(trial: Trial, where: str, setting: AbstractContextManager[object]) -> None:
    arguments = trial.on_device()
    trial.claim(arguments)
    try:
        with setting:
            result = trial.call(arguments)
        synchronize(trial)
        trial.judge(result, arguments)
    except Failure as failure:
        raise Failure(f"{where}: {failure}", failure.findings) from failure
    except (RuntimeError, TypeError) as error:
        raise Failure(f"{where}: {phrase(error)}{place(error)}") from error


CHECKS = (Check("defaults", defaults, anywhere, 1, 2, "calls with another default dtype or grad mode", of_forms=True),)
