# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A product x W^T + bias and its gradients for one kind of call, in high precision or quantized: the operators' calls,
bound, and what is saved. `settled` makes Functions' steps of them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from te_dispatch.core.repeating import repeating
from te_dispatch.numerics.quantized import Quantized

if TYPE_CHECKING:
    from te_dispatch.pytorch.casts import GemmCasts

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


class ProductSteps:
    """A product x W^T + bias and its gradients, quantized, of operands like those of one.

    Attributes:
        casts: around the weight. dtypes: of the input, the weight and the bias (None without one).
        cast_weight, forward: the weight's cast, and what `ops.gemm` returns of (x, weight[, bias]).
        x, weight: what of them is saved; the weight's is None where x takes no gradient.
        dgrad, wgrad: the products of the backward, None until there was one.
    """

    __slots__ = ("casts", "dtypes", "cast_weight", "forward", "x", "weight", "dgrad", "wgrad")

    #: Tensors that `run` has saved, where x takes a gradient.
    parts = 4

    def __init__(self, casts: GemmCasts, dtypes: tuple[Any, ...], cast_weight: Call, forward: Call) -> None:
        self.casts = casts
        self.dtypes = dtypes
        self.cast_weight = cast_weight
        self.forward = forward
        self.x: Kept
        self.weight: Kept | None = None
        self.dgrad: Call | None = None
        self.wgrad: Call | None = None

    @classmethod
    def of(
        cls,
        scope: Any,
        casts: GemmCasts,
        dtype: torch.dtype,
        x: Quantized,
        weight: torch.Tensor,
        weight_quantized: Quantized,
        bias: torch.Tensor | None,
        dgrad: bool,
    ) -> ProductSteps | None:
        """Of a product that was just made; None where such products have to go the long way.

        Args:
            dtype: of the Function's input. dgrad: whether x's gradient is wanted; the weight's must be.
        """
        usages = (casts.wgrad[1][0], casts.dgrad[1][0])
        plain = all(
            record.scale_layout == quantizer.scale_layout and record.global_scale_inv is None
            for record, quantizer in ((x, casts.input), (weight_quantized, casts.weight))
        )
        if casts.relays or not plain or "both" in usages or (bias is not None and bias.dtype is not dtype):
            return None
        cast_weight = cast(scope, weight, casts.weight, casts.weight_usage[1 if dgrad else 0])
        forward = product(scope, x, weight_quantized, "NT", bias, dtype, casts.fprop_split)
        if cast_weight is None or forward is None:
            return None
        self = cls(casts, (dtype, weight.dtype, None if bias is None else bias.dtype), cast_weight, forward)
        self.x = Kept(x, usages[0])
        self.weight = Kept(weight_quantized, usages[1]) if dgrad else None
        return self

    def run(
        self, x: Quantized, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The product, and the tensors to save: two of x, then two of the weight unless x takes no gradient."""
        quantized = self.cast_weight(weight)
        out = self.forward(x, quantized)[0] if bias is None else self.forward(x, quantized, bias)[0]
        if self.weight is None:
            return out, self.x.parts(x)
        return out, self.x.parts(x) + self.weight.parts(quantized)

    def operands(self, saved: Any) -> tuple[Quantized, Quantized | None]:
        """x and the weight of what `run` had saved."""
        if self.weight is None:
            return self.x.record(*saved), None
        data, scale, weight_data, weight_scale = saved
        return self.x.record(data, scale), self.weight.record(weight_data, weight_scale)

    def gradients(
        self, dy: Quantized, x: Quantized, weight: Quantized | None, dbias: torch.Tensor | None
    ) -> tuple[Any, Any, Any]:
        """Gradients of x, the weight and the bias; `dbias` is what whoever made dy has summed."""
        dx = None if weight is None else self.dgrad(dy, weight)[0]  # type: ignore[misc]
        return dx, self.wgrad(dy, x)[0], dbias  # type: ignore[misc]

    def cast_gradient(self, scope: Any, dy: torch.Tensor, dgrad: bool, sums: bool) -> Call | None:
        """dy -> it as `gradients` reads it, with its column sums where it `sums`; None where it must be seen."""
        if not _lies_dense(dy):
            return None
        usage = self.casts.grad_usage[dgrad + 2]
        if not sums:
            return cast(scope, dy, self.casts.grad, usage)
        return repeating(
            scope, "quantize_dbias", ("x",), x=dy, quantizer=self.casts.grad, usage=usage, bias_dtype=self.dtypes[2]
        )

    def learn(self, scope: Any, dy: Quantized, x: Quantized, weight: Quantized | None, sums: bool) -> bool:
        """Settle the products of the backward, of ones that were just made; whether that was possible.

        Args:
            sums: whether the bias's gradient is wanted, and dy was not summed when it was made.
        """
        casts, (x_dtype, weight_dtype, _) = self.casts, self.dtypes
        wgrad = product(scope, dy, x, "TN", None, weight_dtype, casts.wgrad_split)
        dgrad = None if weight is None else product(scope, dy, weight, "NN", None, x_dtype, casts.dgrad_split)
        if wgrad is None or (weight is not None and dgrad is None):
            return False
        self.wgrad, self.dgrad = wgrad, dgrad
        return True


class PlainProduct:
    """`ProductSteps` in high precision: x and the weight are multiplied, and saved, as they are."""

    __slots__ = ("dtypes", "forward", "keeps_weight", "dgrad", "wgrad")

    casts = None
    parts = 2

    def __init__(self, dtypes: tuple[Any, ...], forward: Call, dgrad: bool) -> None:
        self.dtypes = dtypes
        self.forward = forward
        self.keeps_weight = dgrad
        self.dgrad: Call | None = None
        self.wgrad: Call | None = None

    @classmethod
    def of(
        cls, scope: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dgrad: bool
    ) -> PlainProduct | None:
        """As `ProductSteps.of`."""
        dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        if any(dtype not in (None, x.dtype) for dtype in dtypes):
            return None  # cast in every call
        varying = ("a", "b") if bias is None else ("a", "b", "bias")
        forward = repeating(scope, "gemm", varying, a=x, b=weight, layout="NT", bias=bias)
        return None if forward is None else cls(dtypes, forward, dgrad)

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        out = self.forward(x, weight)[0] if bias is None else self.forward(x, weight, bias)[0]
        return out, (x, weight) if self.keeps_weight else (x,)

    def operands(self, saved: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (saved[0], saved[1]) if self.keeps_weight else (saved[0], None)

    def gradients(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, dbias: torch.Tensor | None
    ) -> tuple[Any, Any, Any]:
        dx = None if weight is None else self.dgrad(dy, weight)[0]  # type: ignore[misc]
        dw, _, summed = self.wgrad(dy, x)  # type: ignore[misc]
        return dx, dw, summed if dbias is None else dbias

    def cast_gradient(self, scope: Any, dy: torch.Tensor, dgrad: bool, sums: bool) -> Call | None:
        """dy -> itself."""
        return _itself if _lies_dense(dy) and dy.dtype is self.dtypes[0] else None

    def learn(self, scope: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, sums: bool) -> bool:
        epilogue = "bgrad_a" if sums else None
        both, dgrad = ("a", "b"), None
        wgrad = repeating(scope, "gemm", both, a=dy, b=x, layout="TN", epilogue=epilogue, out_dtype=self.dtypes[1])
        if weight is not None:
            dgrad = repeating(scope, "gemm", both, a=dy, b=weight, layout="NN")
        if wgrad is None or (weight is not None and dgrad is None):
            return False
        self.wgrad, self.dgrad = wgrad, dgrad
        return True


def _itself(dy: torch.Tensor) -> torch.Tensor:
    return dy


def _lies_dense(dy: torch.Tensor) -> bool:
    return dy.__class__ is torch.Tensor and dy.is_contiguous()
