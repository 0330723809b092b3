# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A byte-level GPT made of te_dispatch's modules."""

from __future__ import annotations

import torch

import te_dispatch.pytorch as te
from te_dispatch.cli.demo.options import ALIGNMENT, Options

#: One token per byte, rounded up so that the head's GEMMs meet every backend's alignment.
VOCABULARY = -(-256 // ALIGNMENT) * ALIGNMENT


class ByteGPT(torch.nn.Module):
    """Embeddings, causal transformer layers, a norm and a head: bytes (batch, seq) -> logits (batch, seq, VOCABULARY).

    Parameters are float32. The embeddings are PyTorch's; everything after them is te_dispatch's, and follows
    torch.autocast (bfloat16) and te_dispatch's autocast (FP8).
    """

    def __init__(self, hidden: int, layers: int, heads: int, seq: int, device: torch.device) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, hidden, device=device)
        self.positions = torch.nn.Embedding(seq, hidden, device=device)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                hidden,
                4 * hidden,
                heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
                layer_number=number,
                params_dtype=torch.float32,
                device=device,
            )
            for number in range(1, layers + 1)
        )
        self.norm = te.LayerNorm(hidden, params_dtype=torch.float32, device=device)
        self.head = te.Linear(hidden, VOCABULARY, bias=False, params_dtype=torch.float32, device=device)
        for embedding in (self.tokens, self.positions):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        # The residual stream is bfloat16 in every run: torch.autocast leaves an embedding's sum in float32.
        if torch.is_autocast_enabled(x.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(x.device.type))
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        # The head stays in high precision, as is usual in FP8 training: its output is the loss's input.
        with te.autocast(enabled=False):
            return self.head(hidden)  # type: ignore[no-any-return]


def build(options: Options) -> ByteGPT:
    """The model with its initial weights, which depend on the seed and the shape alone."""
    torch.manual_seed(options.seed)
    return ByteGPT(options.hidden, options.layers, options.heads, options.seq, options.device)


def fingerprint(model: torch.nn.Module) -> str:
    """A checksum of all parameters' bits, cheap on any device: equal weights have equal fingerprints."""
    total = 0
    for position, parameter in enumerate(model.parameters(), 1):
        bits = parameter.detach().contiguous().view(torch.int32).sum(dtype=torch.int64)
        total = (total + position * int(bits)) % 2**64
    return f"{total:016x}"
