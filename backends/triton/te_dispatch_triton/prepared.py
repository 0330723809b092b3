# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators whose calls are prepared: a call like one before skips everything but allocations and launches.

``@prepared()`` puts a lookup before an operator's host function, which has the operator's parameters. Its key is
everything that the function may read of its arguments: classes, shapes, strides, dtypes and devices of tensors, tags of
records and quantizers, options. It holds nothing of what tensors contain, and every tensor must begin at a multiple of
16 bytes. The second call under a key is watched (`tape`), and later ones run what it did: the same allocations and
launches with the addresses at hand. A call that passed its argument checks once need not be checked again, as the key
covers what checks read.

The host function must therefore

- read nothing else that can change: what it does read (PyTorch's setting for fp32 products) is given as ``also``;
- launch with numbers that follow from the key, and with tensors; never with addresses as numbers;
- tell `forget` when what it once looked up (configurations) changes.

A call that does more (a copy of what does not lie dense, say) is never prepared: its host function runs every time. So
it does while a profiler listens to launches, on the host's tensors, and on another device than the current one.
Another allocator than PyTorch's (the conformance kit's) is asked as the host function would ask it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, ParamSpec, TypeVar

from te_dispatch.backend_kit.caches import BoundedDict
from te_dispatch.backend_kit.device import dispatch_modes
from te_dispatch.ops import alloc
from te_dispatch.ops.checks.guards import PLAIN
from te_dispatch.ops.declared import parameters
from te_dispatch_triton import argument_facts, launch
from te_dispatch_triton.argument_facts import OPERAND, OPTION, Kind, indented, kind_of
from te_dispatch_triton.tape import ACTIVE, Given, Tape

P = ParamSpec("P")
R = TypeVar("R")

#: Kinds of calls that one operator keeps, and those it has met once. Ragged batches make a kind for every length.
CAPACITY, MET = 1024, 8192
#: Calls of a kind that run as they are before one is watched.
AFTER = 1
#: The index of the first device whose calls are prepared; the host's is -1.
_LEAST = 0


_tables: list[dict[Any, Any]] = []


def forget() -> None:
    """Prepare all calls anew: configurations have changed."""
    for table in _tables:
        table.clear()


def prepared(
    operator: str | None = "", *, also: Callable[[], object] | None = None, **exceptions: Kind
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of an operator's host function.

    Args:
        operator: whose arguments the function takes, by default the one that has its name. None: of none.
        also: tells what else the function reads.
        exceptions: kinds of arguments that are not those that the operator's declaration says.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        declared = {} if operator is None else parameters(operator or function.__name__)
        names = inspect.signature(function).parameters
        if unknown := exceptions.keys() - names.keys():
            raise TypeError(f"{function.__name__}: takes no {', '.join(sorted(unknown))}")
        kinds = {name: kind_of(declared[name]) if name in declared else OPTION for name in names}
        return _wrapper(function, kinds | exceptions, also)

    return wrap


def _wrapper(function: Any, kinds: dict[str, Kind], also: Any) -> Any:
    calls: BoundedDict[Any, Any] = BoundedDict(CAPACITY)
    met: BoundedDict[Any, int] = BoundedDict(MET)
    _tables.extend((calls, met))
    namespace = vars(argument_facts) | {
        "_launch": launch, "_direct": alloc.direct, "ACTIVE": ACTIVE,
        "_function": function, "_calls": calls, "_learn": functools.partial(_learn, function, kinds, calls, met),
        "_also": also,
    }  # fmt: skip
    wrapper = _compiled(_source(function, kinds, also is not None), function.__name__, namespace)
    functools.update_wrapper(wrapper, function)
    wrapper.__defaults__, wrapper.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    wrapper.calls, wrapper.met = calls, met
    return wrapper


def _variables(kinds: dict[str, Kind]) -> list[str]:
    """Of a call's tensors, without their ``t_``."""
    return [f"{x}_{name}" for x, kind in kinds.items() for name in kind.tensors]


def _parameters(kinds: dict[str, Kind]) -> str:
    """What a prepared call takes behind allocator and stream: tensors, their addresses, what else may come back."""
    records = [x for x, kind in kinds.items() if kind is OPERAND]
    return ", ".join([*(f"t_{x}, p_{x}" for x in _variables(kinds)), *records])


def _each(kinds: dict[str, Kind], values: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Every tensor with the variable that holds it, without its ``t_``."""
    many = {f"{x}_" for x, kind in kinds.items() if kind.many}
    for name, value in zip(_variables(kinds), values, strict=True):
        if name in many:
            yield from ((f"{name}[{i}]", x) for i, x in enumerate(value))
        else:
            yield name, value


def _learn(
    function: Any,
    kinds: dict[str, Kind],
    calls: dict[Any, Any],
    met: dict[Any, int],
    key: Any,
    index: int,
    arguments: tuple[Any, ...],
    tensors: tuple[Any, ...],
) -> Any:
    """Run the function; the second time under a key watch it, and keep what it did."""
    run = functools.partial(function, **dict(zip(kinds, arguments)))
    times = met.get(key, 0)
    if index < _LEAST or times > AFTER or launch.observed() or dispatch_modes():
        return run()
    met[key] = times + 1
    given: dict[str, Given] = {}
    for name, x in _each(kinds, tensors):
        if x is None:
            continue
        if name.endswith("_col_scale_inv") and (row := given.get(name.replace("_col_", "_row_"))) and row.value is x:
            continue  # one scale for both copies, as the key says
        given[name] = Given(f"t_{name}", f"p_{name}", x)
    if times < AFTER or not all(one.value.__class__ in PLAIN for one in given.values()):
        return run()
    tape = Tape(list(given.values()), {x: a for (x, kind), a in zip(kinds.items(), arguments) if kind is OPERAND})
    with tape.watching():
        result = run()
    name = function.__name__
    source = tape.source(name, f"empty, stream, {_parameters(kinds)}", result)
    if source is not None:
        calls[key] = _compiled(source, f"{name}, prepared", tape.names)
    return result


@functools.lru_cache(4 * CAPACITY)
def _code(source: str, label: str) -> CodeType:
    file = f"<te_dispatch_triton {label} {next(_serial)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    return compile(source, file, "exec")


_serial = itertools.count()


def _compiled(source: str, label: str, namespace: dict[str, Any]) -> Any:
    """The one function of a source text; tracebacks and debuggers find the text."""
    made: dict[str, Any] = {}
    exec(_code(source, label), namespace, made)
    return next(iter(made.values()))


_WRAPPER = """
def {name}({signature}):
    try:
        low, index = 0, -1
        {look}
        key = ({key},)
        call = None if low & 15 else _calls.get(key)
        if call is not None:
            empty, current = _direct
            if empty is None:  # another allocator is in force: it is asked
                current = _launch._current
            # A tape sees what host functions do, this one's too.
            if (current is not None and current() != index) or _launch.observed() or ACTIVE:
                low, call = 1, None
    except Exception:  # something that was not foreseen: the function shall say what
        low, call = 1, None
    if call is not None:
        result = call(empty, _launch._raw_stream(index), {variables})
        if result is not NotImplemented:
            return result
    elif not low & 15:
        return _learn(key, index, ({names},), ({tensors},))
    return _function({forwarded})
"""


def _source(function: Any, kinds: dict[str, Kind], also: bool) -> str:
    """The wrapper's text: facts of each argument in variables, then a key of them all."""
    look, key = [], []
    for x, kind in kinds.items():
        if kind.look:
            look.append(kind.look(x))
            key.append(f"f_{x}")
        elif kind.facts:
            key.append(kind.facts.format(x=x))
    if also:
        key.append("_also()")
    tensors = _variables(kinds)
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=p.empty, default=p.empty) for p in parameters]
    return _WRAPPER.format(
        name=function.__name__,
        signature=str(inspect.Signature(bare))[1:-1],
        look=indented("\n".join(look), 8),
        key=", ".join(key),
        forwarded=", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in bare),
        variables=_parameters(kinds),
        names=", ".join(kinds),
        tensors=", ".join(f"t_{x}" for x in tensors),
    )
