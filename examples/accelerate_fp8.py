# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Train in FP8 with accelerate, which replaces a model's layers by Transformer Engine's: here te_dispatch's.

    te-dispatch run examples/accelerate_fp8.py
    te-dispatch run -m accelerate.commands.launch examples/accelerate_fp8.py   # as `accelerate config` says

It runs on the accelerator, else on the CPU.
"""

from __future__ import annotations

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs, broadcast_object_list, has_transformer_engine_layers


def model() -> torch.nn.Module:
    # Dimensions that are multiples of 16: layers with others stay PyTorch's.
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)
    )


def main() -> None:
    recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe], gradient_accumulation_steps=2)
    net = model()
    # Model and optimizer together: the optimizer is given the converted layers' parameters.
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))
    assert has_transformer_engine_layers(net)

    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    y = torch.sin(3 * x).roll(1, dims=1)
    losses = []
    for step in range(40):
        rows = slice(64 * (step % 8), 64 * (step % 8 + 1))
        with accelerator.accumulate(net):
            loss = (net(x[rows].to(accelerator.device)) - y[rows].to(accelerator.device)).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.print(f"FP8 on {accelerator.device}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < losses[0]

    with tempfile.TemporaryDirectory() as folder:
        (folder,) = broadcast_object_list([folder])  # the first process writes, all read
        accelerator.save_state(folder)  # weights, optimizer, and the scales of delayed scaling
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()
