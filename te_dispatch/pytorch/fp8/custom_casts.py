# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The casts of a `CustomRecipe`: what its factory returns for each tensor of a module, checked before anything runs.

A factory is asked once for each tensor of a module and each recipe: its answers stay with the module, and plans that
are made anew, for another policy or device, use them again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from te_dispatch.common.recipe import CustomRecipe, DelayedScaling, Recipe
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.numerics.quantizers import Quantizer as Record
from te_dispatch.pytorch.fp8.quantized_io import Boundary
from te_dispatch.pytorch.fp8.quantizer_request import QuantizerRequest
from te_dispatch.pytorch.fp8.quantizer_role import ModuleRoles, QuantizerRole
from te_dispatch.pytorch.fp8.recipe_casts import BoundaryStates, DelayedCasts, Operands, RecipeCasts, StatelessCasts
from te_dispatch.pytorch.tensor.quantizer import Quantizer
from te_dispatch.pytorch.tensor.quantizers import IdentityQuantizer

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import GemmCasts
    from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales

#: Scalings that products read together, by the scaling of one operand.
_KINDS = {
    "tensor": "one scale per tensor",
    "block_1d": "blocks of 128",
    "block_2d": "blocks of 128",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
    "nvfp4_rht": "NVFP4",
}

#: What dimensions must be multiples of, and rows that no product sums over, by kind; 16 and 8 for the others.
_ALIGNMENT = {"MXFP8": (32, 32), "NVFP4": (32, 32)}


class _Answer(NamedTuple):
    """A factory's answer.

    Attributes:
        place: which tensor, for messages. given: the answer.
        record: the cast that it stands for, None for high precision.
    """

    place: str
    given: Quantizer | None
    record: Record | None

    @property
    def kind(self) -> str:
        return "high precision" if self.record is None else _KINDS[self.record.scaling]

    @property
    def stochastic(self) -> bool:
        return self.given is not None and self.given.stochastic

    def __str__(self) -> str:
        if self.given is None:
            return f"{self.kind} for {self.place}"
        return f"{type(self.given).__name__} ({self.kind}) for {self.place}"


class CustomCasts(RecipeCasts):
    """Of a recipe with a factory.

    A weight's products are quantized where all three operands are, and in high precision where none is. A gradient
    that is left in high precision beside a quantized input and weight gives `override` ``dequantized``.

    Raises:
        TypeError: the factory returns something else than a quantizer or None. RuntimeError: it raises.
        NotImplementedError: quantizers that no product serves together; the message says what to return.
    """

    recipe: CustomRecipe

    def __init__(self, recipe: CustomRecipe, device: torch.device, roles: ModuleRoles) -> None:
        super().__init__(recipe, device)
        self.device = device
        self.roles = roles
        self._operands = [self._asked_operands(i) for i in range(roles.weights)]
        kinds = {_KINDS[made.input.scaling] for made in self._operands if made is not None}
        for alignment, rows in (_ALIGNMENT[kind] for kind in kinds & _ALIGNMENT.keys()):
            self.alignment, self.row_alignment = max(self.alignment, alignment), max(self.row_alignment, rows)

    def operands(self, index: int) -> Operands | None:
        return self._operands[index]

    def boundary(self, casts: GemmCasts, states: BoundaryStates) -> Boundary:
        output = self._ask("output", self.roles.weights - 1)
        input_grad = self._ask("grad_input", 0)
        if output.stochastic:
            raise NotImplementedError(
                f"CustomRecipe: {output}: an output is not rounded stochastically; return a quantizer without "
                "stochastic_rounding"
            )
        return Boundary(output.record, input_grad.record, stochastic=input_grad.stochastic)

    def _asked_operands(self, index: int) -> Operands | None:
        """The casts around a weight."""
        answers = [self._ask(tensor, index) for tensor in ("input", "weight")]
        if self.recipe.backward_override is None:
            answers.append(self._ask("grad_output", index))
        x, w, *rest = answers
        if all(answer.record is None for answer in answers):
            return None
        if x.record is None or w.record is None:
            raise _refused(x, w, "a product reads both in high precision or both quantized; return quantizers for both")
        for operand in (x, w):
            if operand.stochastic:
                raise NotImplementedError(
                    f"CustomRecipe: {operand}: only gradients are rounded stochastically; return a quantizer without "
                    "stochastic_rounding"
                )
        if w.record.scaling == "nvfp4_rht":
            raise NotImplementedError(
                f"CustomRecipe: {w}: a weight's column-wise copy is multiplied by a gradient that is not rotated; "
                "return a quantizer without with_rht"
            )
        _check_pair(x, w)
        g = rest[0] if rest else None
        splits = (x.record.scaling != "tensor", True, True)
        if g is None or g.record is None:
            if self.recipe.backward_override is None:
                self._leave_gradient(g)
            return Operands(x.record, w.record, None, splits)
        _check_pair(g, w)
        _check_pair(g, x)
        if "nvfp4_rht" in (x.record.scaling, g.record.scaling) and x.record.scaling != g.record.scaling:
            raise _refused(
                x, g, "their product needs both rotated or neither; return quantizers that agree in with_rht"
            )
        return Operands(x.record, w.record, g.record, splits, g.stochastic)

    def _leave_gradient(self, g: _Answer | None) -> None:
        """Have the backward read the gradient of the output as it comes."""
        if self.roles.weights > 1:
            raise NotImplementedError(
                f"CustomRecipe: high precision for {g.place if g else 'a gradient'} beside a quantized input and "
                "weight: in a module with several weights a gradient is read as it comes only where its input and "
                "weight are in high precision too; return a quantizer for it, or none for the three"
            )
        self.override = "dequantized"

    def _ask(self, tensor: str, index: int) -> _Answer:
        """The factory's answer about a tensor of a weight, asked for once."""
        role = self.roles.of(tensor, index)
        place = f"{self.roles.module}'s {tensor} (role {role})"
        key = (self.recipe, tensor, index, role)
        known = self.roles.known
        if key not in known:
            given = _checked(self.recipe, place, role)
            known[key] = given
        given = known[key]
        answer = _Answer(place, given, None if given is None else given.cast(self.encodings, self.common))
        if isinstance(answer.record, DelayedQuantizer) and answer.record.scale.device != self.device:
            raise ValueError(
                f"CustomRecipe: {answer} has its scale on {answer.record.scale.device}, the module runs on "
                f"{self.device}; return a quantizer with tensors there"
            )
        return answer


def _checked(recipe: CustomRecipe, place: str, role: QuantizerRole | None) -> Quantizer | None:
    """What the factory returns for a role; None for high precision."""
    try:
        given = recipe.qfactory(role)
        if isinstance(given, Quantizer):
            given.cast((), False)  # a class of the user's own raises
    except NotImplementedError as error:
        raise NotImplementedError(f"CustomRecipe: qfactory for {place}: {error}") from error
    except Exception as error:
        raise RuntimeError(
            f"CustomRecipe: qfactory raised {type(error).__name__} for {place}: {error}. It is called with a "
            "QuantizerRole, and for what leaves a module quantized with None unless the module was given a role"
        ) from error
    if given is None or isinstance(given, IdentityQuantizer):
        return None
    if isinstance(given, QuantizerRequest):
        raise NotImplementedError(
            f"CustomRecipe: qfactory returned a {type(given).__name__} for {place}, which is not supported yet; use "
            "the recipe DelayedScaling for the whole model, or return a Float8Quantizer with scales that you update"
        )
    if not isinstance(given, Quantizer):
        raise TypeError(
            f"CustomRecipe: qfactory must return a quantizer of te_dispatch.pytorch.tensor, or None for high "
            f"precision, got {given!r} for {place}"
        )
    return given


def _check_pair(a: _Answer, b: _Answer) -> None:
    """Raise unless a product reads both together."""
    assert a.record is not None and b.record is not None
    if a.kind != b.kind:
        raise _refused(a, b, "a product reads two operands of one kind; return quantizers of the same kind for both")
    if a.record.scaling == b.record.scaling == "block_2d":
        raise _refused(a, b, "2D times 2D is not defined; return block_scaling_dim=1 for one of them")


def _refused(a: _Answer, b: _Answer, why: str) -> NotImplementedError:
    return NotImplementedError(f"CustomRecipe: {a} and {b}: {why}")


def recipe_casts(
    recipe: Recipe,
    device: torch.device,
    forward: DelayedScales | None,
    backward: DelayedScales | None,
    roles: ModuleRoles,
) -> RecipeCasts:
    """What a plan asks for a recipe's casts.

    Args:
        forward, backward: of a module with delayed scaling, its states; else None. roles: for a factory.
    """
    if isinstance(recipe, CustomRecipe):
        return CustomCasts(recipe, device, roles)
    if isinstance(recipe, DelayedScaling) and forward is not None and backward is not None:
        return DelayedCasts(recipe, device, forward, backward)
    return StatelessCasts(recipe, device)
