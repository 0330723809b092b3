# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The arguments of tensor and context parallelism, on one rank.

On one rank they ask for no communication. What is left of them: attributes of modules, marks on parameters that
Megatron and optimizers read, and the random states that initialization and dropout draw from. Groups of several ranks
are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from te_dispatch.core import scopes
from te_dispatch.pytorch.arguments import reject_unsupported, require_choice
from te_dispatch.pytorch.assignment import Only
from te_dispatch.pytorch.composable import Composable

#: How a GEMM's weight is divided among the ranks of a tensor-parallel group: not, by outputs or by inputs.
PARALLEL_MODES = (None, "column", "row")

#: How ranks of a context-parallel group exchange keys and values.
CONTEXT_COMMUNICATION = ("p2p", "all_gather", "a2a", "a2a+p2p")


class CPLoadBalancingStrategy(enum.Enum):
    """How ranks of a context-parallel group divide the tokens: two chunks each, from both ends; or one after the other.

    On one rank it has no effect.
    """

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


#: Arguments that are kept as attributes of the same name.
_KEPT = ("tp_group", "parallel_mode", "set_parallel_mode", "get_rng_state_tracker", "rng_tracker_name", "ub_name")


#: The same of context parallelism, in the order in which `set_context_parallel_group` takes them.
_KEPT_OF_CONTEXT = ("cp_group", "cp_global_ranks", "cp_stream", "cp_comm_type")


def require_one_rank(owner: str, argument: str, group: Any) -> None:
    """Raise unless a group is None or has one rank.

    Raises:
        TypeError: it is neither None nor a process group. NotImplementedError: it has several ranks.
    """
    if group is None:
        return
    if not isinstance(group, torch.distributed.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup or None"
        raise TypeError(f"{owner}: {argument} must be {expected}, got {type(group).__name__}")
    if group.size() != 1:
        raise NotImplementedError(f"{owner}: {argument} of {group.size()} ranks is not supported yet, only of one rank")


def require_one_tensor_rank(owner: str, tp_group: Any, tp_size: Any) -> None:
    """`require_one_rank` of a tensor-parallel group; without a group, `tp_size` says how many ranks there are."""
    if tp_group is None:
        reject_unsupported(owner, {"tp_size": tp_size}, {"tp_size": 1})
    require_one_rank(owner, "tp_group", tp_group)


class _Group:
    """A process group that is an attribute of a module, in whose dictionary it is under its own name.

    Args:
        several: whether a list of groups may stand for one.
    """

    def __init__(self, several: bool) -> None:
        self.several = several

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return None if module is None else module.__dict__.get(self.name)

    def __set__(self, module: Any, value: Any) -> None:
        for group in value if self.several and isinstance(value, list | tuple) else (value,):
            require_one_rank(type(module).__name__, self.name, group)
        module.__dict__[self.name] = value


class ParallelModule(Composable):
    """A module that takes the arguments of tensor parallelism.

    Attributes:
        tp_group: the process group, of one rank, or None. tp_size: its ranks, 1.
        sequence_parallel: whether activations are divided along the sequence: not on one rank.
        parallel_mode: how the weight would be divided. set_parallel_mode: whether those of the parts are.
        get_rng_state_tracker, rng_tracker_name, ub_name: as given.
    """

    tp_group = _Group(several=False)
    tp_size = Only(1)
    sequence_parallel = False
    parallel_mode: str | None = None
    set_parallel_mode = False
    get_rng_state_tracker: Any = None
    rng_tracker_name: str | None = None
    ub_name: str | None = None

    def _keep_parallel(self, given: Mapping[str, Any]) -> None:
        """Check a constructor's arguments, and keep them as attributes.

        Raises:
            NotImplementedError, TypeError, ValueError: an argument that cannot be honoured; it is named.
        """
        owner = type(self).__name__
        require_one_tensor_rank(owner, given["tp_group"], given["tp_size"])
        require_choice(f"{owner}: parallel_mode", given.get("parallel_mode"), PARALLEL_MODES)
        tracker = given["get_rng_state_tracker"]
        if tracker is not None and not callable(tracker):
            raise TypeError(f"{owner}: get_rng_state_tracker must be a function that gives a tracker, got {tracker!r}")
        self.sequence_parallel = False  # whatever a subclass has set before it called this constructor
        for name in _KEPT:
            if given.get(name):
                setattr(self, name, given[name])

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel group of this module and its parts.

        Raises:
            TypeError: it is neither None nor a process group. NotImplementedError: it has several ranks.
        """
        require_one_rank(f"{type(self).__name__}.set_tensor_parallel_group", "tp_group", tp_group)
        for module in self.modules():
            if isinstance(module, ParallelModule):
                module.tp_group = tp_group

    def _initialize(self, init: Callable[[torch.Tensor], Any], weight: torch.Tensor) -> None:
        """Fill a weight from the tracker's random state, where there is one."""
        with forked(self.get_rng_state_tracker, self.rng_tracker_name):
            init(weight)


class ContextParallelModule(ParallelModule):
    """A module that takes the arguments of context parallelism, too.

    Attributes:
        cp_group: a process group of one rank, a list of such, or None. cp_size, cp_rank: its ranks, 1, and this one, 0.
        cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy: as given; of no effect on one rank.
    """

    cp_group = _Group(several=True)
    cp_size = Only(1)
    cp_rank = Only(0)
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type = "p2p"
    load_balancing_strategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP

    def _keep_context(self, given: Mapping[str, Any]) -> None:
        """Check a constructor's arguments, and keep them as attributes.

        Raises:
            NotImplementedError, TypeError, ValueError: an argument that cannot be honoured; it is named.
        """
        require_one_context_rank(type(self).__name__, given["cp_group"], given["cp_comm_type"])
        for name in _KEPT_OF_CONTEXT:
            setattr(self, name, given[name])

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any,
        cp_stream: Any,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: CPLoadBalancingStrategy = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """Set the context-parallel group of this module and its parts. On one rank, the rest has no effect.

        Raises:
            TypeError, ValueError: an argument that is none of its kind. NotImplementedError: several ranks.
        """
        owner = f"{type(self).__name__}.set_context_parallel_group"
        require_one_context_rank(owner, cp_group, cp_comm_type)
        if not isinstance(load_balancing_strategy, CPLoadBalancingStrategy):
            raise TypeError(
                f"{owner}: load_balancing_strategy must be a CPLoadBalancingStrategy, got "
                f"{type(load_balancing_strategy).__name__}"
            )
        kept = cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy
        for module in self.modules():
            if isinstance(module, ContextParallelModule):
                for name, value in zip((*_KEPT_OF_CONTEXT, "load_balancing_strategy"), kept, strict=True):
                    setattr(module, name, value)


def require_one_context_rank(owner: str, cp_group: Any, cp_comm_type: str) -> None:
    """`require_one_rank` of context parallelism's group or, for ``a2a+p2p``, of each of its groups."""
    require_choice(f"{owner}: cp_comm_type", cp_comm_type, CONTEXT_COMMUNICATION)
    for group in cp_group if isinstance(cp_group, list | tuple) else (cp_group,):
        require_one_rank(owner, "cp_group", group)


@contextmanager
def forked(get_rng_state_tracker: Callable[[], Any] | None, name: str | None = None) -> Iterator[None]:
    """Draw random numbers from a tracker's state `name` (its default state for None); without a tracker, as always."""
    # The states of a tracker outlive a plan, in which nothing is drawn.
    if get_rng_state_tracker is None or not scopes.capture().makes_calls:
        yield
        return
    tracker = get_rng_state_tracker()
    with tracker.fork(name) if name else tracker.fork():
        yield


def mark_divided(parameter: torch.Tensor, dim: int) -> None:
    """Mark a parameter as one that a tensor-parallel group divides along `dim`, in the names that Megatron reads."""
    for name, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
        setattr(parameter, name, value)


def mark_sequence_parallel(parameter: torch.Tensor, sequence_parallel: bool) -> None:
    """Mark whether the gradient of a parameter has to be summed over the ranks that divide the sequence."""
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
