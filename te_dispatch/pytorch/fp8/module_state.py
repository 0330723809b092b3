# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The FP8 state of one GEMM module, and how it begins a call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from te_dispatch.common.recipe import DelayedScaling, Recipe
from te_dispatch.core import scopes
from te_dispatch.pytorch.compile import (
    call_outside_graph,
    exporting,
    graph_trains,
    making_graph,
    real_tensors,
    refuse_recomputation,
    register_call,
)
from te_dispatch.pytorch.compile.recipes import group_numbered, recipe_named
from te_dispatch.pytorch.fp8 import regions, scale_update
from te_dispatch.pytorch.fp8.autocast import AutocastState, thread, trains
from te_dispatch.pytorch.fp8.casts import Plan, build_plan
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales
from te_dispatch.pytorch.fp8.module_scales import ModuleScales
from te_dispatch.pytorch.fp8.quantizer_role import ModuleRoles
from te_dispatch.pytorch.fp8.weight_cache import WeightCache
from te_dispatch.torch_private import graph_task

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


class Dependent(Protocol):
    """What rests on a module's plan."""

    def forget(self) -> None:
        """The plan, or what updates its scales, is another one from now on."""


class Owner(Protocol):
    """What the state asks of the module that it is the state of; `te_dispatch.pytorch.modules.gemm_module` is it."""

    training: bool

    def asked_roles(self) -> ModuleRoles:
        """How the factory of a `CustomRecipe` is to be asked for the module's quantizers."""

    def traced_plan_name(
        self, recipe: str, group: int, policy: str, device_type: str, index: int | None, boundary: bool, trains: bool
    ) -> str:
        """`Fp8State.prepare_traced`, as a function that dynamo calls while tracing."""


class Fp8State:
    """What the quantized calls of one module need, and what they leave for the next.

    Args:
        module: the class of the module, for messages.
        gemm_count: how many weights it has.
        dependent: is told to forget when what rests on the plan is out of date.

    Attributes:
        plan: the recipe of the last call made concrete; None before the first, and after `forget`.
        scales: the states of delayed scaling.
        weights: quantized weights kept between microbatches.
        roles: what the factory of a `CustomRecipe` has answered.
    """

    def __init__(self, module: str, gemm_count: int, dependent: Dependent) -> None:
        self.module = module
        self.gemm_count = gemm_count
        self.scales = ModuleScales(module, gemm_count)
        self.roles = ModuleRoles(module)
        self._dependent = dependent
        #: Whether a forward ran that may have been a checkpoint's, and no region was found for it.
        self._ran_unowned = False
        self._unbound()

    def _unbound(self) -> None:
        self.plan: Plan | None = None
        self.weights = WeightCache()
        self._traced = TracedPlans()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles bind anew: a plan refers to a policy and a process group of this process."""
        kept = ("module", "gemm_count", "scales", "_dependent", "_ran_unowned")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.roles = ModuleRoles(self.module)  # a recipe, which its answers are kept by, may not be picklable
        self._unbound()

    def forget(self) -> None:
        """Let go of all that was made for the state as it was."""
        self._unbound()
        self._dependent.forget()

    # -- the plan of a call ---------------------------------------------------------------------------------------

    def begin(self, module: Owner, x: torch.Tensor, boundary: bool = False) -> tuple[Plan | None, Plan | None]:
        """(plan, record) of this call: how to quantize, None for high precision; and, inside a checkpoint's first
        forward, the entry kept for its recomputation.

        Args:
            boundary: whether something leaves the module quantized, so that the plan must have a `Boundary`.

        Raises:
            RuntimeError: a recomputation whose first forward is unknown.
        """
        if making_graph():
            return self._begin_traced(module, x, boundary), None
        if graph_task() != -1:
            return self._recomputed(module, x, boundary)
        state = thread.state
        if state is None or not (state.enabled or state.calibrating):
            return None, None
        plan = self.plan_for(module, state, x.device, boundary)
        if plan.forward is not None:
            if trains() and (module.training or not regions.phase.declared):
                self.join(plan)
                plan.forward_group.dirty = True  # type: ignore[union-attr]
                if thread.recording is not None:
                    thread.recording.note(module, plan)
            else:
                plan = plan.evaluation()
        if not state.enabled:
            return None, None
        record = self._record(module, plan, regions.find()[0]) if regions.maybe_checkpointed() else None
        return plan if plan.quantizes else None, record

    def plan_for(self, module: Owner, state: AutocastState, device: torch.device, boundary: bool) -> Plan:
        """The plan of a call under an autocast, which stays the state's plan."""
        plan = self.plan
        if plan is None or not plan.fits(state.recipe, scopes.capture(), device, state.process_group):
            plan = self._build(module, state.recipe, device, state.process_group)
        if boundary:
            self._add_boundary(plan)
        return plan

    def join(self, plan: Plan) -> None:
        """Have this thread's groups update the plan's states; what was made for others is forgotten."""
        if plan.join():
            self._dependent.forget()
            self._traced = TracedPlans()

    def _add_boundary(self, plan: Plan) -> None:
        """Have casts for what leaves the module quantized."""
        if plan.boundary is not None or not plan.quantizes:
            return

        def states() -> tuple[DelayedScales, DelayedScales]:
            assert isinstance(plan.recipe, DelayedScaling)
            return self.scales.of_boundary(plan.recipe, plan.device)

        plan.add_boundary(plan.casts.boundary(plan.sole(), states))

    def _build(self, module: Owner, recipe: Recipe, device: torch.device, process_group: Any) -> Plan:
        self._warn_of_another_recipe(recipe)
        forward = backward = None
        before = self.scales.identity()
        if isinstance(recipe, DelayedScaling):
            forward, backward = self.scales.of_gemms(recipe, device)
        self._dependent.forget()
        roles = module.asked_roles() if recipe.custom() else None
        self.plan = plan = build_plan(recipe, device, process_group, self.gemm_count, forward, backward, roles)
        if self.scales.identity() != before:
            self._traced = TracedPlans()
        return plan

    def _warn_of_another_recipe(self, recipe: Recipe) -> None:
        """Warn where the module last ran under a recipe of another class, as Transformer Engine does."""
        last = recipe if self.plan is None else self.plan.recipe
        if not isinstance(recipe, type(last)) and not isinstance(last, type(recipe)):
            warnings.warn(
                f"{self.module}: Recipe type changed from {type(last).__name__} to {type(recipe).__name__}; calls "
                "from now on are cast by the new recipe, whose results differ",
                stacklevel=2,
            )

    def _record(self, module: Owner, plan: Plan, targets: Sequence[regions.Region]) -> Plan | None:
        if not targets:
            self._ran_unowned = True
            return None
        entry = plan.as_replay()
        for region in targets:
            region.root = plan.root
            region.record(module, entry)
        return entry

    def _recomputed(self, module: Owner, x: torch.Tensor, boundary: bool) -> tuple[Plan | None, Plan | None]:
        """The plan of a forward that runs inside a backward: that of the first forward."""
        task = graph_task()
        targets, source = regions.find()
        plan = None if source is None else source.replay(module, task)
        state = thread.state
        if plan is None:
            if state is None or not state.enabled:
                # Nothing recorded and no autocast: high precision then and now, unless an unknown kind of checkpoint
                # ran the first forward where no region was seen.
                if source is None and self._ran_unowned:
                    raise RuntimeError(f"{self.module}: {_NO_STATE}")
                return None, None
            if isinstance(state.recipe, DelayedScaling):
                raise RuntimeError(f"{self.module}: {_NO_STATE}")
            plan = self.plan_for(module, state, x.device, boundary)
        elif plan.forward is not None:
            assert source is not None
            if source.root is None:
                plan.root = task
                scale_update.open_task(task)
            else:
                plan.root = source.root
        record = self._record(module, plan, targets) if targets else None
        return plan if plan.quantizes else None, record

    # -- in a graph that is being made ----------------------------------------------------------------------------

    def _begin_traced(self, module: Owner, x: torch.Tensor, boundary: bool) -> Plan | None:
        """`begin` in a graph that is being made, which knows no checkpoint regions."""
        state = thread.state
        if state is None or not (state.enabled or state.calibrating):
            return None
        plan = self.traced_plan(module, state, x.device, boundary)
        if plan.forward is not None and graph_trains():
            if thread.traced is None:
                call_outside_graph(plan.forward_group.cast_call)  # type: ignore[union-attr, arg-type]
            else:
                call_outside_graph(_DELAYED_FORWARD)
                thread.traced.append(plan)
        return plan if state.enabled and plan.quantizes else None

    def traced_plan(self, module: Owner, state: AutocastState, device: torch.device, boundary: bool = False) -> Plan:
        """The plan of a call in a compiled program; made outside of it, because a graph cannot make state."""
        trains = graph_trains()
        name = module.traced_plan_name(
            *state.names, scopes.capture().token, device.type, device.index, boundary, trains
        )
        return getattr(self._traced, name)  # type: ignore[no-any-return]

    def prepare_traced(
        self,
        module: Owner,
        recipe: str,
        group: int,
        policy: str,
        device_type: str,
        index: int | None,
        boundary: bool,
        trains: bool,
    ) -> str:
        """Have a plan under the bindings with the token `policy`, and return the name that `traced_plan` reads."""
        with real_tensors():
            bindings = scopes.MANAGER.tokens[policy]
            device = torch.device(device_type) if index is None else torch.device(device_type, index)
            found, plan = (recipe_named(recipe), bindings, device, group_numbered(group)), self.plan
            if plan is None or not plan.fits(*found):
                with scopes.reenter(bindings):
                    plan = self._build(module, found[0], device, found[3])
            if boundary:
                self._add_boundary(plan)
            if plan.forward is not None and trains:
                self.join(plan)
                for found_group in (plan.forward_group, plan.backward_group):
                    scale_update.prepare_compiled(found_group)  # type: ignore[arg-type]
            where = _policy_numbers.setdefault(policy, len(_policy_numbers))
            purpose = "trains" if trains else "evaluates"
            if exporting():
                purpose, plan = "exported", plan.as_replay()
            name = f"{recipe}_{group + 1}_{device_type}_{index}_{where}_{purpose}"
            setattr(self._traced, name, plan if trains else plan.evaluation())
            return name
