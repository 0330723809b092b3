# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`autocast`: the region in which modules compute in 8 or 4 bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from te_dispatch.common.recipe import DelayedScaling, Recipe
from te_dispatch.core.bounded import BoundedDict
from te_dispatch.pytorch.compile import call_outside_graph, exporting, register_call
from te_dispatch.pytorch.compile.recipes import default_name, intern_group, intern_recipe, recipe_named
from te_dispatch.pytorch.fp8 import regions, scale_update
from te_dispatch.torch_private import graph_task


class AutocastState:
    """What modules read: immutable, and in eager one for all `autocast` of a thread with the same arguments, so that
    it is compared with ``is`` (`_Thread.states`).
    """

    __slots__ = ("enabled", "calibrating", "recipe", "process_group", "graph", "names")

    def __init__(
        self, enabled: bool, calibrating: bool, recipe_name: str, process_group: Any, graph: bool = False
    ) -> None:
        self.enabled = enabled
        self.calibrating = calibrating
        self.recipe = recipe_named(recipe_name)
        self.process_group = process_group
        #: Whether leaving it updates no scales: what runs inside is captured into a CUDA graph.
        self.graph = graph
        #: Of recipe and process group, for compiled graphs.
        self.names = (recipe_name, intern_group(process_group))


#: How many different autocasts a thread remembers.
_STATES = 64


class _Thread(threading.local):
    # Set in __init__ and not on the class: a traced read of a class-level default would not be guarded.
    def __init__(self) -> None:
        self.state: AutocastState | None = None
        #: Plans that a graph with the outermost autocast inside has run so far, None elsewhere.
        self.traced: list[Any] | None = None
        #: The `capture.recording.Recording` of the callables that this thread captures into CUDA graphs, else None.
        self.recording: Any | None = None
        #: Whether `FP8GlobalStateManager.is_first_fp8_module` has not been asked since the outermost autocast began.
        self.unasked = False
        #: What autocasts were given, in eager: enabled, calibrating, the recipe's name, _graph, the id of the process
        #: group, which lives as long as the state, so that no other gets it. Per thread, so that a module sees by the
        #: state whether the thread that trains it is another one.
        self.states: BoundedDict[tuple[bool, bool, str, bool, int], AutocastState] = BoundedDict(_STATES)


thread = _Thread()


_LEFTOVERS = "backward_scales"
register_call(_LEFTOVERS, scale_update.update_leftover_backward_scales)


def require_usable(asking: str, recipe: Recipe) -> None:
    """Raise a NotImplementedError that names who asks, and the knob that this version cannot honour."""
    knob = recipe.unsupported_knob()
    if knob is not None:
        raise NotImplementedError(f"{asking}: {type(recipe).__name__} asks for {knob}; not supported yet")


def get_default_recipe() -> Recipe:
    """The recipe of an autocast that names none: `DelayedScaling()` on every device, so that all ranks agree."""
    return DelayedScaling()


def current_state() -> AutocastState | None:
    """The innermost autocast of this thread, None outside any."""
    return thread.state


def trains() -> bool:
    """Whether a forward that is called now may have a backward: it then records amaxes.

    A reentrant checkpoint runs its first forward without gradients although it will have a backward.
    """
    return torch.is_grad_enabled() or (not torch.is_inference_mode_enabled() and regions.in_reentrant_forward())


@contextmanager
def restored(state: AutocastState | None) -> Iterator[None]:
    """Be inside the autocast that `state` came from; leaving it updates nothing."""
    previous, thread.state = thread.state, state
    try:
        yield
    finally:
        thread.state = previous


class autocast:
    """Context manager: modules inside quantize the operands of their GEMMs as `recipe` says.

    It nests; the innermost decides. Leaving the outermost one normally, with gradients enabled, updates the forward
    scales of delayed scaling. It belongs to the thread, like torch.autocast: asyncio tasks that are in different ones
    at the same time must not await inside them, or must run in threads of their own.

    Args:
        enabled: False computes in high precision.
        calibrating: with ``enabled=False`` and delayed scaling, record amaxes while computing in high precision. Scales
            change when an autocast ends with gradients enabled; so calibrate with gradients, without a backward.
        recipe: a recipe of `te_dispatch.common.recipe`, taken as it is now: what is assigned to it later holds for
            autocasts that are made later. None for `get_default_recipe()`.
        amax_reduction_group: process group over which amaxes are reduced; None for the default group.
        _graph: update no scales on leaving, because what runs inside is captured into a CUDA graph; the amaxes stay
            recorded for the next update. `make_graphed_callables` enters such an autocast.

    Raises:
        NotImplementedError: the recipe asks for something not built yet; the message names the knob.
        TypeError: an argument of another type.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._previous: list[AutocastState | None] = []
        if not torch.compiler.is_dynamo_compiling():
            known: str | None = getattr(recipe, "_name", None)
            if known is not None:
                asked = bool(enabled), bool(calibrating), known, bool(_graph), id(amax_reduction_group)
                found = thread.states.get(asked)
                if found is not None:
                    self._state = found
                    return
        if recipe is None:
            recipe = recipe_named(default_name())
        if not isinstance(recipe, Recipe):
            raise TypeError(f"autocast: recipe must be a recipe of te_dispatch.common.recipe, got {recipe!r}")
        name = intern_recipe(recipe)
        if not torch.compiler.is_compiling():
            # Not sooner: dynamo cannot trace id() before PyTorch 2.12.
            key = bool(enabled), bool(calibrating), name, bool(_graph), id(amax_reduction_group)
            found = thread.states.get(key)
            if found is not None:  # of an equal recipe
                self._state = found
                return
        if enabled or calibrating:
            require_usable("autocast", recipe)
        state = AutocastState(bool(enabled), bool(calibrating), name, amax_reduction_group, bool(_graph))
        if not torch.compiler.is_compiling():
            thread.states[key] = state
        self._state = state

    def __enter__(self) -> autocast:
        previous = thread.state
        self._previous.append(previous)
        if previous is None:
            if torch.compiler.is_compiling():
                if not exporting():
                    call_outside_graph(_LEFTOVERS)
                    thread.traced = []
            else:
                thread.unasked = True
                if graph_task() == -1:
                    scale_update.update_leftover_backward_scales()
        recording = thread.recording
        thread.state = self._state if recording is None else recording.state_like(self._state)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread.state = previous = self._previous.pop()
        if previous is not None:
            return
        traced = thread.traced
        if traced is not None:
            thread.traced = None
        if kind is not None or self._state.graph:
            return
        if torch.compiler.is_compiling():
            if traced is not None and torch.is_grad_enabled():
                scale_update.update_traced(traced)
            return
        # Inside a backward this is a checkpoint's recomputation, whose first forward has updated already.
        if graph_task() != -1:
            return
        trainer = scale_update.trainer()
        if trainer.has_forward_updates() and trains():
            trainer.update(forward=True)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """`autocast` under its older name and argument names."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)
