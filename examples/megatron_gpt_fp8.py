# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Megatron Core's GPT with its Transformer Engine layers, in FP8, on one rank.

    te-dispatch run examples/megatron_gpt_fp8.py [delayed | tensorwise | blockwise | mxfp8]

It runs on a GPU, else on the CPU.
"""

from __future__ import annotations

import sys

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

STEPS, BATCH, SEQUENCE, VOCABULARY = 20, 8, 64, 256


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "delayed"
    cuda = torch.cuda.is_available()
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    torch.manual_seed(0)
    if cuda:
        model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        use_cpu_initialization=not cuda,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fp8="e4m3" if recipe == "mxfp8" else "hybrid",
        fp8_recipe=recipe,
    )
    model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), VOCABULARY, SEQUENCE)
    device = "cuda" if cuda else "cpu"
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    # Each sequence counts upwards from somewhere: the next token can be learned.
    start = torch.randint(VOCABULARY, (BATCH, 1), device=device)
    data = (start + torch.arange(SEQUENCE + 1, device=device)) % VOCABULARY
    positions = torch.arange(SEQUENCE, device=device).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=device).triu(1)  # True: not looked at
    losses = []
    for _ in range(STEPS):
        model.set_is_first_microbatch()  # weights have changed: quantize them again
        loss = model(data[:, :-1], positions, mask, labels=data[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"{recipe} FP8 on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
