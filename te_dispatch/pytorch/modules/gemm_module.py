# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the GEMM modules share: the plan of a call, delayed-scaling state, the weight cache, parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Recipe
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.ops.checks.likeness import alike
from te_dispatch.pytorch.autograd.scoped import autocast_off
from te_dispatch.pytorch.capture.signatures import ReplayingModule, SignatureCache
from te_dispatch.pytorch.compile import (
    call_outside_graph,
    constant,
    exporting,
    graph_trains,
    making_graph,
    real_tensors,
    refuse_recomputation,
    register_call,
)
from te_dispatch.pytorch.compile.recipes import group_numbered, recipe_named
from te_dispatch.pytorch.distributed.arguments import ParallelModule
from te_dispatch.pytorch.fp8 import regions, scale_update
from te_dispatch.pytorch.fp8.autocast import AutocastState, thread, trains
from te_dispatch.pytorch.fp8.casts import Plan, build_plan
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales
from te_dispatch.pytorch.fp8.quantized_io import operand
from te_dispatch.pytorch.fp8.quantizer_role import AskingModule, ModuleRoles
from te_dispatch.pytorch.fp8.state_views import StateViews
from te_dispatch.pytorch.modules.gemm_steps import as_dtype
from te_dispatch.pytorch.modules.weight_grads import WeightGradModule
from te_dispatch.pytorch.tensor.quantized_tensor import plain
from te_dispatch.torch_private import graph_task

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_NO_STATE = (
    "the state of the first forward cannot be found: this forward runs inside a backward pass, so it is the "
    "recomputation of a checkpoint, but not of one that is known here; use te_dispatch.pytorch.checkpoint"
)


_DELAYED_FORWARD = "delayed_forward"

register_call(_DELAYED_FORWARD, refuse_recomputation)

#: Tokens of bindings, numbered: part of attribute names.
_policy_numbers: dict[str, int] = {}


class TracedPlans:
    """A module's plans as compiled graphs find them, by name.

    Replaced as a whole when state moves to other memory or is scaled for other maxima: graphs that hold the old plans
    are then traced anew.
    """


class GemmModule(ReplayingModule, WeightGradModule, ParallelModule, AskingModule, StateViews):
    """Base of `Linear`, `LayerNormLinear` and `LayerNormMLP`."""

    #: Whether the module's Function multiplies with a `QuantizedTensor` as it is; others are given its values.
    takes_quantized = False
    return_bias = False
    return_layernorm_output = False
    #: Of modules that begin with a norm: return the input last, for a residual connection around the module. Its
    #: gradient then joins dx inside the norm's backward, which saves a pass. `update_passing` sets it.
    passes_input = False

    def __init__(self) -> None:
        super().__init__()
        self._plan: Plan | None = None
        self._traced_plans = TracedPlans()
        self._cached_weights: list[Quantized | None] | None = None
        self._cached_for: Plan | None = None
        self._cached_of: tuple[torch.Tensor, ...] = ()
        self._ran_unowned = False
        #: (guard, features) of inputs that `_checked_input` returned unchanged.
        self._checked_inputs = SignatureCache()

    # -- the plan of a call ---------------------------------------------------------------------------------------

    def _begin(self, x: torch.Tensor, boundary: bool = False) -> tuple[Plan | None, Plan | None]:
        """(plan, record) of this call: how to quantize, None for high precision; and, inside a checkpoint's first
        forward, the entry kept for its recomputation.

        Args:
            boundary: whether something leaves the module quantized, so that the plan must have a `Boundary`.

        Raises:
            RuntimeError: a recomputation whose first forward is unknown.
        """
        if making_graph():
            return self._begin_traced(x, boundary), None
        if graph_task() != -1:
            return self._recomputed(x, boundary)
        state = thread.state
        if state is None or not (state.enabled or state.calibrating):
            return None, None
        plan = self._current_plan(state, x.device, boundary)
        if plan.forward is not None:
            if trains() and (self.training or not regions.phase.declared):
                self.join_plan(plan)
                plan.forward_group.dirty = True  # type: ignore[union-attr]
                if thread.recording is not None:
                    thread.recording.note(self, plan)
            else:
                plan = plan.evaluation()
        if not state.enabled:
            return None, None
        record = self._record(plan, regions.find()[0]) if regions.maybe_checkpointed() else None
        return plan if plan.quantizes else None, record

    def _begin_traced(self, x: torch.Tensor, boundary: bool) -> Plan | None:
        """`_begin` in a graph that is being made, which knows no checkpoint regions."""
        state = thread.state
        if state is None or not (state.enabled or state.calibrating):
            return None
        plan = self._traced_plan(state, x.device, boundary)
        if plan.forward is not None and graph_trains():
            if thread.traced is None:
                call_outside_graph(plan.forward_group.cast_call)  # type: ignore[union-attr, arg-type]
            else:
                call_outside_graph(_DELAYED_FORWARD)
                thread.traced.append(plan)
        return plan if state.enabled and plan.quantizes else None

    def _traced_plan(self, state: AutocastState, device: torch.device, boundary: bool = False) -> Plan:
        """The plan of a call in a compiled program; made outside of it, because a graph cannot make state."""
        trains = graph_trains()
        name = self._prepare(*state.names, scopes.capture().token, device.type, device.index, boundary, trains)
        return getattr(self._traced_plans, name)  # type: ignore[no-any-return]

    @constant
    def _prepare(
        self, recipe: str, group: int, policy: str, device_type: str, index: int | None, boundary: bool, trains: bool
    ) -> str:
        """Have a plan under the bindings with the token `policy`, and return its name in `_traced_plans`.

        Dynamo calls this while tracing.
        """
        with real_tensors():
            bindings = scopes.MANAGER.tokens[policy]
            device = torch.device(device_type) if index is None else torch.device(device_type, index)
            found, plan = (recipe_named(recipe), bindings, device, group_numbered(group)), self._plan
            if plan is None or not plan.fits(*found):
                with scopes.reenter(bindings):
                    plan = self._build_plan(found[0], device, found[3])
            if boundary:
                self._add_boundary(plan)
            if plan.forward is not None and trains:
                self.join_plan(plan)
                for found_group in (plan.forward_group, plan.backward_group):
                    scale_update.prepare_compiled(found_group)  # type: ignore[arg-type]
            where = _policy_numbers.setdefault(policy, len(_policy_numbers))
            purpose = "trains" if trains else "evaluates"
            if exporting():
                purpose, plan = "exported", plan.as_replay()
            name = f"{recipe}_{group + 1}_{device_type}_{index}_{where}_{purpose}"
            setattr(self._traced_plans, name, plan if trains else plan.evaluation())
            return name

    def join_plan(self, plan: Plan) -> None:
        """Have this thread's groups update the plan's states; what was made for others is forgotten."""
        if plan.join():
            self._signatures = SignatureCache()
            self._traced_plans = TracedPlans()

    def _record(self, plan: Plan, targets: Sequence[regions.Region]) -> Plan | None:
        if not targets:
            if not self._ran_unowned:
                self._ran_unowned = True
            return None
        entry = plan.as_replay()
        for region in targets:
            region.root = plan.root
            region.record(self, entry)
        return entry

    def _current_plan(self, state: AutocastState, device: torch.device, boundary: bool) -> Plan:
        plan = self._plan
        if plan is None or not plan.fits(state.recipe, scopes.capture(), device, state.process_group):
            plan = self._build_plan(state.recipe, device, state.process_group)
        if boundary and plan.boundary is None:
            self._add_boundary(plan)
        return plan

    def _add_boundary(self, plan: Plan) -> None:
        """Have casts for what leaves the module quantized."""
        if plan.boundary is not None or not plan.quantizes:
            return

        def states() -> tuple[DelayedScales, DelayedScales]:
            assert isinstance(plan.recipe, DelayedScaling)
            return self._boundary_scales_for(plan.recipe, plan.device)

        plan.add_boundary(plan.casts.boundary(plan.sole(), states))

    def _build_plan(self, recipe: Recipe, device: torch.device, process_group: Any) -> Plan:
        forward = backward = None
        before = self._scales_identity()
        if isinstance(recipe, DelayedScaling):
            forward, backward = self._scales_for(recipe, device)
        self._signatures = SignatureCache()
        self._plan = plan = build_plan(
            recipe,
            device,
            process_group,
            self.gemm_count,
            forward,
            backward,
            self._asked_roles() if recipe.custom() else None,
        )
        if self._scales_identity() != before:
            self._traced_plans = TracedPlans()
        return plan

    def _recomputed(self, x: torch.Tensor, boundary: bool) -> tuple[Plan | None, Plan | None]:
        """The plan of a forward that runs inside a backward: that of the first forward."""
        task = graph_task()
        targets, source = regions.find()
        plan = None if source is None else source.replay(self, task)
        state = thread.state
        if plan is None:
            if state is None or not state.enabled:
                # Nothing recorded and no autocast: high precision then and now, unless an unknown kind of checkpoint
                # ran the first forward where no region was seen.
                if source is None and self._ran_unowned:
                    raise RuntimeError(f"{type(self).__name__}: {_NO_STATE}")
                return None, None
            if isinstance(state.recipe, DelayedScaling):
                raise RuntimeError(f"{type(self).__name__}: {_NO_STATE}")
            plan = self._current_plan(state, x.device, boundary)
        elif plan.forward is not None:
            assert source is not None
            if source.root is None:
                plan.root = task
                scale_update.open_task(task)
            else:
                plan.root = source.root
        record = self._record(plan, targets) if targets else None
        return plan if plan.quantizes else None, record

    def _calibrate(self, index: int, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Record amaxes of a GEMM that runs in high precision."""
        if torch.compiler.is_compiling():
            assert thread.state is not None
            plan: Plan | None = self._traced_plan(thread.state, x.device)
        else:
            plan = self._plan
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

    def _quantized_weights(
        self, plan: Plan, record: Plan | None, weights: Sequence[torch.Tensor], is_first_microbatch: bool | None
    ) -> list[Quantized | None] | None:
        """The quantized weights where the caller has them cached, else None: the Function then quantizes.

        Cached ones are made with every copy a later microbatch may need.
        """
        if plan.replay:
            return plan.weights
        if is_first_microbatch is None:
            return None
        # An evaluation takes what a training step has cached; not the other way round, because it records no amaxes.
        fits = self._cached_weights is not None and self._cached_for in (plan, plan.source)
        if is_first_microbatch or not fits or _replaced(weights, self._cached_of):
            # A weight that inference mode cached could not be saved for a later microbatch's backward.
            with torch.inference_mode(False), torch.no_grad():
                self._cached_weights = [
                    None if casts is None else operand(w.detach().contiguous(), casts.weight, casts.weight_usage[1])
                    for w, casts in zip(weights, plan.gemms)
                ]
            self._cached_for, self._cached_of = plan, tuple(weights)
        if record is not None:
            record.weights = self._cached_weights
        return self._cached_weights

    def _weights_of_call(self) -> tuple[torch.Tensor, ...]:
        """The weights as a call multiplies with them, in the order of the products."""
        raise NotImplementedError

    def cache_weights(self) -> None:
        """Quantize the weights anew, as a call with ``is_first_microbatch=True`` does, if a call has cached them."""
        if self._cached_for is not None:
            self._quantized_weights(self._cached_for, None, self._weights_of_call(), True)

    def cached_weights(self) -> list[Quantized | None]:
        """The quantized weights that calls have cached."""
        return self._cached_weights or []

    # -- checks ---------------------------------------------------------------------------------------------------

    def _input_was_checked(self, inp: Any, weight: torch.Tensor, features: int) -> bool:
        """Whether `_checked_input` returned an input with this metadata unchanged before.

        The guard compares all that it reads: class, shape, strides, dtype and device, and those of the weight.
        """
        if not isinstance(inp, torch.Tensor) or not autocast_off():
            return False
        checked = self._checked_inputs
        for index, entry in enumerate(checked):
            if entry[0](inp, weight):
                if index:
                    checked.use(index, entry)
                return bool(entry[1] == features)
        return False

    def _checked_input(self, inp: torch.Tensor, weight: torch.Tensor, features: int) -> torch.Tensor:
        """The input, contiguous and in the dtype of torch.autocast where that is on; its values, if it is a
        `QuantizedTensor` that the module does not take as it is.

        Raises:
            TypeError, ValueError: not a tensor; another last dimension, device or dtype than the parameters'.
        """
        name, given = type(self).__name__, inp
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
        x = inp.contiguous()
        if x is given and x.numel() and autocast_off() and type(x) is torch.Tensor and self._checked_inputs.admits():
            self._checked_inputs.add((alike((x, weight), (True, False)), features))
        return x

    def _run_function(self, apply: Callable[..., Any], plan: Plan | None, *arguments: Any) -> Any:
        """`apply` of `arguments`, the input first, under what it must run under."""
        if autocast_off() and (plan is None or not plan.replay):
            return apply(*arguments)
        surroundings = self._surroundings(plan, arguments[0].device.type)
        if surroundings is None:
            return apply(*arguments)
        with surroundings:
            return apply(*arguments)

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

    def _forget_plan(self) -> None:
        self._plan = None
        self._signatures = SignatureCache()
        self._traced_plans = TracedPlans()
        self._forget_weights()

    def _forget_weights(self) -> None:
        self._cached_weights = None
        self._cached_for = None
        self._cached_of = ()

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles bind anew: a plan refers to a policy and a process group of this process.
        state = dict(self.__dict__)
        state.update(
            _plan=None,
            _traced_plans=TracedPlans(),
            _cached_weights=None,
            _cached_for=None,
            _cached_of=(),
            _checked_inputs=SignatureCache(),
            _signatures=SignatureCache(),
            _answers=ModuleRoles(type(self).__name__),  # a recipe may not be picklable
        )
        return state


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


def _replaced(weights: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    """Whether a weight is another Parameter than before; views and what parametrizations compute always are."""
    return any(isinstance(w, torch.nn.Parameter) and w is not old for w, old in zip(weights, before, strict=True))
