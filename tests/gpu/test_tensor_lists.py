# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Optimizer steps over lists of tensors that were met before: what is kept of a list must not outlive its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DEVICE = torch.device("cuda")


def known_and_alone(training: Any, lists: list[list[torch.Tensor]], step: int) -> bool:
    """Whether a step of all tensors gives what the steps of each alone do."""
    alone = [[x.clone() for x in tensors] for tensors in lists]
    training.multi_tensor_adam(*lists, lr=0.1 / step, weight_decay=0.01, step=step)
    for one in zip(*alone):
        training.multi_tensor_adam(*([x] for x in one), lr=0.1 / step, weight_decay=0.01, step=step)
    return all(torch.equal(x, y) for tensors, others in zip(lists, alone) for x, y in zip(tensors, others))


@pytest.mark.parametrize("backend", ["te_dispatch_cuda", "te_dispatch_triton"])
def test_steps_of_known_lists_follow_their_tensors(backend: str) -> None:
    """Through gradients made anew, a parameter's memory exchanged, one resized; on another stream; in a graph."""
    training = pytest.importorskip(f"{backend}.training")
    torch.manual_seed(31)
    sizes = [(7919 * i) % 3000 for i in range(50)]
    lists = [[torch.rand(n, device=DEVICE) for n in sizes] for _ in range(4)]
    for step in range(1, 9):
        assert known_and_alone(training, lists, step)
        lists[1] = [torch.rand_like(x) for x in lists[0]]
        if step == 4:
            lists[0][3].data = torch.rand(sizes[3], device=DEVICE)
        if step == 6:
            for tensors in lists:
                tensors[5].resize_(sizes[5] // 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert known_and_alone(training, lists, 9) and known_and_alone(training, lists, 10)
    torch.cuda.current_stream().wait_stream(stream)
    alone = [[x.clone() for x in tensors] for tensors in lists]
    others = [[torch.rand_like(x) for x in tensors] for tensors in lists]
    training.multi_tensor_adam(*others, lr=0.1, step=11)  # a capture takes kinds of calls that were made before
    training.multi_tensor_scale(others[1], others[1], 0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.multi_tensor_adam(*lists, lr=0.1, step=11)
        training.multi_tensor_scale(lists[1], lists[1], 0.5)
    for step in range(1, 7):  # these write over whatever is kept
        training.multi_tensor_adam(*others, lr=0.1, step=step)
        others[1] = [torch.rand_like(x) for x in others[1]]
    for _ in range(2):
        graph.replay()
        training.multi_tensor_adam(*alone, lr=0.1, step=11)
        training.multi_tensor_scale(alone[1], alone[1], 0.5)
        assert all(torch.equal(x, y) for one, two in zip(lists, alone) for x, y in zip(one, two))
