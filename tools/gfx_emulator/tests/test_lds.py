# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which accesses of local memory are races."""

from __future__ import annotations

import numpy as np
import pytest

from gfx_emulator.lds import Lds, Race


class Memory:
    """One workgroup's local memory; accesses are (wave, address) pairs, made at once."""

    def __init__(self) -> None:
        self.lds = Lds(1, 64)

    def read(self, *accesses: tuple[int, int], size: int = 4) -> list[int]:
        waves, places = self._split(accesses)
        return self.lds.load(places, size, waves).view(f"u{size}")[:, 0].tolist()

    def write(self, value: int, *accesses: tuple[int, int], size: int = 4) -> None:
        self.write_each([value] * len(accesses), *accesses, size=size)

    def write_each(self, values: list[int], *accesses: tuple[int, int], size: int = 4) -> None:
        waves, places = self._split(accesses)
        self.lds.store(places, np.array(values, f"u{size}")[:, None].view(np.uint8), waves)

    def modify(self, *accesses: tuple[int, int]) -> None:
        waves, places = self._split(accesses)
        self.lds.atomic(places, 4, waves)

    @staticmethod
    def _split(accesses: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
        waves, places = zip(*accesses)
        return np.array(waves, np.uint8), np.array(places, np.int64)


def test_a_wave_may_do_as_it_likes_alone() -> None:
    memory = Memory()
    memory.write(1, (0, 0))
    assert memory.read((0, 0)) == [1]
    memory.write(2, (0, 0))
    memory.modify((0, 0))
    memory.write(3, (0, 1), size=1)
    memory.write(4, (0, 0))
    assert memory.read((0, 0)) == [4]


@pytest.mark.parametrize("first", ["write", "modify"])
def test_reads_of_another_waves_write(first: str) -> None:
    memory = Memory()
    memory.write(1, (0, 0)) if first == "write" else memory.modify((0, 0))
    with pytest.raises(Race, match="wave 1 reads what wave 0"):
        memory.read((1, 0))


def test_writes_of_what_another_wave_read() -> None:
    memory = Memory()
    memory.read((0, 0))
    with pytest.raises(Race, match="wave 1 writes what wave 0 read"):
        memory.write(1, (1, 0))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("writer", [0, 1])
def test_writes_of_what_several_waves_read(writer: int, at_once: bool) -> None:
    """Also where waves read the same word in one access, of which the last alone would be remembered."""
    memory = Memory()
    if at_once:
        memory.read((0, 0), (1, 0))
    else:
        memory.read((0, 0))
        memory.read((1, 0))
    with pytest.raises(Race, match=f"wave {writer} writes what several waves read"):
        memory.write(1, (writer, 0))


def test_different_values_written_by_two_waves() -> None:
    memory = Memory()
    memory.write(1, (0, 0))
    with pytest.raises(Race, match="wave 1 writes what wave 0 wrote"):
        memory.write(2, (1, 0))


def test_different_values_written_by_two_waves_in_one_access() -> None:
    with pytest.raises(Race, match="wave 0 writes what wave 1 wrote"):
        Memory().write_each([1, 2], (0, 0), (1, 0))


def test_lanes_of_one_wave_may_write_the_same_place() -> None:
    memory = Memory()
    memory.write_each([1, 2], (0, 0), (0, 0))
    assert memory.read((0, 0)) == [2]


@pytest.mark.parametrize("at_once", [False, True])
def test_equal_values_written_by_two_waves(at_once: bool) -> None:
    memory = Memory()
    if at_once:
        memory.write(1, (0, 0), (1, 0))
    else:
        memory.write(1, (0, 0))
        memory.write(1, (1, 0))
    assert memory.read((0, 0), (1, 0)) == [1, 1]


def test_neighbouring_bytes_of_a_word_are_no_race() -> None:
    memory = Memory()
    memory.write(1, (0, 0), size=1)
    memory.write(2, (1, 1), size=1)
    with pytest.raises(Race, match="wave 0 reads what wave 1 wrote"):
        memory.read((0, 0))
    assert memory.read((0, 0), size=1) == [1]


def test_a_word_partly_read_before_by_the_same_wave() -> None:
    memory = Memory()
    memory.read((0, 0), size=1)
    memory.read((0, 0))
    memory.write(5, (0, 0))
    assert memory.read((0, 0)) == [5]


def test_atomics_of_several_waves() -> None:
    memory = Memory()
    memory.modify((0, 0), (1, 0))
    memory.modify((2, 0))
    with pytest.raises(Race, match="wave 2 reads what several waves modified"):
        memory.read((2, 0))


def test_atomics_on_what_another_wave_wrote() -> None:
    memory = Memory()
    memory.write(1, (0, 0))
    with pytest.raises(Race, match="wave 1 modifies what wave 0 wrote"):
        memory.modify((1, 0))


def test_a_barrier_ends_all_of_it() -> None:
    memory = Memory()
    memory.write(1, (0, 0))
    memory.modify((0, 4))
    memory.lds.barrier(0)
    assert memory.read((1, 0)) == [1]
    memory.write(2, (0, 4))
    memory.lds.barrier(0)
    memory.write(3, (2, 0))
    assert memory.read((2, 0)) == [3]
