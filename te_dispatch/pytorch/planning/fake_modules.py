# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A module, and the arguments of its forward, as copies whose tensors have no data.

What the copies do to themselves, the originals do not see. Only what a copy could not work with is shared: process
groups, and the names under which ranks know a module's states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from te_dispatch.core.errors import DispatchError
from te_dispatch.pytorch.fp8.module_state import Fp8State


class PlanningError(DispatchError):
    """A module that cannot be planned; the message says why, and what to do."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that need not exist.

    Attributes:
        shape, dtype: its. It is contiguous, and on the device of the module's parameters.
        requires_grad: whether a gradient is computed for it; of dtypes that have none, no.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    requires_grad: bool = True

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise TypeError(f"TensorSpec: shape must be a tuple of sizes, got {shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"TensorSpec: dtype must be a torch.dtype, got {self.dtype!r}")
        object.__setattr__(self, "shape", tuple(shape))


class Fakes:
    """Makes copies without data, one of each tensor. Used while the mode is entered.

    Args:
        mode: a FakeTensorMode.
        home: where tensors are that have no device of their own: specs, and tensors on the meta device.
    """

    def __init__(self, mode: Any, home: torch.device) -> None:
        self._mode = mode
        self._home = home
        #: By id: the copy, and what it is a copy of, which is kept so that no other gets its id.
        self._made: dict[int, tuple[torch.Tensor, Any]] = {}

    def value(self, given: Any) -> Any:
        """An argument, with copies of the tensors in it."""
        return tree_map(lambda one: self._leaf(one), given)

    def _leaf(self, given: Any) -> Any:
        if isinstance(given, torch.Tensor):
            return self.tensor(given)
        if isinstance(given, TensorSpec):
            differentiable = given.dtype.is_floating_point or given.dtype.is_complex
            wants = given.requires_grad and differentiable
            return torch.empty(given.shape, dtype=given.dtype, device=self._home, requires_grad=wants)
        return given

    def tensor(self, given: torch.Tensor) -> torch.Tensor:
        found = self._made.get(id(given))
        if found is None:
            found = self._made[id(given)] = self._copy(given), given
        return found[0]

    def _copy(self, given: torch.Tensor) -> torch.Tensor:
        foreign = getattr(given, "fake_mode", self._mode) is not self._mode
        if not (given.is_meta or foreign or given.is_inference()):
            made: torch.Tensor = self._mode.from_tensor(given)
        else:
            device = self._home if given.is_meta else given.device
            made = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=device)
            made.requires_grad_(given.requires_grad)
        if isinstance(given, torch.nn.Parameter):
            if not isinstance(made, torch.nn.Parameter):
                made = torch.nn.Parameter(made, given.requires_grad)
            # Marks of Megatron's, and `main_grad`.
            for name, value in given.__dict__.items():
                made.__dict__[name] = self.tensor(value) if isinstance(value, torch.Tensor) else value
        return made

    def module(self, given: torch.nn.Module) -> torch.nn.Module:
        """A copy of a module.

        Raises:
            PlanningError: it holds something that cannot be copied.
        """
        memo: dict[int, Any] = {}
        for tensor in (*given.parameters(), *given.buffers()):
            memo[id(tensor)] = self.tensor(tensor)
        for one in _shared(given):
            memo[id(one)] = one
        try:
            with _Copying(self):
                made: torch.nn.Module = copy.deepcopy(given, memo)
        except Exception as error:
            raise PlanningError(
                f"{type(given).__name__} cannot be planned, because it cannot be copied: "
                f"{type(error).__name__}: {error}; plan the part of it that holds modules of te_dispatch"
            ) from error
        for part in made.modules():
            part.__dict__.pop("_compiled_call_impl", None)  # what `Module.compile` calls instead
        return made


class _Copying(TorchFunctionMode):
    """Has `copy.deepcopy` make copies without data of tensors."""

    def __init__(self, fakes: Fakes) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__deepcopy__:
            return self._fakes.tensor(args[0])
        return function(*args, **(kwargs or {}))


def _shared(module: torch.nn.Module) -> Iterator[Any]:
    """What a copy has in common with the module."""
    group = torch.distributed.ProcessGroup if torch.distributed.is_available() else ()
    for part in module.modules():
        state = part.__dict__.get("fp8_state")
        if isinstance(state, Fp8State):
            yield state.scales.origin  # counts its copies, whose names ranks compare
        for value in part.__dict__.values():
            if isinstance(value, group):
                yield value
