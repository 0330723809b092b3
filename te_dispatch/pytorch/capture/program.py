# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What was recorded of an autograd Function's call, as generated code that repeats it.

A `Program` serves calls with the input signature of the recorded one. Its forward and each of its backwards are
straight-line functions: operator calls that are bound already (`te_dispatch.core.repeating`), the other steps, and what
is saved and returned. Both give the bits of the plain Function, whose calls they are.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from te_dispatch.core.bindings import Bindings
from te_dispatch.core.operator import Operator
from te_dispatch.core.recording_bindings import RecordingBindings
from te_dispatch.core.repeating import repeating
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks.guards import PLAIN, Guard, guard_for
from te_dispatch.ops.results import Saved
from te_dispatch.pytorch.capture.recorder import Expression, NotRepeatable, Recorder, Step, reads_of, recorded
from te_dispatch.pytorch.capture.statistics import STATISTICS

#: Backwards that a program keeps: gradients with other strides, or of fewer inputs, have one each.
_MAX_BACKWARDS = 4

#: The names of a result that is no tuple, and that nobody reads.
_UNREAD = ("_",)

_NO_LINES: Mapping[str, Sequence[str]] = {}
_numbers = count()
_codes: dict[str, Any] = {}


class _Context:
    """A Function's context while it is recorded: it notes what is saved, and set."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(real=ctx, attributes={}, saved=(), marked=(), clears=False, unpacked=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """The same objects each time, which autograd need not give."""
        if self.unpacked is None:
            self.__dict__["unpacked"] = self.real.saved_tensors
        return self.unpacked  # type: ignore[no-any-return]

    def __setattr__(self, name: str, value: Any) -> None:
        if value.__class__ is RecordingBindings:
            value = value.inner
        self.attributes[name] = value
        setattr(self.real, name, value)

    def save_for_backward(self, *tensors: Any) -> None:
        self.__dict__["saved"] = tensors
        self.real.save_for_backward(*tensors)

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.__dict__["marked"] = tensors
        self.real.mark_non_differentiable(*tensors)

    def maybe_clear_saved_tensors(self) -> None:
        self.__dict__["clears"] = True
        self.real.maybe_clear_saved_tensors()


class _Backward:
    """A backward, and what gradients it serves.

    Attributes:
        needs: `ctx.needs_input_grad`. absent: which gradients are None, or None where all are there.
        same: pairs of places at which one tensor was given. guard: of the metadata of those that are there.
    """

    __slots__ = ("needs", "absent", "same", "guard", "run")

    def __init__(self, needs: tuple[bool, ...], grads: Sequence[Any], run: Callable[..., Any]) -> None:
        present = [g for g in grads if g is not None]
        self.needs = needs
        self.absent = None if len(present) == len(grads) else tuple([g is None for g in grads])
        self.same = _same(grads)
        self.guard: Guard = guard_for(present, [True] * len(present))
        self.run = run

    def serves(self, grads: Sequence[Any]) -> bool:
        if any(grads[i] is not grads[j] for i, j in self.same):
            return False
        if self.absent is None:
            return self.guard(*grads)
        return tuple([g is None for g in grads]) == self.absent and self.guard(*[g for g in grads if g is not None])


def _same(grads: Sequence[Any]) -> list[tuple[int, int]]:
    """Pairs of places that have one tensor, as the gradients of both terms of a sum do."""
    return [(i, j) for i, x in enumerate(grads) for j in range(i) if x is not None and x is grads[j]]


class Program:
    """The recorded forward of a Function, and its backwards.

    Attributes:
        scope: the bindings that it ran under.
        needs: `ctx.needs_input_grad`.
        forward: (ctx, tensors..) -> what the Function returns.
        attributes: what the plain forward sets on `ctx`.
        backwards: those that were recorded.
    """

    __slots__ = ("scope", "needs", "forward", "_plain", "attributes", "_same", "backwards", "_refused")

    def __init__(
        self, plain: Callable[..., Any], names: Sequence[str], context: _Context, recorder: Recorder, result: Any
    ) -> None:
        """Of a forward that was recorded. `plain`: the Function's own backward. `names`: the forward's parameters."""
        self.scope = recorder.scope
        self.needs = context.real.needs_input_grad
        for name, value in context.attributes.items():
            _require_constant(name, value)
        saved, marked = ([recorder.expression(x) for x in xs] for xs in (context.saved, context.marked))
        outputs = _outputs(recorder, result)
        early, held, reads = _taken_early(saved, recorder.steps)
        ending = []
        if saved:
            ending.append(f"ctx.save_for_backward({', '.join(held)})")
        if marked:
            ending.append(f"ctx.mark_non_differentiable({', '.join([e.text for e in marked])})")
        ending.append(_returned(result, outputs))
        self.forward = _compiled(
            "forward", names, self.scope, recorder, [], ending, reads_of(*marked, *outputs) | reads, early
        )
        self._plain = plain
        self.attributes = context.attributes
        #: Saved tensors that are one.
        places: dict[str, set[str]] = {}
        for i, expression in enumerate(saved):
            if expression.reads:
                places.setdefault(expression.text, set()).add(f"s{i}")
        self._same = [group for group in places.values() if len(group) > 1]
        self.backwards: list[_Backward] = []
        self._refused = 0

    def backward(self, ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad
        for found in self.backwards:
            if found.needs == needs and found.serves(grads):
                return found.run(ctx, *grads)
        for name, value in self.attributes.items():
            setattr(ctx, name, value)
        if (
            len(self.backwards) + self._refused >= _MAX_BACKWARDS
            or any(g is not None and g.__class__ not in PLAIN for g in grads)
            or all(g is None for g in grads)
        ):
            return self._plain(ctx, *grads)
        return self._record(ctx, needs, grads)

    def _record(self, ctx: Any, needs: tuple[bool, ...], grads: Sequence[Any]) -> Any:
        context = _Context(ctx)
        saved = context.saved_tensors
        inputs = [(f"g{i}", g) for i, g in enumerate(grads)] + [(f"s{i}", x) for i, x in enumerate(saved)]
        try:
            recorder = Recorder(inputs, [*self._same, *({f"g{i}", f"g{j}"} for i, j in _same(grads))])
        except NotRepeatable:  # this time only
            return self._plain(ctx, *grads)
        result = recorded(recorder, self._plain, context, *grads)
        try:
            outputs = _outputs(recorder, result)
            reads = reads_of(*outputs)
            used = reads.union(*[step.reads for step in recorder.steps])
            opening = []
            if saved:
                names = tuple([f"s{i}" if f"s{i}" in used else "_" for i in range(len(saved))])
                opening.append(_assigned("ctx.saved_tensors", names))
            if context.clears:
                opening.append("ctx.maybe_clear_saved_tensors()")
            given = [f"g{i}" for i in range(len(grads))]
            run = _compiled("backward", given, self.scope, recorder, opening, [_returned(result, outputs)], reads)
        except NotRepeatable as reason:
            self._refused += 1
            STATISTICS.refuse("backward", str(reason))
            return result
        STATISTICS.captures += 1
        self.backwards = [*self.backwards, _Backward(needs, grads, run)]
        return result


def record_forward(
    plain: Callable[..., Any], backward: Callable[..., Any], names: Sequence[str], ctx: Any, args: Sequence[Any]
) -> tuple[Any, Program | None]:
    """What a Function's forward returns, and the program of it; None where the call cannot be repeated.

    Args:
        plain, backward: the Function's.
        names: the first parameters, which are tensors or None; the others are the same in every such call.
    """
    try:
        recorder = Recorder(list(zip(names, args)))
    except NotRepeatable as reason:
        STATISTICS.refuse("forward", str(reason))
        return plain(ctx, *args), None
    context = _Context(ctx)
    result = recorded(recorder, plain, context, *args)
    try:
        program = Program(backward, names, context, recorder, result)
    except NotRepeatable as reason:
        STATISTICS.refuse("forward", str(reason))
        return result, None
    STATISTICS.captures += 1
    return result, program


def _require_constant(name: str, value: Any) -> None:
    values = value if isinstance(value, (tuple, list)) else (value,)
    if [item for item in values if isinstance(item, (torch.Tensor, Quantized, Saved))]:
        raise NotRepeatable(f"keeps tensors in ctx.{name}")


def _outputs(recorder: Recorder, result: Any) -> list[Expression]:
    if recorder.failure is not None:
        raise NotRepeatable(recorder.failure)
    return [recorder.expression(x) for x in (result if isinstance(result, tuple) else (result,))]


def _taken_early(
    saved: Sequence[Expression], steps: Sequence[Step]
) -> tuple[dict[str, list[str]], list[str], set[str]]:
    """Parts of records that a backward reads, in variables of their own, so that the records go when the last step has
    read them: their other copies would stay until the forward ends.

    Returns:
        Statements by the variable that they read; the source of what to save, and the variables in it.
    """
    made: set[str] = set()
    for step in steps:
        made.update(step.variables)
    early: dict[str, list[str]] = {}
    held, reads, names = [], set(), {}
    for text, variables in saved:
        # A record's part, not a record that is made of several.
        if len(variables & made) == len(variables) == 1 and text not in made and "(" not in text:
            name = names.get(text)
            if name is None:
                name = names[text] = f"k{len(names)}"
                early.setdefault(next(iter(variables)), []).append(f"{name} = {text}")
            held.append(name)
            reads.add(name)
        else:
            held.append(text)
            reads |= variables
    return early, held, reads


def _returned(result: Any, outputs: Sequence[Expression]) -> str:
    text = "".join([f"{e.text}, " for e in outputs])
    return f"return {text if isinstance(result, tuple) else outputs[0].text}"


def _assigned(text: str, names: tuple[str, ...]) -> str:
    """A statement that gives names to the parts of a tuple, and keeps none that is to be "_"."""
    unread = names.count("_")
    if unread == len(names):
        return text
    if unread == len(names) - 1:
        place = names.index(max(names))  # "_" sorts before letters
        return f"{names[place]} = {text}[{place}]"
    return f"{', '.join(names)}, = {text}{'; del _' if unread else ''}"


def _compiled(
    name: str,
    parameters: Sequence[str],
    scope: Bindings,
    recorder: Recorder,
    opening: Sequence[str],
    ending: Sequence[str],
    reads: frozenset[str],
    early: Mapping[str, Sequence[str]] = _NO_LINES,
) -> Callable[..., Any]:
    """The recorded steps as a function of (ctx, *parameters).

    Args:
        opening, ending: lines in front of the steps and behind them. reads: what the ending reads.
        early: lines behind the step that makes the variable which they read.

    Raises:
        NotRepeatable: an operator's calls must be seen one by one.
    """
    bound: dict[str, Any] = dict(recorder.constants)
    lines: list[str] = []
    needed = set(reads)  # by what comes later
    kept = []
    for number, step in reversed(list(enumerate(recorder.steps))):
        wanted = step.variables
        at_once = []
        for variable in wanted:  # loops: a comprehension is a call more, of which a layer's first step has enough
            if variable in early and variable not in needed:
                at_once.append(variable)
        needed.update(at_once)
        if not needed.issuperset(wanted):
            wanted = tuple([variable if variable in needed else "_" for variable in wanted])
        if not step.pure or needed.intersection(wanted):
            last = sorted(step.reads - needed - set(parameters)) + at_once
            kept.append((f"f{number}", step, wanted, last))
            needed |= step.reads
    for function, step, wanted, last in reversed(kept):
        if isinstance(step.target, Operator):
            operator = step.target
            taken = operator.signature.parameters
            given = dict(zip(taken, step.given))
            call = repeating(scope, operator.name, step.varying, **given)
            if call is None:
                raise NotRepeatable(f"{operator.name}: its calls are watched, or some are declined")
            bound[function] = call
            chosen = [text for key, text in zip(taken, step.args) if key in step.varying]
            text = f"{function}({', '.join(chosen)})"
        else:
            bound[function] = step.target
            text = f"{function}({', '.join((*step.args, *step.keywords))})"
        if step.parts:
            text = _assigned(text, wanted)
        elif wanted != _UNREAD:
            text = f"{wanted[0]} = {text}"
        lines.append(text)
        for variable in wanted:
            lines.extend(early.get(variable, ()))
        if last:
            lines.append(f"del {', '.join(last)}")
    body = "".join([f"        {line}\n" for line in (*opening, *lines, *ending)])
    used = ", ".join(bound)
    source = f"def make({used}):\n    def {name}(ctx, {', '.join(parameters)}):\n{body}    return {name}\n"
    code = _codes.get(source)
    if code is None:  # layers of a model have the same source
        file = f"<te_dispatch {name} {next(_numbers)}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        code = _codes[source] = compile(source, file, "exec")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["make"](**bound)  # type: ignore[no-any-return]
