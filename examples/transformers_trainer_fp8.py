# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Train a small Llama in FP8 with transformers' Trainer, stop, and go on from the checkpoint.

    te-dispatch run examples/transformers_trainer_fp8.py

It runs on the accelerator, else on the CPU, and downloads nothing.
"""

from __future__ import annotations

import os
import tempfile

# As `accelerate launch --mixed_precision fp8` says it; read when the Trainer makes its Accelerator.
os.environ["ACCELERATE_MIXED_PRECISION"] = "fp8"
os.environ.setdefault("ACCELERATE_FP8_AMAX_HISTORY_LEN", "16")

import torch
from accelerate.utils import convert_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, TOKENS = 128, 32


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
        )
    )


def data() -> list[dict[str, torch.Tensor]]:
    """Numbers that go up by one, from anywhere."""
    starts = torch.randint(0, VOCABULARY, (256,), generator=torch.Generator().manual_seed(1))
    rows = [(start + torch.arange(TOKENS)) % VOCABULARY for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def trainer(folder: str) -> Trainer:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=20,
        save_steps=10,
        logging_steps=1,
        per_device_train_batch_size=8,
        learning_rate=5e-3,
        report_to=[],
        disable_tqdm=True,
    )
    made = Trainer(model=model(), args=arguments, train_dataset=data())
    # The Trainer would convert the layers itself, but after it has read a checkpoint, whose FP8 scales then find no
    # place. Converted here, it goes on exactly where it stopped.
    with torch.no_grad():
        convert_model(made.model)
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = trainer(folder), trainer(folder)
        whole.train()
        resumed.train(resume_from_checkpoint=os.path.join(folder, "checkpoint-10"))
        first, second = ([e["loss"] for e in t.state.log_history if "loss" in e] for t in (whole, resumed))
        device, last = whole.args.device, first[-1]
        print(f"FP8 on {device}: loss {first[0]:.4f} -> {last:.4f}; resumed at step 10: {second[-1]:.4f}")
        assert first[-1] < first[0]
        whole.model.save_pretrained(os.path.join(folder, "saved"))


if __name__ == "__main__":
    main()
