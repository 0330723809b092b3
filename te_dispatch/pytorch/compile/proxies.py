# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Graphs that are made without dynamo: non-strict `torch.export.export`, and `make_fx` with fake tensors.

There, Python runs as in eager and PyTorch records the operations on fake tensors. A trampoline's table sends fake
tensors to the slow path, which comes here. The choice of an implementation is that of `dispatch`; one that consists of
PyTorch operations is run and so recorded, every other one is recorded as `te_dispatch::launch`.

With real tensors (``make_fx(tracing_mode="real")``, `torch.jit.trace`) nothing tells a call that it is recorded, and
kernels that are no PyTorch operations are missing from the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_dispatch.core import scopes
from te_dispatch.core.decision import Accepted
from te_dispatch.core.dispatcher import Dispatcher
from te_dispatch.core.errors import Declined
from te_dispatch.core.operator import Operator
from te_dispatch.core.scopes import MANAGER
from te_dispatch.pytorch.compile.asking import Answers, Lacking
from te_dispatch.pytorch.compile.dispatch import choose, hidden, read
from te_dispatch.pytorch.export.lowering import lowered
from te_dispatch.pytorch.export.mode import is_in_onnx_export_mode


def call(operator: Operator, args: tuple[Any, ...]) -> Any:
    """Record a call in the graph that is being made.

    Args:
        operator: its interface.
        args: every argument, in order; tensors among them are fake.

    Returns:
        What the operator returns, of fake tensors.

    Raises:
        NoImplementation: no implementation takes the call; the message is the decision's table.
        DispatchError: an implementation declined a backward.
    """
    bindings = scopes.capture()
    device = MANAGER.device_facts(bindings.dispatcher(operator).device_of(*args))
    known: Answers = {}
    declined: tuple[str, ...] = ()
    while True:
        try:
            with MANAGER.lock:
                name, _, function = choose(operator, known, device, bindings, declined, _recorded)
        except Lacking as lacking:
            known[lacking.atom] = read(operator, lacking.atom, args)
            continue
        try:
            return function(*args)
        except Declined:
            declined = (*declined, name)


def _recorded(dispatcher: Dispatcher, accepted: Accepted) -> Callable[..., Any]:
    """A `Part` for graphs: recorded step by step, or as one call."""
    if "plain_torch" in accepted.traits:
        bound = MANAGER.functions.bound(dispatcher.operator, accepted.id)
        return lowered(dispatcher.operator, bound) if is_in_onnx_export_mode() else bound
    return hidden(dispatcher.operator, accepted).trace
