# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Random states by name, for parts of a model that draw numbers of their own.

On a CUDA device a state is a `torch.Generator`, whose state the device's own generator shares while a fork lasts. A
CUDA graph can then capture what is drawn in a fork: its replays advance the state. Elsewhere a state is the tensor that
the generator's ``get_state`` gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from te_dispatch.pytorch.arguments import resolve_device

#: The state that `fork` takes if it is not told which, as in Transformer Engine and Megatron.
DEFAULT_STATE = "model-parallel-rng"


State: TypeAlias = "torch.Tensor | torch.Generator"

#: The states of the tracker that was last given some.
_registered: dict[str, State] = {}

_trackers: weakref.WeakSet[RngStatesTracker] = weakref.WeakSet()


def get_all_rng_states() -> dict[str, State]:
    """The states by name of the tracker that was last given some, as they are now; empty before the first.

    What `set_all_rng_states` was given counts as such a tracker's.
    """
    return _registered


def set_all_rng_states(states: dict[str, State]) -> None:
    """Have `get_all_rng_states` return `states`, for trackers of other programs. No tracker's states change."""
    global _registered
    _registered = states


def graph_safe_rng_available() -> bool:
    """Whether PyTorch has random states that a CUDA graph can draw from: where it was built for GPUs."""
    return hasattr(torch.Generator, "graphsafe_set_state") and hasattr(torch.cuda.CUDAGraph, "register_generator_state")


def is_graph_safe_rng_state(state: State) -> bool:
    """Whether a random state is one that a CUDA graph can draw from: a generator, not the tensor of its state."""
    return graph_safe_rng_available() and isinstance(state, torch.Generator)


def validate_ctx_manager(ctx: Callable[[], Any]) -> None:
    """Enter and leave what a function returns.

    Raises:
        ValueError: it is no context manager, or raises.
    """
    try:
        with ctx():
            pass
    except Exception as error:
        raise ValueError(f"a function that gives a context manager is needed, got {ctx!r}: {error}") from error


def validate_rng_states_func(get_rng_tracker: Callable[[], Any]) -> None:
    """Check what modules take as `get_rng_state_tracker`: a function that gives a tracker, whose `fork` can be entered.

    Raises:
        TypeError: no function, or its tracker lacks one of `get_states`, `set_states` and `fork`. RuntimeError: the
            function raises. ValueError: `fork` does.
    """
    if not callable(get_rng_tracker):
        raise TypeError(f"get_rng_tracker must be a function that gives a tracker, got {get_rng_tracker!r}")
    try:
        tracker = get_rng_tracker()
    except Exception as error:
        raise RuntimeError(f"get_rng_tracker raised {type(error).__name__}: {error}") from error
    lacks = [name for name in ("get_states", "set_states", "fork") if not callable(getattr(tracker, name, None))]
    if lacks:
        raise TypeError(f"the tracker of get_rng_tracker, a {type(tracker).__name__}, has no method {', '.join(lacks)}")
    validate_ctx_manager(tracker.fork)


def tracked_generators(device: torch.device) -> list[torch.Generator]:
    """The generators on a device that trackers hold, and those that `set_all_rng_states` was given."""
    states = [*_registered.values(), *(state for tracker in _trackers for state in tracker.states())]
    found = {id(x): x for x in states if isinstance(x, torch.Generator) and x.device.type == device.type}
    return [x for x in found.values() if x.device.index in (None, device.index)]


class RngStatesTracker:
    """Named states of the current device's random number generator: of the accelerator, or of the CPU without one.

    Transformer Engine calls it `CudaRNGStatesTracker`.
    """

    def __init__(self) -> None:
        self.reset()
        _trackers.add(self)

    def reset(self) -> None:
        """Forget all states."""
        self._states: dict[str, State] = {}
        self._seeds: set[int] = set()

    def states(self) -> list[State]:
        """The states themselves, which forks change."""
        return list(self._states.values())

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name, as `set_states` takes them. Later forks do not change them."""
        return {name: _as_tensor(state) for name, state in self._states.items()}

    def set_states(self, states: Mapping[str, State]) -> None:
        """Have these states instead of all others. CUDA graphs that draw from a state of the same name go on from it.

        Args:
            states: by name: of `get_states`, or generators, whose states are copied.
        """
        before, device = self._states, resolve_device(None)
        self._states = {}
        for name, state in states.items():
            value = _as_tensor(state)
            if device.type == "cuda":
                known = before.get(name)
                generator = known if isinstance(known, torch.Generator) else torch.Generator(device)
                generator.set_state(value)
                self._states[name] = generator
            else:
                self._states[name] = value
        set_all_rng_states(self._states)

    def add(self, name: str, seed: int) -> None:
        """Add the state that a generator has after ``manual_seed(seed)``.

        Raises:
            RuntimeError: the name or the seed is in use.
        """
        if seed in self._seeds:
            raise RuntimeError(f"seed {seed} is in use already; every state needs a seed of its own")
        if name in self._states:
            raise RuntimeError(f"a state {name!r} is there already")
        self._seeds.add(seed)
        device = resolve_device(None)
        generator = torch.Generator(device).manual_seed(seed)
        self._states[name] = generator if device.type == "cuda" else generator.get_state()
        set_all_rng_states(self._states)

    @contextmanager
    def fork(self, name: str = DEFAULT_STATE) -> Iterator[None]:
        """Draw from the state `name`, and keep what it comes to; the generator's own state is as before afterwards.

        Raises:
            KeyError: no such state was added.
        """
        if name not in self._states:
            known = ", ".join(map(repr, self._states)) or "none"
            raise KeyError(f"no random state {name!r} was added, only {known}")
        state = self._states[name]
        if isinstance(state, torch.Generator):
            with _sharing(state):
                yield
            return
        generators = _generators()
        before = generators.get_rng_state()
        generators.set_rng_state(state)
        try:
            yield
        finally:
            self._states[name] = generators.get_rng_state()
            generators.set_rng_state(before)


def _as_tensor(state: State) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state


@contextmanager
def _sharing(generator: torch.Generator) -> Iterator[None]:
    """Have the current device's own generator draw from the state of another, which is not copied."""
    index = torch.cuda.current_device()  # first: it makes the generators where nothing has used the device yet
    own = torch.cuda.default_generators[index]
    before = own.graphsafe_get_state()
    own.graphsafe_set_state(generator)
    try:
        yield
    finally:
        own.graphsafe_set_state(before)


def _generators() -> Any:
    """The module with `get_rng_state` and `set_rng_state` of the current device."""
    device = resolve_device(None)
    return torch.random if device.type == "cpu" else torch.get_device_module(device)
