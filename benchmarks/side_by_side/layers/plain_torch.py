# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The same layer in plain PyTorch: with explicit scores, on SDPA, compiled, and in FP8 with torchao where that is."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import nn
from torch.nn import functional as F

from side_by_side.layers import Contestant, Layer, Shape


class TorchLayer(nn.Module):
    """x + D(proj(attention(norm x))), then the same with a GELU MLP; causal, input (s, b, hidden)."""

    def __init__(self, shape: Shape, sdpa: bool, dropout: float, device: torch.device) -> None:
        super().__init__()
        hidden = shape.hidden
        options = {"device": device, "dtype": torch.bfloat16}
        self.heads, self.sdpa, self.dropout = shape.heads, sdpa, dropout
        self.norm1 = nn.LayerNorm(hidden, **options)
        self.qkv = nn.Linear(hidden, 3 * hidden, **options)
        self.proj = nn.Linear(hidden, hidden, **options)
        self.norm2 = nn.LayerNorm(hidden, **options)
        self.fc1 = nn.Linear(hidden, shape.ffn, **options)
        self.fc2 = nn.Linear(shape.ffn, hidden, **options)
        mask = torch.ones(shape.sequence, shape.sequence, dtype=torch.bool, device=device).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.sdpa:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        probabilities = torch.softmax(scores.masked_fill(self.mask, -math.inf), -1)
        return F.dropout(probabilities, self.dropout) @ v

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, hidden = x.shape
        packed = self.qkv(self.norm1(x)).view(s, b, self.heads, 3, hidden // self.heads)
        q, k, v = packed.permute(3, 1, 2, 0, 4).unbind(0)
        context = self.attend(q, k, v).permute(2, 0, 1, 3).reshape(s, b, hidden)
        x = x + F.dropout(self.proj(context), self.dropout)
        inner = F.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        return x + F.dropout(self.fc2(inner), self.dropout)


def _layer(sdpa: bool):  # type: ignore[no-untyped-def]
    def build(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
        module = TorchLayer(shape, sdpa, dropout, device)
        return Layer(module, module)

    return build


def _compiled(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    module = TorchLayer(shape, True, dropout, device)
    return Layer(module, torch.compile(module, dynamic=False))


def _torchao(shape: Shape, mode: str, device: torch.device, dropout: float) -> Layer:
    from torchao.float8 import convert_to_float8_training

    module = convert_to_float8_training(TorchLayer(shape, True, dropout, device))
    return Layer(module, torch.compile(module, dynamic=False))


def _no_torchao() -> str | None:
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def _linear(features: int, mode: str, device: torch.device) -> Layer:
    module = nn.Linear(features, features, device=device, dtype=torch.bfloat16)
    return Layer(module, module)


CONTESTANTS = (
    Contestant("naive torch", ("bf16",), lambda: None, _layer(sdpa=False)),
    Contestant("torch+SDPA", ("bf16",), lambda: None, _layer(sdpa=True), _linear),
    Contestant("torch.compile", ("bf16",), lambda: None, _compiled),
    Contestant("torchao, compiled", ("current",), _no_torchao, _torchao),
)
