# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What an implementation keeps between calls: it is never found under too little, and never grows.

A cache may be keyed by an address, a shape, or a tensor's identity and count of writes. All of these stay the same
where a kernel writes new data, or one scale, into the same memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.checks.values import synchronize, thread_count
from te_dispatch.conformance.coverage import Operand
from te_dispatch.conformance.oracle import Oracle
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, moved, options, tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined
from te_dispatch.core.memory import ANY
from te_dispatch.numerics.quantized import Quantized

#: Seeds among which data of the same options are looked for.
_SEEDS = 16
_SCALES = ("scale", "row_scale_inv", "col_scale_inv", "global_scale_inv")
#: Calls of one case, of which the last are judged: behaviour that changes after some warm-up is behind a hundred.
CALLS = 150
#: Calls between two looks at what was left behind, and how many such looks follow one another.
_ROUND, _ROUNDS = 24, 16
#: Seconds after which a case is not called any more: interpreted kernels take seconds a call.
_BUDGET_S = 10.0


class Rescaled(Trial):
    """A trial all of whose scales are half of what they were, and nothing else."""

    def arguments(self) -> Arguments:
        given = super().arguments()
        for scale in scales_of(given):
            scale.mul_(0.5)
        return given

    def expected(self) -> dict[str, torch.Tensor]:
        own = Oracle(self.oracle.manager, self.oracle.backend, str(self.oracle.device))
        return own.results(self.space, self.case, self.arguments)


def scales_of(arguments: Arguments) -> list[torch.Tensor]:
    """Each scale among the arguments once."""
    found = [
        (path, tensor)
        for path, tensor in tensors(dict(arguments))
        if path.rpartition(".")[2] in _SCALES and "." in path and tensor.dtype == torch.float32
    ]
    return list({tensor.data_ptr(): tensor for _, tensor in found}.values())


def same_memory(trial: Trial) -> None:
    """Calls on the same memory: with the contents of another case, then with other scales alone, and through new
    tensors on that memory with the first contents again; and in the same lists and records, with other tensors."""
    given = trial.arguments()
    there = moved(given, trial.device)
    call_again(trial, there, "")
    other = alike(trial, given)
    if other is None:
        trial.notes.append("no other data of the same options was found, so contents were not exchanged")
    else:
        write(there, other.arguments())
        call_again(other, there, "after other contents were written into the same memory: ")
    current = other or trial
    if scales_of(current.arguments()):
        rescaled = Rescaled(current.subject, current.case, current.oracle, current.space)
        write(there, rescaled.arguments())
        call_again(rescaled, there, "after scales alone were changed in the same memory: ")
    write(there, given)
    call_again(trial, mapped(there, _again), "through new tensors on the same memory, with its first contents: ")
    if other is not None and any(map(_holds_tensors, there.values())):
        refilled = {
            name: _refilled(there.get(name), value) for name, value in moved(other.arguments(), trial.device).items()
        }
        call_again(other, refilled, "in the same lists and records, which hold other tensors now: ")


def restrided(trial: Trial) -> None:
    """Calls on the same memory through the transposes of its square operands, one after the other."""
    there = moved(trial.arguments(), trial.device)
    call_again(trial, there, "")
    square = [name for name in _any_strides(trial.subject) if isinstance(there.get(name), torch.Tensor)]
    square = [name for name in square if there[name].is_floating_point() and _is_square(tuple(there[name].shape))]
    if not square:
        trial.notes.append("no operand is square")
    same = trial.with_axes(trial.case.values)  # the same data under other names
    for name in square:
        other = same.with_values(f"transposed_{name}", functools.partial(_transposed, name, True))
        call_again(other, _transposed(name, False, there), f"through the transpose of {name}: ")
    call_again(trial, there, "behind calls through transposes: ")


def _is_square(shape: tuple[int, ...] | None) -> bool:
    return shape is not None and len(shape) > 1 and shape[-1] == shape[-2] > 1


def _any_strides(subject: Subject) -> list[str]:
    return [name for name, form in subject.operator.memory.items() if form == ANY]


def _transposed(name: str, copied: bool, given: Arguments) -> Arguments:
    """With an operand's transpose in its place: a view, or a copy."""
    view = given[name].mT
    return {**given, name: view.contiguous() if copied else view}


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, Quantized) or (isinstance(value, list) and any(True for _ in tensors({"": value})))


def _refilled(old: Any, new: Any) -> Any:
    """The old list or record with what is in the new one; anything else is the new one."""
    if isinstance(old, list) and isinstance(new, list):
        old[:] = new
        return old
    if isinstance(old, Quantized) and isinstance(new, Quantized):
        for name in Quantized.__slots__:
            setattr(old, name, getattr(new, name))
        return old
    return new


def _again(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
    )


def alike(trial: Trial, given: Arguments) -> Trial | None:
    wanted = options(given)
    for seed in range(trial.case.seed + 1, trial.case.seed + 1 + _SEEDS):
        other = trial.with_seed(seed)
        if options(other.arguments()) == wanted:
            return other
    return None


def write(there: Arguments, fresh: Arguments) -> None:
    """New contents, written as a kernel writes them: PyTorch's count of the writes stays as it is."""
    new = dict(tensors(fresh))
    for path, tensor in tensors(there):
        tensor.data.copy_(new[path])


def call_again(trial: Trial, there: Arguments, when: str) -> None:
    """Judge a call on tensors that earlier calls may have had, and put back what it wrote.

    Args:
        there: on the subject's device.
        when: before what is wrong, in messages.
    """
    arguments = trial.with_forward(there)
    trial.claim(arguments)
    result = trial.call(arguments)
    synchronize(trial)
    try:
        trial.judge(result, arguments)
    except Failure as failure:
        raise Failure(f"{when}{failure}", failure.findings) from failure
    if trial.subject.operator.mutates:  # what the call wrote is no part of the next one's arguments
        write(there, trial.arguments())


def turned(trial: Trial) -> None:
    """Calls on the same memory, in which the integers that say where groups or sequences lie became others."""
    assert trial.space.turned is not None
    same = trial.with_axes(trial.case.values)  # the same data under another name
    given, other = same.arguments(), same.with_values("turned", trial.space.turned.arguments)
    fresh = other.arguments()
    before = dict(tensors(given))
    if all(torch.equal(tensor, before[path]) for path, tensor in tensors(fresh) if not tensor.is_floating_point()):
        trial.notes.append("groups or sequences that read the same from behind")
        return
    there = moved(given, trial.device)
    call_again(same, there, "")
    write(there, fresh)
    call_again(other, there, "after other integers were written into the same memory: ")


def fewer_rows(trial: Trial) -> None:
    """A call with half of the rows of the last one, and the first one again: a workspace is cleared for each."""
    half = trial.space.batch
    assert half is not None
    part = trial.with_values("half", half)
    for one, when in ((trial, ""), (part, "after a call with twice as many rows: "), (trial, "after fewer rows: ")):
        call_again(one, moved(one.arguments(), one.device), when)


def many_calls(trial: Trial) -> None:
    """A case called again and again: late results are right, and neither results nor anything of Python's is kept."""
    with thread_count(1):  # small calls do not gain by more
        _call_often(trial)
        require_operands_freed(trial)


def _call_often(trial: Trial) -> None:
    arguments = trial.on_device()
    trial.claim(arguments)
    host, until = trial.arguments(), time.monotonic() + _BUDGET_S
    renewed = bool(trial.subject.operator.mutates) and trial.space.forward is None
    references: list[StorageWeakRef] = []
    blocks: list[tuple[int, int]] = []
    for number in range(1, CALLS + 1):
        if renewed:
            write(arguments, host)
        result = trial.call(arguments)
        late = number > CALLS - 2
        if late or time.monotonic() > until:
            synchronize(trial)
            _judge(trial, result, arguments, number)
            if not late:
                trial.notes.append(f"called {number} times only, which took {_BUDGET_S:g} s")
                break
        if number <= _ROUND:
            made = trial.results(result, arguments).values()
            owned = {x.untyped_storage().data_ptr() for _, x in tensors(dict(arguments))}
            fresh = [x.untyped_storage() for x in made if x.numel() and x.untyped_storage().data_ptr() not in owned]
            references += [StorageWeakRef(storage) for storage in fresh[:1]]  # type: ignore[no-untyped-call]
            del made, fresh
        del result
        if number == _ROUND:
            _require_freed(references, "results")
        if number in (CALLS - _ROUND, CALLS):
            blocks.append((sys.getallocatedblocks(), _open_files()))
    if len(blocks) < 2:
        return
    (blocks_before, files_before), (blocks_after, files_after) = blocks
    if files_after - files_before >= _ROUND:
        raise Failure(f"every call leaves a file open: {files_after - files_before} more after {_ROUND} calls")
    if blocks_after - blocks_before >= _ROUND:
        _require_no_growth(lambda: trial.call(arguments))


def _open_files() -> int:
    """Of this process; 0 where the system does not list them."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def require_operands_freed(trial: Trial, make: Callable[[], Arguments] | None = None, what: str = "operands") -> None:
    """Operands that are new in every call, as activations are, are freed when the call is over, whether it returned or
    raised: nothing holds a reference to them, and no reference cycle does until Python looks for cycles.

    Args:
        make: fresh arguments on the device; None for the trial's.
        what: what they are, in the message.
    """
    references: list[StorageWeakRef] = []
    until = time.monotonic() + _BUDGET_S / 4
    with _no_collection():
        for count in range(_ROUND):
            if count > 1 and time.monotonic() > until:
                break
            references += _called_once(trial, make or trial.on_device)
        kept = sum(not reference.expired() for reference in references)  # type: ignore[no-untyped-call]
    if not kept:
        return
    gc.collect()
    cyclic = all(reference.expired() for reference in references)  # type: ignore[no-untyped-call]
    raise Failure(
        f"{kept} of {len(references)} {what} are kept alive when the calls are over"
        + (", until Python collects reference cycles" if cyclic else "")
    )


def _called_once(trial: Trial, make: Callable[[], Arguments]) -> list[StorageWeakRef]:
    """References to the memory of the operands of a call that is over."""
    arguments = make()
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for _, x in tensors(dict(arguments))}
    references = [StorageWeakRef(storage) for storage in storages.values()]  # type: ignore[no-untyped-call]
    with contextlib.suppress(Declined, ValueError):
        trial.call(arguments)
    return references


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A block in which Python does not look for reference cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _require_no_growth(call: Callable[[], Any]) -> None:
    """Looked at closely only where the number of objects grew: a collection of cycles takes longer than most cases.

    What is kept once for each address, say, grows ever more slowly; what each call leaves behind does not.
    """
    growth: list[int] = []
    while len(growth) < _ROUNDS:
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(_ROUND):
            call()
        gc.collect()
        growth.append(sys.getallocatedblocks() - before)
        if growth[-1] < _ROUND:
            return
    raise Failure(f"every call leaves Python objects behind: {growth} more after each {_ROUND} calls")


def _judge(trial: Trial, result: Any, arguments: Arguments, number: int) -> None:
    try:
        trial.judge(result, arguments)
    except Failure as failure:
        raise Failure(f"in call {number} of the same arguments: {failure}", failure.findings) from failure


def _require_freed(references: list[StorageWeakRef], what: str) -> None:
    def count() -> int:
        return sum(not reference.expired() for reference in references)  # type: ignore[no-untyped-call]

    if count() > len(references) // 2:
        gc.collect()
    kept = count()
    if kept > len(references) // 2:
        raise Failure(f"{kept} of {len(references)} {what} are kept alive after their callers dropped them")


def keepable(subject: Subject, space: Space) -> str | None:
    return "operands are views of one tensor, as an argument promises" if space.views else anywhere(subject, space)


def _may_be_square(subject: Subject, space: Space) -> str | None:
    if subject.operator.backward:
        return "a backward reads what its forward made of its other operands"
    if space.views:
        return "operands are views of one tensor, as an argument promises"
    return None if _any_strides(subject) else "no operand may have any strides"


def _shows_square(subject: Subject, space: Space, operands: Mapping[str, Operand]) -> bool:
    return any(name in operands and _is_square(operands[name].shape) for name in _any_strides(subject))


def _turns(subject: Subject, space: Space) -> str | None:
    return None if space.turned is not None else "no integers say where operands lie"


def _can_turn(subject: Subject, space: Space, operands: Mapping[str, Operand]) -> bool:
    assert space.turned is not None
    integers = any(one.dtype in (torch.int32, torch.int64) for one in operands.values())
    return integers and operands.keys().isdisjoint(space.turned.unless)


def _has_rows(subject: Subject, space: Space) -> str | None:
    return None if space.batch is not None else "a call has no independent rows"


CHECKS = (
    Check("fewer_rows", fewer_rows, _has_rows, 1, 2, "a call behind one with more rows"),
    Check(
        "same_memory", same_memory, keepable, 1, 3, "the same memory with other contents, or other scales alone",
        of_forms=True,
    ),
    Check(
        "restrided", restrided, _may_be_square, 0, 2, "the same memory through other strides", shows=_shows_square,
    ),
    Check("turned", turned, _turns, 1, 4, "the same memory with other groups or sequences", shows=_can_turn),
    Check("many_calls", many_calls, anywhere, 0, 1, "the results of late calls, and what calls leave behind"),
)  # fmt: skip
