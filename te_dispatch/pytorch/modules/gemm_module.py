# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the GEMM modules share: their FP8 state, checks of the input, how the Function is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch.autograd.scoped import autocast_off
from te_dispatch.pytorch.capture.signatures import CapturedCalls
from te_dispatch.pytorch.compile import constant, exporting
from te_dispatch.pytorch.distributed.arguments import ParallelModule
from te_dispatch.pytorch.fp8.asking_module import AskingModule
from te_dispatch.pytorch.fp8.autocast import current_state, thread
from te_dispatch.pytorch.fp8.casts import Plan
from te_dispatch.pytorch.fp8.module_state import Fp8State
from te_dispatch.pytorch.fp8.saved_module import SavedModule
from te_dispatch.pytorch.fp8.state_views import StateViews
from te_dispatch.pytorch.modules.constructor_views import ConstructorViews
from te_dispatch.pytorch.modules.gemm_steps import as_dtype
from te_dispatch.pytorch.modules.weight_grads import WeightGradModule
from te_dispatch.pytorch.tensor.quantized_tensor import plain
from te_dispatch.torch_private import graph_task

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class GemmModule(SavedModule, WeightGradModule, ParallelModule, AskingModule, StateViews, ConstructorViews):
    """Base of `Linear`, `LayerNormLinear` and `LayerNormMLP`.

    Attributes:
        fp8_state: what quantized calls need and leave. It is no parameter and no buffer: dtype casts leave it alone,
            DDP and FSDP do not see it, moves to a device take it along, and `get_extra_state` saves it.
        captured_calls: calls that are replayed; they rest on the plan in `fp8_state`.
    """

    #: The module's autograd Function, of (x, tensors.., options, *parameters).
    function: Callable[..., Any]
    #: How many weights the module has; each has an input, a weight and a gradient that are cast.
    gemm_count = 1

    #: Whether the module's Function multiplies with a `QuantizedTensor` as it is; others are given its values.
    takes_quantized = False
    return_bias = False
    return_layernorm_output = False
    #: Of modules that begin with a norm: return the input last, for a residual connection around the module. Its
    #: gradient then joins dx inside the norm's backward, which saves a pass. `update_passing` sets it.
    passes_input = False

    def __init__(self) -> None:
        super().__init__()
        self.captured_calls = CapturedCalls()
        self.fp8_state = Fp8State(type(self).__name__, self.gemm_count, self.captured_calls)

    def captured_with(self) -> Any:
        return self.captured_calls.signatures

    # -- the FP8 state --------------------------------------------------------------------------------------------

    @constant
    def traced_plan_name(
        self, recipe: str, group: int, policy: str, device_type: str, index: int | None, boundary: bool, trains: bool
    ) -> str:
        """`Fp8State.prepare_traced`. Dynamo calls this while tracing."""
        return self.fp8_state.prepare_traced(self, recipe, group, policy, device_type, index, boundary, trains)

    def _forget_plan(self) -> None:
        """Let go of what was made for the state as it was."""
        self.fp8_state.forget()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GemmModule:
        super()._apply(fn, recurse)
        self.fp8_state.scales.apply(fn)
        self._forget_plan()
        return self

    def get_extra_state(self) -> torch.Tensor:
        """The delayed-scaling state as bytes (`te_dispatch.pytorch.fp8.extra_state`), empty before its first use.

        `torch.distributed.checkpoint` reads a state of any size into an empty one. Under an `autocast` with delayed
        scaling the state is made where there is none yet: what else reads a checkpoint into the tensors of a
        state_dict finds room for it then.
        """
        scales, state, device = self.fp8_state.scales, current_state(), self._device()
        delayed = state is not None and state.enabled and isinstance(state.recipe, DelayedScaling)
        if delayed and device is not None and not scales.live():
            scales.of_gemms(state.recipe, device)  # type: ignore[union-attr, arg-type]
        return scales.encoded()

    def set_extra_state(self, state: Any) -> None:
        """Take the state of `get_extra_state`, or Transformer Engine's; an empty one, and None, change nothing.

        Another history length than the recipe's is adapted at the next use: the newest steps are kept.

        Raises:
            RuntimeError: a state that is not one of this module's, or with values that no training leaves, such as a
                scale of 0. Nothing is changed then.
        """
        if self.fp8_state.scales.load(state, self._device()):
            self._forget_plan()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *others)
        self.fp8_state.weights.clear()

    def _device(self) -> torch.device | None:
        """Where the parameters are; None on the meta device, and where a wrapper holds them."""
        parameter = next(self.parameters(), None)
        return None if parameter is None or parameter.is_meta else parameter.device

    def _calibrate(self, index: int, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Record amaxes of a GEMM that runs in high precision."""
        if torch.compiler.is_compiling():
            assert thread.state is not None
            plan: Plan | None = self.fp8_state.traced_plan(self, thread.state, x.device)
        else:
            plan = self.fp8_state.plan
        if plan is None or plan.forward is None:
            return
        for position, tensor in ((2 * index, x), (2 * index + 1, weight)):
            view = plan.forward.amax_views[position]
            with torch.no_grad():
                torch.maximum(view, ops.compute_amax(tensor.detach()), out=view)

    @staticmethod
    def _calibrating() -> bool:
        state = thread.state
        if state is None or not state.calibrating or state.enabled or exporting():
            return False
        return torch.compiler.is_compiling() or graph_task() == -1

    # -- quantized weights ----------------------------------------------------------------------------------------

    def _weights_of_call(self) -> tuple[torch.Tensor, ...]:
        """The weights as a call multiplies with them, in the order of the products."""
        raise NotImplementedError

    def cache_weights(self) -> None:
        """Quantize the weights anew, as a call with ``is_first_microbatch=True`` does, if a call has cached them."""
        weights = self.fp8_state.weights
        if weights.plan is not None:
            weights.quantize(weights.plan, self._weights_of_call())

    def cached_weights(self) -> list[Quantized | None]:
        """The quantized weights that calls have cached."""
        return self.fp8_state.weights.weights or []

    # -- checks ---------------------------------------------------------------------------------------------------

    def _checked_input(self, inp: torch.Tensor, weight: torch.Tensor, features: int) -> torch.Tensor:
        """The input, contiguous and in the dtype of torch.autocast where that is on; its values, if it is a
        `QuantizedTensor` that the module does not take as it is.

        Raises:
            TypeError, ValueError: not a tensor; another last dimension, device or dtype than the parameters'.
        """
        name = type(self).__name__
        if not isinstance(inp, torch.Tensor):
            raise TypeError(f"{name}: inp must be a tensor, got {type(inp).__name__}")
        if inp.dim() == 0 or inp.shape[-1] != features:
            raise ValueError(f"{name}: inp must be (..., {features}), got shape {tuple(inp.shape)}")
        if inp.device != weight.device:
            raise ValueError(f"{name}: inp must be on {weight.device} like the parameters, got {inp.device}")
        if torch.is_autocast_enabled(inp.device.type):
            inp = inp.to(torch.get_autocast_dtype(inp.device.type))
        elif inp.dtype != weight.dtype:
            raise ValueError(f"{name}: inp must be {weight.dtype} like the parameters, got {inp.dtype}")
        if inp.dtype not in _DTYPES:
            raise ValueError(f"{name}: inp must be float32, bfloat16 or float16, got {inp.dtype}")
        if not self.takes_quantized:
            inp = plain(inp)
        return inp.contiguous()

    def _replayed(
        self, x: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], parameters: tuple[torch.Tensor, ...] = ()
    ) -> Any:
        """What `_run_function` returns for a call like one that was captured; None if none was."""
        options = self.captured_calls.find(x, tensors, parameters)
        if options is None or options.passes_input is not self.passes_input:
            return None
        return self.function(x, *tensors, options, *parameters)

    def _run_function(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        options: Any,
        parameters: tuple[torch.Tensor, ...] = (),
        captures: bool = False,
    ) -> Any:
        """The Function of these arguments, the input first, under what it must run under.

        Args:
            captures: whether `_replayed` will be asked for calls like this one.
        """
        plan = options.plan
        if captures and options.repeatable:
            self.captured_calls.capture(options, plan, self.fp8_state.plan, (*tensors, *parameters))
        if autocast_off() and (plan is None or not plan.replay):
            return self.function(*tensors, options, *parameters)
        x = tensors[0]
        assert x is not None
        surroundings = self._surroundings(plan, x.device.type)
        if surroundings is None:
            return self.function(*tensors, options, *parameters)
        with surroundings:
            return self.function(*tensors, options, *parameters)

    def _results(self, out: Any, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """What the module returns where more is asked for than the output, which `out` may have beside it."""
        out, *beside = out if isinstance(out, tuple) else (out,)
        return (out, as_dtype(bias, out.dtype), *beside) if self.return_bias else (out, *beside)

    def _surroundings(self, plan: Plan | None, device_type: str) -> AbstractContextManager[Any] | None:
        """What the Function must run under; None, as nearly always, for nothing."""
        amp = torch.is_autocast_enabled(device_type)
        elsewhere = plan is not None and plan.replay and plan.scope is not scopes.capture()
        if not amp and not elsewhere:
            return None
        # Inputs are in the right dtype already, and torch.autocast would change arithmetic inside operators.
        off = torch.autocast(device_type, enabled=False)
        if not elsewhere:
            return off
        assert plan is not None
        stack = ExitStack()
        if amp:
            stack.enter_context(off)
        stack.enter_context(scopes.reenter(plan.scope))
        return stack


def update_passing(part: torch.nn.Module) -> None:
    """Have a layer's part, which the layer is about to call, return its input beside its result if only the layer sees
    what the part returns: no hook on it, and no module in its place that calls it in turn, such as an adapter of peft.
    """
    if isinstance(part, GemmModule):
        seen = bool(part._forward_hooks)
        if part.passes_input is seen:
            part.passes_input = not seen
        return
    for inner in part.modules():
        if isinstance(inner, GemmModule) and inner.passes_input:
            inner.passes_input = False
