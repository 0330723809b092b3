# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Launches that are planned once for each signature of a call: a later call skips everything else.

``@planned()`` wraps an operator's host function. The function checks its arguments and works out a launch, as ever, and
returns it with the tensors that it takes in place of making it:

    @planned()
    def rmsnorm_fwd(x, gamma, *, eps=1e-5, ...):
        checks.norm_fwd(x, gamma, None, eps, ...)
        if not x.is_contiguous():
            return rmsnorm_fwd(contiguous(x), gamma, eps=eps, ...)
        rows, columns, dtype = x.numel() // x.shape[-1], x.shape[-1], CODES[x.dtype]

        def launch(x, gamma):
            y = alloc.empty("y", x.shape, x.dtype, x.device)
            native.rmsnorm(stream(x.device), x.data_ptr(), gamma.data_ptr(), y.data_ptr(), rows, columns, dtype, eps)
            return NormForward(y, None, None, None, None)

        return launching(launch, x, gamma)

A launch may find what no signature covers, such as an address that is less aligned than its kernel needs: it then does
nothing and returns NotImplemented. The cached launches of the signature are tried in turn, and where none serves the
call the host function is run, and plans another.

The wrapper caches the launch by the call's signature (`te_dispatch.ops.checks.signatures`, exact kinds): classes,
shapes, strides, dtypes and devices of tensors, tags of records and quantizers, options. The host function must read
nothing else that can change. A launch gets the tensors of the call at hand; of the first call's it may use only what
the signature holds. Three kinds of calls take the slow path every time, which runs the host function: those for which
it returns a result and not a `Planned`, those with arguments of classes that signatures do not know, and those with
one tensor in two places.

``function.plans`` counts hits and misses, and its `repeat` is what a manifest names as an implementation's ``plan``, so
that modules replay launches: ``plan="acme.norm:rmsnorm_fwd.plans.repeat"``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from te_dispatch.backend_kit.caches import CacheStatistics, register
from te_dispatch.core.bounded import RecentDict
from te_dispatch.ops.checks.guards import guard_for, is_plain
from te_dispatch.ops.checks.signatures import OFTEN as OFTEN
from te_dispatch.ops.checks.signatures import OPTION as OPTION
from te_dispatch.ops.checks.signatures import TENSOR as TENSOR
from te_dispatch.ops.checks.signatures import WRITTEN_RECORD as WRITTEN_RECORD
from te_dispatch.ops.checks.signatures import Code, Kind, code_of, kinds_of, look_of, parts_of
from te_dispatch.ops.checks.signatures import compiled as compiled

Function = TypeVar("Function", bound=Callable[..., Any])
Launch = Callable[..., Any]
#: A guard and a launch.
_Entry = tuple[Callable[..., bool], Launch]

#: Sets of facts that one function keeps, and launches with the same facts (tensors of other dtypes, say). Ragged
#: batches make a set for every length.
CAPACITY, LAUNCHES = 4096, 8


class Planned(NamedTuple):
    """The launch of one call, which serves all calls that have its signature.

    Attributes:
        prepare: (places, count) -> a function of `count` tensors by position that makes the call; the i-th of `tensors`
            is the argument at ``places[i]``, and absent where that is None.
        tensors: what the launch takes; None for absent ones.
        unusual: whether the launch serves calls that others with the signature do not, and refuses those that they
            serve: it is tried after them.
        weaker: the plan to take where the launch returns NotImplemented, because of the memory that it allocated, say.
    """

    prepare: Callable[[Sequence[int | None], int], Launch]
    tensors: tuple[torch.Tensor | None, ...]
    unusual: bool = False
    weaker: Callable[[], Planned] | None = None

    def run(self) -> Any:
        """Make this call alone."""
        there = [x for x in self.tensors if x is not None]
        numbers = iter(range(len(there)))
        return self.prepare([None if x is None else next(numbers) for x in self.tensors], len(there))(*there)


def launching(launch: Launch, *tensors: torch.Tensor | None) -> Planned:
    """A launch that is a function of these tensors, by position."""
    return Planned(functools.partial(_placed, launch), tensors)


def _placed(launch: Launch, places: Sequence[int | None], count: int) -> Launch:
    if list(places) == list(range(count)):
        return launch
    placed: Launch = _placing(tuple(places), count)(launch)
    return placed


@functools.lru_cache(CAPACITY)
def _placing(places: tuple[int | None, ...], count: int) -> Callable[[Launch], Launch]:
    """(launch) -> it, as a function of the tensors that are there. Cached, because a call that signatures do not cover
    comes here every time, and the text of what is compiled is kept for tracebacks."""
    taken = ", ".join(f"x{i}" for i in range(count))
    given = ", ".join("None" if place is None else f"x{place}" for place in places)
    source = f"def make():\n    return lambda launch: lambda {taken}: launch({given})\n"
    return compiled(source, "launch")  # type: ignore[no-any-return]


class CallPlans:
    """The launches of one host function, by signature.

    A backend whose launches come about in another way than by `Planned` derives a class, whose `work_out` finds them
    with `launches` and keeps them with `keep`; its `planned` is then the decorator.

    Args:
        function: the host function.
        operator, exceptions: as `planned` takes them.

    Attributes:
        hits, misses: calls that a kept launch served, and others. Counted without a lock: threads may lose some.
        generation: how often all were forgotten.
        function, kinds: the host function, and how its arguments are looked at, by name.
        wrapper: the decorated function.
    """

    def __init__(self, function: Callable[..., Any], operator: str | None, exceptions: Mapping[str, Kind]) -> None:
        name = function.__name__
        self.hits = self.misses = self.generation = 0
        self.function = function
        self.kinds = kinds_of(function, name if operator == "" else operator or "", exceptions, exactly=True)
        self._entries: RecentDict[Any, Sequence[_Entry]] = RecentDict(CAPACITY)
        code = code_of(self.kinds)
        self._look = look_of(code, name)
        self.wrapper: Any = _wrapper(self, function, code)
        register(f"{function.__module__}.{function.__qualname__}", self)

    @classmethod
    def planned(cls, operator: str | None = "", **exceptions: Kind) -> Callable[[Function], Function]:
        """Decorator of an operator's host function, which returns `Planned`, or a result for a call that is not to be
        kept.

        Args:
            operator: whose arguments the function takes; by default the one that has its name. None: of none.
            exceptions: kinds of arguments that are not those that the operator's declaration says.

        Raises:
            TypeError: an exception for an argument that the function does not take, or an argument of a kind that
                signatures do not know.
        """
        return lambda function: cls(function, operator, exceptions).wrapper

    def clear(self) -> None:
        """Plan all calls anew, repeated ones too: something that the function read has changed."""
        self.generation += 1
        self._entries.clear()

    def statistics(self) -> CacheStatistics:
        entries = self._entries
        return CacheStatistics(self.hits, self.misses, entries.size, 2 * entries.half, entries.evicted)

    def work_out(self, *arguments: Any) -> Any:
        """The slow path: run the function on the arguments, in the order of its parameters, and cache its launch."""
        self.misses += 1
        made = self.function(**dict(zip(self.kinds, arguments)))
        result = made
        while made.__class__ is Planned:
            result = self._launched(made, arguments)
            if result is not NotImplemented:
                return result
            if made.weaker is None:
                raise RuntimeError(f"{self.function.__name__}: a launch refused the call that it was planned for")
            made = made.weaker()
        return result

    def _launched(self, made: Planned, arguments: Sequence[Any]) -> Any:
        """The result of a planned call, whose launch is kept where its signature covers what it takes."""
        launch, tensors = self._kept(made, arguments)
        return made.run() if launch is None else launch(*tensors)

    def _kept(self, made: Planned, arguments: Sequence[Any]) -> tuple[Launch | None, tuple[torch.Tensor, ...]]:
        """The launch of a planned call with the tensors that it takes; None where signatures do not cover it."""
        try:
            facts, tensors = self.signature(arguments)
        except TypeError:
            return None, ()
        at = {id(x): i for i, x in enumerate(tensors)}
        if len(at) < len(tensors) or any(x is not None and id(x) not in at for x in made.tensors):
            return None, ()
        launch = made.prepare([None if x is None else at[id(x)] for x in made.tensors], len(tensors))
        self.keep(facts, tensors, launch, made.unusual)
        return launch, tensors

    def signature(self, arguments: Sequence[Any]) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """Facts and tensors of a call, given its arguments in the order of the function's parameters.

        Raises:
            TypeError: there is an argument of a class that signatures do not know.
        """
        try:
            lasting = all(kind.lasting(x) for kind, x in zip(self.kinds.values(), arguments) if x is not None)
            facts, tensors = self._look(*arguments)
            hash(facts)
        except Exception as error:  # whatever a kind does not foresee
            raise TypeError(str(error)) from error
        if not lasting or not all(map(is_plain, tensors)):
            raise TypeError("an argument of another class")
        return facts, tensors

    def launches(self, facts: Any, tensors: Sequence[torch.Tensor]) -> list[Launch]:
        """What is kept for a signature, in the order in which it is tried."""
        return [launch for fits, launch in self._entries.get(facts, ()) if fits(*tensors)]

    def keep(
        self,
        facts: Any,
        tensors: Sequence[torch.Tensor],
        launch: Launch,
        unusual: bool = False,
        instead: Launch | None = None,
    ) -> None:
        """Keep a launch for a signature: a function of its tensors.

        Args:
            unusual: whether others are tried before it.
            instead: a launch that is kept no longer.
        """
        entry = guard_for(tensors, [True] * len(tensors)), launch
        kept = [one for one in self._entries.get(facts, ()) if one[1] is not instead]
        # A new list: another thread may be going through the old one.
        self._entries[facts] = ([*kept, entry] if unusual else [entry, *kept])[:LAUNCHES]

    def repeat(self, varying: Sequence[str], **arguments: Any) -> Launch | None:
        """A function of the `varying` arguments, by position, that makes calls like this one without a lookup.

        Args:
            varying: names of arguments that later calls give anew, with the metadata of these; the others stay the same
                objects.
            arguments: all arguments of a call.

        Returns:
            None where no launch is cached for such a call.
        """
        try:
            found = self.launches(*self.signature([arguments[name] for name in self.kinds]))
        except TypeError:
            return None
        return self._repeated(found, varying, arguments) if found else None

    def ahead(self, **arguments: Any) -> Launch | None:
        """A function without arguments that makes this very call, which need not have been made: for host functions
        that return a plan for it. None where signatures do not cover it."""
        made = self.function(**arguments)
        launch, _ = self._kept(made, [arguments[name] for name in self.kinds])
        return None if launch is None else self._repeated([launch], (), arguments)

    def _repeated(self, launches: Sequence[Launch], varying: Sequence[str], arguments: dict[str, Any]) -> Launch:
        parts = [(name, part, tensor) for name in self.kinds for part, tensor in parts_of(arguments[name])]
        fixed: dict[str, Any] = {f"f{i}": x for i, (name, _, x) in enumerate(parts) if name not in varying}
        given = ", ".join(f"{name}{part}" if name in varying else f"f{i}" for i, (name, part, _) in enumerate(parts))
        if len(fixed) == len(parts):  # hundreds, perhaps
            fixed, given = {"fixed": tuple(fixed.values())}, "*fixed"
        named = fixed | {f"launch{i}": launch for i, launch in enumerate(launches)}
        source = _REPEATED.format(
            named=", ".join(named),
            varying=", ".join(varying),
            tries="\n            ".join(_TRY.format(i=i, given=given) for i in range(len(launches))),
        )
        stay = {name: value for name, value in arguments.items() if name not in varying}

        def otherwise(*values: Any) -> Any:
            return self.wrapper(**stay, **dict(zip(varying, values)))

        return compiled(  # type: ignore[no-any-return]
            source, "repeated launch", plans=self, generation=self.generation, otherwise=otherwise, **named
        )


_TRY = """\
result = launch{i}({given})
            if result is not NotImplemented:
                return result"""
_REPEATED = """
def make(plans, generation, otherwise, {named}):
    def repeated({varying}):
        if plans.generation == generation:
            {tries}
        return otherwise({varying})

    return repeated
"""
_WRAPPER = """
def make(plans, entries, recent, work_out):
    def {name}({signature}):
        tensors = None
        try:
            {body}
        except KeyError:  # not a recent signature
            found = () if tensors is None else entries.get(facts, ())
        except Exception:  # something that was not foreseen: the function shall say
            found = ()
        for fits, launch in found:
            if fits(*tensors):
                result = launch(*tensors)
                if result is not NotImplemented:
                    plans.hits += 1
                    return result
        return work_out({names})

    return {name}
"""
_FIND = """\
facts = ({facts})
tensors = ({tensors})
found = recent[facts]"""


def _wrapper(plans: CallPlans, function: Callable[..., Any], code: Code) -> Any:
    """A function with the parameters of the host function, which tries the cached launches before `work_out`."""
    name = function.__name__
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in inspect.signature(function).parameters.values()]
    source = _WRAPPER.format(
        name=name, signature=str(inspect.Signature(bare))[1:-1], names=code.names, body=code.text(_FIND, 12)
    )
    entries = plans._entries
    given = {"plans": plans, "entries": entries, "recent": entries.recent, "work_out": plans.work_out}
    wrapper = compiled(source, f"planned {name}", **given)
    functools.update_wrapper(wrapper, function)
    wrapper.__defaults__, wrapper.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    wrapper.plans = plans
    return wrapper


planned = CallPlans.planned
