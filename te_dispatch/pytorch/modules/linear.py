# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`Linear`: y = x W^T + b, in high precision or quantized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch.pytorch.arguments import reject_unsupported
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.autograd.scoped import in_forward_scope_as_is
from te_dispatch.pytorch.capture.functions import replayed
from te_dispatch.pytorch.composable import composable
from te_dispatch.pytorch.distributed.tensor_parallel import entering, entering_gradient
from te_dispatch.pytorch.fp8.quantized_io import arrived, operand, outgoing
from te_dispatch.pytorch.modules.linear_module import LinearModule
from te_dispatch.pytorch.modules.linear_steps import (
    LinearOptions,
    note_forward,
    plain_product,
    product_backward,
    quantized_product,
)
from te_dispatch.pytorch.modules.parameters import UNSUPPORTED, InitMethod, empty_result, parameter_factory
from te_dispatch.pytorch.tensor.quantized_tensor import plain


@replayed(in_forward_scope_as_is)
class _Linear(torch.autograd.Function):
    """x (..., in), weight (out, in), bias (out,) or None -> (..., out) in x's dtype.

    Behind the options come the parameters that weight and bias are made of, if they are several (`LinearOptions.rows`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        options: LinearOptions,
        *parameters: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        plan, trains, needs = options.plan, options.trains, ctx.needs_input_grad
        needs_dgrad, needs_wgrad = trains and needs[0], trains and options.trained(needs, 1)[0]
        x = entering(x, options.division)
        if plan is None:
            out, saved = plain_product(x, weight, bias, needs_dgrad, needs_wgrad, options.division)
        else:
            casts = plan.sole()
            xq = operand(x, casts.input, casts.input_usage[1 if needs_wgrad and plan.override is None else 0])
            out, saved = quantized_product(
                ctx, options, x, x, xq, weight, bias, needs_dgrad, needs_wgrad, options.output
            )
        if trains:
            ctx.save_for_backward(*saved)
            note_forward(ctx, options, x, weight, bias)
        out, *parts = outgoing(ctx, out)
        return (out, *parts) if parts else out

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs, options = ctx.needs_input_grad, ctx.options
        needs_wgrad, needs_bgrad = options.trained(needs, 1)
        dx, dw, db = product_backward(
            ctx, dy, ctx.saved_tensors, needs[0], needs_wgrad, needs_bgrad, options.input_grad
        )
        if dx is not None:
            dx = entering_gradient(dx, options.division)
        return dx, *options.gradients(needs, 1, dw, db)


@composable
class Linear(LinearModule):
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
        parallel_mode: ``column`` or ``row``: the weight is divided among the ranks of `tp_group` by outputs or by
            inputs, and marked so in the attributes that Megatron reads; None marks the weight as ``column`` does and
            the bias not at all.
        tp_group: the process group, or None. tp_size: its ranks, for a group that `set_tensor_parallel_group` sets
            later. in_features and out_features are those of all ranks together; the attributes are this rank's.
        sequence_parallel: the ranks divide the first dimension of the input of ``column``, and of the output of
            ``row``. No effect on one rank.
        get_rng_state_tracker: a function that gives an RNG tracker; the weight is then initialized from its state
            `rng_tracker_name`, or its default state.
        save_original_input: keep the input for the backward instead of its quantized copy, and quantize it again
            there, with the same result; for inputs that are kept anyway. Can be set later as an attribute.
        ub_name: kept as an attribute.
        fuse_wgrad_accumulation: add the weight's gradient to its attribute `main_grad`, a tensor of the weight's shape
            in float32, bfloat16 or float16, instead of giving it to autograd; overwrite it with
            is_first_microbatch=True. What other attributes do: `te_dispatch.pytorch.modules.main_grads.MainGrads`.
        delay_wgrad_compute: leave the weight's gradient to `backward_dw`, which computes it for one backward pass.
        The other ub_*, symmetric_ar_type: not supported yet.

    Forward:
        inp: (..., in_features) on the parameters' device, of their dtype outside torch.autocast. All ranks of a
            tp_group call together.
        is_first_microbatch: None quantizes the weight at every call; True does and keeps the result; False uses what
            was kept. The weight must not change in between.
        fp8_output: inside `autocast`, return a `QuantizedTensor`, cast as the recipe casts a GEMM's input (with
            delayed scaling by a scale of its own). Outside, and for an input without elements, it changes nothing.
        fp8_grad: the same for the gradient of inp, cast as the recipe casts gradients.
        A `QuantizedTensor` for inp, or for the gradient of the output, in the format that the recipe's own cast gives,
        enters the GEMMs as it is; in another format, and outside `autocast`, its values do.
        Returns (..., out_features), or (that, bias) with `return_bias` (the bias None if there is none).

    Raises:
        NotImplementedError: an argument not supported yet; names it.
        ValueError: an input of another shape, dtype or device; dimensions the recipe's kernels cannot take;
            `save_original_input` with delayed scaling, whose scales change before the backward.
    """

    takes_quantized = True

    function = staticmethod(applied(_Linear))

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
        given = locals()
        reject_unsupported("Linear", given, UNSUPPORTED)
        super().__init__(in_features, out_features, bias, return_bias, init_method, name, given)
        self.save_original_input = save_original_input
        self._add_weight(parameters_split, parameter_factory(device, params_dtype), given)
        self.reset_parameters()

    @property
    def save_original_input(self) -> bool:
        """Whether the input is kept for the backward instead of its quantized copy."""
        return self._saves_input

    @save_original_input.setter
    def save_original_input(self, value: bool) -> None:
        self._saves_input = bool(value)
        self.captured_calls.forget()  # they keep the quantized copy

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"

    def _run(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        parameters: tuple[torch.Tensor, ...],
        is_first_microbatch: bool | None,
        fp8_output: bool,
        fp8_grad: bool,
    ) -> torch.Tensor:
        plan, kept = self._prepared(x, weight, is_first_microbatch, fp8_output or fp8_grad)
        if plan is None:
            x, weight = plain(x), plain(weight)
            if self._calibrating():
                self._calibrate(0, x, weight)
        output, input_grad = self._leaves(plan, fp8_output, fp8_grad)
        rows = self._split.weights.rows if parameters else ()
        options = LinearOptions(
            plan, kept, torch.is_grad_enabled(), output=output, input_grad=input_grad, rows=rows,
            division=self._division,
        )  # fmt: skip
        options.sink = self._weight_sink(self.weight_names, is_first_microbatch)
        if self._saves_input and plan is not None:
            if plan.forward is not None:
                raise ValueError(f"Linear: save_original_input=True does not go with {type(plan.recipe).__name__}")
            options.saves_input = True
        out = self._run_function((x, weight, bias), options, parameters, is_first_microbatch is None)
        return arrived(out[0], out[1:], output) if isinstance(out, tuple) else out

    def _run_empty(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return empty_result(x, self.out_features, (weight, bias))
