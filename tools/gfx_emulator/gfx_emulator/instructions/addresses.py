# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What instructions that access memory have in common: accesses of the active lanes, and errors that name the lane."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from gfx_emulator.arrays import LANES, Array, whole
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import AccessError, RaceError
from gfx_emulator.lds import Race
from gfx_emulator.memory import OutsideError
from gfx_emulator.registers import Active


class Lanes:
    """The lanes that an access is made for, as flat arrays in the order of waves and, in a wave, of lanes.

    Args:
        mask: which, bool ``[n, 64]``; None for EXEC.

    Attributes:
        row, lane: int64 ``[k]``, places in the arrays ``[n, 64]`` of the active waves.
    """

    def __init__(self, active: Active, mask: Array | None = None) -> None:
        self.active = active
        mask = active.mask if mask is None else mask
        #: Whether it is every lane, of which arrays need not be taken apart.
        self._every = mask is None
        places: tuple[Array, ...] = _places(active.count) if mask is None else np.nonzero(mask)
        self.row, self.lane = places

    def among(self, chosen: Array) -> Lanes:
        """Some of the lanes: bool ``[k]``."""
        found = Lanes(self.active)
        found._every, found.row, found.lane = False, self.row[chosen], self.lane[chosen]
        return found

    def of(self, value: Array) -> Array:
        """Those lanes' values of an array ``[n, 64]``, or of one that broadcasts to it."""
        full = whole(value, self.active.count)
        if self._every:
            return full.flatten()
        chosen: Array = full[self.row, self.lane]
        return chosen

    def words(self, number: int, count: int) -> Array:
        """Bytes of registers from a number on: uint8 ``[k, 4 * count]``."""
        values = np.empty((len(self.row), count), np.uint32)
        for word in range(count):
            values[:, word] = self.of(self.active.v(number + word))
        return values.view(np.uint8)

    def put(self, number: int, values: Array) -> None:
        """Write uint32 ``[k]`` to a register's lanes."""
        if self._every:
            self.active.batch.vector[number][self.active.rows] = values.reshape(-1, LANES)
            return
        rows = self.active.identity[self.row]
        self.active.batch.vector[number][rows, self.lane] = values

    def put_bytes(self, number: int, data: Array) -> None:
        """Write uint8 ``[k, 4 * count]`` to registers from a number on."""
        words = np.ascontiguousarray(data).view(np.uint32)
        for word in range(words.shape[1]):
            self.put(number + word, words[:, word])

    def wave(self) -> Array:
        """Each lane's wave, as its number in the workgroup: uint8 ``[k]``."""
        return np.asarray(self.active.batch.wave[self.active.identity[self.row]])

    def workgroup(self) -> Array:
        """Each lane's workgroup in the batch: int64 ``[k]``."""
        return np.asarray(self.active.batch.workgroup[self.active.identity[self.row]])

    def guarded(self, instruction: Instruction, addresses: Array, access: Callable[..., Any], *arguments: Any) -> Any:
        """Call an access; its errors name instruction, wave, lane and address."""
        try:
            return access(addresses, *arguments)
        except OutsideError as error:
            raise AccessError(self.told(instruction, addresses, error.place, error.near)) from None
        except Race as error:
            raise RaceError(self.told(instruction, addresses, error.place, error.told)) from None

    def told(self, instruction: Instruction, addresses: Array, place: int, why: str) -> str:
        """An error's text: which instruction, wave, lane and address, and why."""
        batch, wave = self.active.batch, int(self.active.identity[self.row[place]])
        where = f"workgroup {batch.names[int(batch.workgroup[wave])]}, wave {int(batch.wave[wave])}"
        return f"{instruction}, {where}, lane {int(self.lane[place])}, address 0x{int(addresses[place]):x}: {why}"


@functools.lru_cache(maxsize=256)
def _places(count: int) -> tuple[Array, Array]:
    """Row and lane of every lane of so many waves."""
    return np.repeat(np.arange(count), LANES), np.tile(np.arange(LANES), count)


def signed(value: int, bits: int) -> int:
    """An encoded two's complement number."""
    return value - (1 << bits) if value >> bits - 1 else value


def extended(data: Array, name: str) -> Array:
    """The byte or short that a load named like ``..._SBYTE`` got (uint8 ``[k, size]``), as 32 bits."""
    size = data.shape[1]
    if size % 4 == 0:
        return data
    signed_load = any(part in name for part in ("SBYTE", "SSHORT", "_I8", "_I16"))
    words = (
        np.ascontiguousarray(data).view(f"{'i' if signed_load else 'u'}{size}")[:, 0].astype(np.int64).astype(np.uint32)
    )
    return words[:, None].view(np.uint8)
