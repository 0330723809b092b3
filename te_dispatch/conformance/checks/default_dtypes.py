# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results do not depend on PyTorch's default dtype, which belongs to the caller."""

from __future__ import annotations

import torch

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import default_dtype, synchronize
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.failures import phrase, place

#: Programs that train in 16 bits set the first for all that they make.
_DTYPES = (torch.bfloat16, torch.float64)


def default_dtypes(trial: Trial) -> None:
    """Results are right with other default dtypes. torch.autocast is not asked about: see `without_autocast`."""
    for dtype in _DTYPES:
        arguments = trial.on_device()
        trial.claim(arguments)
        try:
            with default_dtype(dtype):
                result = trial.call(arguments)
            synchronize(trial)
            trial.judge(result, arguments)
        except Failure as failure:
            raise Failure(f"where the default dtype is {dtype}: {failure}", failure.findings) from failure
        except (RuntimeError, TypeError) as error:
            raise Failure(f"where the default dtype is {dtype}: {phrase(error)}{place(error)}") from error


CHECKS = (
    Check(
        "default_dtypes",
        default_dtypes,
        anywhere,
        1,
        2,
        "calls with other default dtypes",
        of_forms=True,
    ),
)
