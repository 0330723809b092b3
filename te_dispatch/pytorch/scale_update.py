# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The end-of-step update of delayed scaling, for all modules together.

Forward scales update when the outermost autocast exits, backward scales at the end of the backward pass, found
through a callback of the autograd engine. States are grouped by recipe, process group, device and direction: a group
is one all-reduce and one launch, whatever the number of modules.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes
from te_dispatch.core.repeating import repeating
from te_dispatch.pytorch.compile import call_outside_graph, refuse_recomputation, register_call
from te_dispatch.pytorch.delayed_scales import DelayedScales, scale_amax_unknown

_HAS_DISTRIBUTED = torch.distributed.is_available()

_lock = threading.Lock()
_groups: dict[tuple[Any, ...], ScaleGroup] = {}
#: The same by direction, as tuples: every step goes through them, and a reader sees all of one or all of the next.
_forward_groups: tuple[ScaleGroup, ...] = ()
_backward_groups: tuple[ScaleGroup, ...] = ()

#: Of the autograd engine, which is one for the process: calls a function when the running graph task ends.
_queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]

#: Graph tasks whose end-of-backward callback is queued and has not run.
_open_tasks: set[int] = set()

#: Threads that have begun a step.
_training_threads: set[int] = set()


class Members:
    """States of a group.

    Attributes:
        states: of those alive.
        operands: histories, scales, maxima and amaxes of all, as `ops.update_delayed_scales` takes them.
        call: the bindings that an update ran under, and its call of the operator; None before the first.
    """

    __slots__ = ("states", "operands", "call")

    def __init__(self, states: list[weakref.ref[DelayedScales]], operands: tuple[Any, ...]) -> None:
        self.states = states
        self.operands = operands
        self.call: tuple[Any, Callable[[], Any]] | None = None

    def prepare(self, scope: Any, recipe: DelayedScaling) -> tuple[Any, Callable[[], Any]]:
        """`call` for these operands, whose memory and maxima stay: another `Members` is made where they do not."""
        histories, scales, maxima, amaxes = self.operands
        rescale = repeating(
            scope, "update_delayed_scales", (), histories=histories, scales=scales, max_values=maxima,
            algorithm=recipe.amax_compute_algo, margin=recipe.margin, amaxes=amaxes,
        )  # fmt: skip
        if rescale is None:
            rescale = functools.partial(_rescale, histories, scales, maxima, amaxes, recipe)
        self.call = call = scope, rescale
        return call


class ScaleGroup:
    """States that update together.

    Attributes:
        dirty: a cast recorded an amax since the last update. A state whose row 0 is 0 is left alone by the update
            itself, so that the flag need not be kept per module.
        updates: how many there were: what a member copied of its scales is of before the next one.
        cast_call: what compiled graphs call before they record amaxes.
    """

    __slots__ = (
        "recipe",
        "process_group",
        "device",
        "forward",
        "dirty",
        "updates",
        "cast_call",
        "_reduces",
        "_by_callables",
        "_states",
        "_members",
        "_changes",
    )

    def __init__(self, recipe: DelayedScaling, process_group: Any, device: torch.device, forward: bool) -> None:
        self.recipe = recipe
        self.process_group = process_group
        self.device = device
        self.forward = forward
        self.dirty = False
        self.updates = 0
        self._reduces = recipe.reduce_amax and _HAS_DISTRIBUTED
        self._by_callables = computed_by_callables(recipe)
        self.cast_call = f"{'forward' if forward else 'backward'}_cast_{len(_groups)}"
        if forward:
            register_call(self.cast_call, lambda: _note_compiled_forward_cast(self))
        else:
            register_call(self.cast_call, lambda: note_backward_cast(self, None))
        self._states: list[weakref.ref[DelayedScales]] = []
        #: `_gathered`, kept for the next updates, and how often that had to be given up.
        self._members: Members | None = None
        self._changes = 0

    def regroup(self, _: Any = None) -> None:
        """Gather the members anew at the next update.

        Whoever changes a member's memory or maxima, or the membership, calls this; and so does a member's end.
        """
        self._changes += 1
        self._members = None

    def states(self) -> list[DelayedScales]:
        """Members that are alive, in the order they joined, which is the same on every rank."""
        members = self._members or self._gathered()
        return [state for ref in members.states if (state := ref()) is not None]

    def _gathered(self) -> Members:
        before = self._changes
        alive = [(ref, state) for ref in self._states if (state := ref()) is not None]
        if len(alive) != len(self._states):
            self._states = [ref for ref, _ in alive]
        # References that are weak: what is kept here must not keep a module's state alive.
        members = Members([ref for ref, _ in alive], tuple(zip(*[state.operands() for _, state in alive])))
        if before == self._changes:  # else another thread has changed something meanwhile
            self._members = members
        return members

    def add(self, state: DelayedScales) -> None:
        with _lock:
            if state.group is self:
                return
            if state.group is not None:
                state.group._states = [ref for ref in state.group._states if ref() is not state]
                state.group.regroup()
            state.group = self
            state.updated()  # other updates are counted from here on
            self._states.append(weakref.ref(state, self.regroup))
            self.regroup()

    def update(self) -> None:
        """Reduce the amaxes over the process group, then roll histories and recompute scales."""
        self.dirty = False
        members = self._members or self._gathered()
        if not members.states:
            return
        if torch.is_inference_mode_enabled():  # entering it for nothing takes as long as the update
            with torch.inference_mode(False):
                self._update(members)
        else:
            self._update(members)

    def _update(self, members: Members) -> None:
        if self._reduces and torch.distributed.is_initialized():
            _reduce_amaxes(members.operands[0], self.process_group)
        if self._by_callables:
            with torch.no_grad():
                for state in self.states():
                    _rescale_by_callables(state, self.recipe)
        else:
            scope, call = scopes.capture(), members.call
            if call is None or call[0] is not scope:
                call = members.prepare(scope, self.recipe)
            call[1]()
        self.updates += 1


def scale_group(recipe: DelayedScaling, process_group: Any, device: torch.device, forward: bool) -> ScaleGroup:
    """The group of states with these properties."""
    global _forward_groups, _backward_groups
    key = (recipe, process_group, device, forward)
    with _lock:
        found = _groups.get(key)
        if found is None:
            found = _groups[key] = ScaleGroup(recipe, process_group, device, forward)
            _forward_groups = tuple(group for group in _groups.values() if group.forward)
            _backward_groups = tuple(group for group in _groups.values() if not group.forward)
    return found


def computed_by_callables(recipe: DelayedScaling) -> bool:
    """Whether functions of the user compute amaxes or scales."""
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def _rescale(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    amaxes: Sequence[torch.Tensor],
    recipe: DelayedScaling,
) -> None:
    """Roll histories and recompute scales, of all states in one call."""
    ops.update_delayed_scales(
        histories, scales, max_values, algorithm=recipe.amax_compute_algo, margin=recipe.margin, amaxes=amaxes
    )


def _distributed() -> bool:
    """Whether there may be other ranks to reduce amaxes with."""
    return _HAS_DISTRIBUTED and torch.distributed.is_initialized()


def _reduce_amaxes(histories: Sequence[torch.Tensor], process_group: Any) -> None:
    """Maximum of all ranks' row 0, in one collective."""
    dist = torch.distributed
    if dist.get_world_size(process_group) == 1:
        return
    rows = [history[0] for history in histories]
    amaxes = torch.cat(rows)
    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=process_group)
    torch._foreach_copy_(rows, list(amaxes.split([row.numel() for row in rows])))


def _rescale_by_callables(state: DelayedScales, recipe: DelayedScaling) -> None:
    """The update with a user's functions, in PyTorch."""
    history, scale, scale_amax = state.history.data, state.scale.data, state.scale_amax.data
    maxima = torch.tensor(state.max_values, dtype=torch.float32, device=scale.device)
    if callable(recipe.amax_compute_algo):
        amax = recipe.amax_compute_algo(history).to(torch.float32)
    elif recipe.amax_compute_algo == "most_recent":
        amax = history[0].clone()
    else:
        amax = torch.where(history.isnan(), 0.0, history).amax(0)
    _require_shape("amax_compute_algo", amax, scale)
    moves = history[0] != 0
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(amax, scale.clone(), maxima, recipe)
        _require_shape("scaling_factor_compute_algo", new, scale)
        rescales, amax = moves, scale_amax_unknown(scale)
    else:
        new = (maxima * 2.0**-recipe.margin / amax).clamp_max(torch.finfo(torch.float32).max)
        rescales = moves & (amax > 0) & amax.isfinite()
    scale.copy_(torch.where(rescales, new, scale))
    scale_amax.copy_(torch.where(rescales, amax, scale_amax))
    rolled = history.roll(-1, 0)
    rolled[0] = 0
    history.copy_(torch.where(moves, rolled, history))


def _require_shape(name: str, result: torch.Tensor, scale: torch.Tensor) -> None:
    if tuple(result.shape) != tuple(scale.shape):
        raise ValueError(f"{name} must return a tensor of shape {tuple(scale.shape)}, got {tuple(result.shape)}")


def dirty_forward_groups() -> list[ScaleGroup]:
    """Forward groups that saw a cast since their last update."""
    return [group for group in _forward_groups if group.dirty]


def update_backward_scales() -> None:
    """Update every backward group that saw a cast."""
    for group in _backward_groups:
        if group.dirty:
            group.update()


def update_traced(plans: list[Any]) -> None:
    """The update of forward scales for a graph that contains the outermost autocast: of the plans that ran in it.

    Raises:
        NotImplementedError: amaxes would have to be reduced over ranks, or a user's function computes scales.
    """
    groups: list[tuple[ScaleGroup, list[DelayedScales]]] = []
    for plan in plans:
        group = plan.forward_group
        states = next((states for other, states in groups if other is group), None)
        if states is None:
            states = []
            groups.append((group, states))
        for state in plan.forward_states():
            if not any(other is state for other in states):
                states.append(state)
    for group, states in groups:
        recipe = group.recipe
        if recipe.reduce_amax and _distributed():
            raise NotImplementedError(
                "autocast: DelayedScaling.reduce_amax=True is not supported for an autocast inside a compiled region; "
                "put the autocast around the compiled call"
            )
        # Through .data, of the states as the graph knows them: a compiled backward that reads them live must not find
        # their version changed.
        _rescale(
            [state.history.data for state in states],
            [state.scale.data for state in states],
            [state.max_values for state in states],
            [state.scale_amax.data for state in states],
            recipe,
        )
        for state in states:
            state.updated()


def update_leftover_backward_scales() -> None:
    """Update what a compiled or an interrupted backward left behind; called where a new step begins."""
    _training_threads.add(threading.get_ident())
    if _open_tasks and len(_training_threads) == 1:
        # Only this thread trains and it is in no backward, so these tasks ended without their callback: they raised.
        _open_tasks.clear()
    if not _open_tasks:
        update_backward_scales()


def open_task(task: int) -> None:
    """Have backward scales updated when the graph task `task`, which must be the running one, ends."""
    if task in _open_tasks:
        return
    _open_tasks.add(task)

    # The engine calls back from whichever thread ends the task; the update belongs to the backward's policy.
    scope = scopes.capture()

    def finish() -> None:
        _open_tasks.discard(task)
        if scopes.capture() is scope:
            update_backward_scales()
            return
        with scopes.reenter(scope):
            update_backward_scales()

    _queue_callback(finish)


def _note_compiled_forward_cast(group: ScaleGroup) -> None:
    refuse_recomputation()
    group.dirty = True


def note_compiled_backward_cast(group: ScaleGroup, dy: torch.Tensor) -> None:
    """`note_backward_cast` in a compiled backward, whose incoming gradient is `dy`: called whenever it runs."""
    call_outside_graph(group.cast_call, dy)


def note_backward_cast(group: ScaleGroup, root: int | None) -> None:
    """A backward is about to record amaxes.

    Args:
        group: of the gradients' states.
        root: the graph task in which this Function's forward was recomputed, if it was. Reentrant checkpoints run a
            backward inside the backward: its scales wait for the outer one, as without a checkpoint.
    """
    group.dirty = True
    if root is not None and root in _open_tasks:
        return
    task = torch._C._current_graph_task_id()
    if task != -1:
        open_task(task)
