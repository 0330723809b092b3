# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Random states by name, for parts of a model that draw numbers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from te_dispatch.pytorch.arguments import resolve_device

#: The state that `fork` takes if it is not told which, as in Transformer Engine and Megatron.
DEFAULT_STATE = "model-parallel-rng"


#: The states of the tracker that was last given some.
_registered: dict[str, torch.Tensor] = {}


def get_all_rng_states() -> dict[str, torch.Tensor]:
    """The states by name of the tracker that was last given some, as they are now; empty before the first.

    What `set_all_rng_states` was given counts as such a tracker's.
    """
    return _registered


def set_all_rng_states(states: dict[str, torch.Tensor]) -> None:
    """Have `get_all_rng_states` return `states`, for trackers of other programs. No tracker's states change."""
    global _registered
    _registered = states


class RngStatesTracker:
    """Named states of the current device's random number generator: of the accelerator, or of the CPU without one.

    Transformer Engine calls it `CudaRNGStatesTracker`.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name, as `set_states` takes them. Later forks do not change them."""
        return dict(self._states)

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Have these states instead of all others."""
        self._states = dict(states)
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
        generator = torch.Generator(resolve_device(None))
        self._states[name] = generator.manual_seed(seed).get_state()
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
        generators = _generators()
        before = generators.get_rng_state()
        generators.set_rng_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = generators.get_rng_state()
            generators.set_rng_state(before)


def _generators() -> Any:
    """The module with `get_rng_state` and `set_rng_state` of the current device."""
    device = resolve_device(None)
    return torch.random if device.type == "cpu" else torch.get_device_module(device)
