# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Factories of `te_dispatch.common.recipe.CustomRecipe` that cast as the built-in recipes do at their defaults.

``CustomRecipe(qfactory=mxfp8_factory)`` computes what ``MXFP8BlockScaling()`` computes. They are what a factory of
one's own falls back to for the tensors that it does not decide about.
"""

from __future__ import annotations

from te_dispatch.pytorch.arguments import resolve_device
from te_dispatch.pytorch.fp8.quantizer_request import DelayedScalingRequest
from te_dispatch.pytorch.fp8.quantizer_role import QuantizerRole
from te_dispatch.pytorch.tensor.dtypes import DType
from te_dispatch.pytorch.tensor.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)

__all__ = [
    "current_scaling_factory",
    "delayed_scaling_factory",
    "float8_block_scaling_factory",
    "high_precision_factory",
    "mxfp8_factory",
    "nvfp4_factory",
]

_LINEAR = ("linear", "grouped_linear")


def _is(role: QuantizerRole | None, tensor_type: str) -> bool:
    """Whether a role is of this tensor of a linear layer."""
    return role is not None and role.module_type in _LINEAR and role.tensor_type == tensor_type


def high_precision_factory(role: QuantizerRole | None) -> IdentityQuantizer:
    """No cast, for every tensor."""
    return IdentityQuantizer()


def delayed_scaling_factory(role: QuantizerRole | None) -> DelayedScalingRequest:
    """A request for delayed scaling, for every tensor. Modules refuse it: use the recipe `DelayedScaling`."""
    return DelayedScalingRequest()


def current_scaling_factory(role: QuantizerRole | None) -> Float8CurrentScalingQuantizer:
    """As `Float8CurrentScaling`: E5M2 for gradients, E4M3 for the rest."""
    gradient = role is not None and role.tensor_type == "grad_output"
    return Float8CurrentScalingQuantizer(DType.kFloat8E5M2 if gradient else DType.kFloat8E4M3, resolve_device(None))


def float8_block_scaling_factory(role: QuantizerRole | None) -> Float8BlockQuantizer:
    """As `Float8BlockScaling`: E4M3 with power-of-two scales, of 128x128 values for weights and 1x128 for the rest."""
    dim = 2 if _is(role, "weight") else 1
    return Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)


def mxfp8_factory(role: QuantizerRole | None) -> MXFP8Quantizer:
    """As `MXFP8BlockScaling`: E4M3, for every tensor."""
    return MXFP8Quantizer(DType.kFloat8E4M3)


def nvfp4_factory(role: QuantizerRole | None) -> NVFP4Quantizer:
    """As `NVFP4BlockScaling`: weights in blocks of 16x16; the rest rotated, gradients rounded stochastically."""
    if _is(role, "weight"):
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, with_post_rht_amax=True, stochastic_rounding=_is(role, "grad_output"))
