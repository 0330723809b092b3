# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Adapters of peft on te_dispatch's layers: the frozen layers multiply in FP8, the adapters in BF16.

    te-dispatch run examples/peft_lora_fp8.py

It runs on the accelerator, else on the CPU.
"""

from __future__ import annotations

import tempfile

import torch
import transformer_engine.pytorch as te
from peft import LoraConfig, PeftModel, get_peft_model
from transformer_engine.common.recipe import DelayedScaling


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = te.Linear(64, 128, params_dtype=torch.bfloat16)
        self.mlp = te.LayerNormMLP(128, 512, params_dtype=torch.bfloat16)
        self.head = te.LayerNormLinear(128, 64, params_dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return self.head(x + self.mlp(x))


def main() -> None:
    config = LoraConfig(r=16, lora_alpha=32, target_modules=["embed", "mlp", "head"])
    model = get_peft_model(Net(), config, autocast_adapter_dtype=False)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)
    device = next(model.parameters()).device
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    y = torch.sin(3 * x).roll(1, dims=1)
    losses = []
    for _ in range(40):
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(amax_history_len=16)):
            out = model(x)
        loss = (out.float() - y.float()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"FP8 on {device}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    assert losses[-1] < losses[0]

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)  # the adapters alone
        loaded = PeftModel.from_pretrained(Net(), folder, autocast_adapter_dtype=False)
        assert torch.equal(loaded(x), model(x))


if __name__ == "__main__":
    main()
