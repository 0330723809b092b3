# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Spaces: what can be varied in a call of an operator, how a call is made of it, and how its results are judged.

To cover a new operator, or a new option of one: add a `Space` (or an axis) to the module of its family in
`te_dispatch/conformance/families/`. Nothing else knows operators by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from te_dispatch.conformance.maker import Maker
    from te_dispatch.conformance.rules import Rule

#: Axis -> value, both as text.
Values = Mapping[str, str]
#: An operator's arguments by name; parameters that are left out have their defaults.
Arguments = dict[str, Any]


#: Kinds of values (`te_dispatch.conformance.inputs`) of which most results are 0, or NaN.
DULL = frozenset({"zeros", "nan", "inf"})
_SIZES = ("shape", "shapes", "rows")
#: No element, or one of each tensor: ``0x16``, ``1x1x1``, ``1+1+1``, ``0+0``.
_NO_SIZE = re.compile(r"1([x+]1)*|0(\+0)*|(\d+x)*0(x\d+)*")


@dataclass(frozen=True)
class Axis:
    """One thing that varies.

    Attributes:
        name: e.g. ``dtype``, ``layout``, ``shape``, ``values``.
        values: all that level ``full`` covers; the first is the plainest.
        smoke: those that level ``smoke`` covers; empty for all of them.
        soak: those that only level ``soak`` adds (sizes beyond 2^31 elements).
        dull: values that leave nothing to see of the other axes' values, such as a flag that stops the operator; those
            of `DULL` and sizes with no or one element are, too. What a plan covers, it covers in cases without.
        once: values that level ``full`` adds in two cases each, not in every pair: sizes beyond the thresholds at which
            kernels change strategy, which would make every pair expensive. In one case the other axes have their
            plainest values, in the other they rotate through what the implementation claims.
    """

    name: str
    values: tuple[str, ...]
    smoke: tuple[str, ...] = ()
    soak: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    dull: tuple[str, ...] = ()

    def is_dull(self, value: str) -> bool:
        return value in self._dull

    @cached_property
    def _dull(self) -> frozenset[str]:
        known = [value for value in self.known if self.name in _SIZES and _NO_SIZE.fullmatch(value)]
        return frozenset((*self.dull, *known)) | (DULL if self.name == "values" else frozenset())

    @property
    def known(self) -> tuple[str, ...]:
        """Every value of every level, each once."""
        return tuple(dict.fromkeys((*self.values, *self.smoke, *self.once, *self.soak)))


@dataclass(frozen=True)
class Judged:
    """All that a space's rules may look at, on the host.

    Attributes:
        values: of the case.
        arguments: as they were before the call.
        expected: the oracle's results by path (`te_dispatch.conformance.outputs`), of widened operands where the
            space widens.
        actual: the implementation's results by the same paths.
        traits, claims: of the implementation.
    """

    values: Values
    arguments: Mapping[str, Any]
    expected: Mapping[str, torch.Tensor]
    actual: Mapping[str, torch.Tensor]
    traits: frozenset[str] = frozenset()
    claims: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Dropout:
    """For calls that draw a mask: which elements are dropped is the implementation's choice, so it is recovered.

    Attributes:
        recover: (run, arguments) -> bool, True where kept: what the mask is, seen in results of `run` (the subject, or
            the forward of a backward) for arguments on its device that share the case's shapes and `rng_state`. On the
            host, and True where nothing could be dropped; with the elements that could be, bool of that shape.
        judged: results by path that the recovered mask makes right, and their rules.
    """

    recover: Callable[[Callable[[Arguments], Any], Arguments], tuple[torch.Tensor, torch.Tensor]]
    judged: Callable[[Judged, torch.Tensor], tuple[Mapping[str, torch.Tensor], Mapping[str, Rule]]]


@dataclass(frozen=True)
class Drawn:
    """What a stochastic rounding made of the values of one copy, in the row-wise order of elements.

    Attributes:
        up: bool, True where the code of the larger magnitude was taken.
        position: float64, where the value lies between the two codes: the probability with which it must be.
        known: bool, True where it lies between two codes and not too near to either.
        negative, subnormal: bool, of the value.
    """

    up: torch.Tensor
    position: torch.Tensor
    known: torch.Tensor
    negative: torch.Tensor
    subnormal: torch.Tensor


@dataclass(frozen=True)
class Rounding:
    """For calls that round stochastically: which of two codes a value becomes is the implementation's choice.

    Attributes:
        recover: (arguments, result), on the host -> what was drawn, by copy.
        one: (arguments) -> whether a result's copies are one matrix, drawn for once.
        placed: (arguments, float64 of x's elements) -> the same call whose values lie at these places between 0 and the
            smallest positive value, or None where x's dtype cannot hold such values.
    """

    recover: Callable[[Arguments, Any], Mapping[str, Drawn]]
    one: Callable[[Arguments], bool]
    placed: Callable[[Arguments, torch.Tensor], Arguments | None]


@dataclass(frozen=True)
class Later:
    """A call whose later tokens are others.

    Attributes:
        arguments: of it.
        earlier: path of a result -> bool, broadcastable to it, True where no later token may reach.
        shared: whether a scale is shared by all tokens, through which they may.
    """

    arguments: Arguments
    earlier: Mapping[str, torch.Tensor]
    shared: bool


@dataclass(frozen=True)
class Turned:
    """A call whose integers, which say where sequences or groups lie, are others.

    Attributes:
        arguments: the call's, of another's; the same where the values of that allow no other.
        unless: names of operands with which there is none.
    """

    arguments: Callable[[Arguments], Arguments]
    unless: tuple[str, ...] = ()


def turned_lengths(arguments: Arguments) -> Arguments:
    """The same call with the lengths of its sequences in reverse order: for `Turned.arguments`."""
    lengths = {name: x[-1] - x.flip(0) for name, x in arguments.items() if name.startswith("cu_seqlens")}
    return {**arguments, **lengths}


def _always(values: Values) -> bool:
    return True


class Undecided(Exception):
    """Raised to a `Space.valid` that asks for an axis which has no value yet, while combinations are built."""


def every(*conditions: Callable[[Values], bool]) -> Callable[[Values], bool]:
    """A `Space.valid` of several conditions. One that is false decides, whatever axes the others wait for, so that
    combinations are found fast where there are many."""

    def valid(values: Values) -> bool:
        waiting: Undecided | None = None
        for condition in conditions:
            try:
                if not condition(values):
                    return False
            except Undecided as undecided:
                waiting = undecided
        if waiting is not None:
            raise waiting
        return True

    return valid


@dataclass(frozen=True)
class Space:
    """A region of an operator's calls that one function can make and one can judge.

    Attributes:
        operator: its name.
        name: unique among the operator's spaces.
        axes: what varies.
        make: arguments of a case, on the host.
        rules: path of a result -> how it is judged. A result without a rule is an error in the kit.
        valid: combinations that the contract allows.
        widen: whether the oracle gets its bf16 and fp16 operands as the fp32 values they equal, so that it rounds
            its float64 results to fp32 and not to the operands' dtype. Not where results are compared by bits.
        forward: for a backward that reads what its forward saved: the forward's arguments, out of the backward's.
        oracle: results of a call, where the reference's implementation of the operator is not the oracle.
        batch: for calls made of independent rows: the same call on the first half of them. Its results must be the
            first rows of the whole call's, where an implementation claims ``batch_invariant``.
        serves: of calls that are no case, those that the space's rules judge rather than the operator's other
            spaces' (`rules_for`); None for all that no space names.
        raises: what every call must raise, with everything left as it was, where the contract asks for an error.
        contents: what is wrong with its calls only the contents of tensors show, which are looked at on the host alone.
        dropout: for calls that draw a mask.
        rounding: for calls that round stochastically.
        later: for causal calls: (values, arguments, maker) -> the same call with other later tokens.
        views: operands are views of one tensor, as an argument promises: checks leave them where they lie.
        placed: (arguments, results by path) -> what is wrong with where results lie, None if nothing is.
        sampled: judged on samples by `oracle`, because the whole is too large for the reference (level ``soak``).
        turned: the same call with other sequences or groups, to be written into the same memory.
        together: groups of axes of which level ``full`` covers every combination of values, not only every pair.
        within: values of some axes among which level ``full`` covers every pair of the others by itself: where a cast
            goes another way than no cast, a pair that only casts hold says nothing of the calls without.
        fixed: cases that level ``full`` always holds, as the values that matter; axes left out have the first value
            of theirs that the implementation claims. They may name ``once`` values.
        forms: the axes, if there are any, that say of which tensors an operand consists, whether it is given, or along
            which dimension it is read: checks of operands' memory get a case of each combination of their values.
        checks: the names of those that its cases are for; empty for all that apply.
        slow: a case takes seconds, so level ``smoke`` has none.
        like: another space of the operator, whose calls have the same operands and run the same kernels. Where an
            implementation claims that one, level ``smoke`` takes calls whose memory or whose errors it checks from it.
    """

    operator: str
    name: str
    axes: tuple[Axis, ...]
    make: Callable[[Values, Maker], Arguments]
    rules: Callable[[Judged], Mapping[str, Rule]]
    valid: Callable[[Values], bool] = _always
    widen: bool = True
    forward: Callable[[Arguments], Arguments] | None = None
    oracle: Callable[[Arguments, Values], Any] | None = None
    sampled: bool = False
    serves: Callable[[Mapping[str, Any]], bool] | None = None
    raises: type[Exception] | None = None
    contents: bool = False
    batch: Callable[[Arguments], Arguments] | None = None
    dropout: Dropout | None = None
    rounding: Rounding | None = None
    later: Callable[[Values, Arguments, Maker], Later] | None = None
    views: bool = False
    placed: Callable[[Arguments, Mapping[str, torch.Tensor]], str | None] | None = None
    turned: Turned | None = None
    together: tuple[tuple[str, ...], ...] = ()
    within: tuple[Values, ...] = field(default=(), hash=False)
    fixed: tuple[Values, ...] = field(default=(), hash=False)
    forms: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    slow: bool = False
    like: str = ""

    def __post_init__(self) -> None:
        axes = {axis.name: axis.known for axis in self.axes}
        for said, group in (*(("together", group) for group in self.together), ("forms", self.forms)):
            unknown = [name for name in group if name not in axes]
            if unknown:
                raise ValueError(f"space {self.id}: {said} names {unknown[0]!r}, which is none of its axes")
        for said, partials in (("fixed", self.fixed), ("within", self.within)):
            for name, value in (item for values in partials for item in values.items()):
                if value not in axes.get(name, ()):
                    raise ValueError(f"space {self.id}: {said} has {name}={value}, which is no value of its axes")

    @property
    def id(self) -> str:
        return f"{self.operator}.{self.name}"


@dataclass
class _Registry:
    by_operator: dict[str, list[Space]] = field(default_factory=dict)
    loaded: bool = False


_registry = _Registry()


def register(*spaces: Space) -> None:
    """Add spaces. Called by the families' modules when they are imported.

    Raises:
        ValueError: a name is taken.
    """
    for space in spaces:
        known = _registry.by_operator.setdefault(space.operator, [])
        if any(other.name == space.name for other in known):
            raise ValueError(f"space {space.id} is registered twice")
        known.append(space)


def spaces(operator: str | None = None) -> Sequence[Space]:
    """The spaces of one operator, or of all in the order of registration."""
    if not _registry.loaded:
        _registry.loaded = True
        import te_dispatch.conformance.families  # noqa: F401
    if operator is not None:
        return tuple(_registry.by_operator.get(operator, ()))
    return tuple(space for known in _registry.by_operator.values() for space in known)


def rules_for(operator: str, arguments: Mapping[str, Any]) -> Space | None:
    """The space whose rules judge a call that is no case, with these arguments; None if the operator has none.

    Its `rules`, `forward` and `oracle` look at arguments only: such a call has no axis values.
    """
    able = [space for space in spaces(operator) if space.raises is None and not space.sampled]
    for space in able:
        if space.serves is not None and space.serves(arguments):
            return space
    return next((space for space in able if space.serves is None), None)


def find(operator: str, name: str) -> Space:
    """A space by name.

    Raises:
        ValueError: there is none; lists those of the operator.
    """
    known = spaces(operator)
    for space in known:
        if space.name == name:
            return space
    names = ", ".join(space.name for space in known) or "no space at all"
    raise ValueError(f"case: {operator} has no space {name!r}, expected one of: {names}")
