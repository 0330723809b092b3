# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized weights that a module keeps between the microbatches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.fp8.quantized_io import operand

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import Plan


class WeightCache:
    """The quantized weights of one module, made by calls with ``is_first_microbatch=True``.

    Attributes:
        weights: one per GEMM, None for one that runs in high precision; None before the first such call.
        plan: that they were quantized under.
    """

    __slots__ = ("weights", "plan", "_parameters")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.weights: list[Quantized | None] | None = None
        self.plan: Plan | None = None
        self._parameters: tuple[torch.Tensor, ...] = ()

    def of_call(
        self, plan: Plan, record: Plan | None, weights: Sequence[torch.Tensor], is_first_microbatch: bool | None
    ) -> list[Quantized | None] | None:
        """The quantized weights of a call that has them cached, else None: the module's Function then quantizes.

        Args:
            record: what a checkpoint keeps of the call for its recomputation; None outside any.
        """
        if plan.replay:
            return plan.weights
        if is_first_microbatch is None:
            return None
        # An evaluation takes what a training step has cached; not the other way round, because it records no amaxes.
        fits = self.weights is not None and self.plan in (plan, plan.source)
        if is_first_microbatch or not fits or self._replaced(weights):
            self.quantize(plan, weights)
        if record is not None:
            record.weights = self.weights
        return self.weights

    def quantize(self, plan: Plan, weights: Sequence[torch.Tensor]) -> None:
        """Quantize the weights, with every copy that a later microbatch may need."""
        # A weight that inference mode cached could not be saved for a later microbatch's backward.
        with torch.inference_mode(False), torch.no_grad():
            self.weights = [
                None if casts is None else operand(w.detach().contiguous(), casts.weight, casts.weight_usage[1])
                for w, casts in zip(weights, plan.gemms)
            ]
        self.plan, self._parameters = plan, tuple(weights)

    def _replaced(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether a weight is another Parameter than the one cached. Views, and what parametrizations compute, always
        are other tensors and tell nothing."""
        pairs = zip(weights, self._parameters, strict=True)
        return any(isinstance(w, torch.nn.Parameter) and w is not old for w, old in pairs)
