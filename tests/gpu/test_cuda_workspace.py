# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The workspace that calls keep, where something could go wrong: streams at once, graphs beside eager work, growth.

A norm's backward leaves partial sums in its workspace and adds them up in a second kernel: whoever writes there between
the two changes dgamma and dbeta, which have the same bits in every undisturbed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_dispatch.conformance.memory import GuardedMemory

prepared = pytest.importorskip("te_dispatch_cuda.prepared")
norm = pytest.importorskip("te_dispatch_cuda.norm")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    torch.cuda.synchronize()
    prepared.release_workspaces()
    yield
    torch.cuda.synchronize()
    prepared.release_workspaces()


class Backward:
    """One norm's backward on random operands, and what it gives."""

    def __init__(self, seed: int, columns: int = 768, rows: int = 4096) -> None:
        make = torch.Generator(DEVICE).manual_seed(seed)
        x, dy = (torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16, generator=make) for _ in range(2))
        self.operands = dy, x, torch.ones(columns, device=DEVICE), torch.zeros(rows, device=DEVICE)
        self.rstd = torch.ones(rows, device=DEVICE)
        self.expected = self()
        torch.cuda.synchronize()

    def __call__(self) -> Any:
        return norm.layernorm_bwd(*self.operands, self.rstd)

    def right(self, found: Any) -> bool:
        return all(torch.equal(x, y) for x, y in zip(found, self.expected, strict=True))


def test_two_streams_at_once() -> None:
    calls = [Backward(1), Backward(2)]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found: list[list[Any]] = [[], []]
    for _ in range(50):
        for call, stream, results in zip(calls, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(call())
    torch.cuda.synchronize()
    assert all(call.right(result) for call, results in zip(calls, found, strict=True) for result in results)


def test_a_graph_replayed_beside_eager_work() -> None:
    captured, eager = Backward(1), Backward(2)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured()  # what is kept for the stream of the capture is there before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = captured()
    found, graphed = [], []
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(50):
        with torch.cuda.stream(other):
            graph.replay()
            graphed.append([x.clone() for x in result])
        with torch.cuda.stream(stream):
            found.append(eager())
    torch.cuda.synchronize()
    assert all(map(captured.right, graphed)) and all(map(eager.right, found))


def test_a_graph_keeps_its_own() -> None:
    call = Backward(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    torch.cuda.synchronize()
    prepared.release_workspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for size in (256 * KIB, MIB, 4 * MIB, 20 * MIB)]
    graph.replay()
    torch.cuda.synchronize()
    assert call.right(result) and all((x == 255).all() for x in taken)


def test_it_grows_and_is_given_back() -> None:
    before = torch.cuda.memory_allocated()
    calls = [Backward(seed, columns) for seed, columns in enumerate((256, 2048, 512))]
    while_kept = torch.cuda.memory_allocated()
    kept = prepared.release_workspaces()
    assert 256 * KIB < kept <= 8 * MIB and while_kept - torch.cuda.memory_allocated() == kept
    assert all(call.right(call()) for call in calls for _ in range(3))
    del calls
    prepared.release_workspaces()
    assert torch.cuda.memory_allocated() == before


def test_canaries_surround_it() -> None:
    call = Backward(1)
    with GuardedMemory(0xFF) as memory:
        found = call()
    torch.cuda.synchronize()
    roles = [allocation.role for allocation in memory.allocations]
    assert roles.count("workspace") == 1 and memory.overruns() == [] and call.right(found)
    assert all(torch.is_tensor(x) for x in found)
