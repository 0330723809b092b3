# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Compiled graphs: what modules and the runtime need so that torch.compile gives eager's bits.

docs/torch_compile.md has the rules. Start with `dispatch`, how a call of an operator becomes a node of a graph; modules
use only the names that this package exports. May import what `te_dispatch.pytorch` may, but no module; `dispatch` and
`proxies` also `te_dispatch.pytorch.export`.
"""

from te_dispatch.pytorch.compile.hook import constant
from te_dispatch.pytorch.compile.launch import make_opaque
from te_dispatch.pytorch.compile.state import (
    call_outside_graph,
    exporting,
    graph_trains,
    keep_static,
    making_graph,
    real_tensors,
    refuse_recomputation,
    register_call,
    returned,
    snapshot,
)

# Registers what is traced in place of `te_dispatch.using` and `te_dispatch.policy`.
from te_dispatch.pytorch.compile import scoped as _scoped  # noqa: F401  # isort: skip

__all__ = [
    "call_outside_graph",
    "constant",
    "exporting",
    "graph_trains",
    "keep_static",
    "make_opaque",
    "making_graph",
    "real_tensors",
    "refuse_recomputation",
    "register_call",
    "returned",
    "snapshot",
]
