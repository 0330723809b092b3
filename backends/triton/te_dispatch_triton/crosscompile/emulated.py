# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators' kernels compiled for an AMD chip and executed by `gfx_emulator`, a tool for tests, on CPU tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton import knobs

from gfx_emulator import Kernel, Memory, arguments, code_object, machine
from te_dispatch_triton import launch, replay, targets
from te_dispatch_triton.crosscompile.chips import TARGETS
from te_dispatch_triton.crosscompile.matrix import compile_for, specialization_of, type_of
from te_dispatch_triton.crosscompile.pointees import Pointees, allocation, storages
from te_dispatch_triton.launch import Launch
from te_dispatch_triton.targets import Target

CPU = torch.device("cpu")
#: Objects that Python makes before it looks for garbage, while a chip is emulated.
_COLLECT_AFTER = 50_000


class Emulator:
    """Does launches for a chip.

    A kernel may access the storages of its arguments, and of tensors whose addresses it is given as numbers
    (`pointees`).

    Attributes:
        launches: names of the kernels that it executed, in order.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.launches: list[str] = []
        self._compiled: dict[Any, tuple[Kernel, int, int]] = {}
        self.pointees = Pointees()

    def __call__(self, given: Launch) -> None:
        key = (given.kernel.name, given.config, specialization_of(given, self.target))
        if key not in self._compiled:
            binary = compile_for(given, self.target)
            kernel = code_object.kernel(binary.asm["hsaco"], binary.metadata.name, self.target.arch)
            self._compiled[key] = kernel, int(binary.metadata.shared), int(binary.metadata.num_warps)
        kernel, shared, warps = self._compiled[key]
        memory, values = Memory(self.pointees.finder(given)), []
        for storage in storages(given):
            if storage.nbytes():
                memory.register(*allocation(storage))
        for parameter, value in zip(given.kernel.function.params, given.args):
            if type_of(value, specialized=not parameter.do_not_specialize) != "constexpr":
                values += _values(value)
        shown = [one for one in kernel.arguments if not one.kind.startswith("hidden_")]
        # After a kernel's own arguments Triton has pointers to scratch memory, which none here uses.
        values += [0] * (len(shown) - len(values))
        machine.launch(kernel, memory, given.grid, (64 * warps,), arguments.packed(kernel, values), dynamic_lds=shared)
        self.launches.append(given.kernel.name)

    def replayer(self, given: Launch) -> Callable[..., None]:
        """What does launches like a recorded one, given addresses for tensors (`launch.diverted`)."""
        dtypes = [x.dtype if isinstance(x, torch.Tensor) else None for x in given.args]
        first = 4  # behind the grid and the stream

        def run(*told: Any) -> None:
            args = told[first : first + len(dtypes)]
            there = [x if dtype is None else self.pointees.tensor(x, dtype) for x, dtype in zip(args, dtypes)]
            self(given._replace(grid=told[:3], args=tuple(there)))

        return run


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

    Dispatch still sees the host's facts; `te_dispatch.core.emulation.emulated` enters this and sees to them, too.
    """
    emulator = Emulator(TARGETS[arch])
    targets.pretend(CPU, TARGETS[arch])
    thresholds = gc.get_threshold()
    # Compiling and executing makes many objects that hold no others; by default a tenth of the time is the collector's.
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    try:
        with knobs.compilation.scope(), launch.diverted(emulator, emulator.replayer), replay.on_the_host():
            # Which line of a kernel an instruction comes from, nobody asks here; it takes a tenth of a compilation.
            knobs.compilation.disable_line_info = True
            yield emulator
    finally:
        gc.set_threshold(*thresholds)
        targets.pretend(CPU, None)
        emulator.pointees.close()
