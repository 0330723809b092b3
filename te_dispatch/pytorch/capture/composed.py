# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of a module that is made of others, replayed as one autograd Function.

A transformer layer calls four modules whose Functions are replayed by themselves. From the second call with a signature
on, what all of them compute is recorded in one program, forward and backward: the layer then costs the host one lookup
and one Function. A layer with a hook on one of its parts, with a part of another class, with dropout, or whose forward
does what a `te_dispatch.pytorch.capture.tape.Tape` cannot repeat, stays with the Functions of its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import are_deterministic_algorithms_enabled, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from te_dispatch.core import scopes
from te_dispatch.core.watched import reload_changed
from te_dispatch.ops.checks.guards import PLAIN, Guard, guard_for
from te_dispatch.pytorch.autograd import apply
from te_dispatch.pytorch.autograd.scoped import in_forward_scope_as_is
from te_dispatch.pytorch.capture.program import Program, record_forward
from te_dispatch.pytorch.capture.recorder import NotRepeatable, Recorder
from te_dispatch.pytorch.capture.signatures import SignatureCache, capturable, unwatched
from te_dispatch.pytorch.capture.statistics import STATISTICS
from te_dispatch.pytorch.capture.tape import Calls, Tape
from te_dispatch.pytorch.composable import Composable, classes
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.step import thread as step_thread
from te_dispatch.torch_private import global_module_hooks, will_execute

#: Calls that could not be recorded which a module remembers.
_MAX_REFUSED = 64
_NONE: tuple[torch.Tensor, ...] = ()
#: Where a call has a tensor among its other arguments.
_TENSOR = object()


class _Member(NamedTuple):
    """A part as it was when a call was recorded."""

    module: Composable
    kind: type[torch.nn.Module]
    changes: int
    captured: Any
    siblings: dict[str, torch.nn.Module | None]
    name: str

    def same(self, training: bool) -> bool:
        module = self.module
        own = module.__dict__
        return (
            module.__class__ is self.kind
            and own["changes"] == self.changes
            and own["training"] is training
            and self.siblings.get(self.name) is module
            and not own["_forward_hooks"]
            and not own["_forward_pre_hooks"]
            and not own["_backward_hooks"]
            and not own["_backward_pre_hooks"]
            and module.captured_with() is self.captured
        )


def _members(module: torch.nn.Module) -> tuple[_Member, ...] | None:
    """All parts; None where one, or the module, is of a class that is not known: it may do more than a tape sees."""
    if type(module) not in classes:
        return None
    found = []
    for parent in module.modules():
        for name, part in parent._modules.items():
            if part is None:
                continue
            if type(part) not in classes:
                return None
            assert isinstance(part, Composable)
            found.append(_Member(part, type(part), part.changes, part.captured_with(), parent._modules, name))
    training = module.training
    return tuple(found) if all(member.same(training) for member in found) else None


class _Run:
    """A call of `_Composed` beside tensors.

    Attributes:
        forward: what is to be recorded; None once it was.
        program: that replays it; None until it was recorded, and where it cannot be repeated.
        groups: scales that it notes amaxes for.
    """

    __slots__ = ("forward", "program", "groups")

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.forward: Callable[[], Any] | None = forward
        self.program: Program | None = None
        self.groups: Sequence[Any] = ()


class _Composed(torch.autograd.Function):
    """(x, run, tensors..) -> what the module returns."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run, *tensors: torch.Tensor) -> Any:
        program = run.program
        if program is not None:
            ctx.program, ctx.scope = program, program.scope
            return program.forward(ctx, x, *tensors)
        forward, run.forward = run.forward, None  # the graph that keeps it must not keep the module
        assert forward is not None
        names = ["x", *(f"t{i}" for i in range(len(tensors)))]
        plain = functools.partial(_recorded, forward, run)
        result, run.program = record_forward(plain, _backward, names, ctx, (x, *tensors))
        ctx.program = run.program
        return result

    @staticmethod
    @in_forward_scope_as_is
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        program: Program | None = ctx.program
        wanted = [node is None or _executes(node) for node, _ in ctx.next_functions]
        if False not in wanted:
            return _backward(ctx, *gradients) if program is None else program.backward(ctx, *gradients)
        if program is not None:
            ctx.calls = program.attributes["calls"]
        return _backward(ctx, *gradients, wanted=wanted)


def _recorded(forward: Callable[[], Any], run: _Run, ctx: Any, *tensors: torch.Tensor) -> Any:
    """The forward, of whose calls the recorder of this thread is told."""
    recorder = step_thread.recorder
    assert isinstance(recorder, Recorder)
    first, _, *others = ctx.needs_input_grad
    tape = Tape(tensors, (first, *others), recorder)
    result = tape.run(forward)
    ctx.calls = tape.calls(result)
    ctx.save_for_backward(*tape.saved)
    ctx.scope = scopes.capture()
    run.groups = tape.groups
    return result


def _backward(
    ctx: Any, gradient: torch.Tensor, wanted: Sequence[bool] | None = None
) -> tuple[torch.Tensor | None, ...]:
    calls: Calls = ctx.calls
    dx, *others = calls.backward(ctx, gradient, wanted)
    return dx, None, *others


def _executes(node: Any) -> bool:
    """Whether the pass that runs, which may be for some gradients alone, needs a node's."""
    assert will_execute is not None
    try:
        return will_execute(node)
    except RuntimeError:  # a leaf whose gradient is asked for
        return True


_run_composed = apply.applied(_Composed)


class _Signature(NamedTuple):
    """Of recorded calls.

    Attributes:
        state: the autocast's, None outside any. scope: the bindings. key: what else a call has beside tensors.
        arity, guard: whether tensors are as many, and have the metadata of the recorded call's.
        changes: of the module. members: its parts. training: of all of them.
        run: what replays it.
    """

    state: Any
    scope: Any
    key: tuple[Any, ...]
    arity: int
    guard: Guard
    changes: int
    members: tuple[_Member, ...]
    training: bool
    run: _Run


class ComposedCalls:
    """The recorded calls of one module."""

    __slots__ = ("signatures", "_before", "_refused")

    def __init__(self) -> None:
        self.signatures = SignatureCache()
        #: The call before: one that came twice is worth recording.
        self._before: Any = None
        self._refused: set[Any] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return ComposedCalls, ()  # copies of a module record for themselves

    def call(self, module: Composable, forward: Callable[..., Any], x: torch.Tensor, others: Mapping[str, Any]) -> Any:
        """forward(module, x, **others), replayed where such a call was recorded."""
        reload_changed(scopes.MANAGER)
        if not unwatched() or global_module_hooks():
            return forward(module, x, **others)
        shape, given = x.shape, _NONE
        state, scope = thread.state, scopes.capture()
        key: tuple[Any, ...] = (are_deterministic_algorithms_enabled(),)
        if others:
            given = tuple([value for value in others.values() if isinstance(value, torch.Tensor)])
            key += tuple([(n, _TENSOR if isinstance(v, torch.Tensor) else v) for n, v in others.items()])
        signatures = self.signatures
        entries = signatures.by_shape.get(shape, [])
        for index, found in enumerate(entries):
            if found.state is state and found.scope is scope and found.key == key:
                training = module.training
                if (
                    found.changes != module.changes
                    or found.training is not training
                    or not all([member.same(training) for member in found.members])  # noqa: C419  # half the time
                ):
                    continue
                tensors = (x, *given, *_tensors(found.members))
                if len(tensors) == found.arity and found.guard(*tensors):
                    if index or entries is not signatures.recent:
                        signatures.use(shape, index)
                    for group in found.run.groups:
                        group.dirty = True
                    STATISTICS.hits += 1
                    return _run_composed(x, found.run, *tensors[1:])
        return self._other(module, (x, *given), key, functools.partial(forward, module, x, **others))

    def _other(
        self, module: Composable, given: tuple[torch.Tensor, ...], key: tuple[Any, ...], plain: Callable[[], Any]
    ) -> Any:
        """A call that is not replayed: it is recorded if it is like the one before.

        Args:
            given: the input, and tensors among the other arguments. plain: makes the call.
        """
        try:
            now = (given[0].shape, id(thread.state), id(scopes.capture()), module.training, hash(key))
        except TypeError:  # a window as a list, say, which may change
            return plain()
        before, self._before = self._before, now
        if before == now and now not in self._refused and capturable() and self.signatures.admits():
            members = _members(module)
            tensors = given if members is None else (*given, *_tensors(members))
            if members is not None and _recordable(tensors):
                run = _Run(plain)
                try:
                    result = _run_composed(tensors[0], run, *tensors[1:])
                except NotRepeatable as reason:  # before anything was changed
                    STATISTICS.refuse(type(module).__name__, str(reason))
                else:
                    if run.program is None:
                        self._refuse(now)
                    else:
                        self._add(module, key, members, tensors, run)
                    return result
            self._refuse(now)
        return plain()

    def _add(
        self,
        module: Composable,
        key: tuple[Any, ...],
        members: tuple[_Member, ...],
        tensors: tuple[torch.Tensor, ...],
        run: _Run,
    ) -> None:
        guard = guard_for(tensors, [True] * len(tensors))
        found = _Signature(
            thread.state, scopes.capture(), key, len(tensors), guard, module.changes, members, module.training, run
        )
        self.signatures.add(tensors[0].shape, found)

    def _refuse(self, now: tuple[Any, ...]) -> None:
        if len(self._refused) >= _MAX_REFUSED:
            self._refused.clear()
        self._refused.add(now)


def _recordable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor is there twice, or of a class that says what becomes of it, and gradients are wanted."""
    apart = len({id(x) for x in tensors}) == len(tensors)
    return apart and all(x.__class__ in PLAIN for x in tensors) and any(x.requires_grad for x in tensors)


def _tensors(members: Iterable[_Member]) -> list[torch.Tensor]:
    return [x for member in members for x in member.module.tensors_of_call() if x is not None]


def composed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's forward (self, x, **others), with its calls recorded and replayed. The module is `Composable`, and
    `composed_calls` is its `ComposedCalls`."""

    @functools.wraps(forward)
    def run(self: Any, hidden_states: torch.Tensor, *args: Any, **others: Any) -> Any:
        if (
            args or not apply.TAPES or will_execute is None or is_dynamo_compiling() or not is_grad_enabled()
            or hidden_states.__class__ not in PLAIN or apply.thread.tape is not None
            # A recording that fails runs the forward a second time, collectives included.
            or self._parts != 1
        ):  # fmt: skip
            return forward(self, hidden_states, *args, **others)
        return self.composed_calls.call(self, forward, hidden_states, others)

    return run
