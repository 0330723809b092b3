# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`LayerNormLinear`: a norm, then a linear layer, with the norm writing the quantized operand directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.arguments import reject_unsupported, resolve_device
from te_dispatch.pytorch.casts import Plan
from te_dispatch.pytorch.compile import snapshot
from te_dispatch.pytorch.gemm_steps import (
    as_dtype,
    backward_pass,
    dgrad,
    fprop,
    note_backward,
    plain_weight_grads,
    quantize_gradient,
    wgrad,
)
from te_dispatch.pytorch.module import GemmModule
from te_dispatch.pytorch.norm_steps import (
    NormOptions,
    add_norm_parameters,
    norm_backward,
    norm_forward,
    norm_parameter,
    reset_norm_parameters,
)
from te_dispatch.pytorch.parameters import (
    UNSUPPORTED,
    UNSUPPORTED_FORWARD,
    InitMethod,
    add_split_parameters,
    default_init,
    empty_result,
    joined,
    require_size,
    split_sizes,
    without_rows,
)
from te_dispatch.pytorch.saved import NOTHING, PARTS, pack, unpack


class LayerNormLinearOptions:
    """What the Function needs besides tensors that take gradients.

    Attributes:
        plan, weight, trains: as in `LinearOptions`.
        norm: the norm's options.
        returns_norm: return the norm's output too.
    """

    __slots__ = ("plan", "weight", "trains", "norm", "returns_norm")

    def __init__(
        self, plan: Plan | None, weight: Quantized | None, trains: bool, norm: NormOptions, returns_norm: bool
    ) -> None:
        self.plan = plan
        self.weight = weight
        self.trains = trains
        self.norm = norm
        self.returns_norm = returns_norm


class _LayerNormLinear(torch.autograd.Function):
    """x (..., in), gamma, beta (in,), weight (out, in), bias (out,) -> (..., out), and norm(x) where asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: LayerNormLinearOptions,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan, trains = options.plan, options.trains
        needs = ctx.needs_input_grad
        needs_dgrad = trains and (needs[0] or needs[1] or needs[2])
        needs_wgrad = trains and needs[3]
        x_parts = w_parts = NOTHING
        if plan is None:
            normed = norm_forward(x, gamma, beta, options.norm)
            y = normed.y
            assert y is not None
            out = ops.gemm(y, as_dtype(weight, y.dtype), layout="NT", bias=as_dtype(bias, y.dtype)).out
            if needs_wgrad:
                x_parts = (y, None, None, None, None)
            if needs_dgrad:
                w_parts = (weight, None, None, None, None)
        else:
            casts = plan.gemms[0]
            quantizer, usage = snapshot(casts.input, x), casts.input_usage[needs_wgrad]
            normed = norm_forward(x, gamma, beta, options.norm, quantizer, usage, options.returns_norm)
            yq, wq = normed.y_quantized, options.weight
            assert yq is not None
            if wq is None:
                wq = ops.quantize(weight, snapshot(casts.weight, x), usage=casts.weight_usage[needs_dgrad])
            out = fprop(casts, yq, wq, bias, x.dtype)
            if needs_wgrad:
                ctx.x_header, x_parts = pack(yq, casts.wgrad[1][0])
            if needs_dgrad:
                ctx.w_header, w_parts = pack(wq, casts.dgrad[1][0])
        if trains:
            stats = (x, gamma, normed.mean, normed.rstd) if needs_dgrad else (None, None, None, None)
            ctx.save_for_backward(*stats, *x_parts, *w_parts)
            ctx.scope = scopes.capture()
            ctx.plan = plan
            ctx.root = None if plan is None else plan.root
            ctx.norm = options.norm
            ctx.device_type = x.device.type
            ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        if options.returns_norm:
            return out, normed.y  # type: ignore[return-value]
        return out  # type: ignore[return-value]

    @staticmethod
    @backward_pass
    def backward(ctx: Any, dy: torch.Tensor, dnormed: torch.Tensor | None = None) -> tuple[torch.Tensor | None, ...]:
        plan: Plan | None = ctx.plan
        needs = ctx.needs_input_grad
        needs_dgrad = needs[0] or needs[1] or needs[2]
        needs_wgrad = needs[3]
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if not needs[4]:
            bias_dtype = None
        x, gamma, mean, rstd, *saved = ctx.saved_tensors
        dy = dy.contiguous()
        dz = dw = None
        if plan is None:
            if needs_dgrad:
                dz = ops.gemm(dy, as_dtype(saved[PARTS], dy.dtype), layout="NN").out
            dw, db = plain_weight_grads(dy, saved[0], weight_dtype if needs_wgrad else None, bias_dtype)
        else:
            note_backward(plan, ctx.root, dy)
            casts = plan.gemms[0]
            dyq, db = quantize_gradient(casts.grad, casts.grad_usage[needs_dgrad + 2 * needs_wgrad], dy, bias_dtype)
            if needs_dgrad:
                dz = dgrad(casts, dyq, unpack(ctx.w_header, saved[PARTS:]), x_dtype)
            if needs_wgrad:
                dw = wgrad(casts, dyq, unpack(ctx.x_header, saved[:PARTS]), weight_dtype)
        if not needs_dgrad:
            return None, None, None, dw, db, None
        if dnormed is not None:
            dz = dz + dnormed
        grads = norm_backward(dz, x, gamma, mean, rstd, ctx.norm)
        return grads.dx, grads.dgamma, grads.dbeta if needs[2] else None, dw, db, None


class LayerNormLinear(GemmModule):
    """y = norm(x) W^T + b, with LayerNorm or RMSNorm.

    Args:
        in_features, out_features: sizes of the last dimension before and after.
        eps: added to the variance.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        zero_centered_gamma: the norm's factor is 1 + ``layer_norm_weight``, which starts at 0.
        return_layernorm_output: also return norm(x).
        bias, return_bias, init_method, params_dtype, parameters_split, device, name: as in `Linear`.
        return_layernorm_output_gathered and the arguments that `Linear` does not support: not supported yet.

    Forward:
        inp, is_first_microbatch, fp8_output, fp8_grad: as in `Linear`.
        Returns (..., out_features); with `return_bias` and `return_layernorm_output` a tuple of it, the bias and
        norm(x), of which each is there where asked for.

    Raises:
        As `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        reject_unsupported("LayerNormLinear", locals(), UNSUPPORTED)
        super().__init__()
        require_size("in_features", in_features)
        require_size("out_features", out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.eps = eps
        self.name = name
        self._norm = NormOptions(normalization == "RMSNorm", float(eps), bool(zero_centered_gamma))
        self._init_method = init_method or default_init
        factory: dict[str, Any] = {
            "device": resolve_device(device),
            "dtype": params_dtype or torch.get_default_dtype(),
        }
        add_norm_parameters(self, normalization, in_features, factory)
        self.weight_names, self.bias_names = add_split_parameters(
            self,
            split_sizes(parameters_split, out_features),
            torch.empty(out_features, in_features, **factory),
            torch.empty(out_features, **factory) if bias else None,
        )
        self.reset_parameters()

    def reset_layer_norm_parameters(self) -> None:
        """Set the norm's factor to 1 and its shift to 0."""
        reset_norm_parameters(self, self.zero_centered_gamma)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters; nothing with `defer_init`."""
        if defer_init:
            return
        self.reset_layer_norm_parameters()
        with torch.no_grad():
            for name in self.weight_names:
                self._init_method(getattr(self, name))
            for name in self.bias_names:
                getattr(self, name).zero_()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}, eps={self.eps}"
        )

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if fp8_output or fp8_grad:
            reject_unsupported("LayerNormLinear", locals(), UNSUPPORTED_FORWARD)
        if isinstance(inp, torch.Tensor) and inp.dim() == 1:
            return without_rows(self.forward(inp[None], is_first_microbatch))
        weight = joined(self, self.weight_names)
        bias = joined(self, self.bias_names)
        assert weight is not None
        x = self._checked_input(inp, weight, self.in_features)
        added = None if self.return_bias else bias
        normed = None
        if x.numel() == 0:
            out = empty_result(x, self.out_features, (self.layer_norm_weight, self.layer_norm_bias, weight, added))
            normed = x.clone()
        else:
            out = self._run(x, weight, added, is_first_microbatch)
            if self.return_layernorm_output:
                out, normed = out
        if not (self.return_bias or self.return_layernorm_output):
            return out
        results: tuple[torch.Tensor | None, ...] = (out,)
        if self.return_bias:
            results += (as_dtype(bias, out.dtype),)
        return (*results, normed) if self.return_layernorm_output else results

    def _run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_first_microbatch: bool | None
    ) -> Any:
        plan, record = self._begin(x)
        kept = None
        gamma = norm_parameter(self._parameters.get("layer_norm_weight"), x)
        beta = norm_parameter(self._parameters.get("layer_norm_bias"), x)
        if plan is not None:
            sizes = {"in_features": self.in_features, "out_features": self.out_features}
            self._check_alignment(plan.recipe, x, sizes)
            weights = self._quantized_weights(plan, record, (weight,), is_first_microbatch)
            kept = None if weights is None else weights[0]
        returns_norm = self.return_layernorm_output or self._calibrating()
        options = LayerNormLinearOptions(plan, kept, torch.is_grad_enabled(), self._norm, returns_norm)
        surroundings = self._surroundings(plan, x.device.type)
        if surroundings is None:
            result = _LayerNormLinear.apply(x, gamma, beta, weight, bias, options)
        else:
            with surroundings:
                result = _LayerNormLinear.apply(x, gamma, beta, weight, bias, options)
        if returns_norm and not self.return_layernorm_output:
            self._calibrate(0, result[1], weight)
            return result[0]
        return result
