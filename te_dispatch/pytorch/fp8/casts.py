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
from te_dispatch.common.recipe import DelayedScaling, Recipe
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import CANONICAL_SCALES
from te_dispatch.numerics.quantizers import DelayedQuantizer, Quantizer
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.custom_casts import recipe_casts
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales
from te_dispatch.pytorch.fp8.quantizer_role import ModuleRoles

if TYPE_CHECKING:
    from te_dispatch.numerics.quantized import Quantized
    from te_dispatch.pytorch.fp8.quantized_io import Boundary
    from te_dispatch.pytorch.fp8.recipe_casts import Operands, RecipeCasts
    from te_dispatch.pytorch.fp8.scale_group import ScaleGroup
    from te_dispatch.pytorch.fp8.scale_update import Trainer


def _union(*usages: str) -> str:
    return usages[0] if len(set(usages)) == 1 else "both"


class GemmCasts:
    """The casts around one weight: fprop x W^T, dgrad dy W, wgrad dy^T x.

    Attributes:
        input, weight, grad: quantizers; the gradient's is None where no product reads it cast (`Plan.override`).
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
        grad: Quantizer | None,
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
            if quantizer is not None
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
        casts: what the recipe says for the module.
        gemms: one per weight, in the order of the forward; None for a weight whose products run in high precision.
        quantizes: whether there is one that does not.
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
        "recipe", "scope", "device", "process_group", "casts", "gemms", "quantizes", "forward", "backward",
        "forward_group", "backward_group", "trainer", "replay", "root", "weights", "boundary", "aligned", "source",
        "override", "_evaluation",
    )  # fmt: skip

    def __init__(
        self,
        casts: RecipeCasts,
        scope: Any,
        device: torch.device,
        process_group: Any,
        gemms: Sequence[GemmCasts | None],
        forward: DelayedScales | None,
        backward: DelayedScales | None,
    ) -> None:
        self.casts = casts
        self.recipe = casts.recipe
        self.scope = scope
        self.device = device
        self.process_group = process_group
        self.gemms = tuple(gemms)
        self.quantizes = any(gemm is not None for gemm in self.gemms)
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
        self.override = casts.override
        self._evaluation: Plan | None = None

    def sole(self) -> GemmCasts:
        """The casts of a module with one weight, which are there wherever a call has a plan."""
        (casts,) = self.gemms
        assert casts is not None
        return casts

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
            gemms = [casts and casts.replaced(_silent(casts.input), _silent(casts.weight)) for casts in self.gemms]
            plan = Plan(self.casts, self.scope, self.device, self.process_group, gemms, self.forward, self.backward)
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
        gemms: Sequence[GemmCasts | None] = self.gemms
        if self.forward is not None and not self.replay:
            scales = self.forward.frozen_scales()
            gemms = [
                casts and casts.replaced(_frozen(casts.input, scales[2 * i]), _frozen(casts.weight, scales[2 * i + 1]))
                for i, casts in enumerate(gemms)
            ]
        plan = Plan(self.casts, self.scope, self.device, self.process_group, gemms, self.forward, self.backward)
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


def _gemm_casts(device: torch.device, operands: Operands, common: bool) -> GemmCasts:
    """Casts in the formats in which the products that are bound for them read their operands.

    Raises:
        NoImplementation: no product takes such operands.
    """
    x, w, g, splits, stochastic = operands
    if common:
        splits = (True, True, True)
    fprop = _format(device, x, w, "NT")
    if g is None:  # the backward reads the copies that fprop read, and a gradient that is not cast
        plain = ("row", CANONICAL_SCALES)
        x, w = _as_read(x, fprop[0]), _as_read(w, fprop[1])
        return GemmCasts(x, w, None, splits, (fprop, (plain, fprop[1]), (plain, fprop[0])))
    dgrad, wgrad = _format(device, g, w, "NN"), _format(device, g, x, "TN")
    x, w, g = _as_read(x, fprop[0], wgrad[1]), _as_read(w, fprop[1], dgrad[1]), _as_read(g, dgrad[0], wgrad[0])
    return GemmCasts(x, w, g, splits, (fprop, dgrad, wgrad), stochastic)


def _format(device: torch.device, a: Quantizer, b: Quantizer, layout: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return ops.gemm_operand_format(device, a.encoding, _multiplied(a), b.encoding, _multiplied(b), layout)


def build_plan(
    recipe: Recipe,
    device: torch.device,
    process_group: Any,
    gemm_count: int,
    forward: DelayedScales | None,
    backward: DelayedScales | None,
    roles: ModuleRoles | None = None,
) -> Plan:
    """Make a recipe concrete under the policy in force.

    Args:
        gemm_count: weights of the module.
        forward, backward: for delayed scaling, states of two tensors (input, weight) and one tensor (gradient) per
            weight; else None.
        roles: how a `CustomRecipe` is to ask for the module's quantizers; None for a module without a name.
    """
    scope = scopes.capture()
    casts = recipe_casts(recipe, device, forward, backward, roles or ModuleRoles.unnamed(gemm_count))
    asked = [casts.operands(i) for i in range(gemm_count)]
    gemms = [operands and _gemm_casts(device, operands, casts.common) for operands in asked]
    casts.fit_state(gemms)
    return Plan(casts, scope, device, process_group, gemms, forward, backward)
