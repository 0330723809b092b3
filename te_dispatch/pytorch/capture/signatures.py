# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The calls that a module has captured, by their input signatures.

A signature is what a call follows from, beside the values of its tensors: their metadata, the autocast, the policy, and
that nothing looks into the call. The module then skips its checks and calls the Function with the options of the
captured call, which hold the program (`te_dispatch.pytorch.capture.program`). Checkpoints, cached weights, quantized
inputs and outputs, compiled graphs and torch.autocast take the plain path.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch.compiler import is_dynamo_compiling

from te_dispatch.core import scopes
from te_dispatch.ops.checks.guards import PLAIN, Guard, guard_for
from te_dispatch.pytorch.autograd.scoped import autocast_off
from te_dispatch.pytorch.capture.functions import Replayable
from te_dispatch.pytorch.capture.statistics import STATISTICS
from te_dispatch.pytorch.fp8 import regions
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.torch_private import dispatch_modes, function_modes, graph_task, saved_tensors_hooks

if TYPE_CHECKING:
    from te_dispatch.pytorch.fp8.casts import Plan

#: Input signatures that a module keeps: more than the sequence lengths that a bucketing data loader has.
MAX_SIGNATURES = 64
#: Of so many calls that a full cache does not hold, one is captured: where there are more signatures than are kept,
#: capturing each of them costs more than it saves.
_MISSES_PER_CAPTURE = 8
#: Whether an optional tensor was given. A C function, because a comprehension is one more Python call on the hot path.
_given = functools.partial(operator.is_not, None)


class SignatureCache:
    """What a module knows of calls, by the shape of their first tensor; the least recently used entry is evicted.

    To invalidate it, replace it by a new one. A thread that still uses the old one then changes nothing that others
    see. Threads that change one at the same time may lose, or keep twice, an entry; none gets a wrong one.

    Attributes:
        by_shape: the entries of each shape, the most recently used first; a list never changes. The shape that was used
            last comes last.
        recent: the entries of that shape.
    """

    __slots__ = ("by_shape", "recent", "_misses")

    def __init__(self) -> None:
        self.by_shape: dict[torch.Size, list[Any]] = {}
        self.recent: list[Any] | None = None
        self._misses = 0

    def __len__(self) -> int:
        return sum([len(entries) for entries in self.by_shape.copy().values()])

    def __iter__(self) -> Iterator[Any]:
        """The most recently used first."""
        for entries in reversed(list(self.by_shape.values())):
            yield from list(entries)

    def admits(self) -> bool:
        """Whether a call that it does not hold is to be captured."""
        if len(self) < MAX_SIGNATURES:
            return True
        self._misses += 1
        return self._misses % _MISSES_PER_CAPTURE == 0

    def use(self, shape: torch.Size, index: int) -> None:
        """Say that the entry at an index of a shape's entries is in use."""
        entries = self.by_shape.pop(shape, None)
        if entries is None:  # another thread is at it
            return
        if index:
            entries = [*entries[index : index + 1], *entries[:index], *entries[index + 1 :]]
        self.by_shape[shape] = self.recent = entries

    def add(self, shape: torch.Size, entry: Any) -> None:
        self.by_shape[shape] = self.recent = [entry, *self.by_shape.pop(shape, ())]
        if len(self) > MAX_SIGNATURES:
            STATISTICS.evictions += 1
            oldest = next(iter(self.by_shape.copy()))
            kept = self.by_shape[oldest][:-1]
            if kept:
                self.by_shape[oldest] = kept
            else:
                self.by_shape.pop(oldest, None)


def unwatched() -> bool:
    """Whether nothing looks into a forward that is called now: no compiler, torch.autocast, checkpoint, recomputation,
    hook on saved tensors or mode of ``__torch_dispatch__``."""
    return (
        autocast_off()
        and graph_task() == -1
        and saved_tensors_hooks(True) is None
        and not dispatch_modes()
        and (is_grad_enabled() or is_inference_mode_enabled() or not regions.any_around())
    )


def capturable() -> bool:
    """`unwatched`, and neither a mode of PyTorch's nor an observer sees what a capture would see; calls are made."""
    scope = scopes.capture()
    return unwatched() and scope.observer is None and scope.makes_calls and not function_modes()


def reason_of_miss() -> str:
    """Why a call that is made now is not replayed, whatever was captured."""
    if graph_task() != -1:
        return "recomputation"
    if not autocast_off():
        return "torch.autocast"
    if dispatch_modes():
        return "a mode of __torch_dispatch__"
    if saved_tensors_hooks(True) is not None:
        return "hooks on saved tensors"
    return "new signature" if unwatched() else "checkpoint"


class Signature:
    """Of captured calls of one module.

    Attributes:
        state: the autocast's, None outside any. scope: the bindings. grad: whether gradients were recorded.
        count, guard: whether tensors are as many, and have the metadata of those of the first such call.
        group: forward scales that such a call records amaxes for; None where it records none.
        options: of the module's Function, with the program.
    """

    __slots__ = ("state", "scope", "grad", "count", "guard", "group", "options")

    def __init__(self, state: Any, scope: Any, grad: bool, count: int, guard: Guard, group: Any, options: Any) -> None:
        self.state = state
        self.scope = scope
        self.grad = grad
        self.count = count
        self.guard = guard
        self.group = group
        self.options = options


class CapturedCalls:
    """The calls of one GEMM module that are replayed."""

    __slots__ = ("signatures",)

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all: what they were captured with is out of date."""
        self.signatures = SignatureCache()

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedCalls, ()  # copies of a module capture for themselves

    def find(
        self, x: torch.Tensor, others: tuple[torch.Tensor | None, ...], parameters: tuple[torch.Tensor, ...] = ()
    ) -> Any:
        """The Function's options for a call with this input and these tensors; None if no such call was captured.

        Compared is what `Fp8State.begin`, `GemmModule._checked_input` and `check_alignment` look at: the tensors'
        metadata, the autocast, the policy, whether gradients are recorded, and that nothing is compiled, recomputed,
        checkpointed or cast by torch.autocast.
        """
        # The compiler must not see the cache: tracing may empty it, and guards on it would fail.
        if is_dynamo_compiling():
            return None
        signatures = self.signatures
        entries = signatures.by_shape.get(x.shape) if x.__class__ in PLAIN else None
        if entries is not None and unwatched():
            tensors = (x, *filter(_given, others), *parameters)
            state, scope, grad, count = thread.state, scopes.capture(), is_grad_enabled(), len(tensors)
            for index, found in enumerate(entries):
                if (
                    found.state is state
                    and found.scope is scope
                    and found.grad is grad
                    and found.count == count
                    and found.guard(*tensors)
                ):
                    if index or entries is not signatures.recent:
                        signatures.use(x.shape, index)
                    if found.group is not None:
                        found.group.dirty = True
                    STATISTICS.hits += 1
                    return found.options
        STATISTICS.misses[reason_of_miss()] += 1
        return None

    def capture(
        self, options: Replayable, plan: Plan | None, current: Plan | None, tensors: Sequence[torch.Tensor | None]
    ) -> None:
        """Have the call that the module is about to make with these options captured, for calls like it.

        Args:
            plan: the call's. current: the one in the module's state.
            tensors: what `find` will be given, one after the other.
        """
        if is_dynamo_compiling() or not capturable() or not self.signatures.admits():
            return
        state, scope, grad = thread.state, scopes.capture(), is_grad_enabled()
        outside = plan is None and (state is None or not (state.enabled or state.calibrating))
        inside = plan is not None and not plan.replay and state is not None and state.enabled
        if inside and current is not None:
            inside = plan is (current if grad else current.evaluation())
        present = [x for x in tensors if x is not None]
        if not (outside or inside) or any(x.__class__ not in PLAIN for x in present) or not present[0].is_contiguous():
            return
        guard = guard_for(present, [True] * len(present))
        group = None if plan is None or not grad else plan.forward_group
        count, signatures, shape = len(present), self.signatures, present[0].shape

        # It refers to neither the options nor the tensors: a cycle would keep the module, and them, until a collection.
        def keep(found: Replayable) -> None:
            signatures.add(shape, Signature(state, scope, grad, count, guard, group, found))

        options.capture = keep
