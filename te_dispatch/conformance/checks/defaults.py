# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results do not depend on PyTorch's default dtype and grad mode, which belong to the caller."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import default_dtype, synchronize
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.failures import phrase, place


def defaults(trial: Trial) -> None:
    """Results are right with other defaults. Two are not asked about: torch.autocast (see `below_autograd`), and the
    default device."""
    for dtype in (torch.bfloat16, torch.float64):  # programs that train in 16 bits set the first for all that they make
        _called(trial, f"where the default dtype is {dtype}", default_dtype(dtype))
    _called(trial, "under torch.no_grad()", torch.no_grad())
    _called(trial, "under torch.inference_mode()", torch.inference_mode())


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
