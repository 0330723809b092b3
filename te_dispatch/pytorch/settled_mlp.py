# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The steps of `LayerNormMLP`'s Function for one kind of call, as `settled` has them for one product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core.repeating import repeating
from te_dispatch.ops.checks.likeness import alike
from te_dispatch.pytorch import scale_update
from te_dispatch.pytorch.settled import NormSteps, Steps
from te_dispatch.pytorch.settled_products import Call, PlainProduct, ProductSteps

if TYPE_CHECKING:
    from te_dispatch.pytorch.casts import Plan
    from te_dispatch.pytorch.layernorm_mlp_function import Half, LayerNormMLPOptions

#: How many tensors `MLPSteps.run` saves in front of those of the two products: the last of them is z.
FRONT = 7


class MLPSteps(Steps):
    """Norm, product, activation, product and their gradients for one kind of call that wants all of them.

    Attributes:
        norm, first, second: of the norm and the two products.
        activate: z -> what `ops.activation_fwd` returns. activation_gradient: (dhidden, z) -> what its gradient does.
    """

    __slots__ = ("norm", "first", "second", "activate", "activation_gradient", "kind", "params")

    def __init__(
        self,
        scope: Any,
        plan: Plan | None,
        needs: tuple[bool, ...],
        norm: NormSteps,
        first: ProductSteps | PlainProduct,
        second: ProductSteps | PlainProduct,
        activate: Call,
        options: LayerNormMLPOptions,
    ) -> None:
        super().__init__(scope, plan, needs)
        self.norm = norm
        self.first = first
        self.second = second
        self.activate = activate
        self.kind, self.params = options.kind, options.params
        self.activation_gradient: Call | None = None

    @classmethod
    def of(
        cls,
        scope: Any,
        options: LayerNormMLPOptions,
        needs: tuple[bool, ...],
        half: Half,
        norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        first: tuple[torch.Tensor, Any, torch.Tensor | None],
        second: tuple[torch.Tensor, Any, torch.Tensor | None],
    ) -> MLPSteps | None:
        """The steps of a forward that was just made; None where such calls have to go the long way.

        Args:
            norm: x, gamma and beta. first, second: of each product the weight, that as it was multiplied, and the bias.
        """
        x, plan = norm[0], options.plan
        into: ProductSteps | PlainProduct | None
        out: ProductSteps | PlainProduct | None
        how: dict[str, Any] = {"kind": options.kind, "params": options.params}
        if plan is None:
            normed = NormSteps.of(scope, options.norm, *norm, None, "row")
            into = PlainProduct.of(scope, half.operand, first[0], first[2], True)
            out = PlainProduct.of(scope, half.hidden, second[0], second[2], True)
        else:
            casts1, casts2 = plan.gemms
            if casts1 is None or casts2 is None:
                return None
            normed = NormSteps.of(scope, options.norm, *norm, casts1.input, casts1.input_usage[1])
            into = ProductSteps.of(scope, casts1, x.dtype, half.operand, *first, True)
            out = ProductSteps.of(scope, casts2, x.dtype, half.hidden, *second, True)
            how |= {"quantizer": casts2.input, "usage": casts2.input_usage[1]}
        activate = repeating(scope, "activation_fwd", ("x",), x=half.z, **how)
        if normed is None or into is None or out is None or activate is None:
            return None
        return cls(scope, plan, needs, normed, into, out, activate, options)

    def run(
        self,
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
    ) -> torch.Tensor:
        at, normed = self.at, self.norm.run(x, gamma, beta)
        z, of_first = self.first.run(normed[at], w1, b1)
        out, of_second = self.second.run(self.activate(z)[at], w2, b2)
        ctx.save_for_backward(x, gamma, normed[3], normed[4], None, None, z, *of_first, *of_second)
        return out

    def operands(self, saved: Any) -> tuple[Any, Any, Any, Any]:
        """Both weights and both inputs of what `run` saved."""
        until = FRONT + self.first.parts
        operand, w1 = self.first.operands(saved[FRONT:until])
        hidden, w2 = self.second.operands(saved[until:])
        return w1, w2, operand, hidden

    def serves(self, dy: torch.Tensor) -> bool:
        """Whether `gradients` serves this gradient of the output."""
        return self.fits is not None and self.fits(dy)

    def gradients(self, dy: torch.Tensor, saved: list[Any]) -> tuple[Any, Any, Any, Any, Any]:
        """Gradients of the norm's output, the first weight and bias, the second weight and bias.

        Args:
            saved: what `run` saved; emptied, so that what is widest goes as soon as it was used.
        """
        if self.group is not None:
            scale_update.note_backward_cast(self.group, None)
        z = saved[FRONT - 1]
        w1, w2, operand, hidden = self.operands(saved)
        saved.clear()
        dyq, db2 = self.gradient(dy) if self.sums else (self.gradient(dy), None)  # type: ignore[misc]
        dhidden, dw2, db2 = self.second.gradients(dyq, hidden, w2, db2)
        del hidden, w2, dyq
        dz = self.activation_gradient(dhidden, z)  # type: ignore[misc]
        del dhidden, z
        dnorm, dw1, db1 = self.first.gradients(dz[self.at], operand, w1, dz[2])
        return dnorm, dw1, db1, dw2, db2

    def learn_second(self, dy: torch.Tensor, dyq: Any, hidden: Any, w2: Any, sums: bool) -> None:
        """Settle the steps of the second product's gradients, of ones that were just made."""
        self.learn_product(self.second, dy, dyq, hidden, w2, sums)

    def learn_first(
        self,
        dy: torch.Tensor,
        dhidden: torch.Tensor,
        z: torch.Tensor,
        dz: Any,
        operand: Any,
        w1: Any,
        sums: bool,
    ) -> None:
        """The same of the activation's gradient and the first product's, after the second's."""
        casts = self.first.casts
        how: dict[str, Any] = {"kind": self.kind, "params": self.params, "with_dbias": sums}
        if casts is not None:
            how |= {"quantizer": casts.grad, "usage": casts.grad_usage[3]}
        activation = repeating(self.scope, "activation_bwd", ("dy", "x"), dy=dhidden, x=z, **how)
        if self.gradient is None or activation is None or not self.first.learn(self.scope, dz, operand, w1, False):
            return
        self.activation_gradient = activation
        self.fits = alike((dy,), (True,))  # last: another thread may be looking
