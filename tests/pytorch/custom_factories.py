# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Factories for `CustomRecipe` that say what a built-in recipe says, and modules to run them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2


def current(role: te.QuantizerRole | None) -> te.Quantizer:
    backward = role is None or role.tensor_type == "grad_output"
    return te.Float8CurrentScalingQuantizer(E5M2 if backward else E4M3, "cpu")


def current_of_powers(role: te.QuantizerRole) -> te.Quantizer:
    dtype = torch.float8_e5m2 if role.tensor_type == "grad_output" else torch.float8_e4m3fn
    return te.Float8CurrentScalingQuantizer(dtype, "cpu", force_pow_2_scales=True)


def block(role: te.QuantizerRole) -> te.Quantizer:
    dim = 2 if role.tensor_type == "weight" else 1
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=dim)


def mxfp8(role: te.QuantizerRole | None) -> te.Quantizer:
    return te.MXFP8Quantizer(E4M3)


def mxfp8_tiles(role: te.QuantizerRole) -> te.Quantizer:
    return te.MXFP8Quantizer(E4M3, with_2d_quantization=role.tensor_type == "weight")


def four_over_six(role: te.QuantizerRole) -> te.Quantizer:
    return te.NVFP4Quantizer(
        with_2d_quantization=role.tensor_type == "weight",
        nvfp4_use_4over6=role.tensor_type != "grad_output",
        nvfp4_e4m3_max=448 if role.tensor_type == "grad_output" else 256,
    )


def nvfp4(role: te.QuantizerRole) -> te.Quantizer:
    if role.tensor_type == "weight":
        return te.NVFP4Quantizer(with_2d_quantization=True)
    return te.NVFP4Quantizer(
        with_rht=True, with_post_rht_amax=True, stochastic_rounding=role.tensor_type == "grad_output"
    )


#: Built-in recipes and factories that say the same.
EQUALS: dict[str, tuple[Callable[[], Recipe], Callable[..., Any]]] = {
    "current": (Float8CurrentScaling, current),
    "current_of_powers": (lambda: Float8CurrentScaling(use_power_2_scales=True), current_of_powers),
    "block": (Float8BlockScaling, block),
    "mxfp8": (MXFP8BlockScaling, mxfp8),
    "mxfp8_tiles": (lambda: MXFP8BlockScaling(enable_2d_quantization=True), mxfp8_tiles),
    "nvfp4": (NVFP4BlockScaling, nvfp4),
    "four_over_six": (
        lambda: NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6="all"),
        four_over_six,
    ),
}

MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **how: te.Linear(64, 96, **how),
    "LayerNormLinear": lambda **how: te.LayerNormLinear(64, 96, **how),
    "LayerNormMLP": lambda **how: te.LayerNormMLP(64, 128, **how),
    "TransformerLayer": lambda **how: te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, **how),
}


def made(name: str, /, **how: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[name](**how)


def seen(module: torch.nn.Module, recipe: Recipe | None, steps: int = 1, call: Any = None) -> list[torch.Tensor]:
    """Output, and the gradients of the input and all parameters, of the last of some training steps, on the module's
    device; the data are the same on all."""
    call = module if call is None else call
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 2, 64, generator=generator).to(device).requires_grad_()
    for _ in range(steps):
        module.zero_grad()
        x.grad = None
        torch.manual_seed(2)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = call(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(device))
    return [out.detach(), x.grad, *[p.grad for p in module.parameters()]]  # type: ignore[list-item]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
