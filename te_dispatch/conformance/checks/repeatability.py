# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Claims about bits: the same call gives the same bits again, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from threading import Event, Thread

import torch

from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.causality import later_rows
from te_dispatch.conformance.checks.sizes import EMULATED_ROWS, ROWS, enlarged, flattened, serves, shape_of
from te_dispatch.conformance.checks.values import synchronize, thread_count
from te_dispatch.conformance.families import gemm_rows
from te_dispatch.conformance.forwards import NotClaimed
from te_dispatch.conformance.memory import same_results
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, moved, tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined

#: A race that shows in one run of ten is found with probability 1 - 0.9^8 = 57% per case.
REPETITIONS = 8
#: Thread counts of the CPU, with each of which every run must give the same bits; libraries may cut a contraction
#: elsewhere with another count.
THREAD_COUNTS, RUNS_PER_COUNT = (1, 2, 3), 3
#: Bytes by which operands are moved away from where an allocator puts them: parts of a cache line, multiples of the 16
#: that a slice of a packed tensor has.
SHIFTS = (32, 16)
#: Seconds after which a case is not repeated any more: interpreted kernels take seconds a call.
_BUDGET_S = 15.0
_LOAD = 192

_Results = Mapping[str, torch.Tensor]


def repeatable(trial: Trial) -> None:
    """The claim ``deterministic``: equal arguments give equal bits, run after run, also beside other work, between
    calls on other data, with each of several thread counts, at other addresses, and on more rows."""
    larger = enlarged(trial)
    _repeat(trial, beside_work=larger is None)
    if larger is not None:
        try:
            _repeat(larger, beside_work=True)
        except Failure as failure:
            raise Failure(f"with {shape_of(larger)}: {failure}") from failure


def _repeat(trial: Trial, beside_work: bool) -> None:
    given, until = trial.on_device(), time.monotonic() + _BUDGET_S
    trial.claim(given)
    first = _run(trial, given)
    other = trial.with_seed(trial.case.seed + 1)
    with _load(trial.device) if beside_work else nullcontext():
        for repetition in range(1, REPETITIONS):
            if repetition > 1 and time.monotonic() > until:
                trial.notes.append(f"repeated {repetition - 1} times only, which took {_BUDGET_S:g} s")
                return
            _compare(first, _run(trial, given), f"in run {repetition + 1} of {REPETITIONS}")
            if repetition == REPETITIONS // 2 and serves(other):
                other.call(other.on_device())
    for count in THREAD_COUNTS if trial.device.type == "cpu" else ():
        with thread_count(count):
            with_count = _run(trial, given)
            for _ in range(RUNS_PER_COUNT - 1):
                _compare(with_count, _run(trial, given), f"from run to run with {count} threads of the CPU")
    for shift in SHIFTS if not trial.space.views else ():
        try:
            at_another = _shifted(given, shift)
            trial.claim(at_another)
            found = _run(trial, at_another)
        except (NotClaimed, Declined, ValueError):
            continue  # operands there are refused, which the check `offset` looks at
        _compare(first, found, f"with operands {shift} bytes further")


def _run(trial: Trial, given: Arguments) -> _Results:
    """Results for fresh copies of the arguments: a forward behind them ran once, for all runs."""
    arguments = moved(given, trial.device)
    result = trial.call(arguments)
    synchronize(trial)
    return {path: tensor.clone() for path, tensor in trial.results(result, arguments).items()}


def _compare(first: _Results, again: _Results, when: str) -> None:
    for path, tensor in first.items():
        if not same_results(tensor, again[path]):
            differing = int((tensor != again[path]).sum())
            raise Failure(f"{path} differs {when} ({differing} elements)")


@contextmanager
def _load(device: torch.device) -> Iterator[None]:
    """Another thread that multiplies matrices meanwhile."""
    stopping = Event()

    def work() -> None:
        x = torch.ones(_LOAD, _LOAD, device=device)
        while not stopping.wait(0.0005):
            float((x @ x).sum())

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _shifted(arguments: Arguments, by: int) -> Arguments:
    def shift(x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or not x.is_contiguous() or by % x.element_size():
            return x
        start = by // x.element_size()
        room = torch.empty(x.numel() + start, dtype=x.dtype, device=x.device)
        return room[start:].view(x.shape).copy_(x)

    shifted: Arguments = mapped(arguments, shift)
    return shifted


def batch_invariant(trial: Trial) -> None:
    """The claim ``batch_invariant``: the first rows of a call equal the same rows computed with fewer rows beside them,
    down to a single one, and with others beside them."""
    half = _half_of(trial.space)
    assert half is not None
    _halve(trial, half)
    _roll(trial, half)
    until = time.monotonic() + _BUDGET_S
    cases = [case for case in (trial, flattened(trial)) if case is not None]
    sizes = EMULATED_ROWS if trial.subject.emulated else ROWS
    if trial.subject.emulated:
        trial.notes.append(f"with up to {max(sizes)} rows, of {max(ROWS)}: the device is emulated")
    for case, rows in itertools.product(cases, sizes):
        larger = enlarged(case, rows)
        if larger is None:
            continue
        try:
            _halve(larger, half)
            _roll(larger, half)
            if rows == sizes[0] and larger.space.batch is not None:
                later_rows(larger)
        except Failure as failure:
            raise Failure(f"with {shape_of(larger)}: {failure}") from failure
        if time.monotonic() > until:
            trial.notes.append(f"up to {shape_of(larger)} only, which took {_BUDGET_S:g} s")
            return


def _halve(trial: Trial, half: Callable[[Arguments], Arguments]) -> None:
    given = trial.arguments()
    arguments = trial.on_device(given)
    trial.claim(arguments)
    whole, before = _run(trial, arguments), _sizes(given)
    while True:
        given = half(given)
        if _sizes(given) == before or 0 in _sizes(given):
            return
        before = _sizes(given)
        arguments = trial.on_device(given)
        trial.claim(arguments)
        for path, part in _run(trial, arguments).items():
            of_whole = whole[path]
            if part.shape == of_whole.shape:
                continue  # a sum over rows, or a scale: not a result per row
            if not same_results(part, of_whole[tuple(map(slice, part.shape))]):
                raise Failure(
                    f"{path}: {part.shape[0]} rows alone differ from the same rows of a call with {of_whole.shape[0]}"
                )


def _roll(trial: Trial, half: Callable[[Arguments], Arguments]) -> None:
    """The last row first: each row's result goes with it, where the oracle says so, and has the same bits."""
    given, of_half = trial.arguments(), half(trial.arguments())
    if 0 in _sizes(of_half):
        return
    fewer = dict(tensors(of_half))
    dims = {path: _halved_dim(x, fewer.get(path)) for path, x in tensors(given)}

    def rolled(arguments: Arguments) -> Arguments:
        new = dict(_rolled(arguments, dims))
        changed: Arguments = mapped(arguments, lambda x: new.get(id(x), x))
        return changed

    other = trial.with_axes(trial.case.values).with_values("rolled", rolled)  # which has the same data
    arguments, part = trial.on_device(given), trial.on_device(of_half)
    trial.claim(arguments)
    first, fewer_rows = _run(trial, arguments), _run(trial, part)
    again = _run(trial, other.on_device())
    for path, whole in first.items():
        dim = _halved_dim(whole, fewer_rows.get(path))
        if dim is None or same_results(whole.roll(1, dim), again[path]):
            continue  # not a result per row, or as it must be
        # Rows that belong together, as those of a sequence, may not go elsewhere: there the oracle's differ, too.
        if same_results(trial.expected()[path].roll(1, dim), other.expected()[path]):
            raise Failure(f"{path}: rows have other bits in another place of the call")


def _rolled(arguments: Arguments, dims: Mapping[str, int | None]) -> Iterator[tuple[int, torch.Tensor]]:
    """The tensors with rows, by id, the last row first."""
    for path, x in tensors(arguments):
        dim = dims.get(path)
        if dim is not None:
            yield id(x), x.roll(1, dim)


def _halved_dim(whole: torch.Tensor, part: torch.Tensor | None) -> int | None:
    """The one dimension that has fewer elements in a call of half of the rows."""
    if part is None or part.dim() != whole.dim():
        return None
    changed = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    return changed[0] if len(changed) == 1 else None


def _sizes(arguments: Arguments) -> list[int]:
    return [tensor.numel() for _, tensor in tensors(arguments)]


def _half_of(space: Space) -> Callable[[Arguments], Arguments] | None:
    """`Space.batch`; of a product of records, whose rows do not share everything that `later_rows` changes, its own."""
    return space.batch or {"gemm": gemm_rows.half}.get(space.operator)


def _claiming(name: str) -> str:
    return f"does not claim {name}"


def _repeatable_applies(subject: Subject, space: Space) -> str | None:
    if subject.emulated:
        return "an emulator executes a launch in the same order every time"
    return None if "deterministic" in subject.claims else _claiming("deterministic")


def _batch_applies(subject: Subject, space: Space) -> str | None:
    if _half_of(space) is None:
        return "a call has no independent rows"
    return None if "batch_invariant" in subject.claims else _claiming("batch_invariant")


CHECKS = (
    Check(
        "repeatable",
        repeatable,
        _repeatable_applies,
        1,
        4,
        "claim deterministic: equal bits run after run",
        claim="deterministic",
    ),
    Check(
        "batch_invariant",
        batch_invariant,
        _batch_applies,
        1,
        4,
        "claim batch_invariant: rows do not see others",
        claim="batch_invariant",
    ),
)
