# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Global memory: the allocations that a program may touch. Anything else is an error.

An allocation is a NumPy array that stays the caller's. Its address is either given, so that pointers stored in memory
mean what they say, or chosen here, with unmapped pages around it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np

from gfx_emulator.arrays import Array

_FIRST, _GAP, _ALIGNMENT = 0x7000_0000_0000, 1 << 16, 1 << 8


class OutsideError(Exception):
    """Raised with the place, in the arrays of an access, of the first address that is outside, and what is near it."""

    def __init__(self, place: int, near: str) -> None:
        super().__init__(near)
        self.place, self.near = place, near


#: Finds what an address that no allocation holds may belong to: (array, its address, its name), or None.
Finder = Callable[[int], "tuple[Array, int, str] | None"]


class Memory:
    """Allocations by address.

    Args:
        finder: asked where an access is outside; what it finds is registered.
    """

    def __init__(self, finder: Finder | None = None) -> None:
        self._finder = finder
        self._bases: list[int] = []
        self._buffers: list[Array] = []
        self._names: list[str] = []
        self._starts: Array = np.zeros(0, np.int64)
        self._next = _FIRST

    def register(self, array: Array, address: int | None = None, name: str = "") -> int:
        """Make an array accessible to programs; returns its address.

        Args:
            array: C-contiguous, of any dtype; programs read and write it in place.
            address: where it is to be; None for a place of its own, aligned to 256 bytes.

        Raises:
            ValueError: if the array isn't contiguous or the place overlaps another allocation.
        """
        if not array.flags.c_contiguous:
            raise ValueError("an allocation has to be C-contiguous")
        data = array.reshape(-1).view(np.uint8)
        if address is None:
            address = self._next
            self._next += (data.size + _GAP + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        place = bisect.bisect_left(self._bases, address)
        before, after = place - 1, place
        if (before >= 0 and self._bases[before] + self._buffers[before].size > address) or (
            after < len(self._bases) and address + data.size > self._bases[after]
        ):
            raise ValueError(f"0x{address:x} with {data.size} bytes overlaps another allocation")
        self._bases.insert(place, address)
        self._buffers.insert(place, data)
        self._names.insert(place, name)
        self._starts = np.array(self._bases, np.int64)
        return address

    def release(self, address: int) -> None:
        """Forget the allocation that begins at an address."""
        place = self._bases.index(address)
        del self._bases[place], self._buffers[place], self._names[place]
        self._starts = np.array(self._bases, np.int64)

    def load(self, addresses: Array, size: int) -> Array:
        """`size` bytes at each address (int64 ``[n]``): uint8 ``[n, size]``.

        Raises:
            OutsideError: if one of them is outside.
        """
        result = np.empty((len(addresses), size), np.uint8)
        for buffer, offsets, chosen in self._parts(addresses, size):
            result[chosen] = _gather(buffer, offsets, size)
        return result

    def store(self, addresses: Array, data: Array) -> None:
        """Write uint8 ``[n, size]`` to the addresses; of several writes to a byte the last one stays."""
        size = data.shape[1]
        for buffer, offsets, chosen in self._parts(addresses, size):
            _scatter(buffer, offsets, data[chosen])

    def _parts(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array | slice]]:
        """(buffer, offsets in it, which of the addresses) of each allocation that is touched."""
        while True:
            try:
                return self._owned(addresses, size)
            except OutsideError as error:
                if self._finder is None:
                    raise
                found = self._finder(int(addresses[error.place]))
                if found is None or found[1] in self._bases:
                    raise
                self.register(*found)

    def _owned(self, addresses: Array, size: int) -> list[tuple[Array, Array, Array | slice]]:
        if not len(addresses):
            return []
        owner = np.searchsorted(self._starts, addresses, side="right") - 1
        first = int(owner[0])
        if (owner == first).all():
            return [self._within(first, addresses, size, None)]
        found = []
        for one in np.unique(owner):
            chosen = np.nonzero(owner == one)[0]
            found.append(self._within(int(one), addresses[chosen], size, chosen))
        return found

    def _within(
        self, owner: int, addresses: Array, size: int, chosen: Array | None
    ) -> tuple[Array, Array, Array | slice]:
        places = slice(None) if chosen is None else chosen
        if owner < 0:
            wrong = 0
        else:
            buffer = self._buffers[owner]
            offsets = addresses - self._bases[owner]
            outside = offsets > buffer.size - size
            if not outside.any():
                return buffer, offsets, places
            wrong = int(np.nonzero(outside)[0][0])
        place = wrong if chosen is None else int(chosen[wrong])
        raise OutsideError(place, self._near(int(addresses[wrong])))

    def _near(self, address: int) -> str:
        """The allocation before an address, for messages."""
        place = bisect.bisect_right(self._bases, address) - 1
        if place < 0:
            return "no allocation begins below it"
        base, size = self._bases[place], self._buffers[place].size
        name = f" ({self._names[place]})" if self._names[place] else ""
        return f"{address - base} bytes into the allocation of {size} bytes at 0x{base:x}{name}"


def _gather(buffer: Array, offsets: Array, size: int) -> Array:
    """uint8 ``[n, size]``; by words where all addresses and the buffer are aligned to them."""
    word = _word(buffer, offsets, size)
    if word > 1:
        places = (offsets // word)[:, None] + np.arange(size // word)
        words: Array = buffer[: buffer.size // word * word].view(f"u{word}")[places]
        return words.view(np.uint8)
    return np.asarray(buffer[offsets[:, None] + np.arange(size)])


def _scatter(buffer: Array, offsets: Array, data: Array) -> None:
    size = data.shape[1]
    word = _word(buffer, offsets, size)
    if word > 1:
        places = (offsets // word)[:, None] + np.arange(size // word)
        buffer[: buffer.size // word * word].view(f"u{word}")[places] = np.ascontiguousarray(data).view(f"u{word}")
    else:
        buffer[offsets[:, None] + np.arange(size)] = data


def _word(buffer: Array, offsets: Array, size: int) -> int:
    """The largest of 4, 2 and 1 bytes that every access is made of."""
    for word in (4, 2):
        if size % word == 0 and buffer.ctypes.data % word == 0 and not (offsets % word).any():
            return word
    return 1
