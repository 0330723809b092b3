# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The check that every case gets: form, numbers, and what became of memory."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from te_dispatch.conformance.checks import Check, anywhere
from te_dispatch.conformance.memory import GuardedMemory, overlapping, same_bits, unwritten
from te_dispatch.conformance.outputs import ARGUMENT
from te_dispatch.conformance.space import Arguments
from te_dispatch.conformance.transfer import mapped, tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.conformance.uninitialized import Uninitialized
from te_dispatch.core.errors import Declined
from te_dispatch.ops.results import Saved

#: NaN in every float format and a large code in every FP8 one; and a byte that reads as an ordinary number.
POISONS = (0xFF, 0x5A)

_Result = TypeVar("_Result")
_Value = TypeVar("_Value")


def values(trial: Trial) -> None:
    """Shape function, numbers, canaries, unwritten elements, and inputs left alone; and numbers once more in another
    thread, as autograd calls every backward in one of its own."""
    first = _call(trial, POISONS[0], _here)
    trial.judge(*first)
    second = _call(trial, POISONS[1], _elsewhere)
    made = [trial.results(*call) for call in (first, second)]
    reused = _reused_memory(_made(made[0]), _made(made[1]))
    if reused is not None:
        raise Failure(reused)
    for path, one in made[0].items():
        other = made[1].get(path)
        if other is None or other.shape != one.shape or not one.numel():
            continue
        missed = unwritten(one, other, POISONS)
        if bool(missed.any()):
            index = tuple(int(i) for i in missed.nonzero()[0])
            raise Failure(f"{path}{list(index)} was never written ({int(missed.sum())} of {missed.numel()} elements)")
    if made[0].keys() != made[1].keys() or not all(same_bits(made[0][path], made[1][path]) for path in made[0]):
        try:
            trial.judge(*second)
        except Failure as failure:
            raise Failure(f"called again, in another thread: {failure}", failure.findings) from failure
        if "deterministic" in trial.subject.claims and torch.get_num_threads() == _thread_count():
            raise Failure("the second call gave other bits than the first, and it claims to be deterministic")


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """One for all calls: each has threads of its own for PyTorch's operators, which are dear to start."""
    return ThreadPoolExecutor(1, "conformance")


def _thread_count() -> int:
    """Threads of the CPU's operators in that thread."""
    return _thread().submit(torch.get_num_threads).result()


def _here(device: torch.device, call: Callable[[], _Result]) -> _Result:
    return call()


def _elsewhere(device: torch.device, call: Callable[[], _Result]) -> _Result:
    """What a function returns in another thread, on the same device. A backward's forward ran in this one."""

    def on_device() -> _Result:
        if device.type != "cpu" and device.index is not None:
            torch.accelerator.set_device_index(device.index)
        return call()

    return _thread().submit(on_device).result()


def _call(trial: Trial, poison: int, run: Callable[..., Any]) -> tuple[Any, Arguments]:
    arguments = trial.on_device()
    trial.claim(arguments)
    before = fingerprints(trial, arguments)
    whole = {path: tensor.detach().clone() for path, tensor in tensors(dict(arguments))}
    with GuardedMemory(poison) as memory:
        arguments = _guarded(trial, arguments, memory)
        versions = _versions(arguments)
        expected_form = trial.expected_form(arguments)
        try:
            hooked = poison == POISONS[1]
            result, watched = run(trial.device, functools.partial(_watched, trial, arguments, hooked))
        except Declined as declined:
            synchronize(trial)
            if changed_inputs(whole, arguments):
                raise Failure(f"declined ({declined}) after it had written") from declined
            raise
        synchronize(trial)
        overruns = memory.overruns()
    if overruns:
        raise Failure("; ".join(overruns))
    trial.require_form(result, arguments, expected_form)
    state = arguments.get("rng_state")
    if isinstance(state, torch.Tensor) and any(overlapping(x, state) for x in _saved(result)):
        raise Failure("saved holds the caller's rng_state, which moves on: a backward is given its own")
    changed = changed_inputs(before, arguments)
    if changed:
        raise Failure(f"inputs were changed: {', '.join(changed)}")
    after = _versions(arguments)
    written = [path for path in before if after[path] != versions[path]]
    if written:
        raise Failure(f"inputs were written to, and then put back: {', '.join(written)}")
    given = [path for path, tensor in tensors(dict(arguments)) if tensor.is_leaf and tensor.grad is not None]
    if given:
        raise Failure(f"{given[0]} was given a gradient: operators are below autograd")
    made = _made(trial.results(result, arguments))
    given_out = [one.whole for one in memory.allocations]
    unguarded = watched.unfilled(made, [*given_out, *(x for _, x in tensors(dict(arguments)))])
    if unguarded is not None:
        raise Failure(f"{unguarded} was written into memory that did not come from te_dispatch.ops.alloc.empty")
    unused = memory.unused(tensor for _, tensor in tensors(result))
    if unused is not None:
        raise Failure(f"{unused} was allocated and is no result: memory that nobody sees has the role workspace")
    marked = [path for path, tensor in made.items() if vars(tensor)]
    if marked:
        names = ", ".join(vars(made[marked[0]]))
        raise Failure(f"{marked[0]} has attributes of its own ({names}), and keeps what they are alive")
    recorded = [path for path, tensor in made.items() if tensor.requires_grad]
    if recorded:
        raise Failure(f"{recorded[0]} requires a gradient: operators are below autograd")
    closed = [path for path, tensor in made.items() if tensor.is_inference()]
    if closed:
        raise Failure(f"{closed[0]} is a tensor of inference mode, which autograd cannot save for a backward")
    return result, arguments


def _saved(result: Any) -> list[torch.Tensor]:
    """The tensors of a result's `Saved`."""
    items = result if isinstance(result, tuple) else ()
    return [x for item in items if isinstance(item, Saved) for x in item.tensors if x is not None]


def _watched(trial: Trial, arguments: Arguments, hooked: bool) -> tuple[Any, Uninitialized]:
    """Call; `hooked`: where a caller's hooks change what autograd saves, which an operator, below autograd, does not
    see."""
    hooks = torch.autograd.graph.saved_tensors_hooks(_lost, lambda x: x) if hooked else nullcontext()
    with hooks, Uninitialized() as watched:
        return trial.call(arguments), watched


def _lost(x: torch.Tensor) -> torch.Tensor:
    return torch.full_like(x, torch.nan) if x.is_floating_point() else torch.zeros_like(x)


def _guarded(trial: Trial, arguments: Arguments, memory: GuardedMemory) -> Arguments:
    """With guards around what the operator writes into: it was not the implementation that allocated it."""
    written = {name.partition(".")[0] for name in trial.subject.operator.mutates}
    return {
        name: mapped(value, functools.partial(memory.around, name)) if name in written else value
        for name, value in arguments.items()
    }


def _reused_memory(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> str | None:
    """Which result of a call lies in memory that the call before gave out, and that is still in use."""
    for path, result in other.items():
        for earlier, tensor in one.items():
            if overlapping(result, tensor):
                return f"{path} lies in memory that an earlier call gave out as {earlier}"
    return None


def _made(results: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {path: tensor for path, tensor in results.items() if not path.startswith(ARGUMENT)}


def synchronize(trial: Trial) -> None:
    """Wait for the device, so that what a kernel did is seen, and an asynchronous error belongs to this call."""
    if trial.device.type != "cpu":
        torch.accelerator.synchronize(trial.device)


def thread_count(count: int) -> AbstractContextManager[None]:
    """A block in which the CPU's operators run on so many threads."""
    return setting(torch.get_num_threads, torch.set_num_threads, count)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """A block in which PyTorch's default dtype is another."""
    return setting(torch.get_default_dtype, torch.set_default_dtype, dtype)


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """A block in which PyTorch's operators raise where they are not deterministic. Those of cuBLAS ask for a variable
    of the environment then."""
    variable = "CUBLAS_WORKSPACE_CONFIG"
    before = os.environ.get(variable)
    os.environ[variable] = before or ":4096:8"
    try:
        with setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True):
            yield
    finally:
        if before is None:
            del os.environ[variable]


@contextmanager
def setting(read: Callable[[], _Value], write: Callable[[_Value], Any], value: _Value) -> Iterator[None]:
    """A block in which a global setting has a value; behind it, the one that it had."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def fingerprints(trial: Trial, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of every tensor among the arguments that the operator must leave alone."""
    written = trial.subject.operator.mutates
    return {
        path: tensor.detach().clone()
        for path, tensor in tensors(dict(arguments))
        if not any(_unnumbered(path) == name or _unnumbered(path).startswith(f"{name}.") for name in written)
    }


def _versions(arguments: Mapping[str, Any]) -> dict[str, int]:
    """PyTorch's count of the writes to each tensor among the arguments."""
    return {path: tensor._version for path, tensor in tensors(dict(arguments)) if not tensor.is_inference()}


def _unnumbered(path: str) -> str:
    """``quantizers.amax`` of ``quantizers.0.amax``: what `Operator.mutates` calls it."""
    return ".".join(part for part in path.split(".") if not part.isdigit())


def changed_inputs(before: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> list[str]:
    """Paths of the arguments that are not what they were, by bits."""
    after = dict(tensors(dict(arguments)))
    return [path for path, old in before.items() if not same_bits(old, after[path])]


CHECKS = (
    Check("values", values, anywhere, None, None, "results, shapes, canaries, unwritten elements, inputs unchanged"),
)
