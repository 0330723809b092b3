# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""PyTorch's DistributedDataParallel, FullyShardedDataParallel and fully_shard, in two processes.

What a framework would import is imported by Transformer Engine's name: the ranks inherit where that leads.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformer_engine.pytorch as te
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe

import te_dispatch.pytorch
from tests.pytorch import ranks
from tests.pytorch.ranks import WORLD

from .states import DEVICE, assert_falls, assert_filled, assert_same, parameters, scales

SIZE, WIDE = 32, 64
RECIPES = (DelayedScaling(amax_history_len=4), Float8CurrentScaling())


def _model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        te.Linear(SIZE, WIDE, device=DEVICE),
        te.TransformerLayer(WIDE, 2 * WIDE, 4, hidden_dropout=0.0, attention_dropout=0.0, device=DEVICE),
        te.LayerNormLinear(WIDE, SIZE, device=DEVICE),
    )


def _ddp(model: torch.nn.Sequential) -> torch.nn.Module:
    return DistributedDataParallel(model)


def _fsdp1(model: torch.nn.Sequential, use_orig_params: bool = True) -> torch.nn.Module:
    policy = ModuleWrapPolicy({te.TransformerLayer})
    device = torch.device(DEVICE, torch.cuda.current_device() if DEVICE == "cuda" else None)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)


def _fsdp2(model: torch.nn.Sequential) -> torch.nn.Module:
    mesh = init_device_mesh(DEVICE, (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    # Ranks differ in magnitude, so that amaxes that were not reduced would differ.
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = (torch.randn(16, 2, SIZE, generator=generator).to(DEVICE) for _ in range(2))
    return x * (1 + 3 * rank), y


def _loss(
    model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor], recipe: Recipe, enabled: bool = True
) -> torch.Tensor:
    with te.fp8_autocast(enabled=enabled, fp8_recipe=recipe):
        out = model(batch[0])
    return (out - batch[1]).square().mean()


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, recipe: Recipe) -> float:
    optimizer.zero_grad()
    loss = _loss(model, _batch(step, dist.get_rank()), recipe)
    loss.backward()
    optimizer.step()
    return loss.item()


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(WORLD)]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def _assert_same_on_all_ranks(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        first, second = _gathered(tensor)
        assert torch.equal(first, second), name


@torch.no_grad()
def _common_loss(model: torch.nn.Module, recipe: Recipe, enabled: bool = True) -> torch.Tensor:
    return _loss(model, _batch(99, 0), recipe, enabled)


def _plain_scales(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names of the model itself, without those of its wrappers."""
    wrappers = ("_fsdp_wrapped_module.", "module.")
    found = scales(model)
    for wrapper in wrappers:
        found = {name.replace(wrapper, ""): tensor for name, tensor in found.items()}
    return found


def _trained(wrap: Callable[[Any], torch.nn.Module], rank: int) -> None:
    """Training, what ranks share, and a full state dict in a model that is not distributed."""
    for recipe in RECIPES:
        model = wrap(_model())
        optimizer = _optimizer(model)
        losses = [_step(model, optimizer, 0, recipe) for _ in range(10)]
        assert_falls(losses)
        # Ranks trained on batches of their own, and have one model and one state of scales.
        _assert_same_on_all_ranks({"loss": _common_loss(model, recipe)})
        assert not torch.equal(_common_loss(model, recipe), _common_loss(model, recipe, enabled=False))
        if recipe.delayed():
            assert_filled(model)
            _assert_same_on_all_ranks(scales(model))
            largest = _batch(0, 1)[0].abs().max()
            assert _plain_scales(model)["0.forward.history"][-1, 0] == largest  # of the other rank, on rank 0
        else:
            assert scales(model) == {}

        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        alone = _model(seed=1)
        alone.load_state_dict(full)
        for name, parameter in parameters(alone).items():
            assert torch.equal(parameter, full[name]), name
        assert_same(scales(alone), _plain_scales(model))
        assert torch.equal(_common_loss(alone, recipe), _common_loss(model, recipe))


def _resumed(wrap: Callable[[Any], torch.nn.Module], rank: int) -> None:
    """torch.distributed.checkpoint, into a model that never ran: it goes on with the bits of the one that was saved."""
    for recipe in RECIPES:
        model = wrap(_model())
        optimizer = _optimizer(model)
        for step in range(3):
            _step(model, optimizer, step, recipe)
        where = [str(Path(tempfile.mkdtemp()) / "checkpoint") if rank == 0 else None]
        dist.broadcast_object_list(where)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=where[0])
        saved = scales(model)
        later = [_step(model, optimizer, step, recipe) for step in range(3, 6)]

        model = wrap(_model(seed=1))
        optimizer = _optimizer(model)
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=where[0])
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert_same(scales(model), saved)
        assert [_step(model, optimizer, step, recipe) for step in range(3, 6)] == later


# -- bodies, run on every rank ------------------------------------------------------------------------------------


def ddp(rank: int) -> None:
    _trained(_ddp, rank)


def fsdp1(rank: int) -> None:
    _trained(_fsdp1, rank)
    _trained(functools.partial(_fsdp1, use_orig_params=False), rank)


def fsdp2(rank: int) -> None:
    _trained(_fsdp2, rank)


def ddp_resumed(rank: int) -> None:
    _resumed(_ddp, rank)


def fsdp1_resumed(rank: int) -> None:
    _resumed(_fsdp1, rank)


def fsdp2_resumed(rank: int) -> None:
    _resumed(_fsdp2, rank)


# -- tests --------------------------------------------------------------------------------------------------------


def test_the_modules_are_te_dispatchs() -> None:
    assert te.TransformerLayer is te_dispatch.pytorch.TransformerLayer


def test_ddp(tmp_path: Path) -> None:
    ranks.run(ddp, tmp_path)


def test_fsdp1(tmp_path: Path) -> None:
    ranks.run(fsdp1, tmp_path)


def test_fsdp2(tmp_path: Path) -> None:
    ranks.run(fsdp2, tmp_path)


def test_ddp_saved_and_resumed(tmp_path: Path) -> None:
    ranks.run(ddp_resumed, tmp_path)


def test_fsdp1_saved_and_resumed(tmp_path: Path) -> None:
    ranks.run(fsdp1_resumed, tmp_path)


def test_fsdp2_saved_and_resumed(tmp_path: Path) -> None:
    ranks.run(fsdp2_resumed, tmp_path)
