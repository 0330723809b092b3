# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators' kernels compiled for an AMD chip and executed by `gfx_emulator`, a tool for tests, on CPU tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gfx_emulator import Kernel, Memory, arguments, code_object, machine, testing
from te_dispatch_triton import launch, probe, targets
from te_dispatch_triton.crosscompile.chips import TARGETS
from te_dispatch_triton.crosscompile.matrix import compile_for, specialization_of, type_of
from te_dispatch_triton.launch import Launch
from te_dispatch_triton.targets import Target

CPU = torch.device("cpu")


def missing() -> str | None:
    """Why nothing can be executed here, None if it can."""
    return testing.missing()


class Emulator:
    """Does launches for a chip.

    A kernel may access the storages of its arguments; one that is given addresses as numbers (in a tuple, or in a
    tensor of 64-bit integers) those of every tensor that is alive.

    Attributes:
        launches: names of the kernels that it executed, in order.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.launches: list[str] = []
        self._compiled: dict[Any, tuple[Kernel, int, int]] = {}

    def __call__(self, given: Launch) -> None:
        key = (given.kernel.name, given.config, specialization_of(given, self.target))
        if key not in self._compiled:
            binary = compile_for(given, self.target)
            kernel = code_object.load(binary.asm["hsaco"])[binary.metadata.name]
            self._compiled[key] = kernel, int(binary.metadata.shared), int(binary.metadata.num_warps)
        kernel, shared, warps = self._compiled[key]
        memory, values = Memory(), []
        for storage in _storages(given):
            _register(memory, storage)
        for parameter, value in zip(given.kernel.function.params, given.args):
            if type_of(value, specialized=not parameter.do_not_specialize) != "constexpr":
                values += _values(value)
        shown = [one for one in kernel.arguments if not one.kind.startswith("hidden_")]
        # After a kernel's own arguments Triton has pointers to scratch memory, which none here uses.
        values += [0] * (len(shown) - len(values))
        machine.launch(kernel, memory, given.grid, (64 * warps,), arguments.packed(kernel, values), dynamic_lds=shared)
        self.launches.append(given.kernel.name)


def _storages(given: Launch) -> list[torch.UntypedStorage]:
    """What a launch may access, each once."""
    tensors = [one for one in given.args if isinstance(one, torch.Tensor)]
    if any(isinstance(one, tuple) or getattr(one, "dtype", None) is torch.int64 for one in given.args):
        tensors += [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    storages = (one.untyped_storage() for one in tensors if one.device.type == "cpu" and one.layout is torch.strided)
    return list({one.data_ptr(): one for one in storages}.values())


def _register(memory: Memory, storage: torch.UntypedStorage) -> None:
    if storage.nbytes():
        raw = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
        memory.register(raw, address=storage.data_ptr(), name=f"{storage.nbytes()} bytes")


def _values(value: Any) -> Sequence[Any]:
    """An argument as the kernel reads it."""
    if isinstance(value, torch.Tensor):
        return [value.data_ptr()]
    if isinstance(value, tuple):
        return [np.int64(one) for one in value]
    return [np.float32(value) if isinstance(value, float) else value]


@contextmanager
def emulated(arch: str) -> Iterator[Emulator]:
    """CPU tensors are on an emulated chip: host code chooses for it, its kernels are compiled for it and executed.

    Dispatch reads a device's facts once per process. Enter this before the first call, or dispatch keeps the facts that
    the CPU had without it.
    """
    emulator = Emulator(TARGETS[arch])
    targets.pretend(CPU, TARGETS[arch])
    probe.emulate(arch)
    try:
        with launch.diverted(emulator):
            yield emulator
    finally:
        probe.emulate(None)
        targets.pretend(CPU, None)
