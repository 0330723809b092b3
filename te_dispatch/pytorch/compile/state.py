# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Delayed-scaling state in compiled graphs: reading a scale when eager would, calling what must not be traced.

docs/torch_compile.md says why both are needed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.core.devices import is_traced
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.pytorch.compile import hook
from te_dispatch.torch_private import dispatch_modes, graph_task, outside_modes

_library = torch.library.Library("te_dispatch", "FRAGMENT")
_library.define("snapshot(Tensor state, Tensor after, bool in_backward) -> Tensor")
_library.define("call(Tensor(a!) ticket, Tensor? after, str name) -> ()")

_calls: dict[str, Callable[[], None]] = {}

#: Written by every `te_dispatch::call` of a forward, so that the compiler keeps the calls and their order.
_ticket = torch.zeros(1)
#: The same for backwards: a graph must not write one tensor in both.
_backward_ticket = torch.zeros(1)


class _Tracing:
    """Attributes:
    checkpoint: whether the function that `te_dispatch.pytorch.checkpoint` was given is being traced.
    """

    def __init__(self) -> None:
        self.checkpoint = False


tracing = _Tracing()


@hook.constant
def exporting() -> bool:
    """Whether an exported program is being made, by `torch.export` in either mode, or a graph by ``make_fx``.

    Called while dynamo traces, and not traced: to dynamo before PyTorch 2.12 `torch.compiler.is_exporting()` is True in
    every graph.
    """
    return torch.compiler.is_exporting() or is_traced()


def making_graph() -> bool:
    """Whether a graph is being made of what runs now: by torch.compile, `torch.export` or ``make_fx``."""
    return torch.compiler.is_compiling() or (dispatch_modes() > 0 and is_traced())


def graph_trains() -> bool:
    """Whether a graph that is made now is one for training. An exported program is not: it computes with the scales in
    force when it was made, and changes no state."""
    return torch.is_grad_enabled() and not exporting()


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Make state inside, which outlives the trace of the graph that needed it: no fake tensors, nothing recorded."""
    if not is_traced():
        return contextlib.nullcontext()
    return outside_modes()


def snapshot(quantizer: Any, after: torch.Tensor, in_backward: bool = False) -> Any:
    """A delayed quantizer as it stands now: under tracing, one whose scale is a copy taken where this is called.

    A compiled graph that used the state's own scale could save the state for its backward and read it there, after an
    update; or read a backward's scale at forward time.

    Args:
        quantizer: any, or None. Only a `DelayedQuantizer` is affected.
        after: a tensor that exists only from this point on: an input in the forward, the incoming gradient in the
            backward. It pins the read to that pass.
        in_backward: whether this is a backward's cast. A forward's that runs inside a backward pass is a
            recomputation, which would see newer scales: a compiled program then raises a RuntimeError.

    Returns:
        In eager, `quantizer` itself.
    """
    return quantizer


def refuse_recomputation() -> None:
    """Raise in a compiled forward with delayed scaling that runs although its first run was long ago.

    Raises:
        RuntimeError: this thread is inside a backward pass.
    """
    if graph_task() != -1:
        raise RuntimeError(
            "a compiled module with delayed scaling runs inside a backward pass: the recomputation of a checkpoint "
            "would record amaxes again and read newer scales; inside the compiled region use "
            "te_dispatch.pytorch.checkpoint, around it none, or use another recipe"
        )


def with_own_amax(value: Any, amaxes: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """An argument of an opaque call inside a checkpoint: its delayed quantizers start from an amax of 0 of their own.

    A recomputation of the call then reads and writes no state. What it records goes nowhere, since only the first
    run's is accumulated, by `accumulate`.

    Args:
        value: any argument of an operator.
        amaxes: receives (the state's, the quantizer's own) amax of each.
    """
    if value.__class__ is DelayedQuantizer and value.amax is not None:
        # Not zeros_like, whose recomputation would read the state.
        own = torch.zeros(value.amax.shape, dtype=value.amax.dtype, device=value.amax.device)
        amaxes.append((value.amax, own))
        return _copy(value, value.scale, own)
    if isinstance(value, (list, tuple)) and any(item.__class__ is DelayedQuantizer for item in value):
        return [with_own_amax(item, amaxes) for item in value]
    return value


def accumulate(amaxes: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Maximum into the state's amax of what a call recorded in its own."""
    for state, own in amaxes:
        state.copy_(torch.maximum(state, own))


def returned(out: torch.Tensor) -> torch.Tensor:
    """What an autograd Function's forward returns: under tracing, a tensor that is no other of its steps' results.

    Before PyTorch 2.12 a traced forward returns its intermediates beside its result. An operation that does nothing,
    such as ``.to`` the same dtype, makes two of these one tensor; autograd then hands the gradient to the last of
    them, and the backward receives zeros.
    """
    return out


def _returned_traced(out: torch.Tensor) -> torch.Tensor:
    return out.view_as(out)


def _snapshot_traced(quantizer: Any, after: torch.Tensor, in_backward: bool = False) -> Any:
    if quantizer.__class__ is not DelayedQuantizer or exporting():
        return quantizer
    scale = torch.ops.te_dispatch.snapshot(quantizer.scale.detach(), after.detach(), in_backward)
    return _copy(quantizer, scale, quantizer.amax)


def _copy(quantizer: DelayedQuantizer, scale: torch.Tensor, amax: torch.Tensor | None) -> DelayedQuantizer:
    # Not the constructor: it reads the encoding's maximum from a table, and with dynamic shapes dynamo makes such a
    # float symbolic, which then cannot enter the Function's subgraph.
    copy = object.__new__(DelayedQuantizer)
    object.__setattr__(copy, "encoding", quantizer.encoding)
    object.__setattr__(copy, "common", quantizer.common)
    object.__setattr__(copy, "max_value", quantizer.max_value)
    object.__setattr__(copy, "scale", scale)
    object.__setattr__(copy, "amax", amax)
    return copy


def keep_static(*tensors: torch.Tensor) -> None:
    """Tell dynamo that these tensors never change shape. Call it whenever a state's memory is made.

    With ``dynamic=True`` dynamo would make the sizes of a history symbolic, and a graph that updates it fails.
    """
    references = [weakref.ref(tensor) for tensor in tensors]

    def mark() -> None:
        for reference in references:
            tensor = reference()
            if tensor is not None:
                torch._dynamo.mark_static(tensor)

    hook.when_dynamo_loads(mark)


def register_call(name: str, function: Callable[[], None]) -> None:
    """Name a function for `call_outside_graph`. Naming another replaces it."""
    _calls[name] = function


def call_outside_graph(name: str, after: torch.Tensor | None = None) -> None:
    """Call the function registered as `name`: now in eager; in a compiled program at this point of every run.

    It takes and returns nothing, and tensors it writes must not be read or written elsewhere in the same graph: the
    compiler knows nothing of them. Writes go through ``.data``, so that saved state keeps its version.

    Args:
        name: as registered.
        after: in a backward, the incoming gradient, which pins the call to that pass; None in a forward.

    Raises:
        KeyError: nothing is registered under this name.
    """
    _calls[name]()


def _call_traced(name: str, after: torch.Tensor | None = None) -> None:
    if after is None:
        torch.ops.te_dispatch.call(_ticket, None, name)
    else:
        torch.ops.te_dispatch.call(_backward_ticket, after.detach(), name)


def _call(ticket: torch.Tensor, after: torch.Tensor | None, name: str) -> None:
    _calls[name]()


def _snapshot(state: torch.Tensor, after: torch.Tensor, in_backward: bool) -> torch.Tensor:
    if not in_backward:
        refuse_recomputation()
    return state.clone()


_library.impl("snapshot", _snapshot, "CompositeExplicitAutograd")
_library.impl("call", _call, "CompositeExplicitAutograd")
torch.library.register_fake("te_dispatch::snapshot", lambda state, *_: torch.empty_like(state), lib=_library)
torch.library.register_fake("te_dispatch::call", lambda ticket, after, name: None, lib=_library)
hook.substitute(snapshot, _snapshot_traced)
hook.substitute(returned, _returned_traced)
hook.substitute(call_outside_graph, _call_traced)
