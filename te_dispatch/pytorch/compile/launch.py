# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`te_dispatch::launch`: how an opaque implementation appears in a compiled graph.

One operator serves all: it takes the tensors an implementation reads, those it writes, and a string that says how they
make up the arguments. The graph allocates results with the operator's shape function, so that the operator itself
returns nothing and its fake implementation does nothing. Eager calls never come here: dynamo is told to trace
`Opaque.trace` in place of the bound function.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from te_dispatch.core import codegen
from te_dispatch.core.errors import Declined
from te_dispatch.core.operator import Operator
from te_dispatch.ops.results import as_returned
from te_dispatch.pytorch.compile import hook, outputs, state
from te_dispatch.pytorch.compile.flatten import Flat, Values, build, claim_written, encode, parse

_serial = itertools.count()
_namespace = codegen.new_namespace("opaque")
_library = torch.library.Library("te_dispatch", "FRAGMENT")
_library.define("launch(Tensor[] ins, Tensor(a!)[] outs, SymInt[] sizes, float[] numbers, str spec, str impl) -> ()")


class Opaque:
    """An implementation that dynamo must not look into.

    Attributes:
        key: operator, implementation and their versions; a constant in every graph that calls it.
        function: what is called with the operator's arguments, in the order of its own signature.
        operator: its interface.
        shape: computes results for fake arguments: the implementation's own `output_shape`, where the operator's
            shape function cannot know (another scale layout, tensors left in `saved`), else the operator's.
        implementation_id, saved_format: what a forward's `Saved` says.
        inlined: what is traced instead for calls on the CPU; None where those are opaque too.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        operator: Operator,
        implementation_id: str,
        version: str,
        saved_format: str,
        shape: Callable[..., Any] | None,
        inlined: Callable[..., Any] | None,
    ) -> None:
        self.key = f"{operator.name}@{operator.version}:{implementation_id}@{version}"
        self.function = function
        self.operator = operator
        self.implementation_id = implementation_id
        self.saved_format = saved_format
        self.shape = shape or operator.shape
        self.inlined = inlined
        self.device = codegen.reader(operator, _namespace, operator.device, "device")
        parameters = inspect.signature(function).parameters.values()
        #: The function's own parameters: (name, passed by keyword), without what it lacks.
        self.parameters = tuple((p.name, p.kind is p.KEYWORD_ONLY) for p in parameters)
        self.shape_parameters = tuple(
            (p.name, p.kind is p.KEYWORD_ONLY, p.default) for p in operator.signature.parameters.values()
        )
        #: Parameters written as a whole. What a quantizer accumulates is known from the quantizer.
        self.written = tuple(name for name in operator.mutates if "." not in name)

    def trace(self, *args: Any, **keywords: Any) -> Any:
        """What a compiled program does instead of calling `function`. Runs while a graph is made only."""
        given = dict(keywords)
        for (name, _), value in zip(self.parameters, args):  # defaults may be left out
            given[name] = value
        if self.inlined is not None and self.on_cpu(given):
            return self.inlined(*args, **keywords)
        amaxes: list[tuple[torch.Tensor, torch.Tensor]] = []
        if state.tracing.checkpoint:
            for name, value in given.items():
                given[name] = state.with_own_amax(value, amaxes)
        positional, named, values = [], {}, []
        flat = Flat()
        for name, keyword, default in self.shape_parameters:
            value = given.get(name, default)
            claim_written(value, flat, name in self.written)
            if keyword:
                named[name] = value
            else:
                positional.append(value)
            given[name] = value
        for name, _ in self.parameters:
            values.append(given[name])
        for value in values:
            encode(value, flat)
        results = self.shape(*positional, **named)
        result = as_returned(results, self.implementation_id, self.saved_format)
        encode(result, flat, True)
        torch.ops.te_dispatch.launch(flat.ins, flat.outs, flat.sizes, flat.numbers, flat.spec(), self.key)
        state.accumulate(amaxes)
        return result

    def on_cpu(self, given: dict[str, Any]) -> bool:
        """Whether a call with these arguments is one on the CPU."""
        full = [given.get(name, default) for name, _, default in self.shape_parameters]
        return bool(self.device(*full).type == "cpu")

    def run(self, args: list[Any]) -> Any:
        positional = [value for (_, keyword), value in zip(self.parameters, args, strict=True) if not keyword]
        named = {name: value for (name, keyword), value in zip(self.parameters, args, strict=True) if keyword}
        return self.function(*positional, **named)

    def fall_back(self, declined: Declined, args: list[Any]) -> Any:
        """The call by the next candidate, under the policy in force where the graph runs."""
        from te_dispatch.core import scopes  # which declares the operators, and those need what is above

        given = {name: value for (name, _), value in zip(self.parameters, args, strict=True)}
        full = [given.get(name, default) for name, _, default in self.shape_parameters]
        dispatcher = scopes.capture().dispatcher(self.operator)
        return dispatcher.piece_declined(self.implementation_id)(declined, *full)


class _Named:
    """What traced code finds by attribute: dynamo takes a dict as it first saw it, and this one grows meanwhile."""


_OPAQUE: dict[str, Opaque] = {}
_traced = _Named()


def make_opaque(
    function: Callable[..., Any],
    operator: Operator,
    implementation_id: str,
    version: str = "1",
    saved_format: str = "canonical",
    shape: Callable[..., Any] | None = None,
    inline_on_cpu: bool = False,
) -> Opaque:
    """Let compiled graphs call `function` through `te_dispatch::launch`. Costs eager calls nothing.

    Call it for the very function object that trampolines and tables hold (a positional twin, not its original), when
    an implementation is bound that graphs must not take apart.

    Args:
        function: a Python or builtin function with the operator's parameters, newer ones possibly lacking.
        operator: its interface.
        implementation_id, version: from the manifest; both are part of the compile caches' keys.
        saved_format: a forward's, from the manifest.
        shape: see `Opaque.shape`; signature of the operator.
        inline_on_cpu: let graphs take calls on the CPU apart all the same; `function` must be written in Python.
    """
    inlined = _twin(function) if inline_on_cpu else None
    opaque = Opaque(function, operator, implementation_id, version, saved_format, shape, inlined)
    name = f"{operator.name}_{next(_serial)}"
    _OPAQUE[opaque.key] = opaque
    setattr(_traced, name, opaque)

    # The name, not the object: dynamo takes a substitute's cells only where they hold constants.
    def traced(*args: Any, **keywords: Any) -> Any:
        return getattr(_traced, name).trace(*args, **keywords)

    hook.substitute(function, traced)
    return opaque


def _twin(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function as another object, which has no substitute."""
    assert isinstance(function, FunctionType), function
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


#: PyTorch 2.9 and 2.10 save an amax for a compiled backward as if it were read there, and refuse the next backward of
#: another forward once its version has changed: what is written through ``.data`` keeps it.
_VERSIONS_CHECKED = torch.__version__ < (2, 11)


def _launch(
    ins: list[torch.Tensor],
    outs: list[torch.Tensor],
    sizes: list[int],
    numbers: list[float],
    spec: str,
    impl: str,
) -> None:
    opaque = _OPAQUE.get(impl)
    if opaque is None:
        raise RuntimeError(
            f"a compiled graph calls {impl}, which is not bound in this process: the graph was loaded from a cache "
            "without tracing. Call the operator once, or load the plan, before running it"
        )
    *arguments, expected = parse(spec)
    if _VERSIONS_CHECKED:
        outs = [out.data for out in outs]
    values = Values(ins, outs, sizes, numbers)
    args = [build(node, values) for node in arguments]
    try:
        with outputs.handing_out(outs, expected):
            result = opaque.run(args)
    except Declined as declined:
        with outputs.handing_out(outs, expected):
            result = opaque.fall_back(declined, args)
    outputs.collect(result, expected, values, opaque.key)


def _launch_fake(
    ins: list[torch.Tensor],
    outs: list[torch.Tensor],
    sizes: list[int],
    numbers: list[float],
    spec: str,
    impl: str,
) -> None:
    return None


_library.impl("launch", _launch, "CompositeExplicitAutograd")
torch.library.register_fake("te_dispatch::launch", _launch_fake, lib=_library)
