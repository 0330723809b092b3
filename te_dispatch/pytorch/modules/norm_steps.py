# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The norm at the head of a fused module: its step forward and backward, and its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.results import NormBackward, NormForward
from te_dispatch.pytorch.arguments import require_choice
from te_dispatch.pytorch.distributed.arguments import Division, ParallelModule, mark_sequence_parallel
from te_dispatch.pytorch.distributed.tensor_parallel import entering, entering_gradient
from te_dispatch.pytorch.modules.parameters import parameter
from te_dispatch.pytorch.tensor.casting import detached, rounded

NORMALIZATIONS = ("LayerNorm", "RMSNorm")


class NormOptions(NamedTuple):
    """What the norm needs besides tensors."""

    rms: bool
    eps: float
    zero_centered_gamma: bool


class NormAttributes(torch.nn.Module):
    """Of a module with a norm. What is assigned holds for later calls."""

    _norm: Any

    @property
    def eps(self) -> float:
        """What is added to the variance."""
        return self._norm.eps  # type: ignore[no-any-return]

    @eps.setter
    def eps(self, value: float) -> None:
        self._replace_norm(self._norm._replace(eps=float(value)))

    @property
    def zero_centered_gamma(self) -> bool:
        """Whether the norm's factor is 1 + weight."""
        return self._norm.zero_centered_gamma  # type: ignore[no-any-return]

    @zero_centered_gamma.setter
    def zero_centered_gamma(self, value: bool) -> None:
        self._replace_norm(self._norm._replace(zero_centered_gamma=bool(value)))

    def _replace_norm(self, options: NormOptions) -> None:
        self._norm = options
        calls = self.__dict__.get("captured_calls")
        if calls is not None:
            calls.forget()


class FirstNormAttributes(NormAttributes):
    """Of a module that begins with a norm."""

    @property
    def normalization(self) -> str:
        """One of `NORMALIZATIONS`; it follows from the parameters and cannot become another."""
        return NORMALIZATIONS[self._norm.rms]

    @normalization.setter
    def normalization(self, value: str) -> None:
        require_choice("normalization", value, NORMALIZATIONS)
        if value != self.normalization:
            raise AttributeError(
                f"{type(self).__name__}: normalization={self.normalization!r} cannot become {value!r}, only LayerNorm "
                f"has layer_norm_bias; construct a module with normalization={value!r}"
            )


def norm_forward(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    options: NormOptions,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
) -> NormForward:
    """LayerNorm or RMSNorm of x, quantized too where there is a quantizer."""
    if options.rms:
        return ops.rmsnorm_fwd(
            x,
            gamma,
            eps=options.eps,
            zero_centered_gamma=options.zero_centered_gamma,
            quantizer=quantizer,
            usage=usage,
            with_y=with_y,
        )
    return ops.layernorm_fwd(
        x,
        gamma,
        beta,
        eps=options.eps,
        zero_centered_gamma=options.zero_centered_gamma,
        quantizer=quantizer,
        usage=usage,
        with_y=with_y,
    )


def norm_operand(
    x: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None,
    options: NormOptions,
    division: Division | None,
    quantizer: Quantizer | None = None,
    usage: str = "row",
    with_y: bool = False,
) -> tuple[NormForward, torch.Tensor | None, Any]:
    """`norm_forward`, for a product that takes its output.

    Returns:
        The norm of this rank's tokens; that in high precision of all tokens, None where a fused cast leaves it out; and
        what the product reads. Where ranks divide the tokens, one cast of all has the amax of all.
    """
    if quantizer is not None and not (division is not None and division.sequence):
        normed = norm_forward(x, gamma, beta, options, quantizer, usage, with_y)
        return normed, normed.y, normed.y_quantized
    normed = norm_forward(x, gamma, beta, options)
    assert normed.y is not None
    y = entering(normed.y, division)
    return normed, y, y if quantizer is None else rounded(y, quantizer, usage, False)


def norm_operand_gradient(
    dy: torch.Tensor, shown: torch.Tensor | None, division: Division | None, of_all: bool
) -> torch.Tensor:
    """The gradient of the norm's output on this rank.

    Args:
        dy: of what the product read.
        shown: of the norm's output where the module returned it, else None; `of_all`: that of all ranks' tokens, which
            every rank has, so that gradients are added up with the product's.
    """
    if shown is not None and of_all:
        dy, shown = dy + detached(shown), None
    dy = entering_gradient(dy, division)
    return dy if shown is None else dy + detached(shown)


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    options: NormOptions,
    add: torch.Tensor | None = None,
) -> NormBackward:
    """Gradients of `norm_forward`; dbeta is None for RMSNorm. `add`, of x's shape and dtype, is added to dx."""
    if options.rms:
        return ops.rmsnorm_bwd(dy, x, gamma, rstd, zero_centered_gamma=options.zero_centered_gamma, add=add)
    assert mean is not None
    return ops.layernorm_bwd(dy, x, gamma, mean, rstd, zero_centered_gamma=options.zero_centered_gamma, add=add)


def add_norm_parameters(module: torch.nn.Module, normalization: str, size: int, factory: dict[str, Any]) -> None:
    """Register ``layer_norm_weight`` and, for LayerNorm, ``layer_norm_bias``.

    Raises:
        ValueError: a normalization that is neither of `NORMALIZATIONS`.
    """
    require_choice("normalization", normalization, NORMALIZATIONS)
    module.register_parameter("layer_norm_weight", torch.nn.Parameter(torch.empty(size, **factory)))
    if normalization == "LayerNorm":
        module.register_parameter("layer_norm_bias", torch.nn.Parameter(torch.empty(size, **factory)))
    else:
        module.layer_norm_bias = None


def reset_norm_parameters(module: ParallelModule, zero_centered_gamma: bool) -> None:
    """Factor 1 (parameter 0 if it is zero-centered), shift 0."""
    with torch.no_grad():
        module.layer_norm_weight.fill_(0.0 if zero_centered_gamma else 1.0)
        if module.layer_norm_bias is not None:
            module.layer_norm_bias.zero_()
    for one in (module.layer_norm_weight, module.layer_norm_bias):
        if one is not None:
            mark_sequence_parallel(one, module.sequence_parallel)


def norm_parameters(module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``layer_norm_weight`` and ``layer_norm_bias``, or what a parametrization, pruning or FSDP has in their place."""
    return parameter(module, "layer_norm_weight"), parameter(module, "layer_norm_bias")


def norm_parameter(given: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """A norm's parameter in a dtype that the operators take beside x: x's own or float32."""
    if given is None or given.dtype in (x.dtype, torch.float32):
        return given
    return given.to(x.dtype)
