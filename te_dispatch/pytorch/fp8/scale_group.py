# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""States of delayed scaling that update together: one all-reduce and one launch, whatever the number of modules."""

from __future__ import annotations

import dataclasses
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
from te_dispatch.pytorch.fp8.amax_reduction import AmaxReduction, Buffer
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales, scale_amax_unknown

_HAS_DISTRIBUTED = torch.distributed.is_available()

_lock = threading.RLock()


class Members:
    """States of a group.

    Attributes:
        states: of those alive. labels: what the ranks call them.
        operands: histories, scales, maxima and amaxes of all, as `ops.update_delayed_scales` takes them.
        rows: row 0 of the histories.
        call: the bindings that an update ran under, and its call of the operator; None before the first.
        buffer: what their amaxes are reduced with; None before the first reduction.
    """

    __slots__ = ("states", "labels", "operands", "rows", "call", "buffer")

    def __init__(self, states: list[weakref.ref[DelayedScales]], labels: list[str], operands: tuple[Any, ...]) -> None:
        self.states = states
        self.labels = labels
        self.operands = operands
        self.rows = [history[0] for history in operands[0]] if operands else []
        self.call: tuple[Any, Callable[[], Any]] | None = None
        self.buffer: Buffer | None = None

    def prepare(self, scope: Any, recipe: DelayedScaling) -> tuple[Any, Callable[[], Any]]:
        """`call` for these operands, whose memory and maxima stay: another `Members` is made where they do not."""
        histories, scales, maxima, amaxes = self.operands
        call = repeating(
            scope, "update_delayed_scales", (), histories=histories, scales=scales, max_values=maxima,
            algorithm=recipe.amax_compute_algo, margin=recipe.margin, amaxes=amaxes,
        )  # fmt: skip
        if call is None:
            call = functools.partial(rescale, histories, scales, maxima, amaxes, recipe)
        self.call = found = scope, call
        return found


class ScaleGroup:
    """States that update together: those that one thread trains with one recipe on one device, in one direction.

    Attributes:
        dirty: a cast recorded an amax since the last update. A state whose row 0 is 0 is left alone by the update
            itself, so that the flag need not be kept per module.
        updates: how many there were: what a member copied of its scales is of before the next one.
        label: the same on all ranks that have such a group; groups update in the order of their labels.
        alone: (an argument of the constructor) whether amaxes are never reduced over ranks, whatever the recipe says.
        cast_call: what compiled graphs call before they record amaxes, None before one asks for it.
    """

    __slots__ = (
        "recipe", "process_group", "device", "forward", "dirty", "updates", "label", "cast_call", "_reduction",
        "_by_callables", "_states", "_members", "_changes", "__weakref__",
    )  # fmt: skip

    def __init__(
        self, recipe: DelayedScaling, process_group: Any, device: torch.device, forward: bool, alone: bool = False
    ) -> None:
        self.recipe = recipe
        self.process_group = process_group
        self.device = device
        self.forward = forward
        self.dirty = False
        self.updates = 0
        self.label = f"{'forward' if forward else 'backward'} on {device.type}, {_written(recipe)}"
        self.cast_call: str | None = None
        self._reduction: AmaxReduction | None = None
        if recipe.reduce_amax and _HAS_DISTRIBUTED and not alone:
            self._reduction = AmaxReduction(process_group, self.label)
        self._by_callables = computed_by_callables(recipe)
        #: By id: the state, and what the ranks call it.
        self._states: dict[int, tuple[weakref.ref[DelayedScales], str]] = {}
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
        """Members that are alive, in the order in which they joined."""
        members = self._members or self._gathered()
        return [state for ref in members.states if (state := ref()) is not None]

    def _gathered(self) -> Members:
        with _lock:
            before = self._changes
            alive = [(ref, label, state) for ref, label in self._states.values() if (state := ref()) is not None]
            if len(alive) != len(self._states):
                self._states = {id(state): (ref, label) for ref, label, state in alive}
            # References that are weak: what is kept here must not keep a module's state alive.
            members = Members(
                [ref for ref, _, _ in alive],
                [label for _, label, _ in alive],
                tuple(zip(*[state.operands() for _, _, state in alive])),
            )
            if before == self._changes:  # else another thread has changed something meanwhile
                self._members = members
            return members

    def add(self, state: DelayedScales) -> None:
        """Make a state a member, of this group and no other."""
        with _lock:
            before = state.group
            if before is self:
                return
            self._states[id(state)] = weakref.ref(state, self.regroup), state.label
            self.regroup()
            if before is not None:
                before.remove(state)
            state.updated()  # other updates are counted from here on
            state.group = self  # last: where this is interrupted, the next call does it again

    def remove(self, state: DelayedScales) -> None:
        """Make a state no member."""
        with _lock:
            self._states.pop(id(state), None)
            self.regroup()
            state.updated()
            state.group = None

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
        if self._reduction is not None and ranks(self.process_group) > 1:
            self._reduce(self._reduction, members)
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

    @staticmethod
    def _reduce(reduction: AmaxReduction, members: Members) -> None:
        buffer, labels, rows = members.buffer, members.labels, members.rows
        if buffer is None:
            buffer = reduction.buffer(labels, rows)
        members.buffer = reduction.reduce(buffer, labels, rows)


def ranks(process_group: Any) -> int:
    """How many ranks reduce amaxes."""
    if not _HAS_DISTRIBUTED or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size(process_group)


def computed_by_callables(recipe: DelayedScaling) -> bool:
    """Whether functions of the user compute amaxes or scales."""
    return callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None


def _written(recipe: DelayedScaling) -> str:
    """A recipe in words that do not depend on the process: functions by their names."""
    given = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    values = {name: getattr(value, "__qualname__", value) for name, value in given.items()}
    return ", ".join(f"{name}={value}" for name, value in values.items())


def rescale(
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
