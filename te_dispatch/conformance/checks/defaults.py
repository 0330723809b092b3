# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results do not depend on PyTorch's default dtype and device, its autocast and grad mode, or whether it is to refuse
operators whose results differ from run to run: these belong to the caller."""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.sizes import enlarged, in_fp32
from te_dispatch.conformance.checks.values import (
    default_dtype,
    deterministic_algorithms,
    setting,
    synchronize,
    thread_count,
)
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.conformance.world import attribute
from te_dispatch.core.failures import phrase, place


@contextmanager
def _other_settings() -> Iterator[None]:
    """A block in which global state is not as PyTorch starts with it. `Trial.call` sees whether a call leaves it so:
    who sets a default, or puts back less than was changed, does not."""
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for read, write, value in _SETTINGS:
            undo.enter_context(setting(read, write, value))
        undo.enter_context(thread_count(3))
        undo.enter_context(default_dtype(torch.float64))
        yield


#: Calls that no other check makes have this many rows and, by their case, up to so many times 2 more.
_FIRST_ROWS, _FIRST_SIZES = 138, 50
#: (reader, writer, another value than PyTorch's own). None of them changes which results are right.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    (torch.is_warn_always_enabled, torch.set_warn_always, True),
    (sys.getrecursionlimit, sys.setrecursionlimit, 3000),
    (*attribute(torch.backends.cudnn, "benchmark"), True),
    (*attribute(torch.backends.mkldnn, "deterministic"), True),
    (*attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"), False),
)


class _Passing(TorchFunctionMode):
    """Sees all functions of PyTorch that are called, and changes none."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def defaults(trial: Trial) -> None:
    """Results are right with other defaults, and under torch.autocast (`below_autograd`)."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # the first two for training in 16 bits
        _called(trial, f"where the default dtype is {dtype}", default_dtype(dtype))
    kind, precise = trial.device.type, in_fp32(trial) or trial
    for dtype in (torch.bfloat16, torch.float16) if torch.amp.is_autocast_available(kind) else ():
        _called(precise, f"under torch.autocast to {dtype}", torch.autocast(kind, dtype))
    _called(trial, "under torch.no_grad()", torch.no_grad())
    _called(trial, "under torch.inference_mode()", torch.inference_mode())
    anomaly = setting(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True)
    _called(trial, "under torch.autograd.detect_anomaly()", anomaly)
    _called(trial, "in a mode of __torch_function__", _Passing())
    # Where nothing lies: what is made there by mistake cannot be computed with.
    _called(trial, "where the default device is meta", torch.device("meta"))
    _called(trial, "in a process with other settings than PyTorch's", _other_settings())
    precision = setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high")
    _called(trial, "with the precision of float32 products at high", precision, judged=False)
    if "deterministic" in trial.subject.claims:
        _called(trial, "under torch.use_deterministic_algorithms(True)", deterministic_algorithms())


def _called(trial: Trial, where: str, block: AbstractContextManager[object], judged: bool = True) -> None:
    """A call in a block. Global state is compared before and after it; its results where they are `judged`."""
    arguments = trial.on_device()
    trial.claim(arguments)
    try:
        with block:
            result = trial.call(arguments)
        synchronize(trial)
        if judged:
            trial.judge(result, arguments)
    except Failure as failure:
        raise Failure(f"{where}: {failure}", failure.findings) from failure
    except (RuntimeError, TypeError) as error:
        raise Failure(f"{where}: {phrase(error)}{place(error)}") from error


def inference_first(trial: Trial) -> None:
    """A call behind one under torch.inference_mode(), with nothing kept from before: what the first one keeps, a
    workspace or a table, cannot be written outside of that mode if it was allocated in it.

    The thread is new, and where the space has sizes that can be chosen, so are these.
    """
    new = enlarged(trial, _FIRST_ROWS + 2 * (zlib.crc32(str(trial.case).encode()) % _FIRST_SIZES), sure=False)

    def both() -> None:
        _called(new or trial, "under torch.inference_mode(), as the first call", torch.inference_mode())
        _called(new or trial, "behind a first call under torch.inference_mode()", nullcontext())

    with ThreadPoolExecutor(1) as thread:
        thread.submit(both).result()


CHECKS = (
    Check(
        "defaults", defaults, anywhere, 1, 2, "calls with other defaults, and under torch.autocast", of_forms=True
    ),
    Check(
        "inference_first", inference_first, anywhere, 0, 1, "a call behind a first one under torch.inference_mode()"
    ),
)  # fmt: skip
