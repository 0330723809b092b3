# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Recording what an autograd Function's forward or backward does: operator calls, and PyTorch's functions on tensors.

Three things are recorded: calls of operators, through bindings; calls of functions that are marked as a `step`;
and calls of PyTorch's own functions, through a ``TorchFunctionMode``, of which those in `_PURE` may be repeated. Where
every tensor that a step reads, and that is returned or saved, comes from the inputs through earlier steps, the steps
are all that happened. Everything else is `NotRepeatable`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch.overrides import TorchFunctionMode

from te_dispatch.core import scopes
from te_dispatch.core.operator import Operator
from te_dispatch.core.recording_bindings import RecordingBindings
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.results import Saved
from te_dispatch.pytorch.step import thread

#: Functions and methods of PyTorch that compute new values, or views, from their arguments alone.
_PURE = frozenset((
    "view", "view_as", "reshape", "contiguous", "unbind", "to", "transpose", "t", "select", "narrow", "split",
    "split_with_sizes", "chunk", "expand", "unsqueeze", "squeeze", "permute", "flatten", "stack", "cat", "sum", "add",
    "clone", "detach", "movedim",
))  # fmt: skip
#: Those that tell of metadata, which a signature holds.
METADATA = frozenset((
    "size", "stride", "dim", "numel", "is_contiguous", "element_size", "storage_offset", "is_floating_point",
    "nelement", "ndimension", "get_device", "is_complex",
))  # fmt: skip
_CONSTANT = (bool, int, float, str, torch.dtype, torch.device, torch.memory_format, *get_args(Quantizer))


class NotRepeatable(Exception):
    """What was recorded cannot be repeated; says why."""


class Step(NamedTuple):
    """A call.

    Attributes:
        target: the function, or the operator.
        args: by position, as expressions; names, of an operator's parameters that vary.
        reads: the variables in them.
        given: the arguments themselves, of an operator.
        pure: whether nothing is lost where nobody reads the result.
        variables: what holds the result; of a tuple or list, a variable for each part, so that one that nobody reads
            any more goes while others stay.
        parts: whether they are parts.
    """

    target: Any
    args: tuple[str, ...]
    reads: frozenset[str]
    keywords: tuple[str, ...]
    varying: tuple[str, ...]
    given: tuple[Any, ...]
    pure: bool
    variables: tuple[str, ...]
    parts: bool


class Expression(NamedTuple):
    """Source of a value. reads: the variables in it."""

    text: str
    reads: frozenset[str] = frozenset()


_NONE = Expression("None")


def reads_of(*expressions: Expression) -> frozenset[str]:
    """The variables in expressions."""
    return frozenset().union(*[expression.reads for expression in expressions])


class Recorder:
    """The steps of one call.

    Args:
        inputs: the tensors that come with it by variable; None for those that are absent.
        same: groups of inputs that are one tensor in every such call.

    Raises:
        NotRepeatable: one tensor was given twice, which other calls need not do.
    """

    def __init__(self, inputs: Sequence[tuple[str, torch.Tensor | None]], same: Sequence[set[str]] = ()) -> None:
        self.steps: list[Step] = []
        #: Objects that the source names.
        self.constants: dict[str, Any] = {}
        self._numbers: dict[int, Expression] = {}
        self._known: dict[int, Expression] = {}
        #: An id stays that of a value for as long as this is recorded.
        self._alive: list[Any] = []
        #: Whether a step is being made, of which nothing is recorded. PyTorch's functions then go past the watch.
        self._busy = False
        self.watch: _Watch | None = None
        #: Whether a function marked as a `step` may be called. Between the parts of a module that is recorded as a
        #: whole it may not: a call that turns out not to be repeatable is made again, and would draw a second random
        #: state.
        self.makes_steps = True
        self.failure: str | None = None
        #: The bindings that make the calls.
        self.scope = scopes.capture()
        for name, x in inputs:
            if x is None:
                continue
            before = self._known.get(id(x))
            if before is None:
                self._define(x, name, "")
            elif not any({name, before.text} <= group for group in same):
                raise NotRepeatable("one tensor is given twice")

    # -- recording ------------------------------------------------------------------------------------------------

    def make(self, target: Any, args: tuple[Any, ...], call: Callable[..., Any]) -> Any:
        """Make the call of a step, an operator or a function, and note it."""
        if self._busy:
            return call(*args)
        if not self.makes_steps:
            raise NotRepeatable(f"calls {_name_of(target)} between its parts")
        watch = self.watch
        assert watch is not None
        self._busy = True
        watch.__exit__(None, None, None)
        try:
            result = call(*args)
        finally:
            watch.__enter__()
            self._busy = False
        self._note(target, args, {}, result, False)
        return result

    def function(self, function: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Make a call of a function of PyTorch, and note it where it is to be repeated."""
        if self._busy:
            return function(*args, **keywords)
        self._busy = True
        try:
            result = function(*args, **keywords)
        finally:
            self._busy = False
        name = getattr(function, "__name__", str(function))
        if name in _PURE and "out" not in keywords:
            self._note(function, args, keywords, result, True)
        elif name not in METADATA and not (name == "__get__" and not isinstance(result, torch.Tensor)):
            self._fail(f"calls {getattr(function, '__qualname__', name)} of PyTorch")
        return result

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Record nothing of what is called meanwhile."""
        busy, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = busy

    def _fail(self, why: str) -> None:
        if self.failure is None:
            self.failure = why

    def _note(self, target: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any, pure: bool) -> None:
        if self.failure is not None:
            return
        try:
            passed = [self._argument(value, target) for value in args]
            named = {name: self._argument(value, target) for name, value in keywords.items()}
        except NotRepeatable as reason:
            return self._fail(f"{_name_of(target)}: {reason}")
        varying: tuple[str, ...] = ()
        given: tuple[Any, ...] = ()
        if isinstance(target, Operator):
            given = args
            varying = tuple(
                [
                    name
                    for name, value, e in zip(target.signature.parameters, args, passed)
                    if e.reads or value.__class__ is Saved  # of another call, if without tensors
                ]
            )
        reads = reads_of(*passed, *named.values())
        keys = tuple(f"{name}={e.text}" for name, e in named.items())
        name, parts = f"r{len(self.steps)}", isinstance(result, (tuple, list))
        variables = tuple([f"{name}_{i}" for i in range(len(result))]) if parts else (name,)
        for variable, value in zip(variables, result if parts else (result,)):
            self._define(value, variable, "")
        self._alive.append(result)
        args_text = tuple([e.text for e in passed])
        self.steps.append(Step(target, args_text, reads, keys, varying, given, pure, variables, parts))

    # -- values ---------------------------------------------------------------------------------------------------

    def _define(self, value: Any, variable: str, path: str) -> None:
        """Let what a variable holds be known by the object that it is now."""
        if value is None:
            return
        text = variable + path
        if isinstance(value, torch.Tensor):
            self._known.setdefault(id(value), Expression(text, frozenset((variable,))))
        elif value.__class__ is Quantized:
            self._known.setdefault(id(value), Expression(text, frozenset((variable,))))
            for name in Quantized.__slots__:
                part = getattr(value, name)
                if isinstance(part, torch.Tensor):
                    self._define(part, variable, f"{path}.{name}")
        elif value.__class__ is Saved:
            self._known.setdefault(id(value), Expression(text, frozenset((variable,))))
            self._define(value.tensors, variable, f"{path}.tensors")
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                self._define(item, variable, f"{path}[{index}]")
        else:
            return
        self._alive.append(value)

    def _argument(self, value: Any, target: Any) -> Expression:
        if value is None:
            return _NONE
        known = self._known.get(id(value))
        if known is not None:
            return known
        if isinstance(value, _CONSTANT):
            return self.constant(value)
        try:
            return self.expression(value)
        except NotRepeatable:
            if isinstance(target, Operator) or isinstance(value, (torch.Tensor, Quantized, list, tuple, dict)):
                raise
            return self.constant(value)

    def expression(self, value: Any) -> Expression:
        """The source of a value.

        Raises:
            NotRepeatable: it does not come from the inputs.
        """
        if value is None:
            return _NONE
        known = self._known.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            raise NotRepeatable("a tensor that is no input, and was not computed by a step")
        if value.__class__ is Quantized:
            return self._call(Quantized, [getattr(value, name) for name in Quantized.__slots__])
        if value.__class__ is Saved:
            if value.options is not None:
                raise NotRepeatable("options that a forward leaves may differ from call to call")
            return self._call(Saved, [value.implementation, value.format, value.tensors])
        if value.__class__ in (tuple, list, torch.Size):
            parts = [self.expression(item) for item in value]
            reads = reads_of(*parts)
            if not reads:
                return self.constant(value)
            inner = "".join([f"{part.text}, " for part in parts])
            return Expression(f"[{inner}]" if value.__class__ is list else f"({inner})", reads)
        if isinstance(value, _CONSTANT):
            return self.constant(value)
        raise NotRepeatable(f"a {type(value).__name__}")

    def constant(self, value: Any) -> Expression:
        """A name for an object."""
        found = self._numbers.get(id(value))
        if found is None:
            found = self._numbers[id(value)] = Expression(f"c{len(self.constants)}")
            self.constants[found.text] = value
        return found

    def _call(self, function: Any, values: Sequence[Any]) -> Expression:
        parts = [self.expression(value) for value in values]
        return Expression(
            f"{self.constant(function).text}({', '.join([part.text for part in parts])})", reads_of(*parts)
        )


class _Watch(TorchFunctionMode):
    """Tells a recorder of PyTorch's functions."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recorder.function(function, args, kwargs or {})


def recorded(recorder: Recorder, function: Callable[..., Any], *args: Any) -> Any:
    """`function` of the arguments, with its steps told to a recorder; `Recorder.failure` says what was no step."""
    outer = thread.recorder
    thread.recorder = recorder
    recorder.watch = _Watch(recorder)
    try:
        with recorder.watch, scopes.reenter(RecordingBindings(recorder.scope, recorder.make)):
            return function(*args)
    finally:
        thread.recorder = outer
        recorder.watch = None  # which knows it: a cycle would keep what was recorded


def _name_of(target: Any) -> str:
    return str(getattr(target, "name", None) or getattr(target, "__qualname__", target))
