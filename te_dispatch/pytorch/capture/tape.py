# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A module's forward as a list of calls: autograd Functions, and PyTorch's functions between them, with their backward.

While a `Tape` runs a forward, `te_dispatch.pytorch.autograd.apply.applied` gives it the Functions, which it calls
itself, without a graph. The gradients of the whole are then computed by `Calls.backward`, from the last call to the
first, as autograd would.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from te_dispatch.core import scopes
from te_dispatch.core.recording_bindings import RecordingBindings
from te_dispatch.pytorch.autograd import apply
from te_dispatch.pytorch.capture.functions import Replayable
from te_dispatch.pytorch.capture.recorder import METADATA, NotRepeatable, Recorder
from te_dispatch.pytorch.tensor.packing import taken
from te_dispatch.torch_private import set_grad_enabled

#: (gradients of the results..) -> those of the operands.
_Rule = Callable[..., Sequence["torch.Tensor | None"]]
#: What modules ask of their parameters, beside metadata, and what does not change from call to call.
_ASKED = frozenset(("data_ptr", "untyped_storage"))


class _Part:
    """A Function's context, while the Function is one call of several."""

    def __init__(self, needs: Sequence[bool], saved: Sequence[Any] = ()) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors = tuple(saved)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def maybe_clear_saved_tensors(self) -> None:
        """The context of the whole has cleared them."""

    def attributes(self) -> dict[str, Any]:
        """What the Function has set."""
        found = {name: x for name, x in vars(self).items() if name not in ("needs_input_grad", "saved_tensors")}
        return {name: x.inner if x.__class__ is RecordingBindings else x for name, x in found.items()}


class _Call(NamedTuple):
    """One call.

    Attributes:
        backward: of a Function (ctx, gradients..), else a `_Rule`.
        operands, results: numbers of the tensors whose gradients are wanted, None for others.
        needs, attributes, saved: a Function's `needs_input_grad`, what it set on its context, and where what it saved
            begins and ends in what the whole saves. None for others.
    """

    backward: Callable[..., Any]
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    needs: tuple[bool, ...] | None = None
    attributes: dict[str, Any] | None = None
    saved: slice | None = None


class Calls(NamedTuple):
    """The calls of a forward with one result, without any tensor.

    Attributes:
        operands: numbers of its tensors. result: of what it returned.
    """

    calls: tuple[_Call, ...]
    operands: tuple[int | None, ...]
    result: int

    def backward(
        self, ctx: Any, gradient: torch.Tensor, wanted: Sequence[bool] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the forward's tensors, of its context and the result's gradient.

        Args:
            wanted: which of them are asked for; the calls that these do not need are not made. None for all.
        """
        saved = taken(ctx)
        found: dict[int, torch.Tensor] = {self.result: gradient}
        needed = None if wanted is None else self._needed(wanted)
        for call in reversed(self.calls):
            if needed is not None and needed.isdisjoint(call.operands):
                continue
            given = [None if number is None else found.pop(number, None) for number in call.results]
            if call.attributes is None:
                made = call.backward(*given)
            else:
                assert call.needs is not None
                part = _Part(call.needs, saved[call.saved])
                vars(part).update(call.attributes, scope=scopes.capture())
                made = call.backward(part, *given)
            for number, x in zip(call.operands, made if isinstance(made, tuple) else (made,)):
                if number is not None and x is not None:
                    found[number] = x if number not in found else found[number] + x
        return tuple([None if number is None else found.get(number) for number in self.operands])

    def _needed(self, wanted: Sequence[bool]) -> set[int | None]:
        """Numbers of tensors on the way from the result to the gradients that are wanted."""
        needed: set[int | None] = {number for number, asked in zip(self.operands, wanted) if asked} - {None}
        for call in self.calls:
            if not needed.isdisjoint(call.operands):
                needed.update(number for number in call.results if number is not None)
        return needed


class Tape(TorchFunctionMode):
    """Runs a forward, and notes its calls.

    A call whose gradient is not known, or that could not be repeated, is not made: it raises `NotRepeatable`. What was
    called before has left nothing but amaxes, so that the forward can be run again, without a tape.

    Args:
        tensors: what the forward computes from. needs: which of them want gradients.
        recorder: records what the calls do.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], needs: Sequence[bool], recorder: Recorder) -> None:
        super().__init__()
        self._recorder, self._scope = recorder, scopes.capture()
        self._numbers = {id(x): i for i, x in enumerate(tensors)}
        self._operands = tuple([i if needed else None for i, needed in enumerate(needs)])
        self._wanted = {i for i in self._operands if i is not None}
        #: Operands that no call has read, and results that have no reader yet.
        self._unread: set[int] = set()
        self._alive: list[Any] = [*tensors]
        self._calls: list[_Call] = []
        self._marking = False
        self.saved: list[Any] = []
        #: Scales that note amaxes of such a forward, to be marked as changed.
        self.groups: list[Any] = []

    def run(self, forward: Callable[[], Any]) -> Any:
        """What the forward returns."""
        apply.thread.tape, self._recorder.makes_steps = self, False
        try:
            with self._recording(True), self, scopes.reenter(self._recorder.scope):
                return forward()
        finally:
            apply.thread.tape, self._recorder.makes_steps = None, True

    def calls(self, result: Any) -> Calls:
        """All calls of a forward that returned this.

        Raises:
            NotRepeatable: it is no tensor that they made, or they made others that nobody read.
        """
        number = self._number(result)
        if number is None or self._unread != {number}:
            raise NotRepeatable("its result is not one tensor of its calls")
        with self._recorder.aside():
            result.requires_grad_(False)
        return Calls(tuple(self._calls), self._operands, number)

    def call(self, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
        """`function.apply`."""
        forward, backward = getattr(function, "plain", (function.forward, function.backward))
        for x in args:
            if isinstance(x, Replayable):
                if x.program is None:
                    raise NotRepeatable(f"{function.__name__} is not replayed by itself")
                self._note_group(x)
        operands = self._read(args)
        part = _Part([number is not None for number in operands])
        apply.thread.tape, self._recorder.makes_steps = None, True
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # the recorder's own mode is to be the innermost
        try:
            with self._recording(False), scopes.reenter(self._scope):
                result = forward(part, *args)
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            apply.thread.tape, self._recorder.makes_steps = self, False
        start = len(self.saved)
        self.saved += part.saved_tensors
        results = self._made(result, any(part.needs_input_grad))
        self._calls.append(
            _Call(backward, operands, results, part.needs_input_grad, part.attributes(), slice(start, len(self.saved)))
        )
        return result

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._marking:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        rule = _RULES.get(name)
        if rule is None:
            if name not in METADATA and name not in _ASKED and name != "__get__":
                raise NotRepeatable(f"calls {getattr(function, '__qualname__', name)} of PyTorch")
            with self._recorder.aside():
                result = function(*args, **kwargs)
            if isinstance(result, torch.Tensor) and id(result) not in self._numbers:
                raise NotRepeatable(f"reads {getattr(function, '__self__', function)}")
            return result
        with self._recording(False):
            result = function(*args, **kwargs)
        if not any(result is x for x in args):
            backward = rule(args, kwargs)
            if backward is None:
                raise NotRepeatable(f"calls {name} of PyTorch with arguments whose gradients are not known")
            operands = self._read(args)
            results = self._made(result, any(number is not None for number in operands))
            self._calls.append(_Call(backward, operands, results))
        return result

    @contextlib.contextmanager
    def _recording(self, gradients: bool) -> Iterator[None]:
        """Whether modules are to believe that gradients are recorded. The switch is no call of theirs."""
        before = torch.is_grad_enabled()
        with self._recorder.aside():
            set_grad_enabled(gradients)
        try:
            yield
        finally:
            with self._recorder.aside():
                set_grad_enabled(before)

    def _note_group(self, options: Any) -> None:
        plan = getattr(options, "plan", None)
        if plan is not None and plan.forward_group is not None and plan.forward_group not in self.groups:
            self.groups.append(plan.forward_group)

    def _number(self, x: Any) -> int | None:
        """That of a tensor whose gradient is wanted."""
        number = self._numbers.get(id(x)) if isinstance(x, torch.Tensor) else None
        return number if number in self._wanted else None

    def _read(self, args: Sequence[Any]) -> tuple[int | None, ...]:
        operands = tuple([self._number(x) for x in args])
        self._unread.difference_update(operands)
        return operands

    def _marked(self, x: torch.Tensor) -> None:
        """Have modules that see it know that its gradient is wanted."""
        self._marking = True
        try:
            with self._recorder.aside():
                x.requires_grad_()
        finally:
            self._marking = False

    def _made(self, result: Any, wanted: bool) -> tuple[int | None, ...]:
        """Numbers of a call's results, which require gradients where these are wanted."""
        results = result if isinstance(result, (tuple, list)) else (result,)
        numbers: list[int | None] = []
        for x in results:
            self._alive.append(x)
            number = len(self._alive)
            self._numbers[id(x)] = number
            numbers.append(number if wanted else None)
            if wanted:
                self._wanted.add(number)
                self._unread.add(number)
                self._marked(x)
        return tuple(numbers)


def _reshaped(args: Sequence[Any], kwargs: Any) -> _Rule:
    shape = args[0].shape
    return lambda g: (g.reshape(shape),)


def _added(args: Sequence[Any], kwargs: Any) -> _Rule | None:
    a, b = args
    alike = isinstance(b, torch.Tensor) and isinstance(a, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return (lambda g: (g, g)) if alike and not kwargs else None


def _divided(args: Sequence[Any], kwargs: Any, dim: int = 0) -> _Rule:
    at = kwargs.get("dim", args[2] if len(args) > 2 else dim)
    return lambda *gs: (torch.cat(gs, at),)


def _unbound(args: Sequence[Any], kwargs: Any) -> _Rule:
    at = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return lambda *gs: (torch.stack(gs, at),)


#: PyTorch's functions that modules call between Functions -> (args, kwargs) -> the rule of their gradient, or None.
_RULES: dict[str, Callable[[Sequence[Any], Any], _Rule | None]] = {
    "view": _reshaped, "reshape": _reshaped, "flatten": _reshaped, "view_as": _reshaped, "contiguous": lambda *_: None,
    "add": _added, "split": _divided, "split_with_sizes": _divided, "unbind": _unbound, "to": lambda *_: None,
}  # fmt: skip
