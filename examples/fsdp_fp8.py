# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Train in FP8 with parameters sharded over processes (`fully_shard`), and save with torch.distributed.checkpoint.

    torchrun --nproc-per-node 2 examples/fsdp_fp8.py     # a GPU for each process, else the CPU and gloo

It imports te_dispatch by its own name, and so needs no ``te-dispatch run``.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=16)
HIDDEN, HEADS, LAYERS, SEQUENCE, BATCH = 128, 4, 2, 16, 4


def sharded(device: torch.device, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}  # so that two steps can be compared
    layers = [te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, device=device, **no_dropout) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(dist.get_rank())  # each process has a batch of its own
    x, y = (torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator).to(device) for _ in range(2))
    with te.autocast(recipe=RECIPE):  # amaxes are reduced over all processes: they have the same scales
        out = model(x)
    loss = (out - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model, optimizer = sharded(device, seed=0)
    losses = [step(model, optimizer, device) for _ in range(15)]
    assert losses[-1] < losses[0]

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder[0])

    resumed, its_optimizer = sharded(device, seed=1)
    weights, moments = get_state_dict(resumed, its_optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder[0])
    set_state_dict(resumed, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    here, there = step(model, optimizer, device), step(resumed, its_optimizer, device)
    if dist.get_rank() == 0:
        print(f"FP8 on {dist.get_world_size()} x {device.type}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        print(f"loss of the next step: {here:.6f}, of the resumed model: {there:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
