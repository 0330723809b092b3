# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The local data share of the workgroups of a batch, with detection of races.

For every byte the wave that wrote it and the wave that read it since the workgroup's last barrier are kept. An access
by
another wave, one of the two being a write, is a race: on hardware its outcome depends on which wave is faster. Atomics
among themselves are none, and neither is writing the value that is there already; who reads what two waves wrote is
not looked into.
"""

from __future__ import annotations

import numpy as np

from gfx_emulator.arrays import Array

_NOBODY, _SAME, _MANY = 0, 254, 255
#: Marks are waves' numbers plus one.
MAXIMUM_WAVES = _SAME - 1


class Race(Exception):
    """Raised with the place of the access and what it collides with."""

    def __init__(self, place: int, told: str) -> None:
        super().__init__(told)
        self.place, self.told = place, told


class Lds:
    """Local memory of G workgroups, `size` bytes each.

    Addresses are flat: workgroup times `stride` plus the offset; callers check offsets against `size`.
    """

    def __init__(self, workgroups: int, size: int) -> None:
        self.size = size
        self.stride = (size + 15) // 16 * 16
        self._data = np.zeros(workgroups * self.stride, np.uint8)
        self._writer = np.zeros_like(self._data)
        self._reader = np.zeros_like(self._data)
        self._modifier = np.zeros_like(self._data)
        #: Whether there were atomics: without them their marks are not looked at.
        self._modified = False

    def barrier(self, workgroup: int) -> None:
        """All waves of a workgroup have met."""
        part = slice(workgroup * self.stride, (workgroup + 1) * self.stride)
        self._writer[part] = _NOBODY
        self._reader[part] = _NOBODY
        if self._modified:
            self._modifier[part] = _NOBODY

    def load(self, addresses: Array, size: int, waves: Array) -> Array:
        """uint8 ``[n, size]`` at flat addresses (int64 ``[n]``), read by waves (uint8 ``[n]``, numbers in the
        workgroup)."""
        word, places, mark = self._access(addresses, size, waves)
        self._look(self._writer, word, places, mark, waves, "reads what", "wrote", allowed=(_SAME,))
        if self._modified:
            self._look(self._modifier, word, places, mark, waves, "reads what", "modified by an atomic")
        self._join(self._reader, word, places, mark, waves)
        data: Array = np.ascontiguousarray(self._data.view(f"u{word}")[places])
        return data.view(np.uint8)

    def store(self, addresses: Array, data: Array, waves: Array) -> None:
        """Write uint8 ``[n, size]``; of writes to the same byte the last one stays."""
        word, places, mark = self._access(addresses, data.shape[1], waves)
        values = np.ascontiguousarray(data).view(f"u{word}")
        memory = self._data.view(f"u{word}")
        different = memory[places] != values
        others = [(self._writer, "wrote"), (self._reader, "read")]
        for kept, other in [*others, (self._modifier, "modified by an atomic")] if self._modified else others:
            self._look(kept, word, places, mark, waves, "writes what", other, among=different)
        writers = self._writer.view(f"u{word}")
        writer = writers[places]
        foreign = (writer != _NOBODY) & (writer != mark)
        memory[places] = values
        wanted = np.where(foreign & ~different, _repeat(_SAME, word), mark)
        writers[places] = wanted
        # Waves that write the same place in this one access.
        clash = writers[places] != wanted
        if clash.any():
            self._look(self._writer, word, places, mark, waves, "writes what", "wrote", among=memory[places] != values)
            writers[places[clash]] = _repeat(_SAME, word)

    def atomic(self, addresses: Array, size: int, waves: Array) -> None:
        """Look for races of read-modify-writes, which `peek` and `put` make."""
        word, places, mark = self._access(addresses, size, waves)
        self._modified = True
        for kept, other in ((self._writer, "wrote"), (self._reader, "read")):
            self._look(kept, word, places, mark, waves, "modifies what", other)
        self._join(self._modifier, word, places, mark, waves)

    def peek(self, addresses: Array, size: int) -> Array:
        """Read without looking for races."""
        return np.asarray(self._data[addresses[:, None] + np.arange(size)])

    def put(self, addresses: Array, data: Array) -> None:
        """Write without looking for races."""
        self._data[addresses[:, None] + np.arange(data.shape[1])] = data

    def _access(self, addresses: Array, size: int, waves: Array) -> tuple[int, Array, Array]:
        """(bytes of a word, words' places ``[n, k]``, the waves' marks in every byte of a word ``[n, 1]``)."""
        word = next(w for w in (4, 2, 1) if size % w == 0 and not (addresses % w).any())
        places = (addresses // word)[:, None] + np.arange(size // word)
        marks = (waves.astype(np.uint32) + 1) * _repeat(1, word)
        return word, places, marks.astype(f"u{word}")[:, None]

    def _join(self, kept: Array, word: int, places: Array, mark: Array, waves: Array) -> None:
        """Add the waves to those that read or modified the bytes."""
        marks = kept.view(f"u{word}")
        before = marks[places]
        wanted = np.broadcast_to(mark, places.shape)
        if not ((before == _NOBODY) | (before == mark)).all():
            single, own = _bytes(before), waves[:, None] + 1
            joined = np.where((single == _NOBODY) | (single == own), own, _MANY).astype(np.uint8)
            wanted = joined.view(f"u{word}")
        marks[places] = wanted
        # Waves at the same place in this one access.
        after = marks[places]
        clash = after != wanted
        if clash.any():
            several = np.where(
                _bytes(after[clash][:, None]) != _bytes(wanted[clash][:, None]), _MANY, _bytes(after[clash][:, None])
            )
            marks[places[clash]] = several.astype(np.uint8).view(f"u{word}")[:, 0]

    def _look(
        self, kept: Array, word: int, places: Array, mark: Array, waves: Array, verb: str, other: str,
        allowed: tuple[int, ...] = (), among: Array | None = None,
    ) -> None:  # fmt: skip
        """Raise if a byte has a mark that is neither one's own nor allowed.

        Args:
            among: of which words; None for all.
        """
        seen = kept.view(f"u{word}")[places]
        suspects = (seen != _NOBODY) & (seen != mark)
        if among is not None:
            suspects &= among
        if not suspects.any():
            return
        # Words whose bytes were accessed one by one have several marks.
        marks, own = _bytes(seen), waves[:, None] + 1
        wrong = (marks != _NOBODY) & (marks != own) & np.repeat(suspects, word, axis=1)
        for one in allowed:
            wrong &= marks != one
        if wrong.any():
            place, byte = (int(found[0]) for found in np.nonzero(wrong))
            found_mark = int(marks[place, byte])
            who = "several waves" if found_mark in (_SAME, _MANY) else f"wave {found_mark - 1}"
            raise Race(place, f"wave {int(waves[place])} {verb} {who} {other} since the last barrier")


def _bytes(words: Array) -> Array:
    """``[n, k]`` words as uint8 ``[n, k * bytes]``."""
    return np.ascontiguousarray(words).view(np.uint8)


def _repeat(byte: int, word: int) -> int:
    return int.from_bytes(bytes([byte]) * word, "little")
