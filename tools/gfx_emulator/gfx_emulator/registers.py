# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The registers of the waves that are executed together, and a view of those that stand at the same instruction.

A batch holds W waves of 64 lanes. Registers are arrays over all of them, so that an instruction is executed for every
lane of every wave by one NumPy operation:

- vector registers: uint32 ``[rows, W, 64]``; accumulation registers follow the ordinary ones, from `accum_offset` on;
- scalar registers: uint32 ``[128, W]`` by their number as an operand, VCC, M0 and EXEC included;
- SCC: bool ``[W]``; MODE: uint32 ``[W]``.

EXEC is held twice: as two scalar registers and as bool ``[W, 64]``, which follows every write of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gfx_emulator.arrays import LANES, Array, pack, unpack
from gfx_emulator.lds import Lds
from gfx_emulator.memory import Memory

#: Numbers of special scalar registers in the operand space.
FLAT_SCRATCH, XNACK_MASK, VCC, M0, EXEC = 102, 104, 106, 124, 126
#: MODE.FP16_OVFL: conversions to FP16 and FP8 saturate instead of giving Inf or NaN.
MODE_FP16_OVFL = 1 << 23


class Batch:
    """Registers of W waves, all zero but EXEC, which is all ones; and what they share.

    Attributes:
        memory: global memory.
        lds: local memory of the batch's workgroups.
        scratch: private memory: uint32 ``[words, W, 64]``.
        workgroup: int64 ``[W]``, each wave's workgroup in the batch.
        wave: uint8 ``[W]``, each wave's number in its workgroup.
        names: of workgroups, for messages.
    """

    def __init__(
        self, memory: Memory, lds: Lds, workgroup: Array, wave: Array, vgprs: int, accum_offset: int, scratch: int = 0
    ) -> None:
        waves = len(wave)
        self.memory, self.lds, self.workgroup, self.wave = memory, lds, workgroup, wave
        self.waves, self.accum_offset = waves, accum_offset
        self.names = [str(number) for number in range(int(workgroup.max()) + 1)]
        self.scratch = np.zeros(((scratch + 3) // 4, waves, LANES), np.uint32)
        self.vector = np.zeros((max(vgprs, accum_offset), waves, LANES), np.uint32)
        self.scalar = np.zeros((128, waves), np.uint32)
        self.scc = np.zeros(waves, np.bool_)
        self.mode = np.zeros(waves, np.uint32)
        self.exec = np.ones((waves, LANES), np.bool_)
        self.scalar[EXEC : EXEC + 2] = 0xFFFFFFFF


@dataclass(frozen=True)
class Jump:
    """A branch to an offset in the code, of the waves in `taken` (bool ``[n]``)."""

    target: int
    taken: Array


@dataclass(frozen=True)
class End:
    """The waves are done."""


@dataclass(frozen=True)
class Barrier:
    """The waves wait until all waves of their workgroups do."""


@dataclass(frozen=True)
class Yield:
    """Others may run."""


class Active:
    """The waves of a batch that stand at one instruction.

    Attributes:
        rows: their places among the batch's waves: ``slice(None)`` if all, else int64 ``[n]``.
        identity: int64 ``[n]``, those places as an array.
        mask: EXEC as bool ``[n, 64]``; None where every lane is active.
        signal: set by an instruction that changes the order of execution.
    """

    def __init__(self, batch: Batch, rows: Any) -> None:
        self.batch, self.rows = batch, rows
        self.identity: Array = np.arange(batch.waves)[rows]
        self.count = len(self.identity)
        self.mask: Array | None = None
        self.signal: Jump | End | Barrier | Yield | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over EXEC after it was written."""
        mask = self.batch.exec[self.rows]
        self.mask = None if mask.all() else mask

    def active_lanes(self) -> Array:
        """bool ``[n, 64]``."""
        return self.batch.exec[self.rows] if self.mask is None else self.mask

    def v(self, number: int) -> Array:
        """A vector register: uint32 ``[n, 64]``, a view where all waves are active."""
        value: Array = self.batch.vector[number][self.rows]
        return value

    def s(self, number: int) -> Array:
        """A scalar register: uint32 ``[n]``."""
        value: Array = self.batch.scalar[number][self.rows]
        return value

    def s64(self, number: int) -> Array:
        """A pair of scalar registers: uint64 ``[n]``."""
        low, high = self.s(number), self.s(number + 1)
        return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)

    def v64(self, number: int) -> Array:
        """A pair of vector registers: uint64 ``[n, 64]``."""
        return self.v(number).astype(np.uint64) | self.v(number + 1).astype(np.uint64) << np.uint64(32)

    def set_v(self, number: int, value: Array, mask: Array | None = None) -> None:
        """Write a vector register in the active lanes, or in those of a mask (bool ``[n, 64]``) that replaces EXEC."""
        mask = self.mask if mask is None else mask
        target = self.batch.vector[number]
        if mask is None:
            target[self.rows] = value
        elif isinstance(self.rows, slice):
            np.copyto(target, value, where=mask, casting="unsafe")
        else:
            target[self.rows] = np.where(mask, value, target[self.rows])

    def set_v64(self, number: int, value: Array, mask: Array | None = None) -> None:
        self.set_v(number, (value & np.uint64(0xFFFFFFFF)).astype(np.uint32), mask)
        self.set_v(number + 1, (value >> np.uint64(32)).astype(np.uint32), mask)

    def set_s(self, number: int, value: Any) -> None:
        self.batch.scalar[number][self.rows] = value
        if number >= EXEC:
            self._exec_written()

    def set_s64(self, number: int, value: Array) -> None:
        self.batch.scalar[number][self.rows] = (value & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        self.batch.scalar[number + 1][self.rows] = (value >> np.uint64(32)).astype(np.uint32)
        if number >= EXEC:
            self._exec_written()

    def set_mask(self, number: int, lanes: Array) -> None:
        """Write bool ``[n, 64]`` to a pair of scalar registers."""
        words = pack(lanes)
        self.batch.scalar[number][self.rows] = words[:, 0]
        self.batch.scalar[number + 1][self.rows] = words[:, 1]
        if number >= EXEC:
            self._exec_written()

    def mask_of(self, number: int) -> Array:
        """A pair of scalar registers as bool ``[n, 64]``."""
        words = np.empty((self.count, 2), np.uint32)
        words[:, 0], words[:, 1] = self.s(number), self.s(number + 1)
        return unpack(words)

    def scc(self) -> Array:
        """bool ``[n]``."""
        value: Array = self.batch.scc[self.rows]
        return value

    def set_scc(self, value: Any) -> None:
        self.batch.scc[self.rows] = value

    def _exec_written(self) -> None:
        self.batch.exec[self.rows] = self.mask_of(EXEC)
        self.refresh()
