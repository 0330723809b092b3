# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`LayerNormMLP`: the feed-forward block of a transformer layer as one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.ops.activation import GATED
from te_dispatch.pytorch.arguments import reject_unsupported
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.composable import composable
from te_dispatch.pytorch.distributed.arguments import Division, mark_divided, mark_sequence_parallel
from te_dispatch.pytorch.distributed.tensor_parallel import part_of, require_divisible_call
from te_dispatch.pytorch.modules.constructor_views import MlpViews
from te_dispatch.pytorch.modules.gemm_module import GemmModule
from te_dispatch.pytorch.modules.layernorm_mlp_function import LayerNormMLPFunction, LayerNormMLPOptions
from te_dispatch.pytorch.modules.norm_steps import (
    FirstNormAttributes,
    NormOptions,
    add_norm_parameters,
    norm_parameter,
    norm_parameters,
    reset_norm_parameters,
)
from te_dispatch.pytorch.modules.parameters import (
    UNSUPPORTED,
    InitMethod,
    check_alignment,
    default_init,
    empty_result,
    materialize,
    parameter,
    parameter_factory,
    require_size,
    without_rows,
)
from te_dispatch.pytorch.modules.weight_grads import WeightSink
from te_dispatch.pytorch.recompute.checkpoint import checkpoint, left_to_compiler


@composable
class LayerNormMLP(GemmModule, FirstNormAttributes, MlpViews):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    Args:
        hidden_size: size of the last dimension of input and output.
        ffn_hidden_size: size between the two GEMMs; gated activations make ``fc1_weight`` twice as tall.
        eps: added to the variance.
        normalization: ``LayerNorm`` or ``RMSNorm``. zero_centered_gamma: the factor is 1 + ``layer_norm_weight``.
        bias: whether both GEMMs have one. return_bias: do not add the second, return it beside the output.
        activation: one of `te_dispatch.ops.activation.KINDS`, or ``squared_relu``, another name of ``srelu``.
        activation_params: limit and alpha of ``clamped_swiglu``.
        init_method, output_layer_init_method: initialize ``fc1_weight`` and ``fc2_weight`` in place; None for
            normal(0, 0.023).
        return_layernorm_output: also return norm(x), of this rank's tokens; return_layernorm_output_gathered: of those
            of all ranks that sequence_parallel divides them among.
        checkpoint: keep the input only, and run norm, first GEMM and activation again in the backward.
        seq_length, micro_batch_size: accepted; nothing here depends on sizes known ahead.
        set_parallel_mode: True where tp_group has several ranks, which then divide the first weight by outputs and the
            second by inputs. On one rank it marks ``fc2_bias``, too, for programs that sum gradients over ranks; the
            other parameters are marked as divided in any case, as Transformer Engine does.
        params_dtype, device, name, tp_group, tp_size, sequence_parallel, get_rng_state_tracker,
        fuse_wgrad_accumulation, delay_wgrad_compute: as in `Linear`.
        The arguments that `Linear` does not support: not supported yet.

    Forward:
        inp: (..., hidden_size). is_first_microbatch: as in `Linear`.
        Returns (..., hidden_size); with `return_bias` and `return_layernorm_output` a tuple of it, ``fc2_bias`` and
        norm(x), of which each is there where asked for.

    Raises:
        As `Linear`.
    """

    function = staticmethod(applied(LayerNormMLPFunction))
    gemm_count = 2
    part_names = ("fc1", "fc2")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        given = locals()
        reject_unsupported("LayerNormMLP", given, UNSUPPORTED)
        super().__init__()
        self._keep_parallel(given)
        require_size("hidden_size", hidden_size)
        require_size("ffn_hidden_size", ffn_hidden_size)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self.activation = activation
        self.activation_params = activation_params
        self.use_bias = bias
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.checkpoint = checkpoint
        self.name = name
        self._norm = NormOptions(normalization == "RMSNorm", float(eps), bool(zero_centered_gamma))
        self._init_methods = (init_method or default_init, output_layer_init_method or default_init)
        self._require_parallel_mode()
        inner = part_of("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size, self.tp_size)
        fc1_rows = inner * (2 if activation in GATED else 1)
        self._sizes = {"hidden_size": hidden_size, "ffn_hidden_size": inner}
        factory = parameter_factory(device, params_dtype)
        add_norm_parameters(self, normalization, hidden_size, factory)
        for layer, rows, columns in (("fc1", fc1_rows, hidden_size), ("fc2", hidden_size, inner)):
            self.register_parameter(f"{layer}_weight", torch.nn.Parameter(torch.empty(rows, columns, **factory)))
            if bias:
                self.register_parameter(f"{layer}_bias", torch.nn.Parameter(torch.empty(rows, **factory)))
            else:
                setattr(self, f"{layer}_bias", torch.empty(0, **factory))
        self._keep_gradients(given, ("fc1_weight", "fc2_weight"))
        self.reset_parameters()

    def reset_layer_norm_parameters(self) -> None:
        """Set the norm's factor to 1 and its shift to 0."""
        reset_norm_parameters(self, self.zero_centered_gamma)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize all parameters; nothing with `defer_init`. Those on the meta device move to the current one."""
        if defer_init:
            return
        materialize(self)
        self.reset_layer_norm_parameters()
        with torch.no_grad():
            for dim, (init, weight) in enumerate(zip(self._init_methods, (self.fc1_weight, self.fc2_weight))):
                self._initialize(init, weight)
                mark_divided(weight, dim)
            if self.use_bias:
                mark_divided(self.fc1_bias.zero_(), 0)
                self.fc2_bias.zero_()
                if self.set_parallel_mode:
                    mark_sequence_parallel(self.fc2_bias, self.sequence_parallel)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, "
            f"activation={self.activation}, normalization={self.normalization}, bias={self.use_bias}, eps={self.eps}"
        )

    def forward(
        self, inp: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if self._parts > 1:
            require_divisible_call(self, inp)
        fc1_weight, fc2_weight = parameter(self, "fc1_weight"), parameter(self, "fc2_weight")
        fc1_bias = parameter(self, "fc1_bias") if self.use_bias else None
        fc2_bias = parameter(self, "fc2_bias") if self.use_bias else None
        added = None if self.return_bias else fc2_bias
        if is_first_microbatch is None and not self.return_layernorm_output and not self.checkpoint:
            out = self._replayed(inp, (*norm_parameters(self), fc1_weight, fc1_bias, fc2_weight, added))
            if out is not None:
                return self._results(out, fc2_bias) if self.return_bias or isinstance(out, tuple) else out
        if isinstance(inp, torch.Tensor) and inp.dim() == 1:
            return without_rows(self.forward(inp[None], is_first_microbatch))
        x = self._checked_input(inp, fc1_weight, self.hidden_size)
        if x.numel() == 0:
            out = empty_result(x, self.hidden_size, (*norm_parameters(self), fc1_weight, fc1_bias, fc2_weight, added))
            beside = ((x.clone(),) if self.return_layernorm_output else ()) + ((x,) if self.passes_input else ())
            out = (out, *beside) if beside else out
        else:
            out = self._run(x, fc1_weight, fc1_bias, fc2_weight, added, is_first_microbatch)
        return self._results(out, fc2_bias) if self.return_bias or isinstance(out, tuple) else out

    def _run(
        self,
        x: torch.Tensor,
        fc1_weight: torch.Tensor,
        fc1_bias: torch.Tensor | None,
        fc2_weight: torch.Tensor,
        fc2_bias: torch.Tensor | None,
        is_first_microbatch: bool | None,
    ) -> Any:
        plan, record = self.fp8_state.begin(self, x)
        weights = None
        if plan is not None:
            if plan.override is not None:
                raise NotImplementedError(
                    f"{type(self).__name__}: backward_override={plan.override!r} is not supported yet, only None"
                )
            check_alignment(type(self).__name__, plan, x, self._sizes, fc1_weight, fc2_weight)
            sources = (fc1_weight, fc2_weight)
            weights = self.fp8_state.weights.of_call(plan, record, sources, is_first_microbatch)
        by_compiler = self.checkpoint and left_to_compiler()
        options = LayerNormMLPOptions(
            plan,
            weights,
            torch.is_grad_enabled(),
            self._norm,
            self.return_layernorm_output,
            self.activation,
            self._activation_params,
            self.checkpoint and not by_compiler,
            self._calibrate if plan is None and self._calibrating() else None,
            self.passes_input,
            self._sinks(is_first_microbatch),
            self._division,
            self.return_layernorm_output and self.return_layernorm_output_gathered and self.sequence_parallel,
        )
        given = norm_parameters(self)
        gamma, beta = (norm_parameter(p, x) for p in given)
        tensors = (x, gamma, beta, fc1_weight, fc1_bias, fc2_weight, fc2_bias)
        # A norm's parameter in another dtype would have to be cast in every call.
        captures = is_first_microbatch is None and gamma is given[0] and beta is given[1]
        if by_compiler:
            return checkpoint(lambda *given: self._run_function(given, options), *tensors, use_reentrant=False)
        return self._run_function(tensors, options, captures=captures)

    @property
    def _division(self) -> Division | None:
        if self._parts == 1:
            return None
        return Division(self.tp_group, True, True, self.sequence_parallel)

    def tensors_of_call(self) -> tuple[torch.Tensor | None, ...]:
        biases = [parameter(self, f"fc{i}_bias") if self.use_bias else None for i in (1, 2)]
        return (*norm_parameters(self), *self._weights_of_call(), *biases)

    def _weights_of_call(self) -> tuple[torch.Tensor, ...]:
        return parameter(self, "fc1_weight"), parameter(self, "fc2_weight")

    def _sinks(self, is_first_microbatch: bool | None) -> tuple[WeightSink, WeightSink] | None:
        """Where the gradients of both weights go, None to return them."""
        first, second = (self._weight_sink((f"fc{i}_weight",), is_first_microbatch) for i in (1, 2))
        return None if first is None or second is None else (first, second)
