# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""CUDA graphs, as the rest of the room uses them: functions are captured, and replayed later.

`CudaGraphs` is the only class here that needs a GPU. Whatever has its methods serves in its place: the tests of the
room run on a CPU with one that calls the functions again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from te_dispatch.pytorch.distributed.rng_tracker import tracked_generators


class Graph(Protocol):
    """A captured function.

    Attributes:
        results: what the function returned. A replay writes the tensors of it anew, in the same memory.
    """

    results: list[Any]

    def replay(self) -> None:
        """Run the captured work again, on the current stream."""

    def release(self) -> None:
        """Let go of the autograd graph of the results."""


class Graphs(Protocol):
    """What captures. `device_type`: of the devices that it captures on."""

    device_type: str

    def warming_up(self) -> Any:
        """A context for runs before the capture, on the stream of the capture."""

    def capturing(self) -> Any:
        """A context for all captures."""

    def capture(self, function: Callable[[], list[Any]], apart: bool = False) -> Graph:
        """Run a function, and record its work on the device instead of doing it.

        Args:
            apart: for a graph that is not replayed at its place among the others: its memory is shared with none.
        """


class _CudaGraph:
    """A `torch.cuda.CUDAGraph` and its results."""

    __slots__ = ("results", "replay", "_graph")

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any]) -> None:
        self._graph = graph
        self.replay = graph.replay
        self.results = results

    def release(self) -> None:
        self.results = [x.detach() if isinstance(x, torch.Tensor) else x for x in self.results]


class CudaGraphs:
    """Captures of one device, in one pool of memory but for those that are apart.

    Graphs of one pool share what an earlier one has freed by its end, so they must be replayed in the order in which
    they were captured.

    Args:
        pool: of `torch.cuda.graph_pool_handle` or of a graph; None for a new one.
    """

    device_type = "cuda"

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize(self._device)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        # What the collector frees might call into CUDA, which a capture does not allow.
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()
            torch.cuda.synchronize(self._device)

    def capture(self, function: Callable[[], list[Any]], apart: bool = False) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # That of the device's own generator is registered by PyTorch.
        for generator in tracked_generators(self._device):
            graph.register_generator_state(generator)
        with torch.cuda.graph(graph, pool=None if apart else self._pool, stream=self._stream):
            results = function()
        return _CudaGraph(graph, results)


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Leave the random states of a device, and of trackers, as they were."""
    own = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]
    before = [(generator, generator.get_state()) for generator in (own, *tracked_generators(device))]
    try:
        yield
    finally:
        for generator, state in before:
            generator.set_state(state)
