# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""When the scales of delayed scaling update, and which.

Forward scales update when the outermost autocast exits, backward scales at the end of the backward pass, found
through a callback of the autograd engine. States are grouped by thread, recipe, process group, device and direction
(`scale_group`). A state belongs to the thread that last ran its module in training, so that threads that train
different modules do not update each other's.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.core import scopes
from te_dispatch.pytorch.compile import call_outside_graph, refuse_recomputation, register_call
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales
from te_dispatch.pytorch.fp8.scale_group import ScaleGroup, rescale
from te_dispatch.pytorch.step import step
from te_dispatch.torch_private import graph_task, queue_callback

#: Graph tasks whose end-of-backward callback is queued and has not run, and the groups that saw casts in them.
_open_tasks: dict[int, dict[ScaleGroup, None]] = {}

_numbers = itertools.count()

#: Trainers whose modules are being captured into CUDA graphs: their casts lead to no update.
_held: list[Trainer] = []


class Trainer:
    """The groups that one thread updates.

    Args:
        alone: whether they never reduce amaxes over ranks: those of a plan (`te_dispatch.pytorch.planning`).
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone
        #: In the order of their labels, which is the same on all ranks.
        self.groups: tuple[ScaleGroup, ...] = ()

    def group(self, recipe: DelayedScaling, process_group: Any, device: torch.device, forward: bool) -> ScaleGroup:
        """The group of states with these properties; a group without members goes when there is another new one."""
        for group in self.groups:
            if (
                group.recipe == recipe
                and group.process_group is process_group
                and group.device == device
                and group.forward is forward
            ):
                return group
        found = ScaleGroup(recipe, process_group, device, forward, self._alone)
        self._keep((*self.groups, found), found)
        return found

    def adopt(self, group: ScaleGroup) -> None:
        """Be who updates a group: a compiled graph of it runs in this thread, and may have been traced in another."""
        if group in self.groups:
            return
        former = _trainers.get(group)
        if former is not None:
            former.groups = tuple(other for other in former.groups if other is not group)
        self._keep((*self.groups, group), group)

    def _keep(self, groups: Iterable[ScaleGroup], new: ScaleGroup) -> None:
        """Of these, those that have members, and the new one."""
        kept = [group for group in groups if group is new or group.states()]
        self.groups = tuple(sorted(kept, key=lambda group: group.label))
        _trainers[new] = self

    def has_forward_updates(self) -> bool:
        """Whether a forward group saw a cast since its last update."""
        return any(group.dirty and group.forward for group in self.groups)

    def update(self, forward: bool, every: bool = False) -> None:
        """Update the groups of one direction that saw a cast since their last update, or with `every` all of them."""
        for group in self.groups:
            if (group.dirty or every) and group.forward is forward:
                group.update()


_trainers: weakref.WeakKeyDictionary[ScaleGroup, Trainer] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.trainer = Trainer()


_thread = _Thread()


def trainer() -> Trainer:
    """This thread's."""
    return _thread.trainer


@contextmanager
def apart() -> Iterator[None]:
    """Have this thread train apart from what it trains else, and from other ranks. What the block leaves behind, an
    interrupted backward say, ends with it."""
    before, own = _thread.trainer, Trainer(alone=True)
    _thread.trainer = own
    try:
        yield
    finally:
        _thread.trainer = before
        for task, groups in tuple(_open_tasks.items()):
            if any(group in own.groups for group in groups):
                _open_tasks.pop(task, None)
        own.groups = ()  # `_trainers` keeps a group for as long as its trainer does


def _distributed() -> bool:
    """Whether there may be other ranks to reduce amaxes with."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@contextmanager
def without_updates() -> Iterator[None]:
    """Have casts of this thread's modules, in forwards and backwards, lead to no update of scales.

    Not by the thread that casts: the backward of a module may run in a thread of the autograd engine.
    """
    own = _thread.trainer
    dirty = [group for group in own.groups if group.dirty]
    _held.append(own)
    try:
        yield
    finally:
        _held.remove(own)
        for group in own.groups:
            group.dirty = group in dirty


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
        rescale(
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
    own = _thread.trainer
    # This thread is in no backward, so tasks of its groups that are open ended without their callback: they raised.
    for task, groups in tuple(_open_tasks.items()):
        if any(group in own.groups for group in groups):
            _open_tasks.pop(task, None)
    own.update(forward=False)


def open_task(task: int, group: ScaleGroup | None = None) -> None:
    """Have backward scales updated when the graph task `task`, which must be the running one, ends.

    Args:
        group: one that sees a cast in it.
    """
    groups = _open_tasks.get(task)
    if groups is not None:
        if group is not None:
            groups[group] = None
        return
    _open_tasks[task] = {} if group is None else {group: None}

    # The engine calls back from whichever thread ends the task; the update belongs to the backward's policy.
    scope = scopes.capture()

    def finish() -> None:
        groups = sorted(_open_tasks.pop(task, ()), key=lambda group: group.label)
        if scopes.capture() is scope:
            _update(groups)
            return
        with scopes.reenter(scope):
            _update(groups)

    queue_callback(finish)


def _update(groups: Iterable[ScaleGroup]) -> None:
    for group in groups:
        if group.dirty:
            group.update()


def prepare_compiled(group: ScaleGroup) -> None:
    """Give a group its `cast_call`."""
    if group.cast_call is not None:
        return
    name = f"{'forward' if group.forward else 'backward'}_cast_{next(_numbers)}"
    reference = weakref.ref(group)  # the call is registered for good

    def note() -> None:
        found = reference()
        if found is None:
            return
        if not found.forward:
            note_backward_cast(found, None)
            return
        refuse_recomputation()
        _thread.trainer.adopt(found)
        found.dirty = True

    register_call(name, note)
    group.cast_call = name


def note_compiled_backward_cast(group: ScaleGroup, dy: torch.Tensor) -> None:
    """`note_backward_cast` in a compiled backward, whose incoming gradient is `dy`: called whenever it runs."""
    assert group.cast_call is not None
    call_outside_graph(group.cast_call, dy)


@step
def note_backward_cast(group: ScaleGroup, root: int | None) -> None:
    """A backward is about to record amaxes.

    Args:
        group: of the gradients' states.
        root: the graph task in which this Function's forward was recomputed, if it was. Reentrant checkpoints run a
            backward inside the backward: its scales wait for the outer one, as without a checkpoint.
    """
    if _held and _trainers.get(group) in _held:
        return
    group.dirty = True
    if root is not None and root in _open_tasks:
        _open_tasks[root][group] = None
        return
    task = graph_task()
    if task != -1:
        open_task(task, group)
