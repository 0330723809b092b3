# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the GEMM modules share: the plan of a call, delayed-scaling state, the weight cache, parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Recipe
from te_dispatch.core import scopes
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.pytorch import regions, scale_update
from te_dispatch.pytorch.autocast import AutocastState, thread
from te_dispatch.pytorch.casts import Plan, build_plan
from te_dispatch.pytorch.compile import call_outside_graph, constant, register_call, snapshot
from te_dispatch.pytorch.compile.recipes import group_numbered, recipe_named
from te_dispatch.pytorch.delayed_scales import DelayedScales
from te_dispatch.pytorch.gemm_steps import as_dtype

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EXTRA_STATE_FORMAT = 1

_NO_STATE = (
    "the state of the first forward cannot be found: this forward runs inside a backward pass, so it is the "
    "recomputation of a checkpoint, but not of one that is known here; use te_dispatch.pytorch.checkpoint"
)


_DELAYED_FORWARD = "delayed_forward"


def _refuse_recomputation() -> None:
    """What compiled forwards with delayed scaling call whenever they run: nothing else could tell a recomputation."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "a compiled module with delayed scaling runs inside a backward pass: the recomputation of a checkpoint "
            "around the compiled call would record amaxes again and read newer scales; use another recipe, or leave "
            "either the checkpoint or torch.compile away"
        )


register_call(_DELAYED_FORWARD, _refuse_recomputation)

#: Tokens of bindings, numbered: part of attribute names.
_policy_numbers: dict[str, int] = {}


class TracedPlans:
    """A module's plans as compiled graphs find them, by name.

    Replaced as a whole when state moves to other memory or is scaled for other maxima: graphs that hold the old plans
    are then traced anew.
    """


class GemmModule(torch.nn.Module):
    """Base of `Linear`, `LayerNormLinear` and `LayerNormMLP`.

    Delayed-scaling state is kept as plain attributes: dtype casts leave it alone, DDP and FSDP do not see it, device
    moves take it along, and `get_extra_state` saves it.
    """

    #: How many weights the module has; each has an input, a weight and a gradient that are cast.
    gemm_count = 1
    return_bias = False
    return_layernorm_output = False

    def __init__(self) -> None:
        super().__init__()
        self._plan: Plan | None = None
        self._traced_plans = TracedPlans()
        self._forward_scales: DelayedScales | None = None
        self._backward_scales: DelayedScales | None = None
        self._cached_weights: list[Quantized | None] | None = None
        self._cached_for: Plan | None = None
        self._ran_unowned = False

    # -- the plan of a call ---------------------------------------------------------------------------------------

    def _begin(self, x: torch.Tensor) -> tuple[Plan | None, Plan | None]:
        """(plan, record) of this call: how to quantize, None for high precision; and, inside a checkpoint's first
        forward, the entry kept for its recomputation.

        Raises:
            RuntimeError: a recomputation whose first forward is unknown.
        """
        if torch.compiler.is_compiling():
            return self._begin_traced(x), None
        if torch._C._current_graph_task_id() != -1:
            return self._recomputed(x)
        state = thread.state
        if state is None or not (state.enabled or state.calibrating):
            return None, None
        plan = self._current_plan(state, x.device)
        if plan.forward_group is not None:
            plan.forward_group.dirty = True
        if not state.enabled:
            return None, None
        if not regions.maybe_checkpointed():
            return plan, None
        return plan, self._record(plan, regions.find()[0])

    def _begin_traced(self, x: torch.Tensor) -> Plan | None:
        """`_begin` in a compiled program, which knows no checkpoint regions."""
        state = thread.state
        if state is None or not (state.enabled or state.calibrating):
            return None
        plan = self._traced_plan(state, x.device)
        if plan.forward_group is not None:
            call_outside_graph(_DELAYED_FORWARD)
            if thread.traced is None:
                plan.forward_group.dirty = True
            else:
                thread.traced.append(plan)
        return plan if state.enabled else None

    def _traced_plan(self, state: AutocastState, device: torch.device) -> Plan:
        """The plan of a call in a compiled program; made outside of it, because a graph cannot make state."""
        name = self._prepare(*state.names, scopes.capture().token, device.type, device.index)
        return getattr(self._traced_plans, name)  # type: ignore[no-any-return]

    @constant
    def _prepare(self, recipe: str, group: int, policy: str, device_type: str, index: int | None) -> str:
        """Have a plan under the bindings with the token `policy`, and return its name in `_traced_plans`.

        Dynamo calls this while tracing.
        """
        bindings = scopes.MANAGER.tokens[policy]
        device = torch.device(device_type) if index is None else torch.device(device_type, index)
        found, plan = (recipe_named(recipe), bindings, device, group_numbered(group)), self._plan
        if plan is None or not plan.fits(*found):
            with scopes.reenter(bindings):
                plan = self._build_plan(found[0], device, found[3])
        where = _policy_numbers.setdefault(policy, len(_policy_numbers))
        name = f"{recipe}_{group + 1}_{device_type}_{index}_{where}"
        setattr(self._traced_plans, name, plan)
        return name

    def _record(self, plan: Plan, targets: Sequence[regions.Region]) -> Plan | None:
        if not targets:
            if not self._ran_unowned:
                self._ran_unowned = True
            return None
        entry = plan.as_replay()
        for region in targets:
            region.record(self, entry)
        return entry

    def _current_plan(self, state: AutocastState, device: torch.device) -> Plan:
        plan = self._plan
        scope = scopes.capture()
        if plan is None or not plan.fits(state.recipe, scope, device, state.process_group):
            plan = self._build_plan(state.recipe, device, state.process_group)
        return plan

    def _build_plan(self, recipe: Recipe, device: torch.device, process_group: Any) -> Plan:
        forward = backward = None
        before = self._scales_identity()
        if isinstance(recipe, DelayedScaling):
            forward, backward = self._scales_for(recipe, device)
            scale_update.scale_group(recipe, process_group, device, True).add(forward)
            scale_update.scale_group(recipe, process_group, device, False).add(backward)
        self._plan = plan = build_plan(recipe, device, process_group, self.gemm_count, forward, backward)
        if self._scales_identity() != before:
            self._traced_plans = TracedPlans()
        return plan

    def _scales_identity(self) -> list[Any]:
        """What a plan of delayed scaling depends on and cannot follow: memory and maxima."""
        return [
            None if scales is None else (scales.history.data_ptr(), scales.max_values, scales.group)
            for scales in (self._forward_scales, self._backward_scales)
        ]

    def _scales_for(self, recipe: DelayedScaling, device: torch.device) -> tuple[DelayedScales, DelayedScales]:
        length = recipe.amax_history_len
        if self._forward_scales is None:
            self._forward_scales = DelayedScales.fresh(length, 2 * self.gemm_count, device)
        if self._backward_scales is None:
            self._backward_scales = DelayedScales.fresh(length, self.gemm_count, device)
        for scales in (self._forward_scales, self._backward_scales):
            scales.move(device)
            scales.resize(length)
        return self._forward_scales, self._backward_scales

    def _recomputed(self, x: torch.Tensor) -> tuple[Plan | None, Plan | None]:
        """The plan of a forward that runs inside a backward: that of the first forward."""
        task = torch._C._current_graph_task_id()
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
            plan = self._current_plan(state, x.device)
        elif plan.forward is not None:
            assert source is not None
            if source.root is None:
                plan.root = task
                scale_update.open_task(task)
            else:
                plan.root = source.root
        if not targets:
            return plan, None
        for region in targets:
            region.root = plan.root
        return plan, self._record(plan, targets)

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
        if state is None or not state.calibrating or state.enabled:
            return False
        return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1

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
        if is_first_microbatch or self._cached_weights is None or self._cached_for is not plan:
            with torch.no_grad():
                self._cached_weights = [
                    ops.quantize(w.detach().contiguous(), snapshot(casts.weight, w), usage=casts.weight_usage[1])
                    for w, casts in zip(weights, plan.gemms)
                ]
            self._cached_for = plan
        if record is not None:
            record.weights = self._cached_weights
        return self._cached_weights

    # -- checks ---------------------------------------------------------------------------------------------------

    def _checked_input(self, inp: torch.Tensor, weight: torch.Tensor, features: int) -> torch.Tensor:
        """The input, contiguous and in the dtype of torch.autocast where that is on.

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
        return inp.contiguous()

    def _run_function(self, function: type[torch.autograd.Function], plan: Plan | None, *arguments: Any) -> Any:
        """`function` of `arguments`, the input first, under what it must run under."""
        surroundings = self._surroundings(plan, arguments[0].device.type)
        if surroundings is None:
            return function.apply(*arguments)
        with surroundings:
            return function.apply(*arguments)

    def _results(self, out: Any, bias: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """What the module returns where more is asked for than the output; `out` has the norm's beside it if it is."""
        out, *normed = out if self.return_layernorm_output else (out,)
        return (out, as_dtype(bias, out.dtype), *normed) if self.return_bias else (out, *normed)

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

    # -- state ----------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> GemmModule:
        super()._apply(fn, recurse)
        for scales in (self._forward_scales, self._backward_scales):
            if scales is not None:
                # Only where fn moves tensors is of interest: a float32 probe tells, whatever it does to dtypes.
                with torch.no_grad():
                    device = fn(torch.zeros((), dtype=torch.float32, device=scales.device)).device
                if device.type != "meta":
                    scales.move(device)
        self._forget_plan()
        return self

    def _forget_plan(self) -> None:
        self._plan = None
        self._traced_plans = TracedPlans()
        self._cached_weights = None
        self._cached_for = None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles bind anew: a plan refers to a policy and a process group of this process.
        state = dict(self.__dict__)
        state.update(_plan=None, _traced_plans=TracedPlans(), _cached_weights=None, _cached_for=None)
        return state

    def get_extra_state(self) -> dict[str, Any] | None:
        """The delayed-scaling state as plain data, None before the first use of delayed scaling."""
        if self._forward_scales is None or self._backward_scales is None:
            return None
        return {
            "format": _EXTRA_STATE_FORMAT,
            "recipe": "delayed",
            "forward": self._forward_scales.as_data(),
            "backward": self._backward_scales.as_data(),
        }

    def set_extra_state(self, state: Any) -> None:
        """Take the state of `get_extra_state`; None changes nothing.

        Another history length than the recipe's is adapted at the next use: the newest steps are kept.

        Raises:
            RuntimeError: a state that is not one of this module's.
        """
        if state is None:
            return
        name = type(self).__name__
        if not isinstance(state, dict) or state.get("format") != _EXTRA_STATE_FORMAT:
            found = state.get("format") if isinstance(state, dict) else type(state).__name__
            raise RuntimeError(f"{name}: extra state must have format {_EXTRA_STATE_FORMAT}, got {found!r}")
        for key, attribute, count in (
            ("forward", "_forward_scales", 2 * self.gemm_count),
            ("backward", "_backward_scales", self.gemm_count),
        ):
            loaded = DelayedScales.from_data(state[key], count, f"{name}: extra state, {key}")
            live = getattr(self, attribute)
            if live is None:
                setattr(self, attribute, loaded)
            else:
                live.load(loaded)
        self._forget_plan()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = f"{prefix}_extra_state"
        if destination.get(key, self) is None:
            # Nothing to save: a model that never used delayed scaling has the keys of its torch.nn twin.
            del destination[key]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        key = f"{prefix}_extra_state"
        if key in missing_keys:
            # Checkpoints of high-precision training have none; scales then start as in a new model.
            missing_keys.remove(key)
        self._cached_weights = None
