# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`CpuGraphs`: in place of `capture.graphs.CudaGraphs`, where there is no GPU.

A replay calls the captured function again and writes its results into the memory of the first ones. What Python does
in the function happens again, too; but casts lead to no update of scales in it, as during a capture, so that whoever
replays has to see to that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch


class CpuGraph:
    def __init__(self, function: Callable[[], list[Any]]) -> None:
        self._function = function
        #: Of the last replay, with its autograd graph: what a backward's function reads.
        self.results = function()
        self._memory = [x.detach() if isinstance(x, torch.Tensor) else None for x in self.results]
        self.replays = 0
        self.apart = False

    def replay(self) -> None:
        self.replays += 1
        with torch.enable_grad():
            self.results = self._function()
        with torch.no_grad():
            for memory, new in zip(self._memory, self.results, strict=True):
                if memory is not None and memory.data_ptr() != new.data_ptr():
                    memory.copy_(new)

    def release(self) -> None:
        pass


class CpuGraphs:
    device_type = "cpu"
    #: Those of the last `make_graphed_callables`, in the order of their captures.
    captured: ClassVar[list[CpuGraph]] = []

    def __init__(self, device: torch.device, pool: Any) -> None:
        type(self).captured = []
        self.pool = pool

    def warming_up(self) -> Any:
        return nullcontext()

    capturing = warming_up

    def capture(self, function: Callable[[], list[Any]], apart: bool = False) -> CpuGraph:
        graph = CpuGraph(function)
        graph.apart = apart
        self.captured.append(graph)
        return graph
