# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The input signatures of `DotProductAttention`: of query, key and value, and no other tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core import scopes
from te_dispatch.ops.checks.guards import guard_for
from te_dispatch.pytorch.attention.inputs import shared_packing

if TYPE_CHECKING:
    from te_dispatch.pytorch.attention.function import AttentionCall

#: Query, key, value, all three packed, key and value packed; None for what was not given.
Given = tuple[torch.Tensor | None, ...]


class AttentionSignature:
    """Of captured calls of one module.

    Attributes:
        arguments: what it was called with beside tensors. given: which operands there are. guard: of their metadata.
        packing: that of three operands given apart, which their metadata do not tell.
        scope: the bindings. deterministic: PyTorch's flag, which no attribute or argument tells.
        call: for the Function, with the program; None until that was called.
    """

    __slots__ = ("arguments", "given", "guard", "packing", "deterministic", "scope", "call")

    def __init__(self, operands: Given, arguments: Any, packing: str | None) -> None:
        present = [x for x in operands if x is not None]
        self.arguments = arguments
        self.given = tuple([x is not None for x in operands])
        self.guard = guard_for(present, [True] * len(present))
        self.packing = packing
        self.deterministic = torch.are_deterministic_algorithms_enabled()
        self.scope = scopes.capture()
        self.call: AttentionCall | None = None

    def serves(self, operands: Given, arguments: Any) -> bool:
        """Whether a call with these operands has this signature."""
        present = [x for x in operands if x is not None]
        return (
            self.arguments == arguments
            and self.scope is scopes.capture()
            and tuple([x is not None for x in operands]) == self.given
            and self.guard(*present)
            and self.deterministic is torch.are_deterministic_algorithms_enabled()
            and (len(present) < 3 or shared_packing(*present) == self.packing)
        )
