# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`make_graphed_callables`: the method `reset` of what it returns."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.graphs import graphs
from tests.pytorch.capturing import made
from tests.pytorch.graphs_on_cpu import CpuGraphs

DELAYED = DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaGraphs", CpuGraphs)


def sample() -> torch.Tensor:
    return torch.randn(32, 1, 64).requires_grad_()


def test_reset_lets_go_of_graphs_and_their_memory() -> None:
    module = te.make_graphed_callables(made("LayerNormMLP"), (sample(),))
    x = sample()
    out = module(x)
    expected = out.detach().clone()
    freed = [weakref.ref(graph) for graph in CpuGraphs.captured]
    CpuGraphs.captured.clear()
    for _ in range(2):
        module.reset()
    gc.collect()
    assert [graph() for graph in freed] == [None, None]
    assert torch.equal(out, expected)
    for call in (lambda: module(x), lambda: out.sum().backward()):
        with pytest.raises(RuntimeError, match=r"the graphs of LayerNormMLP were reset.*`del module.forward` brings"):
            call()
    module.eval()
    assert torch.equal(module(x), expected)
    del module.forward
    module.train()
    module(x).sum().backward()
    assert x.grad is not None


def test_reset_of_one_call_leaves_the_others() -> None:
    module = made("Linear")
    first, second = te.make_graphed_callables(
        (module,), ((sample(),),) * 2, enabled=True, recipe=DELAYED, cache_quantized_params=True, _order=[1, -1, 1, -1]
    )
    first.reset()
    with te.autocast(recipe=DELAYED):
        with pytest.raises(RuntimeError, match="the graphs of Linear were reset"):
            first(sample(), is_first_microbatch=True)
        out = second(sample(), is_first_microbatch=True)
    out.sum().backward()
    assert module.weight.grad is not None


def test_a_function_that_was_reset() -> None:
    call = te.make_graphed_callables(lambda x: x * 2, (sample(),))
    call.reset()
    with pytest.raises(RuntimeError, match="the graphs of <lambda> were reset"):
        call(sample())
