# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""For which tensor of which module a factory of `CustomRecipe` is asked: roles, and the modules that have them."""

from __future__ import annotations

from collections.abc import Sequence
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


#: Roles of a weight in the lists of `AskingModule.get_quantizer_roles`.
_FORWARD, _BACKWARD = 3, 2

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
    known: dict[tuple[Recipe, str, int, QuantizerRole | None], Any] = field(default_factory=dict)

    @classmethod
    def unnamed(cls, weights: int) -> ModuleRoles:
        names = ("",) * weights
        return cls("module", _roles(names, True, None), _roles(names, False, None))

    @property
    def weights(self) -> int:
        return len(self.forward) // _FORWARD

    def of(self, tensor: str, weight: int) -> QuantizerRole | None:
        """The role of ``input``, ``weight``, ``output``, ``grad_output`` or ``grad_input`` of a weight."""
        if tensor in _OF_FORWARD:
            return self.forward[_FORWARD * weight + _OF_FORWARD.index(tensor)]
        return self.backward[_BACKWARD * weight + _OF_BACKWARD.index(tensor)]


_OF_FORWARD, _OF_BACKWARD = ("input", "weight", "output"), ("grad_output", "grad_input")


def _roles(names: Sequence[str], forward: bool, leaving: QuantizerRole | None) -> list[QuantizerRole | None]:
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


class AskingModule(torch.nn.Module):
    """A module for whose tensors a factory is asked for quantizers."""

    gemm_count: int
    name: str | None = None
    #: What tells a module's weights from each other in roles, behind the module's name.
    part_names: tuple[str, ...] = ("",)
    _output_role: QuantizerRole | None = None
    _grad_input_role: QuantizerRole | None = None

    def __init__(self) -> None:
        super().__init__()
        self._answers = ModuleRoles(type(self).__name__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if "_answers" not in self.__dict__:  # pickled by a version without
            self._answers = ModuleRoles(type(self).__name__)

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> Roles | None:
        """What a factory is told of the module's tensors. A class of one's own may say something else.

        Args:
            fwd: whether of the forward, input, weight and output of each weight, or of the backward, gradients of the
                output and of the input.
            num_quantizers: the length of the list: 3 for each weight, or 2.

        Returns:
            Roles, None for a tensor of which nothing is known; or None for `QuantizerRole()` of every tensor.
        """
        names = [".".join(filter(None, (self.name, part))) for part in self.part_names]
        roles = _roles(names, fwd, self._output_role if fwd else self._grad_input_role)
        return [roles[i % len(roles)] for i in range(num_quantizers)]

    def _asked_roles(self) -> ModuleRoles:
        """How a factory is to be asked now.

        Raises:
            ValueError: `get_quantizer_roles` of a class of one's own returns another number of roles.
        """
        for fwd, each in ((True, _FORWARD), (False, _BACKWARD)):
            count = each * self.gemm_count
            roles = self.get_quantizer_roles(fwd=fwd, num_quantizers=count)
            if roles is None:
                roles = [QuantizerRole()] * count
            if len(roles) != count:
                raise ValueError(
                    f"{type(self).__name__}.get_quantizer_roles(fwd={fwd}) must return {count} roles, got {len(roles)}"
                )
            setattr(self._answers, "forward" if fwd else "backward", tuple(roles))
        return self._answers

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """What a factory is told of the output, where it leaves the module quantized: whoever reads it; None for
        nobody that is known."""
        return self._output_role

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._output_role = _required_role("output_quantizer_role", role)
        self._forget_plan()

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The same of the input's gradient."""
        return self._grad_input_role

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._grad_input_role = _required_role("grad_input_quantizer_role", role)
        self._forget_plan()

    def _forget_plan(self) -> None:
        raise NotImplementedError


def _required_role(name: str, role: QuantizerRole | None) -> QuantizerRole | None:
    if role is not None and not isinstance(role, QuantizerRole):
        raise TypeError(f"{name} must be a QuantizerRole or None, got {role!r}")
    return role
