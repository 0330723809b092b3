# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a plan asks of a recipe: how each operand of a module's products is cast.

`RecipeCasts` is the interface, `recipe_casts` in `te_dispatch.pytorch.fp8.custom_casts` chooses the class for a recipe.
The classes here serve recipes whose fields say how every module casts; `CustomCasts` there serves a factory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.numerics.encodings import device_encoding
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.pytorch.fp8.quantized_io import Boundary
from te_dispatch.pytorch.tensor.dtypes import device_encodings

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import GemmCasts
    from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales

#: The states of what leaves a module quantized: (of the output, of the input's gradient).
BoundaryStates = Callable[[], "tuple[DelayedScales, DelayedScales]"]


class Operands(NamedTuple):
    """The casts of one weight's three operands, before it is known in which layout a product reads scales.

    Attributes:
        input, weight: quantizers.
        grad: the same of the output's gradient; None where products read it as it comes (`RecipeCasts.override`).
        splits: whether fprop, dgrad and wgrad promote partial sums to full float32 (all do in portable FP8).
        stochastic: whether gradients are rounded stochastically.
    """

    input: Quantizer
    weight: Quantizer
    grad: Quantizer | None
    splits: tuple[bool, bool, bool]
    stochastic: bool = False


class RecipeCasts:
    """A recipe's casts for one module on one device under the policy in force.

    Attributes:
        recipe: which one.
        common: the policy's portable FP8: equal codes on every device, and split accumulation.
        encodings: FP8 encodings of the device.
        override: of the plan, what the backward multiplies (`te_dispatch.pytorch.fp8.casts.Plan`).
        alignment, row_alignment: what dimensions of products must be multiples of, and rows where no gradient of a
            weight sums over them.
    """

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.common = ops.policy_numerics().fp8_portability == "common"
        self.encodings = device_encodings(device)
        self.override: str | None = recipe.backward_override
        self.alignment = recipe.alignment
        self.row_alignment = recipe.untrained_row_alignment

    def operands(self, index: int) -> Operands | None:
        """The casts around weight number `index` of the module; None where its products run in high precision."""
        raise NotImplementedError

    def fit_state(self, gemms: Sequence[GemmCasts | None]) -> None:
        """Called once products are known to be served: fit state to the casts that were made of `operands`."""

    def boundary(self, casts: GemmCasts, states: BoundaryStates) -> Boundary:
        """The casts of what leaves a module with one product, whose casts are given."""
        raise NotImplementedError

    def encoding(self, family: str) -> str:
        """The device's encoding of ``e4m3`` or ``e5m2``."""
        return device_encoding(family, self.encodings)


class StatelessCasts(RecipeCasts):
    """The casts of a recipe without state, which are the same in every module."""

    def operands(self, index: int) -> Operands:
        x, w, g = (self._quantizer(role) for role in ("input", "weight", "grad"))
        recipe = self.recipe
        stochastic = isinstance(recipe, NVFP4BlockScaling) and recipe.fp4_quant_bwd_grad.stochastic_rounding
        return Operands(x, w, g, self._splits(), stochastic)

    def boundary(self, casts: GemmCasts, states: BoundaryStates) -> Boundary:
        return Boundary(casts.input, casts.grad, stochastic=casts.stochastic)

    def _splits(self) -> tuple[bool, bool, bool]:
        recipe = self.recipe
        if isinstance(recipe, (Float8CurrentScaling, Float8BlockScaling)):
            gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
            return tuple(gemm.use_split_accumulator for gemm in gemms)  # type: ignore[return-value]
        return (True, True, True)

    def _quantizer(self, role: str) -> Quantizer:
        """The quantizer of ``input``, ``weight`` or ``grad``."""
        recipe, common = self.recipe, self.common
        if isinstance(recipe, NVFP4BlockScaling):
            params = {
                "input": recipe.fp4_quant_fwd_inp,
                "weight": recipe.fp4_quant_fwd_weight,
                "grad": recipe.fp4_quant_bwd_grad,
            }[role]
            if params.random_hadamard_transform:
                return NVFP4HadamardQuantizer("e2m1", common)
            choice = recipe.four_over_six(role)
            if choice is not None:
                return NVFP4FourOverSixQuantizer("e2m1", common, params.fp4_2d_quantization, *choice)
            return NVFP4Quantizer("e2m1", common, params.fp4_2d_quantization)
        encoding = self.encoding(recipe.fp8_format.bwd if role == "grad" else recipe.fp8_format.fwd)
        if isinstance(recipe, MXFP8BlockScaling):
            tiles = role == "weight" and recipe.enable_2d_quantization
            return MXFP8TileQuantizer(encoding, common) if tiles else MXFP8Quantizer(encoding, common)
        if not isinstance(recipe, (Float8CurrentScaling, Float8BlockScaling)):
            raise NotImplementedError(f"{type(recipe).__name__}: no quantizers for this recipe yet")
        params = {
            "input": recipe.fp8_quant_fwd_inp,
            "weight": recipe.fp8_quant_fwd_weight,
            "grad": recipe.fp8_quant_bwd_grad,
        }[role]
        if isinstance(recipe, Float8CurrentScaling):
            return CurrentQuantizer(encoding, common, params.power_2_scale, params.amax_epsilon)
        dims = {
            "input": recipe.x_block_scaling_dim,
            "weight": recipe.w_block_scaling_dim,
            "grad": recipe.grad_block_scaling_dim,
        }
        return BlockQuantizer(encoding, common, dims[role] == 2, params.power_2_scale, params.amax_epsilon)


class DelayedCasts(RecipeCasts):
    """Of delayed scaling: each quantizer reads its scale from a module's state and records amaxes there.

    Args:
        forward: state of two tensors (input, weight) per weight. backward: of one tensor (gradient) per weight.
    """

    recipe: DelayedScaling

    def __init__(
        self, recipe: DelayedScaling, device: torch.device, forward: DelayedScales, backward: DelayedScales
    ) -> None:
        super().__init__(recipe, device)
        self.forward = forward
        self.backward = backward

    def operands(self, index: int) -> Operands:
        fwd, bwd = self.encoding(self.recipe.fp8_format.fwd), self.encoding(self.recipe.fp8_format.bwd)
        return Operands(
            self._quantizer(fwd, self.forward, 2 * index),
            self._quantizer(fwd, self.forward, 2 * index + 1),
            self._quantizer(bwd, self.backward, index),
            (False, True, True),
        )

    def fit_state(self, gemms: Sequence[GemmCasts | None]) -> None:
        made: list[Any] = list(gemms)
        self.forward.retarget([q.max_value for casts in made for q in (casts.input, casts.weight)], self.recipe.margin)
        self.backward.retarget([casts.grad.max_value for casts in made], self.recipe.margin)

    def boundary(self, casts: GemmCasts, states: BoundaryStates) -> Boundary:
        assert casts.grad is not None
        return Boundary.delayed(casts.input, casts.grad, self.recipe.margin, *states())

    def _quantizer(self, encoding: str, scales: DelayedScales, position: int) -> DelayedQuantizer:
        return DelayedQuantizer(encoding, self.common, scales.scale_views[position], scales.amax_views[position])
