# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""One captured call: a forward graph, a backward graph, and the memory that they read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_unflatten

from te_dispatch.core import scopes
from te_dispatch.pytorch.autograd.scoped import in_forward_scope
from te_dispatch.pytorch.fp8 import regions
from te_dispatch.pytorch.fp8.autocast import AutocastState, thread
from te_dispatch.pytorch.graphs.graphs import Graph
from te_dispatch.pytorch.graphs.recording import Scaled
from te_dispatch.pytorch.graphs.settings import NAME
from te_dispatch.pytorch.graphs.signature import Signature
from te_dispatch.torch_private import foreach_copy, graph_task


class Captured:
    """Attributes:
    signature: of the call; its buffers are what the forward graph reads.
    parameters: of the module, which both graphs read.
    state: of the autocast that the call was captured in; None where it quantizes nothing.
    amp: the dtype of torch.autocast, None where it was off.
    weights: quantizes the weights for the forward graph; None where that does so itself.
    forward: its results are what the call returned, flat. spec: how they were nested.
    outputs: the results, detached from the capture's own graph.
    backward: None where nothing takes a gradient. output_grads: what it reads, by tensor among the outputs, None for
        those without gradient; grads: what it writes, for buffers and parameters, None for those without gradient.
    scaled: modules with delayed scaling that the call consists of.
    clones: whether gradients of parameters are copied out of the backward graph's memory.
    calls: how often the forward was replayed.
    is_reset: whether the graphs are gone.
    """

    __slots__ = (
        "signature", "parameters", "state", "amp", "weights", "forward", "spec", "outputs", "backward", "output_grads",
        "grads", "scaled", "clones", "calls", "is_reset", "trains", "_addresses",
        "_state_seen",
    )  # fmt: skip

    def __init__(
        self, signature: Signature, parameters: Sequence[torch.Tensor], state: AutocastState | None, clones: bool
    ) -> None:
        self.signature = signature
        self.parameters = tuple(parameters)
        self.state = state
        self.amp = _amp(signature, self.parameters)
        self.trains = torch.is_grad_enabled()
        self.weights: Graph | None = None
        self.forward: Graph
        self.spec: TreeSpec
        self.outputs: list[Any] = []
        self.backward: Graph | None = None
        self.output_grads: list[torch.Tensor | None] = []
        self.grads: list[torch.Tensor | None] = []
        self.scaled: list[Scaled] = []
        self.clones = clones
        self.calls = 0
        self.is_reset = False
        self._addresses = [parameter.data_ptr() for parameter in self.parameters]
        self._state_seen: AutocastState | None = None

    def surface(self) -> tuple[torch.Tensor, ...]:
        """All tensors that gradients are for."""
        return (*self.signature.buffers, *self.parameters)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: bool | None) -> Any:
        """The call, by replays.

        Args:
            first: whether to quantize the weights; None where the forward graph does so itself.

        Raises:
            RuntimeError, TypeError, ValueError: a call that is not as it was captured.
        """
        self._refuse_reset()
        tensors = self.signature.tensors(args, kwargs)
        self._check_surroundings()
        for scaled in self.scaled:
            scaled.begin_forward()
        found = iter(_Replay.apply(self, first, *tensors, *self.parameters))  # type: ignore[no-untyped-call]
        return tree_unflatten([next(found) if isinstance(x, torch.Tensor) else x for x in self.outputs], self.spec)

    def reset(self) -> None:
        """Let go of the graphs and of what they write, so that their memory is free; calls and backward passes raise a
        RuntimeError from now on. Outputs that the caller still holds keep their memory.

        The graph of the weights serves other calls of the same module, too, and ends with the last of them.
        """
        if not self.is_reset:
            self.is_reset = True
            del self.forward
            self.weights = self.backward = None
            self.outputs, self.output_grads, self.grads = [], [], []

    def _refuse_reset(self) -> None:
        if self.is_reset:
            raise RuntimeError(
                f"the graphs of {self.signature.owner} were reset; of a module, `del module.forward` brings its own "
                "forward back"
            )

    def _check_surroundings(self) -> None:
        owner, state = self.signature.owner, thread.state
        if state is not self._state_seen or state is None:
            if not self._fits(state):
                raise RuntimeError(
                    f"{owner} was captured for {_autocast(self.state)}, and is called in {_autocast(state)}: call it "
                    "in an autocast like the one it was captured for"
                )
            self._state_seen = state
        if _amp(self.signature, self.parameters) is not self.amp:
            raise RuntimeError(
                f"{owner} was captured with torch.autocast {'off' if self.amp is None else f'for {self.amp}'}, and is "
                "called with another: enter torch.autocast as for the capture"
            )
        for parameter, address in zip(self.parameters, self._addresses):
            if parameter.data_ptr() != address:
                raise RuntimeError(
                    f"{owner}: a parameter of shape {tuple(parameter.shape)} has moved to other memory since it was "
                    "captured; copy values into the parameter, or capture it again"
                )

    def refuse_checkpoints(self) -> None:
        """Raise a RuntimeError in a checkpoint, whose recomputation a graph with delayed scaling cannot be."""
        if graph_task() != -1 or (regions.maybe_checkpointed() and regions.find()[0]):
            raise RuntimeError(
                f"{self.signature.owner} was captured for delayed scaling, and is called in a checkpoint, whose "
                "recomputation would need the scales of the first forward: checkpoint inside of what is captured, or "
                "use another recipe"
            )

    def _fits(self, state: AutocastState | None) -> bool:
        mine = self.state
        if mine is None:
            return state is None or not (state.enabled or state.calibrating)
        # The names are those of the recipe and the process group.
        captured = mine.enabled, mine.calibrating, mine.names
        return state is not None and (state.enabled, state.calibrating, state.names) == captured

    def replay_forward(self, first: bool | None, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors among the outputs, for such tensors: buffers, then parameters."""
        for buffer, tensor in zip(self.signature.buffers, tensors):
            if buffer.data_ptr() != tensor.data_ptr():
                buffer.copy_(tensor)
        self.calls += 1
        if first and self.weights is not None:
            self.weights.replay()
        self.forward.replay()
        return [x.detach() for x in self.outputs if isinstance(x, torch.Tensor)]

    def replay_backward(
        self, gradients: Sequence[torch.Tensor | None], leaves: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gradients of buffers and parameters, of those of the outputs.

        Args:
            leaves: which arguments keep their gradients, which are therefore copied.
        """
        assert self.backward is not None
        for buffer, gradient in zip(self.output_grads, gradients):
            if buffer is not None and gradient is not None and buffer.data_ptr() != gradient.data_ptr():
                buffer.copy_(gradient)
        self.backward.replay()
        for scaled in self.scaled:
            scaled.note_backward()
        inputs = len(self.signature.buffers)
        mine = [
            gradient if gradient is None else gradient.clone() if leaf else gradient.detach()
            for gradient, leaf in zip(self.grads[:inputs], leaves)
        ]
        theirs = self.grads[inputs:]
        if self.clones:
            return [*mine, *_copies(theirs)]
        return [*mine, *(gradient if gradient is None else gradient.detach() for gradient in theirs)]


class _Replay(torch.autograd.Function):
    """(call, first, *buffers' values, *parameters) -> outputs."""

    @staticmethod
    def forward(ctx: Any, call: Captured, first: bool | None, *tensors: torch.Tensor) -> tuple[Any, ...]:
        outputs = call.replay_forward(first, tensors)
        ctx.captured, ctx.call, ctx.scope = call, call.calls, scopes.capture()
        ctx.leaves = [x.is_leaf for x in tensors[: len(call.signature.buffers)]]
        ctx.mark_non_differentiable(*[x for x, gradient in zip(outputs, call.output_grads) if gradient is None])
        return tuple(outputs)

    @staticmethod
    @in_forward_scope
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        call: Captured = ctx.captured
        call._refuse_reset()
        if ctx.call != call.calls:
            raise RuntimeError(
                f"{call.signature.owner} was called again before the backward of an earlier call; its graphs have "
                f"memory for one call: capture one per microbatch with {NAME}(..., _order=...)"
            )
        return None, None, *call.replay_backward(gradients, ctx.leaves)


def _copies(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    sources = [tensor for tensor in tensors if tensor is not None]
    made = [torch.empty_like(tensor) for tensor in sources]
    if made:
        foreach_copy(made, sources)
    copies = iter(made)
    return [None if tensor is None else next(copies) for tensor in tensors]


def _amp(signature: Signature, parameters: Sequence[torch.Tensor]) -> torch.dtype | None:
    """The dtype of torch.autocast on the device of the call."""
    for tensor in (*signature.buffers, *parameters):
        kind = tensor.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return None


def _autocast(state: AutocastState | None) -> str:
    """An autocast in messages."""
    if state is None or not (state.enabled or state.calibrating):
        return "no autocast that quantizes"
    group = "" if state.process_group is None else f", amax_reduction_group={state.process_group}"
    return f"autocast(enabled={state.enabled}, calibrating={state.calibrating}, recipe={state.recipe}{group})"
