# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""LayerNorm and RMSNorm modules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from te_dispatch.core import scopes
from te_dispatch.pytorch.arguments import reject_unsupported, require_tensor, resolve_device
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.autograd.scoped import in_forward_scope, outside_autocast
from te_dispatch.pytorch.compile import returned
from te_dispatch.pytorch.distributed.arguments import mark_sequence_parallel
from te_dispatch.pytorch.fp8.saved_module import SavedModule
from te_dispatch.pytorch.modules.norm_steps import NormAttributes, NormOptions, norm_backward, norm_forward
from te_dispatch.pytorch.modules.parameters import materialize
from te_dispatch.pytorch.tensor.quantized_tensor import plain


class _NormFunction(torch.autograd.Function):
    """x (..., N), weight (N,), bias (N,) or None -> (..., N)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: NormOptions
    ) -> torch.Tensor:
        result = norm_forward(x, weight, bias, options)
        ctx.save_for_backward(x, weight, result.mean, result.rstd)
        ctx.options = options
        ctx.scope = scopes.capture()
        assert result.y is not None
        return returned(result.y)

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = norm_backward(dy.contiguous(), *ctx.saved_tensors, ctx.options)
        return grads.dx, grads.dgamma, grads.dbeta, None


_run_norm = applied(_NormFunction)


def normalize(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: NormOptions) -> torch.Tensor:
    """A norm over the last dimension, with gradients: x (..., N), weight (N,), bias (N,) or None -> (..., N)."""
    return outside_autocast(_run_norm, plain(x), weight, bias, options)  # type: ignore[no-any-return]


class _Norm(SavedModule, NormAttributes):
    """Arguments, parameters and checks that both norms share."""

    weight: torch.nn.Parameter
    _rms: bool

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None,
        eps: float,
        sequence_parallel: bool | None,
        params_dtype: torch.dtype | None,
        zero_centered_gamma: bool,
        hidden_size: int | None,
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__()
        name = type(self).__name__
        unknown = sorted(set(kwargs) - {"device", "dtype", "sm_margin"})
        if unknown:
            raise TypeError(f"{name}: unexpected argument {unknown[0]!r}, expected device, dtype or sm_margin")
        reject_unsupported(name, kwargs, {"sm_margin": 0})
        if hidden_size is not None:
            if normalized_shape is not None:
                raise ValueError(f"{name}: give normalized_shape or hidden_size, not both")
            normalized_shape = hidden_size
        if normalized_shape is None:
            raise ValueError(f"{name}: normalized_shape must be an int or a sequence of int, got None")
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any(size < 1 for size in shape):
            raise ValueError(f"{name}: normalized_shape must hold positive sizes, got {shape}")
        dtype = kwargs.get("dtype")
        if params_dtype is not None and dtype is not None and params_dtype != dtype:
            raise ValueError(f"{name}: dtype={dtype} contradicts params_dtype={params_dtype}, give one of them")
        self.normalized_shape = shape
        self.sequence_parallel = sequence_parallel
        self._norm = NormOptions(self._rms, float(eps), bool(zero_centered_gamma))
        self._factory: dict[str, Any] = {
            "device": resolve_device(kwargs.get("device")),
            "dtype": dtype or params_dtype or torch.get_default_dtype(),
        }
        self.weight = torch.nn.Parameter(torch.empty(shape, **self._factory))

    def extra_repr(self) -> str:
        shape = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        return f"{shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Set the factor to 1 (parameter 0 if it is zero-centered); nothing with `defer_init`. Parameters on the meta
        device move to the current one."""
        if not defer_init:
            materialize(self)
            torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
            self._mark(self.weight)

    def _mark(self, parameter: torch.nn.Parameter) -> None:
        if self.sequence_parallel is not None:
            mark_sequence_parallel(parameter, self.sequence_parallel)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """x checked, in the dtype of torch.autocast if that is on, else of the parameters, its normalized dimensions
        merged into one."""
        require_tensor(f"{type(self).__name__}: input", x)
        dims = len(self.normalized_shape)
        if tuple(x.shape[x.dim() - dims :]) != self.normalized_shape:
            raise ValueError(
                f"{type(self).__name__}: input must end in the dimensions {self.normalized_shape}, "
                f"got shape {tuple(x.shape)}"
            )
        weight = self.weight
        if x.device != weight.device:
            raise ValueError(
                f"{type(self).__name__}: input is on {x.device}, must be on {weight.device} like the parameters"
            )
        amp = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if amp else weight.dtype
        if x.dtype != dtype:
            require_tensor(f"{type(self).__name__}: weight", weight)
            x = x.to(dtype)
        if dims > 1:
            x = x.reshape(*x.shape[: x.dim() - dims], math.prod(self.normalized_shape))
        return x.contiguous()

    def _vector(self, parameter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A parameter as the operators take it: one dimension, float32 or x's dtype."""
        if parameter.dtype not in (x.dtype, torch.float32):
            parameter = parameter.to(x.dtype)
        return parameter.reshape(-1) if parameter.dim() > 1 else parameter


class LayerNorm(_Norm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the trailing dimensions (Ba et al., 2016).

    Args:
        normalized_shape: the trailing dimensions of the input, an int or several.
        eps: added to the variance.
        sequence_parallel: what parameters are marked with, as an attribute of this name, for programs that sum their
            gradients over the ranks which divide the sequence; None for no mark. Nothing is communicated here.
        params_dtype: dtype of the parameters, None for PyTorch's default.
        zero_centered_gamma: the factor is 1 + weight, with weight starting at 0.
        hidden_size: another name of `normalized_shape`.
        kwargs: `device` (None for the current accelerator, or the CPU), `dtype` (as params_dtype), `sm_margin`.

    Forward: input (..., *normalized_shape) -> the same shape, in the dtype of torch.autocast if that is on, else in
    that of the parameters, as in Transformer Engine; an input of another dtype is cast to it first.

    Raises:
        ValueError: at construction, contradicting arguments; at the call, another shape or device.
    """

    _rms = False

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, kwargs
        )
        self.bias = torch.nn.Parameter(torch.empty(self.normalized_shape, **self._factory))
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Factor 1, shift 0."""
        super().reset_parameters(defer_init)
        if not defer_init:
            torch.nn.init.zeros_(self.bias)
            self._mark(self.bias)

    def reset_layer_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self._rows(input)
        weight, bias = self._vector(self.weight, x), self._vector(self.bias, x)
        return normalize(x, weight, bias, self._norm).view(input.shape)


class RMSNorm(_Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the trailing dimensions (Zhang and Sennrich, 2019).

    Arguments, input and errors as of `LayerNorm`.
    """

    _rms = True

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            normalized_shape, eps, sequence_parallel, params_dtype, zero_centered_gamma, hidden_size, kwargs
        )
        self.reset_parameters()

    def reset_rms_norm_parameters(self) -> None:
        """The older name of `reset_parameters`."""
        self.reset_parameters()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self._rows(input)
        return normalize(x, self._vector(self.weight, x), None, self._norm).view(input.shape)


class L2Normalization(SavedModule):
    """y = x / sqrt(sum(x^2) + eps) over the last dimension, without parameters; for `qk_norm_type`.

    It runs as an RMSNorm: sum(x^2) + eps = N (mean(x^2) + eps / N), so the factor is 1 / sqrt(N) throughout.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps}"

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        size = inp.shape[-1]
        factor = torch.full((size,), size**-0.5, dtype=torch.float32, device=inp.device)
        return normalize(inp.contiguous(), factor, None, NormOptions(True, self.eps / size, False))


def make_norm(
    normalization: str,
    hidden_size: int,
    eps: float,
    params_dtype: torch.dtype | None,
    device: torch.device | str | int | None,
    zero_centered_gamma: bool = False,
    sequence_parallel: bool | None = None,
) -> LayerNorm | RMSNorm:
    """The norm that a module's `normalization` argument names: ``LayerNorm`` or ``RMSNorm``."""
    kinds: dict[str, type[LayerNorm] | type[RMSNorm]] = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if normalization not in kinds:
        raise ValueError(f"normalization must be one of {', '.join(map(repr, kinds))}, got {normalization!r}")
    return kinds[normalization](
        hidden_size,
        eps=eps,
        sequence_parallel=sequence_parallel,
        params_dtype=params_dtype,
        zero_centered_gamma=zero_centered_gamma,
        device=device,
    )
