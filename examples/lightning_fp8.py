# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Train in FP8 with Lightning's Trainer and its plugin for Transformer Engine, which here is te_dispatch.

    te-dispatch run examples/lightning_fp8.py

It runs on the accelerator, else on the CPU.
"""

from __future__ import annotations

import tempfile

import lightning
import torch
from lightning.pytorch.plugins import TransformerEnginePrecision


class Net(lightning.LightningModule):
    def configure_model(self) -> None:
        # Layers that are made here are te_dispatch's from the start (`replace_layers=True`), so that a checkpoint's
        # FP8 scales find their place.
        if not hasattr(self, "net"):
            self.net = torch.nn.Sequential(
                torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 64)
            )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = (self.net(x) - y).float().square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def trainer(folder: str, steps: int) -> lightning.Trainer:
    recipe = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}
    return lightning.Trainer(
        devices=1,
        max_steps=steps,
        plugins=TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=True),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def main() -> None:
    lightning.seed_everything(0)
    x = torch.randn(128, 64)
    dataset = torch.utils.data.TensorDataset(x, torch.sin(3 * x).roll(1, dims=1))
    loader = torch.utils.data.DataLoader(dataset, batch_size=128)
    with tempfile.TemporaryDirectory() as folder:
        losses = []
        for steps, checkpoint in ((1, None), (20, "0"), (40, "1")):
            net, run = Net(), trainer(folder, steps)
            run.fit(net, loader, ckpt_path=checkpoint and f"{folder}/{checkpoint}.ckpt")
            run.save_checkpoint(f"{folder}/{len(losses)}.ckpt")
            losses.append(run.callback_metrics["loss"].item())
        device = run.strategy.root_device
        print(f"FP8 on {device}: loss after 1, 20 and 40 steps: {losses[0]:.4f}, {losses[1]:.4f}, {losses[2]:.4f}")
        assert losses[2] < losses[0]


if __name__ == "__main__":
    main()
