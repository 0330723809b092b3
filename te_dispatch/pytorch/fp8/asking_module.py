# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules that say for which of their tensors a factory of `CustomRecipe` is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_dispatch.pytorch.fp8.quantizer_role import (
    BACKWARD,
    FORWARD,
    ModuleRoles,
    QuantizerRole,
    Roles,
    default_roles,
)

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.module_state import Fp8State


class AskingModule(torch.nn.Module):
    """A module for whose tensors a factory is asked for quantizers."""

    gemm_count: int
    fp8_state: Fp8State
    name: str | None = None
    #: What tells a module's weights from each other in roles, behind the module's name.
    part_names: tuple[str, ...] = ("",)
    _output_role: QuantizerRole | None = None
    _grad_input_role: QuantizerRole | None = None

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
        roles = default_roles(names, fwd, self._output_role if fwd else self._grad_input_role)
        return [roles[i % len(roles)] for i in range(num_quantizers)]

    def asked_roles(self) -> ModuleRoles:
        """How a factory is to be asked now.

        Raises:
            ValueError: `get_quantizer_roles` of a class of one's own returns another number of roles.
        """
        for fwd, each in ((True, FORWARD), (False, BACKWARD)):
            count = each * self.gemm_count
            roles = self.get_quantizer_roles(fwd=fwd, num_quantizers=count)
            if roles is None:
                roles = [QuantizerRole()] * count
            if len(roles) != count:
                raise ValueError(
                    f"{type(self).__name__}.get_quantizer_roles(fwd={fwd}) must return {count} roles, got {len(roles)}"
                )
            setattr(self.fp8_state.roles, "forward" if fwd else "backward", tuple(roles))
        return self.fp8_state.roles

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
