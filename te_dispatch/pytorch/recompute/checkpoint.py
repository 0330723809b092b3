# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activation checkpointing that replays the autocast, the scales and the policy of the first forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from te_dispatch.core import scopes
from te_dispatch.pytorch.arguments import reject_unsupported
from te_dispatch.pytorch.compile.state import graph_trains, tracing
from te_dispatch.pytorch.distributed.arguments import require_one_rank
from te_dispatch.pytorch.fp8 import regions
from te_dispatch.pytorch.fp8.autocast import current_state, restored, thread

_TORCH_ONLY_NON_REENTRANT = ("context_fn", "determinism_check", "debug", "early_stop")


#: How the last `checkpoint` recomputes.
_reentrant = True


def use_reentrant_activation_recompute() -> bool:
    """Whether the last `checkpoint` that was called with gradients recomputes by a backward inside of the backward, as
    ``use_reentrant=True`` does; True before the first. Compiled calls do not count."""
    return _reentrant


class _Checkpointed:
    """The user's function, run once forward and then again for every backward."""

    __slots__ = ("function", "kwargs", "region", "_get_tracker", "_random", "_scope", "_started", "_state")

    def __init__(
        self, function: Callable[..., Any], kwargs: dict[str, Any], get_tracker: Callable[[], Any] | None
    ) -> None:
        self.function = function
        self.kwargs = kwargs
        self.region = regions.Region()
        self._state = current_state()
        self._scope = scopes.capture()
        self._started = False
        if not self._scope.makes_calls:
            get_tracker = None  # as in `te_dispatch.pytorch.distributed.arguments.forked`
        self._get_tracker = get_tracker
        #: The tracker's states of the first forward.
        self._random = None if get_tracker is None else _copied(get_tracker().get_states())

    def __call__(self, *args: Any) -> Any:
        replaying = self._started
        self._started = True
        if not replaying:
            return _without_leaves(self.function(*args, **self.kwargs), args)
        # The engine may recompute in a thread of its own, which sees neither the autocast nor the policy scope.
        with restored(self._state), scopes.reenter(self._scope), self._replayed():
            return self.function(*args, **self.kwargs)

    @contextmanager
    def _replayed(self) -> Iterator[None]:
        """Have the tracker draw what it drew in the first forward."""
        if self._get_tracker is None:
            yield
            return
        tracker = self._get_tracker()
        before = tracker.get_states()
        tracker.set_states(_copied(self._random))
        try:
            yield
        finally:
            tracker.set_states(before)


def _without_leaves(result: Any, args: tuple[Any, ...]) -> Any:
    """What a first forward returned, with detached tensors in place of parameters, such as the bias of a module with
    ``return_bias=True``.

    A reentrant checkpoint is an autograd Function. One that returns a leaf makes the leaf a result of its own: it is no
    leaf any more, and the recomputation, which reads it, would be recomputed in turn, without end.
    """
    if torch.is_grad_enabled():  # not reentrant
        return result
    found = [
        x.detach()
        if isinstance(x, torch.Tensor) and x.is_leaf and x.requires_grad and all(x is not a for a in args)
        else x
        for x in (result if isinstance(result, tuple) else (result,))
    ]
    return tuple(found) if isinstance(result, tuple) else found[0]


def _copied(states: Any) -> dict[str, Any]:
    """A tracker's states, which forks must not change: tensors, or generators where CUDA graphs can capture them."""
    return {
        name: state.clone_state() if isinstance(state, torch.Generator) else state.clone()
        for name, state in states.items()
    }


regions.mark_own(_Checkpointed.__call__.__code__)


def _keep_scales(context: Any, operation: Any, *args: Any, **kwargs: Any) -> torch_checkpoint.CheckpointPolicy:
    """What the compiler keeps of a checkpoint's first forward: the scales that it saw, nothing else."""
    policy = torch_checkpoint.CheckpointPolicy
    kept = operation is torch.ops.te_dispatch.snapshot.default
    return policy.MUST_SAVE if kept else policy.PREFER_RECOMPUTE


def _scales_kept() -> Any:
    return torch_checkpoint.create_selective_checkpoint_contexts(_keep_scales)


def _traced(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    preserve_rng_state: bool,
    options: dict[str, Any],
) -> Any:
    """In a compiled program the compiler recomputes, from the graph that it traced; there is one kind of checkpoint."""
    autocast = current_state()
    delayed = autocast is not None and (autocast.enabled or autocast.calibrating) and autocast.recipe.delayed()
    if delayed:
        if thread.traced is not None:
            raise NotImplementedError(
                "checkpoint: delayed scaling is not supported for a checkpoint inside a compiled region that contains "
                "the autocast too; put the autocast around the compiled call, or use another recipe"
            )
        if "context_fn" in options:
            raise NotImplementedError(
                "checkpoint: context_fn is not supported with delayed scaling inside a compiled region, which needs "
                "one of its own to keep scales; use another recipe, or leave it away"
            )
        options = {**options, "context_fn": _scales_kept}
    arguments = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state, **options, **kwargs}
    if not delayed or tracing.checkpoint:  # written outside of checkpoints only: dynamo refuses it inside
        return torch_checkpoint.checkpoint(function, *args, **arguments)
    tracing.checkpoint = True
    try:
        return torch_checkpoint.checkpoint(function, *args, **arguments)
    finally:
        tracing.checkpoint = False


def left_to_compiler() -> bool:
    """Whether a module that recomputes by itself must leave that to the compiler: where a graph for training is made
    under delayed scaling, a Function cannot keep the scales that its forward saw."""
    state = current_state()
    return (
        state is not None and (state.enabled or state.calibrating) and state.recipe.delayed()
        and torch.compiler.is_compiling() and graph_trains()
    )  # fmt: skip


def _check_distribution(tp_group: Any, use_reentrant: bool) -> None:
    """Raise unless the saved inputs can be distributed among the ranks of a group, of which one has all of them."""
    if not use_reentrant:
        raise ValueError("checkpoint: distribute_saved_activations=True needs use_reentrant=True")
    if tp_group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        tp_group = torch.distributed.group.WORLD
    require_one_rank("checkpoint with distribute_saved_activations", "tp_group", tp_group)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without keeping its activations, and again during the backward to have them.

    Built on `torch.utils.checkpoint.checkpoint`. The recomputation runs inside the autocast and the policy scope of
    the first forward and with its scales, so the result equals that without a checkpoint, bit for bit.

    Args:
        function: any function or module.
        args: its positional arguments. With ``use_reentrant=True`` gradients flow to these only.
        use_reentrant: as in PyTorch; True by default, as in Transformer Engine.
        preserve_rng_state: replay the random state in the recomputation; True by default.
        determinism_check, context_fn, debug, early_stop: as in PyTorch, with ``use_reentrant=False`` only.
        get_rng_state_tracker: a function that gives an RNG tracker, whose states are replayed in the recomputation too.
        distribute_saved_activations: divide the saved inputs among the ranks of `tp_group` (None for all ranks): no
            effect on one rank, not supported yet on several. It needs ``use_reentrant=True``.
        kwargs: everything else is passed to `function`.

    Returns:
        What `function` returns.

    Raises:
        NotImplementedError, ValueError: an argument that cannot be honoured; the message names it.
    """
    use_reentrant = kwargs.pop("use_reentrant", True)
    preserve_rng_state = kwargs.pop("preserve_rng_state", True)
    tp_group, get_tracker = kwargs.pop("tp_group", None), kwargs.pop("get_rng_state_tracker", None)
    if kwargs.pop("distribute_saved_activations", False):
        _check_distribution(tp_group, use_reentrant)
    options = {name: kwargs.pop(name) for name in _TORCH_ONLY_NON_REENTRANT if name in kwargs}
    if use_reentrant and options:
        raise ValueError(f"checkpoint: {next(iter(options))} needs use_reentrant=False, got use_reentrant=True")
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        reject_unsupported(
            "checkpoint in a compiled region", {"get_rng_state_tracker": get_tracker}, {"get_rng_state_tracker": None}
        )
        return _traced(function, args, kwargs, preserve_rng_state, options)
    global _reentrant
    _reentrant = bool(use_reentrant)
    return torch_checkpoint.checkpoint(
        _Checkpointed(function, kwargs, get_tracker),
        *args,
        use_reentrant=use_reentrant,
        preserve_rng_state=preserve_rng_state,
        **options,
    )
