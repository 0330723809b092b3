# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Programs that capture CUDA graphs of modules by themselves: weak references, and scales that replays leave due."""

from __future__ import annotations

import copy

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.devices import canonicalize_device, devices_match, get_sm_count
from te_dispatch.pytorch.fp8.global_state import FP8GlobalStateManager
from te_dispatch.pytorch.graphs.outside import graph_pool_handle, restore_fp8_tensors, save_fp8_tensors
from te_dispatch.pytorch.tensor.memory import clear_tensor_data, make_weak_ref


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_a_weak_reference_reads_the_same_memory(dtype: torch.dtype) -> None:
    x = (torch.rand(6, 8, 10, device="cuda") * 3).to(dtype)
    for tensor in (x, x.transpose(0, 2), x[1:, ::2], x[0, 0, 0], x[:0]):
        found = make_weak_ref((tensor, 1))[0]
        assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert tensor.numel() == 0 or found.data_ptr() == tensor.data_ptr()
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)) if dtype == torch.bool else True
        assert torch.equal(found.float(), tensor.float()) and found.device == tensor.device
    x.fill_(1)
    assert bool((make_weak_ref(x).float() == 1).all())


def test_a_weak_reference_keeps_no_memory() -> None:
    x = torch.zeros(1 << 20, device="cuda", requires_grad=True)
    allocated = torch.cuda.memory_allocated()
    found = make_weak_ref(x)
    assert torch.cuda.memory_allocated() == allocated and not found.requires_grad
    del x
    assert torch.cuda.memory_allocated() <= allocated - (4 << 20)
    held = torch.zeros(1 << 20, device="cuda")
    allocated = torch.cuda.memory_allocated()
    clear_tensor_data(held)
    assert torch.cuda.memory_allocated() <= allocated - (4 << 20)


def test_replays_leave_updates_of_scales_to_who_asks() -> None:
    """A step of delayed scaling by a replay, and the update that is asked for, are a step in eager, bit for bit."""
    torch.manual_seed(0)
    recipe, x = DelayedScaling(amax_history_len=4), torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    eager = te.Linear(64, 128, params_dtype=torch.bfloat16)
    captured = copy.deepcopy(eager)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        saved = save_fp8_tensors([captured], recipe)
        for _ in range(2):
            with te.autocast(recipe=recipe, _graph=True):
                captured(x)
        restore_fp8_tensors([captured], saved)
    torch.cuda.current_stream().wait_stream(stream)
    graph, inp = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, pool=graph_pool_handle()), te.autocast(recipe=recipe, _graph=True):
        out = make_weak_ref(captured(inp))
    restore_fp8_tensors([captured], saved)
    for scale in (1.0, 8.0, 0.5):
        with te.autocast(recipe=recipe):
            expected = eager(x * scale)
        inp.copy_(x * scale)
        graph.replay()
        assert torch.equal(out, expected)
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        states = [module.get_fp8_meta_tensors() for module in (eager, captured)]
        assert all(torch.equal(a, b) for a, b in zip(*(state["scaling_fwd"] for state in states if state is not None)))


def test_facts_of_the_current_device() -> None:
    index = torch.cuda.current_device()
    assert canonicalize_device(None) == canonicalize_device("cuda") == torch.device("cuda", index)
    assert devices_match("cuda", f"cuda:{index}") and not devices_match("cuda", "cpu")
    assert get_sm_count() == torch.cuda.get_device_properties(index).multi_processor_count
