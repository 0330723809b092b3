# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The helpers of tensor parallelism: on one rank here, on two over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_dispatch.pytorch as te
from te_dispatch.pytorch.devices import canonicalize_process_group
from te_dispatch.pytorch.distributed import collectives as helpers
from te_dispatch.pytorch.distributed.rng_tracker import (
    DEFAULT_STATE,
    RngStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
    validate_ctx_manager,
    validate_rng_states_func,
)
from te_dispatch.pytorch.fp8.global_state import FP8GlobalStateManager

from . import ranks
from .ranks import WORLD

pytestmark = pytest.mark.sampled(5)

# -- bodies, run on every rank ------------------------------------------------------------------------------------


def of_rank(rank: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rank))


def collectives(rank: int) -> None:
    group = dist.group.WORLD
    assert helpers.get_distributed_world_size() == helpers.get_distributed_world_size(group) == WORLD
    assert helpers.get_distributed_rank() == rank
    everyone = [of_rank(r) for r in range(WORLD)]
    largest = of_rank(rank)
    FP8GlobalStateManager.reduce_tensor_across_group_op_max(largest, group)
    assert torch.equal(largest, torch.maximum(*everyone))
    assert canonicalize_process_group(None) is group
    for async_op in (False, True):
        mine = of_rank(rank)
        out, handle = helpers.allreduce(mine, group, async_op=async_op)
        waited(handle, async_op)
        assert out is mine and torch.equal(out, sum(everyone))

        out, handle = helpers.reduce_scatter_along_first_dim(of_rank(rank), group, async_op=async_op)
        waited(handle, async_op)
        assert torch.equal(out, sum(everyone)[2 * rank : 2 * rank + 2])

        for given in (of_rank(rank), of_rank(rank).t().contiguous().t()):
            out, handle = helpers.gather_along_first_dim(given, group, async_op=async_op)
            waited(handle, async_op)
            assert torch.equal(out, torch.cat(everyone))


def waited(handle: Any, async_op: bool) -> None:
    assert (handle is not None) == async_op
    if handle is not None:
        handle.wait()


def given_outputs(rank: int) -> None:
    group = dist.group.WORLD
    out = torch.zeros(8, 3)
    assert helpers.gather_along_first_dim(of_rank(rank), group, output_tensor=out)[0] is out
    assert torch.equal(out, torch.cat([of_rank(r) for r in range(WORLD)]))
    out = torch.zeros(2, 3)
    assert helpers.reduce_scatter_along_first_dim(of_rank(rank), group, output=out)[0] is out
    assert torch.equal(out, (of_rank(0) + of_rank(1))[2 * rank : 2 * rank + 2])
    for wrong in (torch.zeros(8, 4), torch.zeros(8, 3, dtype=torch.bfloat16), torch.zeros(3, 8).t()):
        with pytest.raises(ValueError, match=r"output_tensor must be contiguous torch\.float32 of shape"):
            helpers.gather_along_first_dim(of_rank(rank), group, output_tensor=wrong)
        with pytest.raises(ValueError, match=r"output must be contiguous torch\.float32 of shape"):
            helpers.reduce_scatter_along_first_dim(of_rank(rank), group, output=wrong)
    with pytest.raises(ValueError, match=r"divisible by the 2 ranks of tp_group, got shape \(3, 3\)"):
        helpers.reduce_scatter_along_first_dim(of_rank(rank, rows=3), group)


def quantized(rank: int) -> None:
    linear = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    with te.autocast(recipe=te.get_default_recipe()), torch.no_grad():
        out = linear(torch.randn(16, 32, generator=torch.Generator().manual_seed(rank)), fp8_output=True)
    assert isinstance(out, te.QuantizedTensor)
    gathered, _ = helpers.gather_along_first_dim(out, dist.group.WORLD)
    assert torch.equal(gathered[16 * rank : 16 * rank + 16], out.dequantize()) and gathered.shape == (32, 32)


def chunks(rank: int) -> None:
    group = dist.group.WORLD
    whole = of_rank(7)
    part = helpers.split_tensor_into_1d_equal_chunks(whole, group)
    assert part.data_ptr() == whole.view(-1)[6 * rank :].data_ptr() and part.numel() == 6
    copy = helpers.split_tensor_into_1d_equal_chunks(whole, group, new_buffer=True)
    assert torch.equal(copy, part) and copy.data_ptr() != part.data_ptr() and copy.untyped_storage().nbytes() == 24
    assert torch.equal(helpers.gather_split_1d_tensor(copy, group).view_as(whole), whole)
    for wrong in (torch.zeros(3, 3), torch.zeros(4, 3).t()):
        with pytest.raises(ValueError, match="with elements for each of the 2 ranks"):
            helpers.split_tensor_into_1d_equal_chunks(wrong, group)


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [collectives, given_outputs, quantized, chunks])
def test_on_two_ranks(body: Any, tmp_path: Path) -> None:
    ranks.run(body, tmp_path)


def test_without_torch_distributed_there_is_one_rank() -> None:
    x = torch.randn(4, 3)
    assert helpers.get_distributed_world_size() == 1
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        helpers.get_distributed_rank()
    for result in (
        helpers.allreduce(x),
        helpers.reduce_scatter_along_first_dim(x, None),
        helpers.gather_along_first_dim(x, None),
    ):
        assert result[0] is x and result[1] is None
    part = helpers.split_tensor_into_1d_equal_chunks(x, None)
    assert part.data_ptr() == x.data_ptr() and torch.equal(part, x.flatten())
    gathered = helpers.gather_split_1d_tensor(part, None)
    assert torch.equal(gathered, part) and gathered.data_ptr() != part.data_ptr()
    with pytest.raises(NotImplementedError, match="gather_along_first_dim: quantizer=1 is not supported yet"):
        helpers.gather_along_first_dim(x, None, quantizer=1)  # type: ignore[arg-type]


def test_a_weight_is_initialized_from_the_trackers_state_and_marked() -> None:
    tracker = RngStatesTracker()
    tracker.add(DEFAULT_STATE, 3)
    weight = torch.zeros(4, 4, device="cpu")
    if not torch.accelerator.is_available():  # else the tracker's states are of the accelerator
        helpers.initialize_affine_weight_gpu(weight, torch.nn.init.normal_, lambda: tracker, 1, 2)
        assert torch.equal(weight, torch.zeros(4, 4).normal_(generator=torch.Generator().manual_seed(3)))
        marks = (weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride)  # type: ignore[attr-defined]
        assert marks == (True, 1, 2)
    unmarked = torch.zeros(2)
    helpers.initialize_affine_weight_gpu(unmarked, torch.nn.init.ones_, None, set_tp_attributes=False)
    assert unmarked.tolist() == [1.0, 1.0] and not hasattr(unmarked, "partition_dim")


def test_a_marked_weight_is_not_marked_again() -> None:
    weight = torch.zeros(2)
    helpers.set_tensor_model_parallel_attributes(weight, False, -1, 1)
    with pytest.raises(RuntimeError, match="has the attribute tensor_model_parallel already"):
        helpers.initialize_affine_weight_gpu(weight, torch.nn.init.ones_, None)
    assert weight.tolist() == [0.0, 0.0] and weight.partition_dim == -1  # type: ignore[attr-defined]


def test_all_states_are_those_of_the_tracker_that_was_last_given_some() -> None:
    before = get_all_rng_states()
    try:
        first, second = RngStatesTracker(), RngStatesTracker()
        first.add("a", 1)
        assert list(get_all_rng_states()) == ["a"]
        second.add("b", 2)
        assert list(get_all_rng_states()) == ["b"]
        first.set_states(first.get_states())
        assert list(get_all_rng_states()) == ["a"]
        old = get_all_rng_states()["a"]
        with first.fork("a"):
            torch.randn(1, device=te.Linear(1, 1).weight.device)
        assert not torch.equal(get_all_rng_states()["a"], old)
        others = {"c": torch.get_rng_state()}
        set_all_rng_states(others)
        assert get_all_rng_states() is others and list(first.get_states()) == ["a"]
    finally:
        set_all_rng_states(before)


def test_random_states_that_a_graph_can_draw_from_are_generators() -> None:
    built = torch.version.cuda is not None or torch.version.hip is not None
    assert graph_safe_rng_available() is built and is_graph_safe_rng_state(torch.Generator()) is built
    assert not is_graph_safe_rng_state(torch.get_rng_state())


def test_functions_that_give_trackers_are_checked() -> None:
    tracker = RngStatesTracker()
    tracker.add(DEFAULT_STATE, 7)
    validate_rng_states_func(lambda: tracker)
    with pytest.raises(TypeError, match="get_rng_tracker must be a function that gives a tracker"):
        validate_rng_states_func(tracker)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="get_rng_tracker raised ZeroDivisionError"):
        validate_rng_states_func(lambda: 1 // 0)
    with pytest.raises(TypeError, match="a dict, has no method get_states, set_states, fork"):
        validate_rng_states_func(dict)
    with pytest.raises(ValueError, match="a function that gives a context manager is needed"):
        validate_rng_states_func(RngStatesTracker)  # without the state that a fork draws from
    with pytest.raises(ValueError, match="a function that gives a context manager is needed"):
        validate_ctx_manager(int)
