# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A Function's steps for one kind of call: the operators' calls, bound, and what its saved tensors are.

They are worked out from a call that was made the long way (`linear_steps`, `norm_steps`, `gemm_steps`), and make the
same operators' calls, so both give the same bits. Which calls are of the kind: `known_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core.repeating import repeating
from te_dispatch.ops.checks.likeness import PLAIN, Likeness, alike
from te_dispatch.pytorch import scale_update
from te_dispatch.pytorch.norm_steps import NormOptions, norm_backward
from te_dispatch.pytorch.settled_products import Call, PlainProduct, ProductSteps, cast

if TYPE_CHECKING:
    from te_dispatch.pytorch.casts import Plan


def teach(options: Any, steps: Any) -> None:
    """Give the steps of the call with these options, or None where there are none, to the module that asked for them.

    It asks once: the graph that keeps the options must not keep the module.
    """
    learn, options.learn = options.learn, None
    learn(options.settled(steps))


class NormSteps:
    """The norm in front of a product, with what it is cast to, and its gradients.

    Attributes:
        forward: (x, gamma, beta), without beta for RMSNorm -> what the operator returns.
        backward: (dy, x, gamma, mean, rstd), without mean for RMSNorm, and `add` where one `adds`; None until there was
            one. fits: whether an `add` looks as the first did.
    """

    __slots__ = ("scope", "options", "forward", "backward", "adds", "fits")

    def __init__(self, scope: Any, options: NormOptions, forward: Call) -> None:
        self.scope = scope
        self.options = options
        self.forward = forward
        self.backward: Call | None = None
        self.adds = False
        self.fits: Likeness | None = None

    @classmethod
    def of(
        cls,
        scope: Any,
        options: NormOptions,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        quantizer: Any,
        usage: str,
    ) -> NormSteps | None:
        """Of a norm that was just made: cast by a quantizer, without its values, or without one."""
        how = {
            "x": x, "gamma": gamma, "eps": options.eps, "zero_centered_gamma": options.zero_centered_gamma,
            "quantizer": quantizer, "usage": usage,
        }  # fmt: skip
        if options.rms:
            forward = repeating(scope, "rmsnorm_fwd", ("x", "gamma"), **how)
        else:
            forward = repeating(scope, "layernorm_fwd", ("x", "gamma", "beta"), beta=beta, **how)
        return None if forward is None else cls(scope, options, forward)

    def run(self, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> Any:
        return self.forward(x, gamma) if self.options.rms else self.forward(x, gamma, beta)

    def gradients(
        self,
        dy: torch.Tensor,
        x: torch.Tensor,
        gamma: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        add: torch.Tensor | None,
    ) -> Any:
        """As `norm_backward`."""
        backward = self.backward
        if backward is None or self.adds != (add is not None) or (add is not None and not self.fits(add)):  # type: ignore[misc]
            grads = norm_backward(dy, x, gamma, mean, rstd, self.options, add)
            if backward is None:
                self._learn(dy, x, gamma, mean, rstd, add)
            return grads
        if self.options.rms:
            return backward(dy, x, gamma, rstd) if add is None else backward(dy, x, gamma, rstd, add)
        return backward(dy, x, gamma, mean, rstd) if add is None else backward(dy, x, gamma, mean, rstd, add)

    def _learn(self, dy: Any, x: Any, gamma: Any, mean: Any, rstd: Any, add: Any) -> None:
        if any(t is not None and (t.__class__ not in PLAIN or not t.is_contiguous()) for t in (dy, add)):
            return
        given = {"dy": dy, "x": x, "gamma": gamma, "mean": mean, "rstd": rstd, "add": add}
        if self.options.rms:
            del given["mean"]
        if add is None:
            del given["add"]
        name = "rmsnorm_bwd" if self.options.rms else "layernorm_bwd"
        zero_centered = self.options.zero_centered_gamma
        backward = repeating(self.scope, name, tuple(given), zero_centered_gamma=zero_centered, **given)
        self.adds, self.fits = add is not None, None if add is None else alike((add,), (True,))
        self.backward = backward


class Steps:
    """What a Function's steps of any kind have: where they hold, and how the gradient of its output is read.

    Attributes:
        scope: the bindings of the forward. group: of the gradients' scales.
        needs: `ctx.needs_input_grad` of the Function; its backward may be asked for less, and then takes the long way.
        gradient, fits: the gradient's cast, and what gradients the steps serve; None until there was one.
        sums: whether the gradient's cast sums its columns, too.
    """

    __slots__ = ("scope", "plan", "group", "needs", "gradient", "fits", "sums", "at")

    def __init__(self, scope: Any, plan: Plan | None, needs: tuple[bool, ...]) -> None:
        self.scope = scope
        self.plan = plan
        self.group = None if plan is None else plan.backward_group
        #: Where results have what products read: values, or, behind them, values quantized.
        self.at = 0 if plan is None else 1
        self.needs = needs
        self.gradient: Call | None = None
        self.fits: Likeness | None = None
        self.sums = False

    def learn_product(
        self, product: ProductSteps | PlainProduct, dy: torch.Tensor, dyq: Any, x: Any, weight: Any, sums: bool
    ) -> bool:
        """Settle the gradients of the product that made the output, of ones that were just made; whether that was
        possible. `fits` is left to who settles the rest.
        """
        gradient = product.cast_gradient(self.scope, dy, weight is not None, sums)
        if gradient is None or not product.learn(self.scope, dyq, x, weight, sums):
            return False
        self.gradient, self.sums = gradient, sums and product.casts is not None
        return True


class LinearSteps(Steps):
    """The steps of `Linear` and `LayerNormLinear`, for one kind of call; all that a training step wants.

    Attributes:
        product: the weight's.
        cast_x: the input's cast. norm: casts x instead, in `LayerNormLinear`.
    """

    __slots__ = ("product", "cast_x", "norm")

    def __init__(
        self, scope: Any, plan: Plan | None, needs: tuple[bool, ...], product: ProductSteps | PlainProduct
    ) -> None:
        super().__init__(scope, plan, needs)
        self.product = product
        self.cast_x: Call | None = None
        self.norm: NormSteps | None = None

    @classmethod
    def of(
        cls,
        scope: Any,
        plan: Plan | None,
        needs: tuple[bool, ...],
        product: ProductSteps | PlainProduct | None,
        x: torch.Tensor,
        norm: Callable[[Any], NormSteps | None] | None,
    ) -> LinearSteps | None:
        """The steps of a forward that was just made; None where such calls have to go the long way.

        Args:
            x: the Function's input.
            norm: scope -> the steps of the norm in front; None without one.
        """
        if product is None:
            return None
        self = cls(scope, plan, needs, product)
        if norm is not None:
            self.norm = norm(scope)
            return None if self.norm is None else self
        if plan is not None:
            casts = plan.sole()
            self.cast_x = cast(scope, x, casts.input, casts.input_usage[1])
            return None if self.cast_x is None else self
        return self

    def run(self, ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The forward of `Linear`."""
        out, saved = self.product.run(x if self.cast_x is None else self.cast_x(x), weight, bias)
        ctx.save_for_backward(*saved)
        return out

    def run_normed(
        self,
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The forward of `LayerNormLinear`."""
        normed = self.norm.run(x, gamma, beta)  # type: ignore[union-attr]
        out, saved = self.product.run(normed[self.at], weight, bias)
        if len(saved) < self.product.parts:
            ctx.save_for_backward(None, None, None, None, *saved)
        else:
            ctx.save_for_backward(x, gamma, normed[3], normed[4], *saved)
        return out

    def gradients(self, dy: torch.Tensor, x: Any, weight: Any) -> tuple[Any, Any, Any] | None:
        """Gradients of x, weight and bias; None where this gradient has to go the long way."""
        if self.fits is None or not self.fits(dy):
            return None
        if self.group is not None:
            scale_update.note_backward_cast(self.group, None)
        dyq, dbias = self.gradient(dy) if self.sums else (self.gradient(dy), None)  # type: ignore[misc]
        return self.product.gradients(dyq, x, weight, dbias)

    def learn(self, dy: torch.Tensor, dyq: Any, x: Any, weight: Any, sums: bool) -> None:
        """Settle the backward's steps, of one that was just made."""
        if self.learn_product(self.product, dy, dyq, x, weight, sums):
            self.fits = alike((dy,), (True,))  # last: another thread may be looking
