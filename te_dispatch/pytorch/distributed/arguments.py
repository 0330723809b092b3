# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The arguments of tensor and context parallelism.

On one rank they ask for no communication. What is left of them: attributes of modules, marks on parameters that
Megatron and optimizers read, and the random states that initialization and dropout draw from. What ranks of a
tensor-parallel group exchange stands in `tensor_parallel`; context-parallel groups of several ranks are refused.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from te_dispatch.core import scopes
from te_dispatch.pytorch.arguments import require_choice
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


class Division(NamedTuple):
    """How the ranks of a group divide the weights of a module.

    Attributes:
        group: the process group, of several ranks.
        column: whether the first product's weight is divided by outputs. row: the last one's by inputs.
        sequence: whether the ranks divide the tokens outside of the module.
    """

    group: Any
    column: bool
    row: bool
    sequence: bool


def _ranks(owner: str, argument: str, group: Any) -> int:
    """How many ranks a group has; None stands for one.

    Raises:
        TypeError: it is neither None nor a process group.
    """
    if group is None:
        return 1
    if not isinstance(group, torch.distributed.ProcessGroup):
        expected = "a torch.distributed.ProcessGroup or None"
        raise TypeError(f"{owner}: {argument} must be {expected}, got {type(group).__name__}")
    return group.size()


def require_one_rank(owner: str, argument: str, group: Any) -> None:
    """Raise unless a group is None or has one rank.

    Raises:
        TypeError: it is neither None nor a process group. NotImplementedError: it has several ranks.
    """
    if _ranks(owner, argument, group) != 1:
        raise NotImplementedError(f"{owner}: {argument} of {group.size()} ranks is not supported yet, only of one rank")


def _require_group_of(module: Any, owner: str, tp_group: Any) -> None:
    """Raise unless a module can take a tensor-parallel group.

    Raises:
        TypeError: it is neither None nor a process group. ValueError: it has others than `tp_size` ranks.
    """
    ranks = _ranks(owner, "tp_group", tp_group)
    if tp_group is not None and ranks != module.tp_size:
        raise ValueError(f"{owner}: tp_group has {ranks} ranks, and the parameters were made for {module.tp_size}")


class _TensorGroup:
    """`ParallelModule.tp_group`, in the module's dictionary under its own name."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return None if module is None else module.__dict__.get("tp_group")

    def __set__(self, module: Any, value: Any) -> None:
        _require_group_of(module, type(module).__name__, value)
        module.__dict__["tp_group"] = value
        calls = module.__dict__.get("captured_calls")
        if calls is not None:
            calls.forget()


class _TensorRanks:
    """`ParallelModule.tp_size`: what the constructor made the parameters for."""

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return 1 if module is None else module.__dict__.get("_parts") or module.__dict__.get("tp_size", 1)

    def __set__(self, module: Any, value: Any) -> None:
        name = type(module).__name__
        if "_parts" not in module.__dict__:  # a subclass, before it calls the constructor, which says what counts
            module.__dict__["tp_size"] = value
            return
        if value != module.tp_size:
            raise AttributeError(
                f"{name}: tp_size cannot become {value!r}, the parameters were made for tp_size={module.tp_size}; "
                f"construct a module with tp_size={value!r}"
            )


class _Group:
    """A context-parallel group, or a list of groups that stands for one, in the module's dictionary under its name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return None if module is None else module.__dict__.get(self.name)

    def __set__(self, module: Any, value: Any) -> None:
        for group in value if isinstance(value, list | tuple) else (value,):
            require_one_rank(type(module).__name__, self.name, group)
        module.__dict__[self.name] = value


class ParallelModule(Composable):
    """A module that takes the arguments of tensor parallelism.

    Attributes:
        tp_group: the process group, or None. tp_size: its ranks.
        sequence_parallel: whether activations are divided along the sequence: not on one rank.
        parallel_mode: how the weight is divided, or would be. set_parallel_mode: whether those of the parts are.
        get_rng_state_tracker, rng_tracker_name, ub_name: as given.
    """

    tp_group = _TensorGroup()
    tp_size = _TensorRanks()
    #: `tp_size`, for calls: that is a descriptor, which takes longer.
    _parts = 1
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
        ranks = self._ranks_of(owner, given["tp_group"], given["tp_size"])
        require_choice(f"{owner}: parallel_mode", given.get("parallel_mode"), PARALLEL_MODES)
        tracker = given["get_rng_state_tracker"]
        if tracker is not None and not callable(tracker):
            raise TypeError(f"{owner}: get_rng_state_tracker must be a function that gives a tracker, got {tracker!r}")
        self._parts = ranks
        # Whatever a subclass has set before it called this constructor.
        self.sequence_parallel = ranks > 1 and bool(given["sequence_parallel"])
        for name in _KEPT:
            if given.get(name):
                setattr(self, name, given[name])

    @staticmethod
    def _ranks_of(owner: str, tp_group: Any, tp_size: Any) -> int:
        """How many ranks a constructor's arguments name.

        Raises:
            TypeError, ValueError: an argument that is none of its kind, or the two name different numbers.
        """
        if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
            raise ValueError(f"{owner}: tp_size must be a positive int, got {tp_size!r}")
        if tp_group is None:
            return tp_size
        ranks = _ranks(owner, "tp_group", tp_group)
        if tp_size not in (1, ranks):
            raise ValueError(f"{owner}: tp_size={tp_size} and a tp_group of {ranks} ranks contradict each other")
        return ranks

    @property
    def _division(self) -> Division | None:
        """How the ranks divide the module's weights; None for one rank."""
        if self._parts == 1 or self.parallel_mode is None:
            return None
        column, row = (self.parallel_mode == mode for mode in ("column", "row"))
        return Division(self.tp_group, column, row, self.sequence_parallel)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel group of this module and its parts.

        Raises:
            TypeError: it is neither None nor a process group. ValueError: it has others than `tp_size` ranks.
                Nothing is set then.
        """
        parts = [module for module in self.modules() if isinstance(module, ParallelModule)]
        for part in parts:
            _require_group_of(part, f"{type(self).__name__}.set_tensor_parallel_group", tp_group)
        for part in parts:
            part.tp_group = tp_group

    def _require_parallel_mode(self) -> None:
        """Raise for parts that several ranks would divide, and whose results nobody would add up.

        Raises:
            ValueError: `set_parallel_mode` is False.
        """
        if self._parts > 1 and not self.set_parallel_mode:
            raise ValueError(f"{type(self).__name__}: tp_size={self._parts} needs set_parallel_mode=True")

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

    cp_group = _Group()
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
