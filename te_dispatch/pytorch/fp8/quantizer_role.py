# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""For which tensor of which module a factory of `CustomRecipe` is asked: roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from te_dispatch.common.recipe import Recipe
from te_dispatch.core.bounded import BoundedDict

#: How many answers a module keeps: a program may make another recipe at every step.
_KEPT = 64


@dataclass(frozen=True)
class QuantizerRole:
    """What a factory of `te_dispatch.common.recipe.CustomRecipe` is asked about.

    Attributes:
        module_type: ``linear``: one weight's products, in `Linear`, `LayerNormLinear` and `LayerNormMLP` alike.
        tensor_type: ``input``, ``weight`` or ``grad_output``, the gradient of the output.
        name: the argument `name` of the module's constructor, "" without one; of `LayerNormMLP`, with ``.fc1`` or
            ``.fc2`` behind it, or ``fc1`` and ``fc2`` alone.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        said = [f"{one.name}={value}" for one in fields(self) if (value := getattr(self, one.name))]
        return "|".join(said) or "QuantizerRole()"


#: Roles of a weight in the lists of `AskingModule.get_quantizer_roles`.
FORWARD, BACKWARD = 3, 2

Roles = Sequence["QuantizerRole | None"]


@dataclass
class ModuleRoles:
    """How a module's factory is asked.

    Attributes:
        module: the class, for messages.
        forward, backward: roles as `AskingModule.get_quantizer_roles` gives them.
        known: what factories have answered, by recipe, tensor, number of the weight and role: a quantizer, None for
            high precision.
    """

    module: str
    forward: Roles = ()
    backward: Roles = ()
    known: BoundedDict[tuple[Recipe, str, int, QuantizerRole | None], Any] = field(
        default_factory=lambda: BoundedDict(_KEPT)
    )

    @classmethod
    def unnamed(cls, weights: int) -> ModuleRoles:
        names = ("",) * weights
        return cls("module", default_roles(names, True, None), default_roles(names, False, None))

    @property
    def weights(self) -> int:
        return len(self.forward) // FORWARD

    def of(self, tensor: str, weight: int) -> QuantizerRole | None:
        """The role of ``input``, ``weight``, ``output``, ``grad_output`` or ``grad_input`` of a weight."""
        if tensor in _OF_FORWARD:
            return self.forward[FORWARD * weight + _OF_FORWARD.index(tensor)]
        return self.backward[BACKWARD * weight + _OF_BACKWARD.index(tensor)]


_OF_FORWARD, _OF_BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")


def default_roles(names: Sequence[str], forward: bool, leaving: QuantizerRole | None) -> list[QuantizerRole | None]:
    """The roles of a module's weights in order. What one product hands to the next has the next one's role.

    Args:
        leaving: the role of what leaves the module.
    """
    found: list[QuantizerRole | None] = []
    for i, name in enumerate(names):
        if forward:
            after = names[i + 1] if i + 1 < len(names) else None
            found += [QuantizerRole("linear", "input", name), QuantizerRole("linear", "weight", name)]
            found.append(leaving if after is None else QuantizerRole("linear", "input", after))
        else:
            found.append(QuantizerRole("linear", "grad_output", name))
            found.append(leaving if i == 0 else QuantizerRole("linear", "grad_output", names[i - 1]))
    return found
