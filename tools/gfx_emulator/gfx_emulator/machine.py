# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Launching kernels: workgroups, the state that a launch gives their waves, barriers, and which waves run next.

All waves of a batch of workgroups are executed together. Those with the lowest place in the code run first, so that
waves that took different branches meet again where the branches do; those that only wait for others yield to them.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gfx_emulator import decode
from gfx_emulator.arrays import LANES, Array
from gfx_emulator.code_object import Kernel
from gfx_emulator.decode import Instruction
from gfx_emulator.errors import CodeObjectError, EmulatorError, HangError
from gfx_emulator.instructions.flow import SIGNALS
from gfx_emulator.lds import MAXIMUM_WAVES, Lds
from gfx_emulator.memory import Memory, OutsideError
from gfx_emulator.registers import FLAT_SCRATCH, Active, Barrier, Batch, End, Jump
from gfx_emulator.registry import Context, Execute, build

#: Instructions that waves may execute before others that wait get their turn.
_TURN = 1 << 14
#: An AQL packet's ENABLE_SGPR_... bits in the order of the registers, with how many each takes.
_USER_REGISTERS = (
    ("private segment buffer", 4), ("dispatch pointer", 2), ("queue pointer", 2), ("kernarg segment pointer", 2),
    ("dispatch id", 2), ("flat scratch", 2), ("private segment size", 1),
)  # fmt: skip
#: Code that hardware skips where it has preloaded arguments: it loads them for firmware that cannot.
_PRELOAD_PROLOGUE = 256


@dataclass(frozen=True)
class Program:
    """A kernel's instructions by their place, and where execution begins.

    Attributes:
        places: of instructions by their offset in the code.
        built: what executes them, made when they are first reached.
    """

    instructions: tuple[Instruction, ...]
    places: dict[int, int]
    entry: int
    context: Context
    built: list[Execute | None]


@functools.lru_cache(maxsize=64)
def program(kernel: Kernel) -> Program:
    """Decode a kernel."""
    instructions = tuple(decode.decode(kernel.text))
    places = {one.offset: place for place, one in enumerate(instructions)}
    entry = kernel.entry + (_PRELOAD_PROLOGUE if kernel.descriptor.preload[1] else 0)
    if entry not in places:
        raise CodeObjectError(f"kernel {kernel.name}: no instruction at its entry +0x{entry:x}")
    descriptor = kernel.descriptor
    if descriptor.denorm_32 not in (0, 3):
        raise CodeObjectError(f"kernel {kernel.name}: FLOAT_DENORM_MODE_32 {descriptor.denorm_32} is not emulated")
    context = Context(kernel.arch, descriptor.denorm_32 == 0, descriptor.ieee)
    return Program(instructions, places, places[entry], context, [None] * len(instructions))


@dataclass(frozen=True)
class Limits:
    """Bounds of a launch.

    Attributes:
        instructions: that a batch may execute, for its waves together; more is taken for a hang.
        waves: that are executed together, at least a workgroup's.
    """

    instructions: int = 5_000_000
    waves: int = 128


def launch(
    kernel: Kernel, memory: Memory, grid: Sequence[int], workgroup: Sequence[int], arguments: bytes,
    dynamic_lds: int = 0, limits: Limits | None = None,
) -> int:  # fmt: skip
    """Run a kernel to its end.

    Args:
        memory: what it may access; the kernel's arguments are added to it for the time of the launch.
        grid: workgroups in x, y and z.
        workgroup: work-items of one in x, y and z.
        arguments: the kernarg segment.
        dynamic_lds: bytes of local memory beside the kernel's own.

    Returns:
        Instructions that were executed, each counted once for all waves at it.

    Raises:
        EmulatorError: for whatever it does wrong; see `errors`.
    """
    limits = limits or Limits()
    size = _three(workgroup)
    items = size[0] * size[1] * size[2]
    if not 0 < items <= kernel.max_workgroup:
        raise EmulatorError(f"kernel {kernel.name}: {items} work-items, at most {kernel.max_workgroup} are allowed")
    segment = np.frombuffer(arguments, np.uint8).copy()
    if len(segment) < kernel.descriptor.kernarg_bytes:
        raise EmulatorError(
            f"kernel {kernel.name}: {len(segment)} bytes of arguments, it has {kernel.descriptor.kernarg_bytes}"
        )
    _fill_hidden(kernel, segment, _three(grid), size, dynamic_lds)
    address = memory.register(segment, name="kernel arguments")
    packet = memory.register(_packet(_three(grid), size, kernel, dynamic_lds, address), name="dispatch packet")
    try:
        executed = 0
        waves = (items + LANES - 1) // LANES
        together = max(1, limits.waves // waves)
        for chosen in _chunks(_workgroups(_three(grid)), together):
            batch = _Run(kernel, memory, chosen, size, waves, address, packet, segment, dynamic_lds)
            executed += batch.run(limits.instructions)
        return executed
    finally:
        memory.release(address)
        memory.release(packet)


def _fill_hidden(
    kernel: Kernel, segment: Array, grid: tuple[int, int, int], size: tuple[int, int, int], dynamic_lds: int
) -> None:
    """Arguments that the compiler added (LLVM, "AMDHSA Code Object V5 Kernel Argument Metadata"); those that are not
    known here stay zero, so that memory accessed through them is outside."""
    known = {"hidden_grid_dims": 3, "hidden_dynamic_lds_size": dynamic_lds}
    for axis, name in enumerate("xyz"):
        known |= {f"hidden_block_count_{name}": grid[axis], f"hidden_group_size_{name}": size[axis]}
    for one in kernel.arguments:
        if one.kind in known:
            raw = known[one.kind].to_bytes(one.size, "little")
            segment[one.offset : one.offset + one.size] = np.frombuffer(raw, np.uint8)


def _packet(
    grid: tuple[int, int, int], size: tuple[int, int, int], kernel: Kernel, dynamic_lds: int, address: int
) -> Array:
    """The kernel dispatch packet (HSA Platform System Architecture, "Kernel dispatch packet"): uint8 ``[64]``."""
    items = [groups * one for groups, one in zip(grid, size)]
    lds = kernel.descriptor.lds_bytes + dynamic_lds
    raw = struct.pack(
        "<HHHHHHIIIIIQQQQ", 2, 3, *size, 0, *items, kernel.descriptor.scratch_bytes, lds, 0, address, 0, 0
    )
    return np.frombuffer(raw, np.uint8).copy()


def _three(sizes: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*sizes, 1, 1, 1)[:3]
    return x, y, z


def _workgroups(grid: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    return ((x, y, z) for z, y, x in itertools.product(*(range(size) for size in reversed(grid))))


def _chunks(items: Iterator[tuple[int, int, int]], size: int) -> Iterator[list[tuple[int, int, int]]]:
    while chosen := list(itertools.islice(items, size)):
        yield chosen


class _Run:
    """The execution of a batch of workgroups."""

    def __init__(
        self, kernel: Kernel, memory: Memory, workgroups: list[tuple[int, int, int]], size: tuple[int, int, int],
        waves: int, address: int, packet: int, arguments: Array, dynamic_lds: int,
    ) -> None:  # fmt: skip
        if waves > MAXIMUM_WAVES:
            raise EmulatorError(f"kernel {kernel.name}: {waves} waves in a workgroup")
        self.kernel, self.program, self.waves = kernel, program(kernel), waves
        descriptor = kernel.descriptor
        total = len(workgroups) * waves
        owner = np.repeat(np.arange(len(workgroups)), waves)
        self.batch = Batch(
            memory, Lds(len(workgroups), descriptor.lds_bytes + dynamic_lds), owner,
            np.tile(np.arange(waves, dtype=np.uint8), len(workgroups)), descriptor.vgprs, descriptor.accum_offset,
            descriptor.scratch_bytes,
        )  # fmt: skip
        self.batch.names = [str(one) for one in workgroups]
        if descriptor.fp16_overflow:
            self.batch.mode[:] = 1 << 23
        self._launch_state(np.array(workgroups, np.uint32), size, address, packet, arguments)
        self.place = np.full(total, self.program.entry, np.int64)
        self.ended = np.zeros(total, np.bool_)
        self.waiting = np.zeros(total, np.bool_)
        self.turn = np.zeros(total, np.int64)
        #: Instructions executed in loops since waves last had a new turn.
        self._spent = 0

    def _launch_state(
        self, workgroups: Array, size: tuple[int, int, int], address: int, packet: int, arguments: Array
    ) -> None:
        """Registers as a launch leaves them (LLVM, "Initial Kernel Execution State")."""
        batch, descriptor = self.batch, self.kernel.descriptor
        register = 0
        for bit, (name, count) in enumerate(_USER_REGISTERS):
            if not descriptor.properties >> bit & 1:
                continue
            if name in ("kernarg segment pointer", "dispatch pointer"):
                pointer = packet if name == "dispatch pointer" else address
                batch.scalar[register], batch.scalar[register + 1] = pointer & 0xFFFFFFFF, pointer >> 32
            elif name == "private segment size":
                batch.scalar[register] = descriptor.scratch_bytes
            # The others stay zero: whoever reads memory through them is told.
            register += count
        first, length = descriptor.preload
        if length:
            words = np.frombuffer(arguments.tobytes() + bytes(4 * (first + length)), np.uint32)
            batch.scalar[register : register + length] = words[first : first + length, None]
        register = max(register + length, descriptor.user_sgprs)
        for axis in range(3):
            if descriptor.workgroup_ids[axis]:
                batch.scalar[register] = workgroups[batch.workgroup, axis]
                register += 1
        batch.scalar[FLAT_SCRATCH : FLAT_SCRATCH + 2] = 0
        item = batch.wave.astype(np.uint32)[:, None] * LANES + np.arange(LANES, dtype=np.uint32)
        x, y, z = item % size[0], item // size[0] % size[1], item // (size[0] * size[1])
        batch.vector[0] = x | y << np.uint32(10) | z << np.uint32(20)
        batch.exec[:] = item < size[0] * size[1] * size[2]
        packed = np.packbits(batch.exec, axis=1, bitorder="little").view(np.uint32)
        batch.scalar[126], batch.scalar[127] = packed[:, 0], packed[:, 1]

    def run(self, limit: int) -> int:
        """Execute until every wave has ended; returns the instructions executed."""
        executed = 0
        with np.errstate(all="ignore"):
            while not self.ended.all():
                ready = ~(self.ended | self.waiting)
                if not ready.any():
                    raise HangError(f"kernel {self.kernel.name}: {self._told()}")
                executed += self._advance(ready)
                if executed > limit:
                    raise HangError(
                        f"kernel {self.kernel.name}: more than {limit} instructions executed; {self._told()}"
                    )
        return executed

    def _advance(self, ready: Array) -> int:
        """Run some of the ready waves until they branch, wait, end, meet others or have had their turn."""
        # Who has run least of late comes first: waves in a loop that waits for others would else keep them from
        # running.
        oldest = self.turn[ready].min()
        candidates = ready & (self.turn == oldest)
        place = int(self.place[candidates].min())
        chosen = ready & (self.place == place)
        others = self.place[ready & ~chosen]
        later = others[others > place]
        stop = int(later.min()) if len(later) else len(self.program.built)
        active = Active(self.batch, slice(None) if chosen.all() else np.nonzero(chosen)[0])
        begun = place
        try:
            place = self._straight(active, place, stop)
        except EmulatorError as error:
            raise type(error)(f"kernel {self.kernel.name}: {error}") from error.__cause__
        self.place[active.rows] = place
        self._signal(active, place - begun)
        return place - begun

    def _straight(self, active: Active, place: int, stop: int) -> int:
        """Execute up to an instruction that changes the order of execution, or to where others stand, for a turn at
        most; returns the place that comes next."""
        instructions, built, total = self.program.instructions, self.program.built, len(self.program.built)
        last = min(stop, place + _TURN)
        try:
            while True:
                instruction = instructions[place]
                execute = built[place]
                if execute is None:
                    execute = built[place] = build(instruction, self.program.context)
                execute(active)
                place += 1
                if instruction.name in SIGNALS or place == last:
                    return place
                if place >= total:
                    raise EmulatorError("execution runs past the end of the code")
        except OutsideError as error:
            raise EmulatorError(f"{instruction}: a scalar load outside: {error.near}") from None
        except IndexError as error:
            raise EmulatorError(f"{instruction}: a register that it has not: {error}") from error

    def _signal(self, active: Active, executed: int) -> None:
        signal, active.signal = active.signal, None
        rows = active.identity
        match signal:
            case Jump(target, taken):
                if target not in self.program.places:
                    raise EmulatorError(
                        f"kernel {self.kernel.name}: a branch to +0x{target:x}, where no instruction is"
                    )
                backward = self.program.places[target] < self.place[rows[0]]
                self.place[rows[taken]] = self.program.places[target]
                if backward and taken.any():
                    self._age(rows, executed)
            case End():
                self.ended[rows] = True
                self._meet(rows)
            case Barrier():
                self.waiting[rows] = True
                self._meet(rows)
            case None:
                pass
            case _:
                self.turn[rows] += 1

    def _age(self, rows: Array, executed: int) -> None:
        """Count what waves executed in loops; after a turn's worth others come first."""
        self._spent += executed
        if self._spent > _TURN:
            self._spent = 0
            self.turn[rows] += 1

    def _meet(self, rows: Array) -> None:
        """Let workgroups go on of which every wave waits or has ended."""
        for workgroup in np.unique(self.batch.workgroup[rows]):
            own = slice(int(workgroup) * self.waves, (int(workgroup) + 1) * self.waves)
            if self.waiting[own].any() and (self.waiting[own] | self.ended[own]).all():
                self.waiting[own] = False
                self.batch.lds.barrier(int(workgroup))

    def _told(self) -> str:
        """Where the waves that have not ended are."""
        left = np.nonzero(~self.ended)[0]
        wave = int(left[0])
        place = int(self.place[wave])
        where = self.program.instructions[place - 1 if self.waiting[wave] else place]
        state = "waits at a barrier" if self.waiting[wave] else "is"
        return (
            f"{len(left)} waves have not ended; wave {int(self.batch.wave[wave])} of workgroup "
            f"{self.batch.names[int(self.batch.workgroup[wave])]} {state} at {where}"
        )
