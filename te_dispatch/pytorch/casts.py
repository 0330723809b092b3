# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A recipe made concrete for one module on one device under one policy: quantizers, usages, accumulation modes.

Built once and reused while recipe, policy, device and process group stay the same, so that a call creates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from te_dispatch.core import scopes
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
from te_dispatch.pytorch import scale_update
from te_dispatch.pytorch.delayed_scales import DelayedScales

if TYPE_CHECKING:
    from te_dispatch.numerics.quantized import Quantized
    from te_dispatch.pytorch.boundary import Boundary
    from te_dispatch.pytorch.scale_group import ScaleGroup
    from te_dispatch.pytorch.scale_update import Trainer


def _union(*usages: str) -> str:
    return usages[0] if len(set(usages)) == 1 else "both"


class GemmCasts:
    """The casts around one weight: fprop x W^T, dgrad dy W, wgrad dy^T x.

    Attributes:
        input, weight, grad: quantizers.
        stochastic: whether gradients are rounded stochastically.
        input_usage: copies of x, without and with a wgrad to come. weight_usage: of W, without and with a dgrad.
        grad_usage: of dy, by (dgrad) + 2 (wgrad); entry 0 is never used.
        fprop, dgrad, wgrad: ((usage, scale layout) of a, the same of b), as the bound GEMMs read them.
        fprop_split, dgrad_split, wgrad_split: whether partial sums are promoted to full float32.
        relays: whether a GEMM reads scales in another layout than the casts write.
    """

    __slots__ = (
        "input", "weight", "grad", "input_usage", "weight_usage", "grad_usage", "fprop", "dgrad", "wgrad",
        "fprop_split", "dgrad_split", "wgrad_split", "relays", "stochastic",
    )  # fmt: skip

    def __init__(
        self,
        input: Quantizer,
        weight: Quantizer,
        grad: Quantizer,
        splits: tuple[bool, bool, bool],
        formats: tuple[Any, Any, Any],
        stochastic: bool = False,
    ) -> None:
        self.input = input
        self.weight = weight
        self.grad = grad
        self.stochastic = stochastic
        self.fprop_split, self.dgrad_split, self.wgrad_split = splits
        self.fprop, self.dgrad, self.wgrad = formats
        self.input_usage = (self.fprop[0][0], _union(self.fprop[0][0], self.wgrad[1][0]))
        self.weight_usage = (self.fprop[1][0], _union(self.fprop[1][0], self.dgrad[1][0]))
        read = ((self.fprop, (input, weight)), (self.dgrad, (grad, weight)), (self.wgrad, (grad, input)))
        self.relays = any(
            layout != quantizer.scale_layout
            for gemm, quantizers in read
            for (_, layout), quantizer in zip(gemm, quantizers, strict=True)
        )
        dgrad, wgrad = self.dgrad[0][0], self.wgrad[0][0]
        self.grad_usage = (dgrad, dgrad, wgrad, _union(dgrad, wgrad))

    def replaced(self, input: Quantizer, weight: Quantizer) -> GemmCasts:
        """The same with other forward quantizers."""
        return GemmCasts(
            input,
            weight,
            self.grad,
            (self.fprop_split, self.dgrad_split, self.wgrad_split),
            (self.fprop, self.dgrad, self.wgrad),
            self.stochastic,
        )


class Plan:
    """What a module needs to know for a call in 8 or 4 bits.

    Attributes:
        recipe, scope, device, process_group: what it was built for.
        gemms: one per weight, in the order of the forward.
        forward, backward: states of delayed scaling, None for other recipes.
        forward_group, backward_group: that update them, None before a training step.
        trainer: whose groups they are.
        replay: whether this plan repeats an earlier forward: fixed scales, no amax.
        root: of a replay: the graph task whose end updates the backward scales (`scale_update.note_backward_cast`).
        weights: of a replay: the quantized weights of the first forward where it had them cached.
        boundary: the casts of what enters and leaves the module quantized; None until a call asks for that.
        override: what the backward multiplies: None for operands that the recipe casts; ``high_precision`` for the
            operands before their casts, ``dequantized`` for the values of the forward's quantized operands, with the
            gradient as it comes.
        aligned: shape of the last input whose dimensions were found to suit the recipe.
        source: of what `evaluation` gives, the plan that it was made of; else the plan itself.
    """

    __slots__ = (
        "recipe", "scope", "device", "process_group", "gemms", "forward", "backward", "forward_group",
        "backward_group", "trainer", "replay", "root", "weights", "boundary", "aligned", "source", "override",
        "_evaluation",
    )  # fmt: skip

    def __init__(
        self,
        recipe: Recipe,
        scope: Any,
        device: torch.device,
        process_group: Any,
        gemms: Sequence[GemmCasts],
        forward: DelayedScales | None,
        backward: DelayedScales | None,
    ) -> None:
        self.recipe = recipe
        self.scope = scope
        self.device = device
        self.process_group = process_group
        self.gemms = tuple(gemms)
        self.forward = forward
        self.backward = backward
        self.forward_group: ScaleGroup | None = None
        self.backward_group: ScaleGroup | None = None
        self.trainer: Trainer | None = None
        self.replay = False
        self.root: int | None = None
        self.weights: list[Quantized | None] | None = None
        self.boundary: Boundary | None = None
        self.aligned: tuple[tuple[int, ...], bool] | None = None
        self.source = self
        self.override: str | None = recipe.backward_override
        self._evaluation: Plan | None = None

    def join(self) -> bool:
        """Have this thread's groups update the states; whether others did before, or none."""
        trainer = scale_update.trainer()
        if self.trainer is trainer and self.forward is not None and self.forward.group is self.forward_group:
            return False
        assert self.forward is not None and self.backward is not None and isinstance(self.recipe, DelayedScaling)
        properties = self.recipe, self.process_group, self.device
        forward = trainer.group(*properties, True)
        moved = self.forward.group is not forward
        for state in self.forward_states():
            forward.add(state)
        backward = trainer.group(*properties, False)
        backward.add(self.backward)
        if self.boundary is not None and self.boundary.backward is not None:
            backward.add(self.boundary.backward)
        self.forward_group, self.backward_group, self.trainer = forward, backward, trainer
        return moved

    def add_boundary(self, boundary: Boundary) -> None:
        self.boundary, self.trainer, self._evaluation = boundary, None, None

    def evaluation(self) -> Plan:
        """The plan for a forward that will have no backward: it uses the scales in force, and records nothing."""
        if self.forward is None:
            return self
        if self._evaluation is None:
            gemms = [casts.replaced(_silent(casts.input), _silent(casts.weight)) for casts in self.gemms]
            plan = Plan(self.recipe, self.scope, self.device, self.process_group, gemms, self.forward, self.backward)
            plan.source = self
            plan.boundary = None if self.boundary is None else self.boundary.evaluation()
            self._evaluation = plan
        return self._evaluation

    def forward_states(self) -> list[DelayedScales]:
        """All states that this plan's forwards record amaxes in."""
        states = [self.forward, None if self.boundary is None else self.boundary.forward]
        return [state for state in states if state is not None]

    def fits(self, recipe: Recipe, scope: Any, device: torch.device, process_group: Any) -> bool:
        return (
            self.recipe is recipe
            and self.scope is scope
            and self.device == device
            and self.process_group is process_group
        )

    def as_replay(self) -> Plan:
        """A plan that repeats this forward bit for bit, whatever the scales are by then, and records nothing."""
        gemms: Sequence[GemmCasts] = self.gemms
        if self.forward is not None and not self.replay:
            scales = self.forward.frozen_scales()
            gemms = [
                casts.replaced(_frozen(casts.input, scales[2 * i]), _frozen(casts.weight, scales[2 * i + 1]))
                for i, casts in enumerate(gemms)
            ]
        plan = Plan(self.recipe, self.scope, self.device, self.process_group, gemms, self.forward, self.backward)
        plan.forward_group, plan.backward_group = self.forward_group, self.backward_group
        plan.replay = True
        plan.weights = self.weights
        if self.boundary is not None:
            plan.boundary = self.boundary if self.replay else self.boundary.as_replay()
        return plan


def _frozen(quantizer: Quantizer, scale: torch.Tensor) -> DelayedQuantizer:
    return DelayedQuantizer(quantizer.encoding, quantizer.common, scale, None)


def _silent(quantizer: Quantizer) -> Quantizer:
    """The quantizer of delayed scaling without the amax that it records."""
    assert isinstance(quantizer, DelayedQuantizer)
    return _frozen(quantizer, quantizer.scale)


def device_encodings(device: torch.device) -> tuple[str, ...]:
    """FP8 encodings of a device, best first; empty where it has none or nothing is known about it."""
    found = scopes.MANAGER.devices.facts(device)["encodings"]
    return found if isinstance(found, tuple) else ()


def _splits(recipe: Recipe) -> tuple[bool, bool, bool]:
    """Split accumulation of fprop, dgrad and wgrad."""
    if isinstance(recipe, (Float8CurrentScaling, Float8BlockScaling)):
        gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
        return tuple(gemm.use_split_accumulator for gemm in gemms)  # type: ignore[return-value]
    return (not isinstance(recipe, DelayedScaling), True, True)


def _stateless(recipe: Recipe, role: str, encoding: str, common: bool) -> Quantizer:
    """The quantizer of a role (``input``, ``weight`` or ``grad``) for a recipe without state."""
    if isinstance(recipe, (Float8CurrentScaling, Float8BlockScaling)):
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
    if isinstance(recipe, MXFP8BlockScaling):
        tiles = role == "weight" and recipe.enable_2d_quantization
        return MXFP8TileQuantizer(encoding, common) if tiles else MXFP8Quantizer(encoding, common)
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
    raise NotImplementedError(f"{type(recipe).__name__}: no quantizers for this recipe yet")


def _multiplied(quantizer: Quantizer) -> str:
    """Scaling of what a GEMM reads of a quantizer's records: of those with a rotated copy, one copy (`single_copy`)."""
    return "nvfp4" if quantizer.scaling == "nvfp4_rht" else quantizer.scaling


def _as_read(quantizer: Quantizer, *formats: tuple[str, str]) -> Quantizer:
    """The quantizer with the scale layout of the (usage, scale layout) in which GEMMs read what it makes, where they
    agree: a record has one."""
    layouts = {layout for _, layout in formats}
    if quantizer.kind != "block" or len(layouts) > 1:
        return quantizer
    return replace(quantizer, scale_layout=layouts.pop())  # type: ignore[call-arg]


def build_plan(
    recipe: Recipe,
    device: torch.device,
    process_group: Any,
    gemm_count: int,
    forward: DelayedScales | None,
    backward: DelayedScales | None,
) -> Plan:
    """Make a recipe concrete under the policy in force.

    Args:
        gemm_count: weights of the module.
        forward, backward: for delayed scaling, states of two tensors (input, weight) and one tensor (gradient) per
            weight; else None.
    """
    scope = scopes.capture()
    common = ops.policy_numerics().fp8_portability == "common"
    encodings = device_encodings(device)
    families = ("e2m1", "e2m1") if recipe.nvfp4() else (recipe.fp8_format.fwd, recipe.fp8_format.bwd)
    fwd, bwd = (f if f == "e2m1" else device_encoding(f, encodings) for f in families)
    splits = (True, True, True) if common else _splits(recipe)
    stochastic = isinstance(recipe, NVFP4BlockScaling) and recipe.fp4_quant_bwd_grad.stochastic_rounding
    gemms = []
    for i in range(gemm_count):
        if forward is not None and backward is not None:
            x: Quantizer = DelayedQuantizer(fwd, common, forward.scale_views[2 * i], forward.amax_views[2 * i])
            w: Quantizer = DelayedQuantizer(fwd, common, forward.scale_views[2 * i + 1], forward.amax_views[2 * i + 1])
            g: Quantizer = DelayedQuantizer(bwd, common, backward.scale_views[i], backward.amax_views[i])
        else:
            x = _stateless(recipe, "input", fwd, common)
            w = _stateless(recipe, "weight", fwd, common)
            g = _stateless(recipe, "grad", bwd, common)
        formats = fprop, dgrad, wgrad = tuple(
            ops.gemm_operand_format(device, a.encoding, _multiplied(a), b.encoding, _multiplied(b), layout)
            for a, b, layout in ((x, w, "NT"), (g, w, "NN"), (g, x, "TN"))
        )
        x, w, g = _as_read(x, fprop[0], wgrad[1]), _as_read(w, fprop[1], dgrad[1]), _as_read(g, dgrad[0], wgrad[0])
        gemms.append(GemmCasts(x, w, g, splits, formats, stochastic))
    if forward is not None and backward is not None:
        assert isinstance(recipe, DelayedScaling)
        forward.retarget([q.max_value for casts in gemms for q in (casts.input, casts.weight)], recipe.margin)
        backward.retarget([casts.grad.max_value for casts in gemms], recipe.margin)
    return Plan(recipe, scope, device, process_group, gemms, forward, backward)
