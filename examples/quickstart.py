# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A transformer layer in PyTorch's modules, in te_dispatch's, as one module, and in FP8, each trained for a few steps.

    python examples/quickstart.py
    python examples/quickstart.py --hidden 4096 --ffn 16384 --heads 32 --sequence 256 --batch 32   # on a GPU

The same file runs on NVIDIA, AMD and CPU machines: which kernels run is decided by the policy in force, and printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Format
from te_dispatch.core import scopes


class PlainBlock(torch.nn.Module):
    """The layer in PyTorch's own modules: causal attention and a GELU MLP, each after a LayerNorm."""

    def __init__(self, hidden: int, ffn: int, heads: int, **factory: object) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = torch.nn.LayerNorm(hidden, **factory)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, **factory)
        self.proj = torch.nn.Linear(hidden, hidden, **factory)
        self.norm2 = torch.nn.LayerNorm(hidden, **factory)
        self.fc1 = torch.nn.Linear(hidden, ffn, **factory)
        self.fc2 = torch.nn.Linear(ffn, hidden, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(s, b, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.permute(2, 0, 1, 3).reshape(s, b, hidden))
        return x + self.fc2(torch.nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class FusedBlock(torch.nn.Module):
    """The same layer in te_dispatch's modules, each of which stands for a norm, a GEMM and what goes between."""

    def __init__(self, hidden: int, ffn: int, heads: int, **factory: object) -> None:
        super().__init__()
        self.heads = heads
        options = {"device": factory["device"], "params_dtype": factory["dtype"]}
        self.qkv = te.LayerNormLinear(hidden, 3 * hidden, **options)
        self.attention = te.DotProductAttention(heads, hidden // heads)
        self.proj = te.Linear(hidden, hidden, **options)
        self.mlp = te.LayerNormMLP(hidden, ffn, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, hidden = x.shape
        qkv = self.qkv(x).view(s, b, 3, self.heads, hidden // self.heads)
        x = x + self.proj(self.attention(qkv_layer=qkv))
        return x + self.mlp(x)


def whole_layer(hidden: int, ffn: int, heads: int, **factory: object) -> torch.nn.Module:
    """The same layer as one module."""
    return te.TransformerLayer(
        hidden, ffn, heads, hidden_dropout=0.0, attention_dropout=0.0, device=factory["device"],
        params_dtype=factory["dtype"],
    )  # fmt: skip


def train(
    model: torch.nn.Module,
    x: torch.Tensor,
    target: torch.Tensor,
    steps: int,
    precision: Callable[[], AbstractContextManager[object]],
) -> tuple[list[float], float]:
    """Losses, and the milliseconds of the fastest step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, fastest = [], float("inf")
    for _ in range(steps):
        start = time.perf_counter()
        with precision():
            out = model(x)
        loss = (out.float() - target.float()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        fastest = min(fastest, (time.perf_counter() - start) * 1e3)
    return losses, fastest


def chosen_kernels(model: torch.nn.Module, x: torch.Tensor, precision: Callable[[], object]) -> dict[str, str]:
    """Which implementation served each operator of one forward and backward."""
    found: dict[str, str] = {}
    with scopes.observe(lambda operator, accepted, args, result: found.setdefault(operator.name, accepted.id)):
        with precision():  # type: ignore[attr-defined]
            out = model(x)
        out.sum().backward()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("hidden", 128), ("ffn", 512), ("heads", 4), ("sequence", 32), ("batch", 4), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    factory = {"device": device, "dtype": torch.float32 if device.type == "cpu" else torch.bfloat16}
    torch.manual_seed(0)
    x, target = (torch.randn(arguments.sequence, arguments.batch, arguments.hidden, **factory) for _ in range(2))

    # E4M3 forward, E5M2 for gradients; scales follow the largest magnitude of the last 16 steps.
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")

    def fp8() -> AbstractContextManager[object]:
        return te.autocast(enabled=True, recipe=recipe)

    sizes = arguments.hidden, arguments.ffn, arguments.heads
    for title, build, precision in (
        ("PyTorch modules", PlainBlock, nullcontext),
        ("te_dispatch modules", FusedBlock, nullcontext),
        ("TransformerLayer", whole_layer, nullcontext),
        ("TransformerLayer, FP8", whole_layer, fp8),
    ):
        model = build(*sizes, **factory)
        losses, fastest = train(model, x, target, arguments.steps, precision)
        print(f"{title:24} loss {losses[0]:.4f} -> {losses[-1]:.4f}, fastest step {fastest:.2f} ms")
    print("\nFP8 ran on:")
    for operator, implementation in sorted(chosen_kernels(model, x, fp8).items()):
        print(f"  {operator:24} {implementation}")


if __name__ == "__main__":
    main()
