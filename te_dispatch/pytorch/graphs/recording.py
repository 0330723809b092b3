# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""States of delayed scaling while their modules are captured, and when a graph is replayed.

Inside a graph casts record amaxes in the modules' states, as they do in eager. The scales are updated outside, by
the autocast that ends and at the end of the backward pass: a replay tells the groups of the states that casts were
made (`Scaled`), as the modules themselves would have. Warm-up and capture run the modules, too, but are no training
steps: they update nothing, and what they record is taken back (`Recording`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import AutocastState, thread
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales
from te_dispatch.pytorch.graphs.settings import NAME

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import Plan
    from te_dispatch.pytorch.modules.gemm_module import GemmModule


class Scaled:
    """A module with delayed scaling inside a graph, under the plan with which it was captured."""

    __slots__ = ("module", "plan", "_memory")

    def __init__(self, module: GemmModule, plan: Plan) -> None:
        self.module = module
        self.plan = plan
        self._memory = [(scales, scales.history, scales.scale, scales.max_values) for scales in states_of(plan)]

    def states(self) -> list[DelayedScales]:
        return [scales for scales, *_ in self._memory]

    def begin_forward(self) -> None:
        """Have this thread's groups update the states when the autocast ends.

        Raises:
            RuntimeError: the states are not those of the capture any more.
        """
        for scales, history, scale, max_values in self._memory:
            if scales.history is not history or scales.scale is not scale or scales.max_values != max_values:
                raise RuntimeError(
                    f"{type(self.module).__name__}: its state of delayed scaling was moved, resized or bound to "
                    f"another encoding after {NAME} had captured it; capture it again"
                )
        self.module.fp8_state.join(self.plan)
        self.plan.forward_group.dirty = True  # type: ignore[union-attr]

    def note_backward(self) -> None:
        """Have the gradients' states updated when this backward pass ends."""
        scale_update.note_backward_cast(self.plan.backward_group, None)  # type: ignore[arg-type]


def states_of(plan: Plan) -> list[DelayedScales]:
    """All states that calls under a plan record amaxes in."""
    boundary = None if plan.boundary is None else plan.boundary.backward
    return [*plan.forward_states(), *(scales for scales in (plan.backward, boundary) if scales is not None)]


class _Saved:
    """A state's values as they were before the warm-up."""

    __slots__ = ("scales", "_copy")

    def __init__(self, scales: DelayedScales) -> None:
        self.scales = scales
        scale, history, scale_amax = (tensor.detach().clone() for tensor in scales.values())
        self._copy = DelayedScales(history, scale, scale_amax, scales.max_values, scales.margin)

    def restore(self) -> None:
        scales = self.scales
        self._copy.resize(scales.length)
        self._copy.retarget(scales.max_values, scales.margin)
        scales.assign(self._copy.values())


class Recording:
    """What the modules that are being captured call: `autocast.thread.recording` while they run."""

    def __init__(self) -> None:
        self._saved: dict[int, _Saved] = {}
        self._modules: dict[int, GemmModule] = {}
        self._states: dict[int, tuple[AutocastState, AutocastState]] = {}
        self._into: dict[int, Scaled] = {}

    @contextmanager
    def active(self, into: dict[int, Scaled]) -> Iterator[None]:
        """Have this thread's modules run for a capture. `into`: gets those with delayed scaling, by their plan."""
        before, thread.recording = thread.recording, self
        self._into = into
        try:
            with scale_update.without_updates():
                yield
        finally:
            thread.recording = before

    def state_like(self, state: AutocastState) -> AutocastState:
        """The state of an autocast that is entered during a capture: a copy, so that no module knows calls in it.

        A module that knows a call does not say what states it has. The copy is one for all autocasts with the same
        state, so that calls are known after the first iteration of the warm-up.
        """
        found = self._states.get(id(state))
        if found is None:
            copy = AutocastState(state.enabled, state.calibrating, state.names[0], state.process_group, state.graph)
            found = self._states[id(state)] = state, copy
            self._states[id(copy)] = copy, copy
        return found[1]

    def note(self, module: GemmModule, plan: Plan) -> None:
        """A module is about to record amaxes under a plan, which is joined."""
        for scales in states_of(plan):
            if id(scales) not in self._saved:
                self._saved[id(scales)] = _Saved(scales)
        self._modules[id(module)] = module
        self._into.setdefault(id(plan), Scaled(module, plan))

    def renew_frozen_scales(self) -> None:
        """Have checkpoints copy the scales anew, inside the capture: replays must not use those of the warm-up."""
        for saved in self._saved.values():
            saved.scales.updated()

    @torch.no_grad()
    def restore(self) -> None:
        """Give all states the values that they had, and let modules forget calls in memory of graphs."""
        for saved in self._saved.values():
            saved.restore()
        for module in self._modules.values():
            module.captured_calls.forget()
