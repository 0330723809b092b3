# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the tests of all frameworks share: the device, te_dispatch's modules in a model, their delayed-scaling state."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import te_dispatch.pytorch as te

#: Where the tests of one process run. Those of several ranks (`tests/pytorch/ranks.py`) have a GPU each, or none.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Why the Trainer of one process cannot train in FP8 here; empty where it can.
TRAINER_REFUSED = (
    "the Trainer of one process uses all GPUs, which accelerate refuses in FP8" if torch.cuda.device_count() > 1 else ""
)
PARTS = ("history", "scale", "scale_amax")
GEMM_MODULES = (te.Linear, te.LayerNormLinear, te.LayerNormMLP)


def gemm_modules(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """(name, module) of each module of te_dispatch that multiplies matrices."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, GEMM_MODULES)]


def scales(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the delayed-scaling state, by module, direction and part; empty where delayed scaling never ran."""
    return {f"{name}.{part}": tensor.detach().clone() for name, part, tensor in _parts(model)}


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for name, module in gemm_modules(model):
        for direction in ("forward", "backward"):
            state = getattr(module.fp8_state.scales, direction)
            if state is not None:
                for part in PARTS:
                    yield f"{name}.{direction}", part, getattr(state, part)


def assert_filled(model: torch.nn.Module) -> None:
    """Every module of te_dispatch's has trained with delayed scaling: its amaxes are recorded, its scales set."""
    found = scales(model)
    assert len(found) == 2 * len(PARTS) * len(gemm_modules(model)) > 0
    for name, tensor in found.items():
        if name.endswith(".history"):
            assert (tensor[-1] > 0).all(), name
        if name.endswith(".scale"):
            assert (tensor.isfinite() & (tensor != 1)).all(), name


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and the same bits under each."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_falls(losses: list[float]) -> None:
    assert all(math.isfinite(loss) for loss in losses), losses
    assert losses[-1] < 0.9 * losses[0], losses
