# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What `Linear` and `LayerNormLinear` share as modules: the parameters of one GEMM, and the call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.compile import exporting
from te_dispatch.pytorch.distributed.arguments import mark_divided, mark_sequence_parallel
from te_dispatch.pytorch.distributed.tensor_parallel import part_of, require_divisible_call
from te_dispatch.pytorch.export.mode import is_in_onnx_export_mode
from te_dispatch.pytorch.fp8.casts import Plan
from te_dispatch.pytorch.fp8.quantized_io import Leaves
from te_dispatch.pytorch.modules.constructor_views import LinearViews
from te_dispatch.pytorch.modules.gemm_module import GemmModule
from te_dispatch.pytorch.modules.norm_steps import NormOptions, norm_parameters
from te_dispatch.pytorch.modules.parameters import (
    InitMethod,
    SplitParameters,
    add_split_parameters,
    check_alignment,
    default_init,
    joined,
    lay_together,
    materialize,
    parameter,
    require_size,
    split_sizes,
    without_rows,
)
from te_dispatch.pytorch.tensor.quantized_tensor import plain

_COMPILED_GRADIENT = (
    "fp8_grad=True is not supported in a compiled region: while tracing, the class of a gradient is taken to be that "
    "of the output it belongs to; leave fp8_grad or torch.compile away"
)

_OUTPUT_IN_ONNX = (
    "onnx_export: fp8_output=True is not supported, only fp8_output=False: ONNX has no tensors that carry their scales"
)


class LinearModule(GemmModule, LinearViews):
    """Base of the modules with one GEMM; they say in `_run` and `_run_empty` what happens to a checked input."""

    #: Of the norm in front, where there is one.
    _norm: NormOptions | None = None
    weight_names: list[str]
    bias_names: list[str]

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        return_bias: bool,
        init_method: InitMethod | None,
        name: str | None,
        given: Mapping[str, Any],
    ) -> None:
        """`given`: the constructor's arguments, of which those of parallelism are read."""
        super().__init__()
        self._keep_parallel(given)
        require_size("in_features", in_features)
        require_size("out_features", out_features)
        owner, ranks = type(self).__name__, self.tp_size
        column, row = (ranks > 1 and self.parallel_mode == mode for mode in ("column", "row"))
        self.in_features = part_of(owner, "in_features", in_features, ranks) if row else in_features
        self.out_features = part_of(owner, "out_features", out_features, ranks) if column else out_features
        self._sizes = {"in_features": self.in_features, "out_features": self.out_features}
        self.use_bias = bias
        self.return_bias = return_bias
        self.name = name
        self._init_method = init_method or default_init

    def _add_weight(
        self,
        parameters_split: Sequence[str] | Mapping[str, int] | None,
        factory: Mapping[str, Any],
        given: Mapping[str, Any],
    ) -> None:
        """Register weight and bias, uninitialized."""
        ranks = self.tp_size if self.parallel_mode == "column" else 1
        sizes = split_sizes(parameters_split, self.out_features * ranks)
        if sizes is not None:
            owner = type(self).__name__
            sizes = {name: part_of(owner, f"parameters_split: {name}", size, ranks) for name, size in sizes.items()}
        self.weight_names, self.bias_names = add_split_parameters(
            self,
            sizes,
            torch.empty(self.out_features, self.in_features, **factory),
            torch.empty(self.out_features, **factory) if self.use_bias else None,
        )
        if not self.use_bias:
            # What Transformer Engine has there, so that programs can ask for its size.
            for name in self.weight_names:
                setattr(self, name.removesuffix("weight") + "bias", torch.empty(0, **factory))
        self._split = SplitParameters(self.weight_names, self.bias_names) if len(self.weight_names) > 1 else None
        self._keep_gradients(given, self.weight_names)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters; nothing with `defer_init`. Those on the meta device move to the current one."""
        if defer_init:
            return
        if materialize(self):
            lay_together(self, self.weight_names)
            lay_together(self, self.bias_names)
        row = self.parallel_mode == "row"
        with torch.no_grad():
            for name in self.weight_names:
                weight = getattr(self, name)
                self._initialize(self._init_method, weight)
                mark_divided(weight, 1 if row else 0)
            for name in self.bias_names:
                bias = getattr(self, name).zero_()
                if row:
                    mark_sequence_parallel(bias, self.sequence_parallel)
                elif self.parallel_mode == "column":
                    mark_divided(bias, 0)

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        if self._parts > 1:
            require_divisible_call(self, inp, fp8_output, fp8_grad)
        adds_bias = self.use_bias and not self.return_bias
        weight, bias, parameters = self._parameters_of_call(adds_bias)
        if (
            is_first_microbatch is None and not fp8_output and not fp8_grad
            and not self.return_bias and not self.return_layernorm_output
        ):  # fmt: skip
            tensors = (weight, bias) if self._norm is None else (*norm_parameters(self), weight, bias)
            out = self._replayed(inp, tensors, parameters)
            if out is not None:
                return out
        if isinstance(inp, torch.Tensor) and inp.dim() == 1:
            return without_rows(self.forward(inp[None], is_first_microbatch, fp8_output, fp8_grad))
        x = self._checked_input(inp, weight, self.in_features)
        if x.numel():
            out = self._run(x, weight, bias, parameters, is_first_microbatch, fp8_output, fp8_grad)
        else:
            out = self._run_empty(plain(x), *self._with_gradients(adds_bias))
        if self.return_bias:
            return self._results(out, joined(self, self.bias_names))
        return self._results(out, None) if isinstance(out, tuple) else out

    def _parameters_of_call(
        self, with_bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, ...]]:
        """(weight, bias, parameters): with parameters, these have the gradients of the other two."""
        if self._split is not None:
            return self._split.whole(self, with_bias)
        weight = parameter(self, self.weight_names[0])
        return weight, parameter(self, self.bias_names[0]) if with_bias else None, ()

    def tensors_of_call(self) -> tuple[torch.Tensor | None, ...]:
        weight, bias, parameters = self._parameters_of_call(self.use_bias and not self.return_bias)
        return (*(() if self._norm is None else norm_parameters(self)), weight, bias, *parameters)

    def _weights_of_call(self) -> tuple[torch.Tensor, ...]:
        return (self._parameters_of_call(False)[0],)

    def _with_gradients(self, with_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias, differentiable."""
        weight = joined(self, self.weight_names)
        assert weight is not None
        return weight, joined(self, self.bias_names) if with_bias else None

    def _forget_plan(self) -> None:
        super()._forget_plan()
        if self._split is not None:
            self._split.forget()

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
        """The result, in a tuple with the norm's output (`return_layernorm_output`) and the input (`passes_input`)."""
        raise NotImplementedError

    def _run_empty(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """`_run` of an x without elements."""
        raise NotImplementedError

    def _prepared(
        self, x: torch.Tensor, weight: torch.Tensor, is_first_microbatch: bool | None, boundary: bool
    ) -> tuple[Plan | None, Quantized | None]:
        """The call's plan, None for high precision, and the quantized weight where it is cached.

        Args:
            boundary: whether something is to leave quantized.
        """
        plan, record = self.fp8_state.begin(self, x, boundary)
        if plan is None:
            return None, None
        # The joined memory of a divided weight takes no gradient; its parts do.
        parts = (weight,) if self._split is None else tuple(getattr(self, name) for name in self.weight_names)
        check_alignment(type(self).__name__, plan, x, self._sizes, *parts)
        weights = self.fp8_state.weights.of_call(plan, record, (weight,), is_first_microbatch)
        return plan, None if weights is None else weights[0]

    @staticmethod
    def _leaves(plan: Plan | None, fp8_output: bool, fp8_grad: bool) -> tuple[Leaves | None, Leaves | None]:
        """How the output and the input's gradient leave the module: quantized where asked, under a plan."""
        if plan is None or not (fp8_output or fp8_grad):
            return None, None
        if fp8_output and exporting() and is_in_onnx_export_mode():
            raise NotImplementedError(_OUTPUT_IN_ONNX)
        if fp8_grad and torch.compiler.is_compiling():
            raise NotImplementedError(_COMPILED_GRADIENT)
        boundary, trains = plan.boundary, torch.is_grad_enabled()
        assert boundary is not None
        output, grad = boundary.output, boundary.input_grad
        return (
            Leaves(output, trains) if fp8_output and output is not None else None,
            Leaves(grad, trains, boundary.stochastic) if fp8_grad and trains and grad is not None else None,
        )
