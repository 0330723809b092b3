# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A quantized Function's steps for one kind of call: the operators' calls, bound, and what its saved tensors are.

They are worked out from a call that was made the long way (`linear_steps`, `norm_steps`, `gemm_steps`), and make the
same operators' calls, so both give the same bits. Which calls are of the kind: `known_calls`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core.repeating import repeating
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.ops.checks.likeness import Likeness, alike
from te_dispatch.pytorch import scale_update
from te_dispatch.pytorch.norm_steps import NormOptions, norm_backward

if TYPE_CHECKING:
    from te_dispatch.pytorch.casts import GemmCasts, Plan

#: Classes of tensors whose likeness says everything about them.
PLAIN = (torch.Tensor, torch.nn.Parameter)

Call = Callable[..., Any]


def cast(scope: Any, x: torch.Tensor, quantizer: Any, usage: str) -> Call | None:
    """x -> `ops.quantize` of it."""
    return repeating(scope, "quantize", ("x",), x=x, quantizer=quantizer, usage=usage)


def product(
    scope: Any, a: Quantized, b: Quantized, layout: str, bias: torch.Tensor | None, dtype: torch.dtype, split: bool
) -> Call | None:
    """(a, b, bias), or (a, b) where there is none -> `ops.gemm` of them."""
    return repeating(
        scope, "gemm", ("a", "b") if bias is None else ("a", "b", "bias"), a=a, b=b, layout=layout, bias=bias,
        out_dtype=dtype, split_accumulator=split,
    )  # fmt: skip


class Kept:
    """The one copy of a quantized operand that a backward reads, as tensors to save.

    Attributes:
        parts: record -> (data, scale_inv).
        record: (data, scale_inv) -> a record of that copy alone.
    """

    __slots__ = ("parts", "record")

    def __init__(self, of: Quantized, usage: str) -> None:
        encoding, scaling, layout, shape, dtype, device = (
            of.encoding, of.scaling, of.scale_layout, of.shape, of.dtype, of.device,
        )  # fmt: skip
        if usage == "row":
            self.parts = attrgetter("row_data", "row_scale_inv")
            self.record: Call = lambda data, scale: Quantized(
                data, None, scale, None, encoding, scaling, layout, shape, dtype, device
            )
        else:
            self.parts = attrgetter("col_data", "col_scale_inv")
            self.record = lambda data, scale: Quantized(
                None, data, None, scale, encoding, scaling, layout, shape, dtype, device
            )


class NormSteps:
    """The norm in front of a product, quantized by it, and its gradients.

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
        """Of a norm that was just made, without its values in high precision."""
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


class LinearSteps:
    """A product x W^T + bias and its gradients, quantized, for one kind of call; all that a training step wants.

    Attributes:
        scope: the bindings of the forward.
        needs: `ctx.needs_input_grad` of the Function; its backward may be asked for less, and then takes the long way.
        cast_x, cast_weight, forward: the steps of the forward. `forward` returns what `ops.gemm` does.
        norm: casts x instead of `cast_x`, in `LayerNormLinear`.
        x, weight: what of them is saved; the weight's is None where x takes no gradient.
        gradient, dgrad, wgrad, fits: the steps of the backward and what gradients they serve, None until there was one.
    """

    __slots__ = (
        "scope", "plan", "casts", "group", "needs", "dtypes", "bias", "cast_x", "norm", "cast_weight", "forward", "x",
        "weight", "gradient", "dgrad", "wgrad", "fits", "sums",
    )  # fmt: skip

    def __init__(self, scope: Any, plan: Plan, needs: tuple[bool, ...]) -> None:
        self.scope = scope
        self.plan = plan
        self.casts: GemmCasts = plan.gemms[0]
        self.group = plan.backward_group
        self.needs = needs
        self.cast_x: Call | None = None
        self.norm: NormSteps | None = None
        self.gradient: Call | None = None
        self.dgrad: Call | None = None
        self.wgrad: Call | None = None
        self.fits: Likeness | None = None
        #: Whether the gradient's cast sums its columns, too.
        self.sums = False

    @classmethod
    def of(
        cls,
        scope: Any,
        plan: Plan,
        needs: tuple[bool, ...],
        x: torch.Tensor,
        x_quantized: Quantized,
        weight: torch.Tensor,
        weight_quantized: Quantized,
        bias: torch.Tensor | None,
        dgrad: bool,
        norm: Callable[[Any], NormSteps | None] | None = None,
    ) -> LinearSteps | None:
        """The steps of a forward that was just made; None where such calls have to go the long way.

        Args:
            x: the Function's input. dgrad: whether x's gradient is wanted; the weight's must be.
            norm: scope -> the steps of the norm that has cast x, None where x was cast itself.
        """
        casts = plan.gemms[0]
        usages = (casts.wgrad[1][0], casts.dgrad[1][0])
        plain = all(
            record.scale_layout is CANONICAL_SCALES and record.global_scale_inv is None
            for record in (x_quantized, weight_quantized)
        )
        if casts.relays or not plain or "both" in usages or (bias is not None and bias.dtype is not x.dtype):
            return None
        self = cls(scope, plan, needs)
        self.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.bias = bias is not None
        if norm is None:
            self.cast_x = cast(scope, x, casts.input, casts.input_usage[1])
        else:
            self.norm = norm(scope)
        self.cast_weight = cast(scope, weight, casts.weight, casts.weight_usage[1 if dgrad else 0])
        self.forward = product(scope, x_quantized, weight_quantized, "NT", bias, x.dtype, casts.fprop_split)
        if (self.norm or self.cast_x) is None or self.cast_weight is None or self.forward is None:
            return None
        self.x = Kept(x_quantized, usages[0])
        self.weight = Kept(weight_quantized, usages[1]) if dgrad else None
        return self

    def run(self, ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The forward of `Linear`."""
        xq, wq = self.cast_x(x), self.cast_weight(weight)  # type: ignore[misc]
        if self.weight is None:
            ctx.save_for_backward(*self.x.parts(xq))
        else:
            ctx.save_for_backward(*self.x.parts(xq), *self.weight.parts(wq))
        return self.forward(xq, wq, bias)[0] if self.bias else self.forward(xq, wq)[0]  # type: ignore[misc,no-any-return]

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
        _, xq, _, mean, rstd = self.norm.run(x, gamma, beta)  # type: ignore[union-attr]
        wq = self.cast_weight(weight)  # type: ignore[misc]
        if self.weight is None:
            ctx.save_for_backward(None, None, None, None, *self.x.parts(xq))
        else:
            ctx.save_for_backward(x, gamma, mean, rstd, *self.x.parts(xq), *self.weight.parts(wq))
        return self.forward(xq, wq, bias)[0] if self.bias else self.forward(xq, wq)[0]  # type: ignore[misc,no-any-return]

    def operands(self, saved: Any) -> tuple[Quantized, Quantized | None]:
        """x and the weight of what `run` saved."""
        if self.weight is None:
            return self.x.record(*saved), None
        data, scale, weight_data, weight_scale = saved
        return self.x.record(data, scale), self.weight.record(weight_data, weight_scale)

    def gradients(self, dy: torch.Tensor, x: Quantized, weight: Quantized | None) -> tuple[Any, Any, Any] | None:
        """Gradients of x, weight and bias; None where this gradient has to go the long way."""
        if self.fits is None or not self.fits(dy):
            return None
        if self.group is not None:
            scale_update.note_backward_cast(self.group, None)
        if self.sums:
            dyq, dbias = self.gradient(dy)  # type: ignore[misc]
        else:
            dyq, dbias = self.gradient(dy), None  # type: ignore[misc]
        dx = None if weight is None else self.dgrad(dyq, weight)[0]  # type: ignore[misc]
        return dx, self.wgrad(dyq, x)[0], dbias  # type: ignore[misc]

    def learn(self, dy: torch.Tensor, dyq: Quantized, x: Quantized, weight: Quantized | None, sums: bool) -> None:
        """Settle the backward's steps, of one that was just made."""
        if dy.__class__ is not torch.Tensor or not dy.is_contiguous():
            return
        casts, scope = self.casts, self.scope
        x_dtype, weight_dtype, bias_dtype = self.dtypes
        usage = casts.grad_usage[(weight is not None) + 2]
        if sums:
            gradient = repeating(
                scope, "quantize_dbias", ("x",), x=dy, quantizer=casts.grad, usage=usage, bias_dtype=bias_dtype
            )
        else:
            gradient = cast(scope, dy, casts.grad, usage)
        wgrad = product(scope, dyq, x, "TN", None, weight_dtype, casts.wgrad_split)
        dgrad = None
        if weight is not None:
            dgrad = product(scope, dyq, weight, "NN", None, x_dtype, casts.dgrad_split)
        if gradient is None or wgrad is None or (weight is not None and dgrad is None):
            return
        self.gradient, self.wgrad, self.dgrad, self.sums = gradient, wgrad, dgrad, sums
        self.fits = alike((dy,), (True,))  # last: another thread may be looking
