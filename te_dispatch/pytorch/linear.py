# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`Linear`: y = x W^T + b, in high precision or quantized."""

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
    column_sums,
    dgrad,
    fprop,
    note_backward,
    plain_weight_grads,
    quantize_gradient,
    wgrad,
)
from te_dispatch.pytorch.module import GemmModule
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


class LinearOptions:
    """What the Function needs besides tensors that take gradients.

    Attributes:
        plan: None for high precision.
        weight: the quantized weight where the module has it cached.
        trains: whether a backward may follow.
    """

    __slots__ = ("plan", "weight", "trains")

    def __init__(self, plan: Plan | None, weight: Quantized | None, trains: bool) -> None:
        self.plan = plan
        self.weight = weight
        self.trains = trains


class _Linear(torch.autograd.Function):
    """x (..., in), weight (out, in), bias (out,) or None -> (..., out) in x's dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, options: LinearOptions
    ) -> torch.Tensor:
        plan = options.plan
        trains = options.trains
        needs_dgrad = trains and ctx.needs_input_grad[0]
        needs_wgrad = trains and ctx.needs_input_grad[1]
        if plan is None:
            dtype = x.dtype
            out = ops.gemm(x, as_dtype(weight, dtype), layout="NT", bias=as_dtype(bias, dtype)).out
            if trains:
                ctx.save_for_backward(x if needs_wgrad else None, weight if needs_dgrad else None)
        else:
            casts = plan.gemms[0]
            xq = ops.quantize(x, snapshot(casts.input, x), usage=casts.input_usage[needs_wgrad])
            wq = options.weight
            if wq is None:
                wq = ops.quantize(weight, snapshot(casts.weight, x), usage=casts.weight_usage[needs_dgrad])
            out = fprop(casts, xq, wq, bias, x.dtype)
            if trains:
                x_parts = w_parts = NOTHING
                if needs_wgrad:
                    ctx.x_header, x_parts = pack(xq, casts.wgrad[1][0])
                if needs_dgrad:
                    ctx.w_header, w_parts = pack(wq, casts.dgrad[1][0])
                ctx.save_for_backward(*x_parts, *w_parts)
        if trains:
            ctx.scope = scopes.capture()
            ctx.plan = plan
            ctx.root = None if plan is None else plan.root
            ctx.device_type = x.device.type
            ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        return out  # type: ignore[no-any-return]

    @staticmethod
    @backward_pass
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: Plan | None = ctx.plan
        needs_dgrad, needs_wgrad, needs_bgrad, _ = ctx.needs_input_grad
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        if not needs_bgrad:
            bias_dtype = None
        saved = ctx.saved_tensors
        dy = dy.contiguous()
        dx = dw = None
        if plan is None:
            x, weight = saved
            if needs_dgrad:
                dx = ops.gemm(dy, as_dtype(weight, dy.dtype), layout="NN").out
            dw, db = plain_weight_grads(dy, x, weight_dtype if needs_wgrad else None, bias_dtype)
            return dx, dw, db, None
        if not (needs_dgrad or needs_wgrad):
            return None, None, None if bias_dtype is None else column_sums(dy, bias_dtype), None
        note_backward(plan, ctx.root, dy)
        casts = plan.gemms[0]
        dyq, db = quantize_gradient(casts.grad, casts.grad_usage[needs_dgrad + 2 * needs_wgrad], dy, bias_dtype)
        if needs_dgrad:
            dx = dgrad(casts, dyq, unpack(ctx.w_header, saved[PARTS:]), x_dtype)
        if needs_wgrad:
            dw = wgrad(casts, dyq, unpack(ctx.x_header, saved[:PARTS]), weight_dtype)
        return dx, dw, db, None


class Linear(GemmModule):
    """y = x W^T + b.

    Inside `te_dispatch.pytorch.autocast` the GEMM operands are quantized as its recipe says; both dimensions of
    every GEMM (rows, `in_features`, `out_features`) must then be divisible by 16 (32 for MXFP8 and NVFP4).

    Args:
        in_features, out_features: sizes of the last dimension before and after.
        bias: whether there is a bias.
        return_bias: do not add the bias, return it beside the output.
        init_method: initializes the weights in place; None for normal(0, 0.023). Biases start at 0.
        params_dtype: dtype of the parameters; None for PyTorch's default.
        parameters_split: the weight as several parameters ``<name>_weight`` (and ``<name>_bias``) along the output:
            names for equal parts, or a dict of sizes.
        device: None for the current accelerator, or the CPU.
        name: for the user's own use.
        sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, get_rng_state_tracker, rng_tracker_name,
        parallel_mode, ub_*, delay_wgrad_compute, symmetric_ar_type, save_original_input: not supported yet.

    Forward:
        inp: (..., in_features) on the parameters' device, of their dtype outside torch.autocast.
        is_first_microbatch: None quantizes the weight at every call; True does and keeps the result; False uses what
            was kept. The weight must not change in between.
        fp8_output, fp8_grad: not supported yet.
        Returns (..., out_features), or (that, bias) with `return_bias` (the bias None if there is none).

    Raises:
        NotImplementedError: an argument not supported yet; names it.
        ValueError: an input of another shape, dtype or device; dimensions the recipe's kernels cannot take.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        reject_unsupported("Linear", locals(), UNSUPPORTED)
        super().__init__()
        require_size("in_features", in_features)
        require_size("out_features", out_features)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bias
        self.return_bias = return_bias
        self.name = name
        self._init_method = init_method or default_init
        factory: dict[str, Any] = {
            "device": resolve_device(device),
            "dtype": params_dtype or torch.get_default_dtype(),
        }
        self.weight_names, self.bias_names = add_split_parameters(
            self,
            split_sizes(parameters_split, out_features),
            torch.empty(out_features, in_features, **factory),
            torch.empty(out_features, **factory) if bias else None,
        )
        self.reset_parameters()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters; nothing with `defer_init`."""
        if defer_init:
            return
        with torch.no_grad():
            for name in self.weight_names:
                self._init_method(getattr(self, name))
            for name in self.bias_names:
                getattr(self, name).zero_()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        if fp8_output or fp8_grad:
            reject_unsupported("Linear", locals(), UNSUPPORTED_FORWARD)
        if isinstance(inp, torch.Tensor) and inp.dim() == 1:
            return without_rows(self.forward(inp[None], is_first_microbatch))
        weight = joined(self, self.weight_names)
        bias = joined(self, self.bias_names)
        assert weight is not None
        x = self._checked_input(inp, weight, self.in_features)
        added = None if self.return_bias else bias
        if x.numel() == 0:
            out = empty_result(x, self.out_features, (weight, added))
        else:
            out = self._run(x, weight, added, is_first_microbatch)
        if self.return_bias:
            return out, as_dtype(bias, out.dtype)
        return out

    def _run(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_first_microbatch: bool | None
    ) -> torch.Tensor:
        plan, record = self._begin(x)
        kept = None
        if plan is not None:
            sizes = {"in_features": self.in_features, "out_features": self.out_features}
            self._check_alignment(plan.recipe, x, sizes)
            weights = self._quantized_weights(plan, record, (weight,), is_first_microbatch)
            kept = None if weights is None else weights[0]
        elif self._calibrating():
            self._calibrate(0, x, weight)
        options = LinearOptions(plan, kept, torch.is_grad_enabled())
        surroundings = self._surroundings(plan, x.device.type)
        if surroundings is None:
            return _Linear.apply(x, weight, bias, options)  # type: ignore[no-any-return]
        with surroundings:
            return _Linear.apply(x, weight, bias, options)  # type: ignore[no-any-return]
