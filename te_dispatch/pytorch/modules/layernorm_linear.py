# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`LayerNormLinear`: a norm, then a linear layer, with the norm writing the quantized operand directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch.pytorch.arguments import reject_unsupported
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.autograd.scoped import in_forward_scope_as_is
from te_dispatch.pytorch.capture.functions import replayed
from te_dispatch.pytorch.compile import returned, snapshot
from te_dispatch.pytorch.composable import composable
from te_dispatch.pytorch.fp8.quantized_io import arrived, leaving, outgoing
from te_dispatch.pytorch.modules.linear_module import LinearModule
from te_dispatch.pytorch.modules.linear_steps import (
    LinearOptions,
    note_forward,
    plain_product,
    product_backward,
    quantized_product,
)
from te_dispatch.pytorch.modules.norm_steps import (
    FirstNormAttributes,
    NormOptions,
    add_norm_parameters,
    norm_backward,
    norm_operand,
    norm_operand_gradient,
    norm_parameter,
    norm_parameters,
    reset_norm_parameters,
)
from te_dispatch.pytorch.modules.parameters import UNSUPPORTED, InitMethod, empty_result, parameter_factory
from te_dispatch.pytorch.tensor.casting import detached
from te_dispatch.pytorch.tensor.quantized_tensor import plain


@replayed(in_forward_scope_as_is)
class _LayerNormLinear(torch.autograd.Function):
    """x (..., in), gamma, beta (in,), weight (out, in), bias (out,) -> (..., out), and norm(x), and x, where asked.

    Behind the options come the parameters that weight and bias are made of, if they are several (`LinearOptions.rows`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: LinearOptions,
        *parameters: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        plan, trains, norm, needs = options.plan, options.trains, options.norm, ctx.needs_input_grad
        assert norm is not None
        needs_dgrad = trains and (needs[0] or needs[1] or needs[2])
        needs_wgrad = trains and options.trained(needs, 3)[0]
        division = options.division
        y: Any
        if plan is None:
            normed, whole, y = norm_operand(x, gamma, beta, norm, division)
            out, saved = plain_product(y, weight, bias, needs_dgrad, needs_wgrad, division)
        else:
            casts = plan.sole()
            reads = needs_wgrad and plan.override is None
            quantizer, usage = snapshot(casts.input, x), casts.input_usage[1 if reads else 0]
            with_y = options.returns_norm or (needs_wgrad and plan.override == "high_precision")
            normed, whole, y = norm_operand(x, gamma, beta, norm, division, quantizer, usage, with_y)
            out, saved = quantized_product(
                ctx, options, x, whole, y, weight, bias, needs_dgrad, needs_wgrad, options.output
            )
        if trains:
            stats = (x, gamma, normed.mean, normed.rstd) if needs_dgrad else (None, None, None, None)
            ctx.save_for_backward(*stats, *saved)
            note_forward(ctx, options, x, weight, bias)
        out, *parts = outgoing(ctx, out)
        norms = (returned(whole if options.returns_gathered else normed.y),) if options.returns_norm else ()
        passed = (x.view_as(x),) if options.passes_input else ()
        return (out, *norms, *parts, *passed) if norms or parts or passed else out  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *beside: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needs, options = ctx.needs_input_grad, ctx.options
        needs_dgrad = needs[0] or needs[1] or needs[2]
        needs_wgrad, needs_bgrad = options.trained(needs, 3)
        x, gamma, mean, rstd, *saved = ctx.saved_tensors
        dz, dw, db = product_backward(ctx, dy, saved, needs_dgrad, needs_wgrad, needs_bgrad)
        of_linear = options.gradients(needs, 3, dw, db)
        if not needs_dgrad:
            return None, None, None, *of_linear
        assert dz is not None
        dnormed = beside[0] if options.returns_norm else None
        dz = norm_operand_gradient(dz, dnormed, options.division, options.returns_gathered)
        residual = beside[-1] if options.passes_input else None
        if residual is not None:
            residual = detached(residual).contiguous()
        grads = norm_backward(dz, x, gamma, mean, rstd, options.norm, residual)
        dx = leaving(grads.dx, options.input_grad) if needs[0] and options.input_grad is not None else grads.dx
        return dx, grads.dgamma, grads.dbeta if needs[2] else None, *of_linear


@composable
class LayerNormLinear(LinearModule, FirstNormAttributes):
    """y = norm(x) W^T + b, with LayerNorm or RMSNorm.

    Args:
        in_features, out_features: sizes of the last dimension before and after.
        eps: added to the variance.
        normalization: ``LayerNorm`` or ``RMSNorm``.
        zero_centered_gamma: the norm's factor is 1 + ``layer_norm_weight``, which starts at 0.
        return_layernorm_output: also return norm(x), of this rank's tokens; return_layernorm_output_gathered: of those
            of all ranks that sequence_parallel divides them among.
        bias, return_bias, init_method, params_dtype, parameters_split, device, name, parallel_mode, tp_group, tp_size,
        sequence_parallel, get_rng_state_tracker, ub_name, fuse_wgrad_accumulation,
        delay_wgrad_compute: as in `Linear`.
        The arguments that `Linear` does not support: not supported yet.

    Forward:
        inp, is_first_microbatch, fp8_output, fp8_grad: as in `Linear`; of a `QuantizedTensor` the norm takes the
            values.
        Returns (..., out_features); with `return_bias` and `return_layernorm_output` a tuple of it, the bias and
        norm(x), of which each is there where asked for.

    Raises:
        As `Linear`.
    """

    function = staticmethod(applied(_LayerNormLinear))

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
        given = locals()
        reject_unsupported("LayerNormLinear", given, UNSUPPORTED)
        super().__init__(in_features, out_features, bias, return_bias, init_method, name, given)
        if self._parts > 1 and parallel_mode == "row":
            raise ValueError(
                "LayerNormLinear: parallel_mode='row' with several ranks would normalize a part of the features; only "
                "parallel_mode='column' divides its weight"
            )
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self._norm = NormOptions(normalization == "RMSNorm", float(eps), bool(zero_centered_gamma))
        factory = parameter_factory(device, params_dtype)
        add_norm_parameters(self, normalization, in_features, factory)
        self._add_weight(parameters_split, factory, given)
        self.reset_parameters()

    def reset_layer_norm_parameters(self) -> None:
        """Set the norm's factor to 1 and its shift to 0."""
        reset_norm_parameters(self, self.zero_centered_gamma)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters; nothing with `defer_init`. Those on the meta device move to the current one."""
        super().reset_parameters(defer_init)
        if not defer_init:
            self.reset_layer_norm_parameters()

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}, "
            f"normalization={self.normalization}, eps={self.eps}"
        )

    def _run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parameters: tuple[torch.Tensor, ...],
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> Any:
        plan, kept = self._prepared(x, weight, is_first_microbatch, fp8_output or fp8_grad)
        if plan is None:
            weight = plain(weight)
        given = norm_parameters(self)
        gamma, beta = (norm_parameter(p, x) for p in given)
        returns_norm = self.return_layernorm_output or self._calibrating()
        output, input_grad = self._leaves(plan, fp8_output, fp8_grad)
        rows = self._split.weights.rows if parameters else ()
        options = LinearOptions(
            plan, kept, torch.is_grad_enabled(), self._norm, returns_norm, output, input_grad, self.passes_input, rows,
            self._division,
        )  # fmt: skip
        if self.return_layernorm_output and self.return_layernorm_output_gathered:
            options.returns_gathered = self.sequence_parallel
        options.sink = self._weight_sink(self.weight_names, is_first_microbatch)
        # A norm's parameter in another dtype would have to be cast in every call.
        captures = is_first_microbatch is None and gamma is given[0] and beta is given[1]
        result = self._run_function((x, gamma, beta, weight, bias), options, parameters, captures)
        # Slices, because dynamo before PyTorch 2.12 makes a tuple of what `out, *beside = ...` makes a list of.
        results = result if isinstance(result, tuple) else (result,)
        end = len(results) - self.passes_input
        out, norms = results[0], results[1:][:returns_norm]
        parts, passed = results[1 + returns_norm : end], results[end:]
        if parts:
            out = arrived(out, parts, output)
        if norms and not self.return_layernorm_output:
            self._calibrate(0, norms[0], weight)
            norms = ()
        return (out, *norms, *passed) if norms or passed else out

    def _run_empty(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        out = empty_result(x, self.out_features, (self.layer_norm_weight, self.layer_norm_bias, weight, bias))
        beside = ((x.clone(),) if self.return_layernorm_output else ()) + ((x,) if self.passes_input else ())
        return (out, *beside) if beside else out
