# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a caller has set for PyTorch's own operators: an operator of te_dispatch reads its arguments alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import synchronize
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.failures import phrase, place


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: Programs that train in 16 bits set the first for all that they make.
_DTYPES = (torch.bfloat16, torch.float64)


def surroundings(trial: Trial) -> None:
    """Results are right with other default dtypes. torch.autocast is not asked about: see `outside_autocast`."""
    for dtype in _DTYPES:
        arguments = trial.on_device()
        trial.claim(arguments)
        try:
            with _default_dtype(dtype):
                result = trial.call(arguments)
            synchronize(trial)
            trial.judge(result, arguments)
        except Failure as failure:
            raise Failure(f"where the default dtype is {dtype}: {failure}", failure.findings) from failure
        except (RuntimeError, TypeError) as error:
            raise Failure(f"where the default dtype is {dtype}: {phrase(error)}{place(error)}") from error


CHECKS = (
    Check(
        "surroundings",
        surroundings,
        anywhere,
        1,
        2,
        "calls with other default dtypes",
        of_forms=True,
    ),
)
