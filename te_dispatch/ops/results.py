# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results of operators: fixed-length named tuples. A member that was not asked for is None.

Members are never added, removed or reordered within a major version of an operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from te_dispatch.numerics.quantized import FakeQuantized, Quantized

if TYPE_CHECKING:
    import torch


class Saved:
    """What a forward leaves for its backward beyond the results its interface names.

    Attributes:
        implementation: id of the forward's implementation; the backward runs on its companion.
        format: its `saved_format`; any backward that declares the same one may run instead.
        tensors: for `save_for_backward`.
        options: everything else, as hashable data.
    """

    __slots__ = ("implementation", "format", "tensors", "options")

    def __init__(
        self, implementation: str, format: str, tensors: tuple[torch.Tensor | None, ...] = (), options: Any = None
    ) -> None:
        self.implementation = implementation
        self.format = format
        self.tensors = tensors
        self.options = options


def as_returned(value: Any, implementation: str, saved_format: str) -> Any:
    """A shape function's result as an implementation returns it: with records that operators take, and its own name
    in what is saved.

    Args:
        value: the result.
        implementation, saved_format: of the `Saved` in it.
    """
    if value.__class__ is FakeQuantized:
        return Quantized(
            value.row_data,
            value.col_data,
            value.row_scale_inv,
            value.col_scale_inv,
            value.encoding,
            value.scaling,
            value.scale_layout,
            value.shape,
            value.dtype,
            value.device,
            value.global_scale_inv,
        )
    if value.__class__ is Saved:
        return Saved(implementation, saved_format, value.tensors, value.options)
    if isinstance(value, list):
        return [as_returned(item, implementation, saved_format) for item in value]
    if isinstance(value, tuple):
        items = [as_returned(item, implementation, saved_format) for item in value]
        return value.__class__(*items) if hasattr(value, "_fields") else tuple(items)
    return value


class QuantizeDbias(NamedTuple):
    quantized: Quantized
    dbias: torch.Tensor


class Gemm(NamedTuple):
    out: torch.Tensor | Quantized
    aux: torch.Tensor | Quantized | None
    dbias: torch.Tensor | None


class NormForward(NamedTuple):
    y: torch.Tensor | None
    y_quantized: Quantized | None
    residual_out: torch.Tensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


class NormBackward(NamedTuple):
    dx: torch.Tensor
    dgamma: torch.Tensor
    dbeta: torch.Tensor | None


class ActivationForward(NamedTuple):
    out: torch.Tensor | None
    out_quantized: Quantized | None


class ActivationBackward(NamedTuple):
    dx: torch.Tensor | None
    dx_quantized: Quantized | None
    dbias: torch.Tensor | None


class AttentionForward(NamedTuple):
    out: torch.Tensor | Quantized
    lse: torch.Tensor | None
    max_logit: torch.Tensor | None
    saved: Saved | None


class AttentionBackward(NamedTuple):
    dq: torch.Tensor | Quantized
    dk: torch.Tensor | Quantized
    dv: torch.Tensor | Quantized
    dbias: torch.Tensor | None
    dsoftmax_offset: torch.Tensor | None


class DropoutAddForward(NamedTuple):
    out: torch.Tensor
    mask: torch.Tensor | None


class MoePermute(NamedTuple):
    permuted: torch.Tensor | Quantized
    row_map: torch.Tensor
    probs: torch.Tensor | None


class MoeUnpermuteBackward(NamedTuple):
    dinput: torch.Tensor
    dprobs: torch.Tensor | None
