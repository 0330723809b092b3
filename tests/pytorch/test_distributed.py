# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Two processes over gloo: amax reduction, DDP, FSDP2."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes
from te_dispatch.pytorch.modules.gemm_module import GemmModule

from . import ranks
from .ranks import WORLD

pytestmark = pytest.mark.sampled(6)

RECIPE = DelayedScaling(amax_history_len=3)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.LayerNormLinear(32, 32, device="cpu"), te.LayerNormMLP(32, 32, device="cpu"))


def _batch(step: int, rank: int) -> torch.Tensor:
    # Ranks differ in magnitude, so that unreduced amaxes would differ.
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + 3 * rank)


def _step(model: torch.nn.Module, x: torch.Tensor, **autocast: Any) -> torch.Tensor:
    with te.autocast(recipe=autocast.pop("recipe", RECIPE), **autocast):
        y = model(x)
    y.square().sum().backward()
    return y.detach()


def _states(model: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for module in model.modules():
        if isinstance(module, GemmModule):
            for state in module.fp8_state.scales.live().values():
                found += [state.history.clone(), state.scale.clone(), state.scale_amax.clone()]
    assert found
    return found


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(parts, tensor.contiguous())
    return parts


# -- bodies, run on every rank ------------------------------------------------------------------------------------


def reduced_amaxes(rank: int) -> None:
    model = _model()
    for step in range(3):
        _step(model, _batch(step, rank))
    for tensor in _states(model):
        parts = _gathered(tensor)
        assert torch.equal(parts[0], parts[1])
    # The reduced amax is the maximum over the ranks: that of a model that saw both batches.
    whole = _model()
    for step in range(3):
        with te.autocast(recipe=DelayedScaling(amax_history_len=3, reduce_amax=False)):
            for each in range(WORLD):
                whole[0](_batch(step, each))
    assert torch.equal(whole[0].fp8_state.scales.forward.history, model[0].fp8_state.scales.forward.history)


def unreduced_amaxes(rank: int) -> None:
    model = _model()
    _step(model, _batch(0, rank), recipe=DelayedScaling(amax_history_len=3, reduce_amax=False))
    parts = _gathered(model[0].fp8_state.scales.forward.scale)
    assert not torch.equal(parts[0], parts[1])


def group_decides_who_reduces(rank: int) -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = _model()
    _step(model, _batch(0, rank), amax_reduction_group=groups[rank])
    parts = _gathered(model[0].fp8_state.scales.forward.scale)
    assert not torch.equal(parts[0], parts[1])
    model = _model()
    _step(model, _batch(0, rank), amax_reduction_group=dist.group.WORLD)
    parts = _gathered(model[0].fp8_state.scales.forward.scale)
    assert torch.equal(parts[0], parts[1])


def one_collective_for_all_modules(rank: int) -> None:
    model = _model()
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        _step(model, _batch(0, rank))
    finally:
        dist.all_reduce = all_reduce
    assert len(calls) == 2  # forward, then backward


def data_parallel(rank: int) -> None:
    model = _model()
    # State that differs between ranks must survive the broadcasts that DDP makes of parameters and buffers.
    _step(model, _batch(0, rank), recipe=DelayedScaling(amax_history_len=3, reduce_amax=False))
    before = _states(model)
    model.zero_grad()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    for a, b in zip(_states(model), before):
        assert torch.equal(a, b)
    for step in range(1, 4):  # as many as the history is long: the step that was not reduced is forgotten
        ddp.zero_grad()
        _step(ddp, _batch(step, rank))
    for tensor in [p.grad for p in model.parameters()] + [m.fp8_state.scales.forward.scale for m in model]:
        parts = _gathered(tensor)
        assert torch.equal(parts[0], parts[1])


def _reference_gradients(steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients averaged over the ranks and states, of plain replicas that reduce amaxes; runs on every rank."""
    model = _model()
    rank = dist.get_rank()
    for step in range(steps):
        model.zero_grad()
        _step(model, _batch(step, rank))
    grads = []
    for parameter in model.parameters():
        grad = parameter.grad.clone()
        dist.all_reduce(grad)
        grads.append(grad / WORLD)
    return grads, _states(model)


def fully_sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected, states = _reference_gradients(3)
    model = _model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(3):
        model.zero_grad()
        _step(model, _batch(step, rank))
    for parameter, grad in zip(model.parameters(), expected):
        assert torch.equal(
            parameter.grad.full_tensor(), grad
        )  # two terms: their sum has no order, the half no rounding
    for a, b in zip(_states(model), states):
        assert torch.equal(a, b)
    extra = {k for k in model.state_dict() if k.endswith("_extra_state")}
    assert extra == {"0._extra_state", "1._extra_state"}


def sharded_as_one_tensor(rank: int) -> None:
    """FSDP1 with its default, in which parameters are views of one tensor and no longer the modules' own."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    reference = torch.nn.parallel.DistributedDataParallel(_model())
    model = FullyShardedDataParallel(_model(), device_id=torch.device("cpu"))
    for step in range(2):
        expected, found = _step(reference, _batch(step, rank)), _step(model, _batch(step, rank))
        assert torch.equal(found, expected)
    for a, b in zip(_states(model), _states(reference)):
        assert torch.equal(a, b)


def sharded_and_checkpointed(rank: int) -> None:
    """FSDP2 with activation checkpointing: the same states and gradients as without."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected, states = _reference_gradients(2)
    model = _model()
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return te.checkpoint(self.model, x, use_reentrant=False)

    wrapped = Checkpointed()
    for step in range(2):
        wrapped.zero_grad()
        _step(wrapped, _batch(step, rank))
    for parameter, grad in zip(model.parameters(), expected):
        assert torch.equal(
            parameter.grad.full_tensor(), grad
        )  # two terms: their sum has no order, the half no rounding
    for a, b in zip(_states(model), states):
        assert torch.equal(a, b)


def policies_reach_the_backward_of_ddp(rank: int) -> None:
    """DDP's reducer and autograd hooks leave the forward's policy scope in force in the backward."""
    model = torch.nn.parallel.DistributedDataParallel(_model())
    seen: list[str] = []

    def watch(operator: Any, accepted: Any, args: tuple[Any, ...], result: Any) -> None:
        seen.append(getattr(operator, "name", operator))

    with scopes.observe(watch), te.autocast(recipe=RECIPE):
        y = model(_batch(0, rank))
    forward = seen.count("gemm")
    y.sum().backward()
    assert (forward, seen.count("gemm")) == (3, 9)


def saved_and_resumed(rank: int) -> None:
    """FSDP2 with torch.distributed.checkpoint: a resumed model goes on with the bits of one that never stopped."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    trained, resumed = _model(), _model()
    for model in (trained, resumed):
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    for step in range(2):
        _step(trained, _batch(step, rank))
    where = [str(Path(tempfile.mkdtemp()) / "checkpoint") if rank == 0 else None]
    dist.broadcast_object_list(where)
    dcp.save(get_model_state_dict(trained), checkpoint_id=where[0])
    # A loader fills in what the model has, and a new one has no extra state: a step of any kind gives it one.
    _step(resumed, _batch(9, rank))
    loaded = get_model_state_dict(resumed)
    dcp.load(loaded, checkpoint_id=where[0])
    set_model_state_dict(resumed, loaded)
    for a, b in zip(_states(resumed), _states(trained)):
        assert torch.equal(a, b)
    assert torch.equal(_step(resumed, _batch(2, rank)), _step(trained, _batch(2, rank)))
    for a, b in zip(_states(resumed), _states(trained)):
        assert torch.equal(a, b)


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_amaxes_are_reduced_over_the_default_group(tmp_path: Path) -> None:
    ranks.run(reduced_amaxes, tmp_path)


@pytest.mark.slow
def test_reduction_can_be_switched_off(tmp_path: Path) -> None:
    ranks.run(unreduced_amaxes, tmp_path)


@pytest.mark.slow
def test_reduction_group(tmp_path: Path) -> None:
    ranks.run(group_decides_who_reduces, tmp_path)


def test_one_collective_for_all_modules(tmp_path: Path) -> None:
    ranks.run(one_collective_for_all_modules, tmp_path)


def test_ddp(tmp_path: Path) -> None:
    ranks.run(data_parallel, tmp_path)


def test_fsdp2(tmp_path: Path) -> None:
    ranks.run(fully_sharded, tmp_path)


def test_fsdp1(tmp_path: Path) -> None:
    ranks.run(sharded_as_one_tensor, tmp_path)


def test_fsdp2_with_activation_checkpointing(tmp_path: Path) -> None:
    ranks.run(sharded_and_checkpointed, tmp_path)


@pytest.mark.slow
def test_fsdp2_saved_and_resumed(tmp_path: Path) -> None:
    ranks.run(saved_and_resumed, tmp_path)


def test_ddp_backward_keeps_the_policy(tmp_path: Path) -> None:
    ranks.run(policies_reach_the_backward_of_ddp, tmp_path)
