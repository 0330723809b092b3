# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""For which tensor of which module a factory of `CustomRecipe` is asked: roles, and the modules that have them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from te_dispatch.common.recipe import Recipe


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


@dataclass
class ModuleRoles:
    """How a module's factory is asked.

    Attributes:
        module: the class, for messages.
        names: of the roles, one per weight.
        output, input_grad: roles of what leaves the module quantized.
        known: what factories have answered, by recipe, tensor and role: a quantizer, None for high precision.
    """

    module: str
    names: tuple[str, ...]
    output: QuantizerRole | None = None
    input_grad: QuantizerRole | None = None
    known: dict[tuple[Recipe, str, QuantizerRole | None], Any] = field(default_factory=dict)

    def without_answers(self) -> ModuleRoles:
        """For copies and pickles, which ask anew: a recipe may not be picklable."""
        return ModuleRoles(self.module, self.names, self.output, self.input_grad)

    @classmethod
    def unnamed(cls, gemm_count: int) -> ModuleRoles:
        return cls("module", ("",) * gemm_count)


class AskingModule(torch.nn.Module):
    """A module for whose tensors a factory is asked for quantizers."""

    gemm_count: int
    name: str | None = None
    #: What tells a module's weights from each other in roles, behind the module's name.
    part_names: tuple[str, ...] = ("",)

    def __init__(self) -> None:
        super().__init__()
        self._roles = ModuleRoles(type(self).__name__, ())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_roles" not in self.__dict__:  # pickled by a version without
            self._roles = ModuleRoles(type(self).__name__, ())

    def _asked_roles(self) -> ModuleRoles:
        """How a factory is to be asked now."""
        self._roles.names = tuple(".".join(filter(None, (self.name, part))) for part in self.part_names)
        return self._roles

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """What a factory is told of the output, where it leaves the module quantized: whoever reads it; None for
        nobody that is known."""
        return self._roles.output

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._roles.output = _required_role("output_quantizer_role", role)
        self._forget_plan()

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The same of the input's gradient."""
        return self._roles.input_grad

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._roles.input_grad = _required_role("grad_input_quantizer_role", role)
        self._forget_plan()

    def _forget_plan(self) -> None:
        raise NotImplementedError


def _required_role(name: str, role: QuantizerRole | None) -> QuantizerRole | None:
    if role is not None and not isinstance(role, QuantizerRole):
        raise TypeError(f"{name} must be a QuantizerRole or None, got {role!r}")
    return role
