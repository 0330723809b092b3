# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Running a call that is known: kernels around a graph, and the graph. Everything by address, 0 for what is absent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.backend_kit.device import current_device
from te_dispatch_cuda.attention.assemble import Call
from te_dispatch_cuda.attention.frontend import handle_of
from te_dispatch_cuda.attention.graphs import Graph
from te_dispatch_cuda.attention.rows import Batch

_NO_BATCH = Batch(0, 0, 0, 0)
_NO_LENGTHS = (0, 0)


def forward(
    call: Call,
    device: int,
    stream: int,
    workspace: int,
    operands: Sequence[int],
    out: int,
    lse: int,
    bias: int,
    sink: int,
    table: int,
    largest: int,
    batch: Batch | None,
) -> None:
    """`batch` where sequences have lengths of their own."""
    lengths, sink = _prepare(call, stream, workspace, batch, sink) if call.prepared else (_NO_LENGTHS, sink)
    if batch is not None and call.cleaned:
        operands = _clean(call, stream, workspace, batch, operands)
    row_max = workspace + call.statistics_at if largest else 0
    row_sum = row_max + call.per_row
    execute(call.graph, device, stream, workspace, (
        0, *operands, out, lse, bias, *lengths, sink, row_max, table, table, 0, 0, 0, 0, 0, 0, row_sum,
    ))  # fmt: skip
    if batch is not None:
        call.sequences.mend_forward(stream, batch, out, call.written[0], lse)
    if largest:
        call.sequences.summarize(stream, batch or _NO_BATCH, row_max, row_sum, lse, largest)


def backward(
    call: Call,
    device: int,
    stream: int,
    workspace: int,
    operands: Sequence[int],
    out: int,
    lse: int,
    dout: int,
    gradients: tuple[int, int, int],
    bias: int,
    dbias: int,
    sink: int,
    dsink: int,
    batch: Batch | None,
) -> None:
    """As `forward`."""
    lengths, sink = _prepare(call, stream, workspace, batch, sink) if call.prepared else (_NO_LENGTHS, sink)
    if batch is not None and call.cleaned and not call.sequences.all_see_themselves(batch):
        *operands, dout = _clean(call, stream, workspace, batch, (*operands, dout))
    execute(call.graph, device, stream, workspace, (
        0, *operands, out, lse, bias, *lengths, sink, 0, 0, 0, dout, *gradients, dbias, dsink, 0,
    ))  # fmt: skip
    if batch is not None:
        call.sequences.mend_backward(stream, batch, gradients, call.written)  # type: ignore[arg-type]


def execute(graph: Graph, device: int, stream: int, workspace: int, addresses: tuple[int, ...]) -> None:
    """Run a graph; cuDNN works on the current device only."""
    if current_device() == device:
        graph.run(addresses, workspace, handle_of(device, stream))
        return
    with torch.cuda.device(device):
        graph.run(addresses, workspace, handle_of(device, stream))


def _prepare(call: Call, stream: int, workspace: int, batch: Batch | None, sink: int) -> tuple[tuple[int, int], int]:
    """Lengths, offsets and zeros that the graph reads: addresses of lengths and softmax offsets."""
    graph = call.graph
    lengths = graph.lengths(workspace)
    zeros = workspace + call.sink_at if call.sink_at >= 0 else 0
    call.sequences.describe(stream, batch or _NO_BATCH, lengths, workspace + graph.offsets_at, len(graph.ragged), zeros)
    return lengths, zeros or sink


def _clean(call: Call, stream: int, workspace: int, batch: Batch, addresses: Sequence[int]) -> list[int]:
    """Addresses of the operands, copies in the place of those that are copied."""
    found = list(addresses)
    copies = []
    for c in call.cleaned:
        source, target = c.source, c.target
        found[c.operand] = workspace + c.at
        copies.append((
            int(c.of_keys), addresses[c.operand], source.batch, source.row, source.head, workspace + c.at, target.batch,
            target.row, target.head, c.heads, source.bytes,
        ))  # fmt: skip
    call.sequences.clean(stream, batch, tuple(copies))
    return found
