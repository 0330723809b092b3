# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A recipe as a list of quantizers, under Transformer Engine's names, for programs that cast tensors by themselves.

Modules keep states of their own. Nothing here updates the scales of a `DelayedScalingRecipeState`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_dispatch.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.pytorch.arguments import require_choice, resolve_device
from te_dispatch.pytorch.fp8.autocast import require_usable
from te_dispatch.pytorch.fp8.quantizer_request import QuantizerRequest
from te_dispatch.pytorch.fp8.quantizer_role import QuantizerRole
from te_dispatch.pytorch.fp8.recipe_casts import StatelessCasts
from te_dispatch.pytorch.fp8.support import get_fp4_te_dtype, get_fp8_te_dtype
from te_dispatch.pytorch.tensor.dtypes import DType
from te_dispatch.pytorch.tensor.quantizer import Quantizer
from te_dispatch.pytorch.tensor.quantizers import Float8Quantizer, as_quantizer

__all__ = [
    "CustomRecipeState",
    "DelayedScalingRecipeState",
    "Float8BlockScalingRecipeState",
    "Float8CurrentScalingRecipeState",
    "MXFP8BlockScalingRecipeState",
    "NVFP4BlockScalingRecipeState",
    "RecipeState",
]

#: What the quantizers of a list are for without roles, over and over.
_ORDER = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
_TENSORS = tuple(name for names in _ORDER.values() for name in names)


class RecipeState:
    """Quantizers of one recipe and direction. `RecipeState.create` makes one of the recipe's class.

    Args:
        recipe: of the class that the state is named for.
        mode: ``forward`` or ``backward``.
        num_quantizers: how many. Without roles they are for input, weight and output in turn, or for the gradients of
            output and input.
        device: where the casts will run; None for the current accelerator, or the CPU.
        roles: what each is for: its `tensor_type`, of those that it can be; others count as none.

    Raises:
        ValueError: another mode, or another number of roles. NotImplementedError: the recipe asks for something that is
            not built yet; it is named.
    """

    #: The number of the type that values are cast to; None where the recipe's factory decides.
    dtype: DType | None = None

    def __init__(
        self,
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        require_choice("RecipeState: mode", mode, _ORDER)
        if roles is not None and len(roles) != num_quantizers:
            raise ValueError(f"RecipeState: roles must be {num_quantizers}, one for each quantizer, got {len(roles)}")
        require_usable("RecipeState", recipe)
        self.recipe = recipe
        self.mode = mode
        self.num_quantizers = num_quantizers
        self.device = resolve_device(device)
        self.roles = roles
        if not isinstance(recipe, CustomRecipe):
            forward = mode == "forward"
            self.dtype = get_fp4_te_dtype(recipe) if recipe.nvfp4() else get_fp8_te_dtype(recipe, forward)

    @staticmethod
    def create(
        recipe: Recipe,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> RecipeState:
        """The state of a recipe; arguments and errors are the class's.

        Raises:
            TypeError: `recipe` is none of `te_dispatch.common.recipe`.
        """
        kind = next((state for known, state in _STATES.items() if isinstance(recipe, known)), None)
        if kind is None:
            raise TypeError(f"RecipeState.create: recipe must be one of te_dispatch.common.recipe, got {recipe!r}")
        return kind(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)

    def make_quantizers(self) -> list[Quantizer]:
        """A quantizer for each place, which casts as a module under the recipe does."""
        operands = StatelessCasts(self.recipe, self.device).operands(0)
        assert operands.grad is not None
        made = []
        for place in range(self.num_quantizers):
            tensor = self._tensor(place)
            if tensor.startswith("grad"):
                made.append(as_quantizer(operands.grad, operands.stochastic))
            else:
                made.append(as_quantizer(operands.weight if tensor == "weight" else operands.input))
        return made

    def inherit_state_from(self, other: RecipeState) -> bool:
        """Have the tensors of another state of the same class, before quantizers are made.

        Returns:
            Whether there are any, and they fit; nothing is changed otherwise.
        """
        return False

    def _tensor(self, place: int) -> str:
        role = None if self.roles is None else self.roles[place]
        if role is not None and role.tensor_type in _TENSORS:
            return role.tensor_type
        order = _ORDER[self.mode]
        return order[place % len(order)]


class DelayedScalingRecipeState(RecipeState):
    """Of `DelayedScaling`.

    Attributes:
        scale: float32 (num_quantizers,), ones. amax_history: float32 (amax_history_len, num_quantizers), zeros.
            Quantizers read the scales, and write the first row of the history.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> None:
        super().__init__(recipe, mode=mode, num_quantizers=num_quantizers, device=device, roles=roles)
        self.scale = torch.ones(num_quantizers, dtype=torch.float32, device=self.device)
        shape = (recipe.amax_history_len, num_quantizers)
        self.amax_history = torch.zeros(shape, dtype=torch.float32, device=self.device)

    def make_quantizers(self) -> list[Quantizer]:
        places = range(self.num_quantizers)
        return [Float8Quantizer(self.scale[i : i + 1], self.amax_history[0, i : i + 1], self.dtype) for i in places]

    def inherit_state_from(self, other: RecipeState) -> bool:
        if not isinstance(other, DelayedScalingRecipeState) or other.amax_history.shape != self.amax_history.shape:
            return False
        self.scale, self.amax_history = other.scale, other.amax_history
        return True


class Float8CurrentScalingRecipeState(RecipeState):
    """Of `Float8CurrentScaling`."""


class Float8BlockScalingRecipeState(RecipeState):
    """Of `Float8BlockScaling`."""


class MXFP8BlockScalingRecipeState(RecipeState):
    """Of `MXFP8BlockScaling`."""


class NVFP4BlockScalingRecipeState(RecipeState):
    """Of `NVFP4BlockScaling`."""


class CustomRecipeState(RecipeState):
    """Of `CustomRecipe`: quantizers are what its factory returns for the roles, None for a place without one."""

    recipe: CustomRecipe

    def make_quantizers(self) -> list[Quantizer]:
        made = [self.recipe.qfactory(role) for role in self.roles or [None] * self.num_quantizers]
        for given in made:
            if isinstance(given, QuantizerRequest):
                raise NotImplementedError(
                    f"CustomRecipeState: qfactory returned a {type(given).__name__}, which is not supported yet; "
                    "use the recipe DelayedScaling"
                )
        return made


_STATES: dict[type[Recipe], type[RecipeState]] = {
    DelayedScaling: DelayedScalingRecipeState,
    Float8CurrentScaling: Float8CurrentScalingRecipeState,
    Float8BlockScaling: Float8BlockScalingRecipeState,
    MXFP8BlockScaling: MXFP8BlockScalingRecipeState,
    NVFP4BlockScaling: NVFP4BlockScalingRecipeState,
    CustomRecipe: CustomRecipeState,
}
