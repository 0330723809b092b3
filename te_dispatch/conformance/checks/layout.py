# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operands that do not lie in memory of their own: rows apart, at an odd element, in another order, expanded.

What an operand may look like is `Operator.memory`, and exactly that is asked. An implementation that needs more
refuses, before it writes anything, with an error that names an argument or `Declined`; a backward must not, as its
caller has no other. What none may do is to read as if elements were adjacent, or to write between those of an output.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from te_dispatch.conformance import arranging
from te_dispatch.conformance.arranging import Allocate, Arranged, Chosen, Plan
from te_dispatch.conformance.checks import Check
from te_dispatch.conformance.checks.memoized import require_operands_freed
from te_dispatch.conformance.checks.values import changed_inputs, synchronize
from te_dispatch.conformance.memory import same_results
from te_dispatch.conformance.space import Arguments, Space
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.transfer import mapped, moved, tensors
from te_dispatch.conformance.trial import Failure, Trial
from te_dispatch.core.errors import Declined
from te_dispatch.core.memory import ANY, ROWS, WRITTEN

#: Parameters that hold the gradient of an output, which is one number for all where the loss is a sum.
_GRADIENTS = ("dy",)


def _check(trial: Trial, plan: Plan, names: tuple[str, ...] | None = None) -> None:
    """All operands at once; where such a call is refused, one after the other, as some may be served."""
    memory = {n: f for n, f in trial.subject.operator.memory.items() if names is None or n in names}
    together = called(trial, plan, memory)
    if together is None:
        return
    trial.notes.append(f"refuses such operands: {together}")

    def arranged() -> Arguments:
        return Arranged(trial.on_device(), memory, plan).arguments

    require_operands_freed(trial, arranged, "operands of calls that were refused")
    for name in memory:
        called(trial, plan, memory, arranging.only(name))


def _differently(trial: Trial, plan: Plan) -> None:
    """Calls in which only some tensors have other strides. Any two parameters, and any two neighbours in a list, have
    different strides in one of the calls: a kernel that uses one operand's strides for another gives right results
    where all have the same."""
    memory = trial.subject.operator.memory
    given = trial.arguments()
    places = {
        name: place for place, name in enumerate(name for name in memory if any(tensors({name: given.get(name)})))
    }
    listed = any(isinstance(given.get(name), (list, tuple)) for name in places)
    for turn in range((max(len(places) - 1, 0) + listed).bit_length()):

        def chosen(name: str, number: int, turn: int = turn) -> bool:
            return bool(places.get(name, 0) + number >> turn & 1)

        refused = called(trial, plan, memory, chosen)
        if refused is not None:
            trial.notes.append(f"refuses operands that lie differently: {refused}")


def _neighbours(trial: Trial) -> None:
    """All operands of a dtype are slices of one tensor, with gaps between them, as scales are of a table: a kernel must
    not compute the address of one from the address of another."""
    count = sum(tensor.numel() + arranging.APART for _, tensor in tensors(dict(trial.arguments())))
    pool = arranging.Pool(count + arranging.APART)
    memory = trial.subject.operator.memory
    refused = called(trial, arranging.offset, memory, allocate=pool.allocate)
    if refused is None:
        return
    if called(trial, arranging.offset, memory) is None:
        raise Failure(
            f"refuses operands that are parts of one tensor, and serves them apart from each other: {refused}"
        )
    trial.notes.append(f"refuses operands in one piece of memory: {refused}")


def _same_draw(trial: Trial, plan: Plan) -> None:
    """Where the state that numbers are drawn from lies changes nothing: any mask would be right for the call alone. Nor
    does it where x lies, of a cast, whose codes follow from the numbers alone."""
    state = "rng_state"
    memory = trial.subject.operator.memory
    if "deterministic" not in trial.subject.claims or not isinstance(trial.arguments().get(state), torch.Tensor):
        return
    plain = trial.on_device()
    trial.claim(plain)
    one = _copied(trial, moved(plain, trial.device))
    for name in (state, "x") if trial.subject.operator.name == "quantize" else (state,):
        arranged = Arranged(moved(plain, trial.device), memory, plan, arranging.only(name))
        try:
            other = _copied(trial, arranged.arguments)
        except (Declined, ValueError):
            continue  # which `called` looks at
        for path, tensor in one.items():
            if not same_results(tensor, other[path]):
                raise Failure(f"{path} is another where {name} lies otherwise in memory, with the same numbers")


def _copied(trial: Trial, arguments: Arguments) -> dict[str, torch.Tensor]:
    """Results of a call that later ones do not change."""
    result = trial.call(arguments)
    synchronize(trial)
    return {path: tensor.clone() for path, tensor in trial.results(result, arguments).items()}


def called(
    trial: Trial,
    plan: Plan,
    memory: Mapping[str, str],
    chosen: Chosen = arranging.every,
    given: Arguments | None = None,
    allocate: Allocate = arranging.anywhere,
) -> str | None:
    """One call with operands in other memory; the refusal, in words, or None.

    Args:
        memory: form of each parameter whose tensors may be laid otherwise.
        chosen: which of these tensors are.
        given: arguments on the device, which are copied; None to make them.
        allocate: where memory comes from.

    Raises:
        Failure: a wrong result, or a refusal that is none.
    """
    plain = trial.on_device() if given is None else moved(given, trial.device)
    trial.claim(plain)
    arranged = Arranged(plain, memory, plan, chosen, allocate)
    if not arranged.changed:
        return None
    arguments = arranged.arguments
    before = {path: tensor.detach().clone() for path, tensor in tensors(dict(arguments))}
    try:
        trial.claim(arguments)
        result = trial.call(arguments)
    except (Declined, ValueError) as refusal:
        synchronize(trial)
        changed = changed_inputs(before, arguments)
        if changed:
            raise Failure(f"refused ({refusal}) after it had changed {', '.join(changed)}") from refusal
        if trial.subject.operator.backward:
            of = ", ".join(arranged.changed)
            raise Failure(f"a backward must serve every call that it claims, also with {of} so: {refusal}") from refusal
        return str(refusal)
    synchronize(trial)
    around = arranged.written_around()
    if around:
        raise Failure("; ".join(around))
    try:
        trial.judge(result, arguments)
    except Failure as failure:
        raise Failure(f"with {', '.join(arranged.changed)} so: {failure}", failure.findings) from failure
    return None


def strided(trial: Trial) -> None:
    """Operands whose rows are further apart than they are long: by a few elements, so that no row but the first is
    aligned, and as slices of wider tensors with aligned rows, of which kernels read and write whole vectors."""
    _check(trial, arranging.strided)
    _check(trial, arranging.sliced)
    _same_draw(trial, arranging.strided)
    _differently(trial, arranging.strided)


def offset(trial: Trial) -> None:
    """Operands that start at an odd element, and whose first, or last, has the largest magnitude: what a kernel leaves
    out at the ends to read whole vectors shows in a maximum only where it is that."""
    _check(trial, arranging.offset)
    _same_draw(trial, arranging.offset)
    _neighbours(trial)
    if not isinstance(trial.arguments().get("x"), torch.Tensor):
        return
    for place in (0, -1):
        _check(trial.with_values(f"largest_{place}", functools.partial(_with_largest, place)), arranging.offset, ("x",))


def _with_largest(place: int, arguments: Arguments) -> Arguments:
    x = arguments["x"]
    if not x.is_floating_point() or not x.numel() or not x.is_contiguous():
        return arguments
    x = x.clone()
    finite = x.flatten()[x.flatten().isfinite()].abs()
    largest = finite.max().double() * 1.5 if finite.numel() else torch.ones((), dtype=torch.float64)
    x.view(-1)[place] = largest.clamp(max=torch.finfo(x.dtype).max)
    return {**arguments, "x": x}


def permuted(trial: Trial) -> None:
    """Operands whose dimensions lie in memory in another order, all of them or all but the last, and vectors of every
    other element."""
    _check(trial, arranging.permuted)
    _check(trial, arranging.turned)
    _differently(trial, arranging.permuted)
    _differently(trial, arranging.turned)
    _same_draw(trial, arranging.permuted)


def expanded(trial: Trial) -> None:
    """Operands of one row for all, and gradients of one number for all."""
    memory = trial.subject.operator.memory
    _check(trial.with_values("expanded", _equal_rows(memory)), arranging.expanded)
    gradients = tuple(name for name in _GRADIENTS if name in memory)
    if gradients:
        _check(trial.with_values("constant", _equal_everywhere(gradients)), arranging.constant, gradients)


def _equal_rows(memory: Mapping[str, str]) -> Callable[[Arguments], Arguments]:
    """What may be expanded has the values of one row in all of them, see `_row`."""

    def changed(arguments: Arguments) -> Arguments:
        forms = {name: memory.get(name, "") for name in arguments}
        return {name: mapped(value, functools.partial(_equal, form=forms[name])) for name, value in arguments.items()}

    return changed


def _equal(x: torch.Tensor, form: str) -> torch.Tensor:
    dim = arranging.expandable(x, form)
    return x if dim is None else _row(x, dim).expand(x.shape).clone()


def _row(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The first row along a dimension; where that holds NaN or Inf, the first number of the rows behind it. What lies
    between the sequences of attention, where operands may hold anything, does not come to lie inside of them so."""
    return x.gather(dim, x.isfinite().int().argmax(dim, keepdim=True))


def _equal_everywhere(names: tuple[str, ...]) -> Callable[[Arguments], Arguments]:
    def one(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, _row(x.flatten()).item()) if x.numel() else x

    return lambda given: {name: mapped(value, one) if name in names else value for name, value in given.items()}


def tracked(trial: Trial) -> None:
    """Operands that require gradients, as a module's do where no gradients are recorded, and where they are; operands
    that are parameters; and those of inference mode."""
    memory = trial.subject.operator.memory
    for recording, leaf in (
        (False, torch.Tensor.requires_grad_),
        (True, torch.Tensor.requires_grad_),
        (False, Parameter),
    ):
        plain = trial.on_device()
        trial.claim(plain)
        # What is written may be a parameter, too, where no gradients are recorded.
        forms = (ANY, ROWS) if recording else (ANY, ROWS, WRITTEN)
        read = {n: _leaves(v, leaf) if memory.get(n) in forms or _scaled(v) else v for n, v in plain.items()}
        leaves = {n: v for n, v in read.items() if memory.get(n) in forms}
        before = _of_autograd(leaves)
        with torch.set_grad_enabled(recording):
            result = trial.call(read)
        synchronize(trial)
        _require_untouched(leaves, before)
        own = {id(x) for _, x in tensors(dict(read))}  # written and returned, and requires what its owner says
        made = {path: x for path, x in trial.results(result, read).items() if id(x) not in own}
        required = [path for path, tensor in made.items() if tensor.requires_grad]
        if required and not recording:
            raise Failure(f"{required[0]} requires a gradient, where none is recorded")
        trial.judge(result, read)
    with torch.inference_mode():
        made = mapped(trial.on_device(), torch.clone)
        result = trial.call(made)
        synchronize(trial)
    trial.judge(result, made)


def _of_autograd(arguments: Arguments) -> dict[str, bool]:
    """Which tensors require gradients."""
    return {path: tensor.requires_grad for path, tensor in tensors(dict(arguments))}


def _require_untouched(arguments: Arguments, required: Mapping[str, bool]) -> None:
    """What autograd knows of operands is their owner's to change."""
    for path, tensor in tensors(dict(arguments)):
        if tensor.requires_grad != required[path]:
            raise Failure(f"whether {path} requires a gradient was changed")
        if tensor.is_leaf and tensor.grad is not None:
            raise Failure(f"{path} has a gradient, which nobody asked for")


def _leaves(value: Any, leaf: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Tensors of floats require gradients, and scales of quantizers; records have none.

    Args:
        leaf: makes a tensor require one.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(item, leaf) for item in value)
    if _scaled(value):
        return dataclasses.replace(value, scale=leaf(value.scale))
    return leaf(value) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _scaled(value: Any) -> bool:
    """Whether it is a quantizer with a scale of its own."""
    return isinstance(getattr(value, "scale", None), torch.Tensor)


def movable(subject: Subject, space: Space) -> str | None:
    return "operands are views of one tensor, as an argument promises" if space.views else None


CHECKS = (
    Check(
        "strided",
        strided,
        movable,
        1,
        3,
        "operands with gaps between rows, and nothing written into the gaps",
        of_forms=True,
    ),
    Check("offset", offset, movable, 1, 3, "operands that start at an odd element", of_forms=True),
    Check("permuted", permuted, movable, 1, 3, "operands whose dimensions lie in another order", of_forms=True),
    Check("expanded", expanded, movable, 1, 3, "operands with stride 0", of_forms=True),
    Check("tracked", tracked, movable, 1, 2, "operands that require gradients, and of inference mode"),
)
