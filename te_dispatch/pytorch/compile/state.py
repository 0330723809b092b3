# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Delayed-scaling state in compiled graphs: reading a scale when eager would, and calling what must not be traced.

docs/torch_compile.md says why both are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.pytorch.compile import hook

_library = torch.library.Library("te_dispatch", "FRAGMENT")
_library.define("snapshot(Tensor state, Tensor after) -> Tensor")
_library.define("call(Tensor(a!) ticket, Tensor? after, str name) -> ()")

_calls: dict[str, Callable[[], None]] = {}

#: Written by every `te_dispatch::call` of a forward, so that the compiler keeps the calls and their order.
_ticket = torch.zeros(1)
#: The same for backwards: a graph must not write one tensor in both.
_backward_ticket = torch.zeros(1)


def snapshot(quantizer: Any, after: torch.Tensor) -> Any:
    """A delayed quantizer as it stands now: under tracing, one whose scale is a copy taken where this is called.

    A compiled graph that used the state's own scale could save the state for its backward and read it there, after an
    update; or read a backward's scale at forward time.

    Args:
        quantizer: any, or None. Only a `DelayedQuantizer` is affected.
        after: a tensor that exists only from this point on: an input in the forward, the incoming gradient in the
            backward. It pins the read to that pass.

    Returns:
        In eager, `quantizer` itself.
    """
    return quantizer


def returned(out: torch.Tensor) -> torch.Tensor:
    """What an autograd Function's forward returns: under tracing, a tensor that is no other of its steps' results.

    Before PyTorch 2.12 a traced forward returns its intermediates beside its result. An operation that does nothing,
    such as ``.to`` the same dtype, makes two of these one tensor; autograd then hands the gradient to the last of
    them, and the backward receives zeros.
    """
    return out


def _returned_traced(out: torch.Tensor) -> torch.Tensor:
    return out.view_as(out)


def _snapshot_traced(quantizer: Any, after: torch.Tensor) -> Any:
    if quantizer.__class__ is not DelayedQuantizer:
        return quantizer
    # Not the constructor: it reads the encoding's maximum from a table, and with dynamic shapes dynamo makes such a
    # float symbolic, which then cannot enter the Function's subgraph.
    copy = object.__new__(DelayedQuantizer)
    object.__setattr__(copy, "encoding", quantizer.encoding)
    object.__setattr__(copy, "common", quantizer.common)
    object.__setattr__(copy, "max_value", quantizer.max_value)
    object.__setattr__(copy, "scale", torch.ops.te_dispatch.snapshot(quantizer.scale.detach(), after.detach()))
    object.__setattr__(copy, "amax", quantizer.amax)
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


_library.impl("snapshot", lambda state, after: state.clone(), "CompositeExplicitAutograd")
_library.impl("call", _call, "CompositeExplicitAutograd")
torch.library.register_fake("te_dispatch::snapshot", lambda state, after: torch.empty_like(state), lib=_library)
torch.library.register_fake("te_dispatch::call", lambda ticket, after, name: None, lib=_library)
hook.substitute(snapshot, _snapshot_traced)
hook.substitute(returned, _returned_traced)
hook.substitute(call_outside_graph, _call_traced)
