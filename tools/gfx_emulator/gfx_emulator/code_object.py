# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""AMDGPU code objects: ELF sections, kernel descriptors and the metadata note.

Source: LLVM, "User Guide for AMDGPU Backend", sections "ELF Code Object", "Code Object V5 Metadata" and "Kernel
Descriptor".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import msgspec

from gfx_emulator.errors import CodeObjectError

#: EF_AMDGPU_MACH of the chips whose code is executed (e_flags, low byte).
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}
_EM_AMDGPU = 224
_SHT_SYMTAB, _SHT_NOTE, _SHT_DYNSYM = 2, 7, 11
_NT_AMDGPU_METADATA = 32
_DESCRIPTOR_BYTES = 64


@dataclass(frozen=True)
class Argument:
    """A kernel's parameter in the kernarg segment: `kind` is ``by_value``, ``global_buffer`` or ``hidden_...``."""

    offset: int
    size: int
    kind: str
    name: str


@dataclass(frozen=True)
class Descriptor:
    """A kernel descriptor, decoded.

    Attributes:
        lds_bytes: static LDS of a workgroup; dynamic LDS comes with the launch.
        scratch_bytes: private memory of a lane.
        vgprs: rows of vector registers, accumulation registers included.
        accum_offset: the first of them that is an accumulation register.
        denorm_32: whether fp32 instructions keep subnormal inputs and results.
        user_sgprs: scalar registers that a launch fills before those of the system.
        preload: (first dword, number of dwords) of kernel arguments that a launch puts in user registers.
    """

    lds_bytes: int
    scratch_bytes: int
    kernarg_bytes: int
    entry: int
    vgprs: int
    accum_offset: int
    denorm_32: int
    denorm_16_64: int
    round_mode: int
    dx10_clamp: bool
    ieee: bool
    fp16_overflow: bool
    user_sgprs: int
    properties: int
    preload: tuple[int, int]
    workgroup_ids: tuple[bool, bool, bool]
    workgroup_info: bool
    private_segment: bool


@dataclass(frozen=True)
class Kernel:
    """One kernel of a code object: its machine code begins at `entry` in `text`, which is loaded at `address`."""

    name: str
    arch: str
    descriptor: Descriptor
    text: bytes
    entry: int
    address: int
    arguments: tuple[Argument, ...]
    max_workgroup: int


def load(data: bytes) -> dict[str, Kernel]:
    """Every kernel of a code object, by name.

    Raises:
        CodeObjectError: if it is no AMDGPU ELF file, or one for a chip that is not executed here.
    """
    if data[:4] != b"\x7fELF" or data[4] != 2:
        raise CodeObjectError("not a 64-bit ELF file")
    machine = struct.unpack_from("<H", data, 18)[0]
    if machine != _EM_AMDGPU:
        raise CodeObjectError(f"ELF machine {machine} is not AMDGPU ({_EM_AMDGPU})")
    flags = struct.unpack_from("<I", data, 48)[0]
    arch = _MACHINES.get(flags & 0xFF)
    if arch is None:
        known = ", ".join(f"{name} (0x{number:x})" for number, name in _MACHINES.items())
        raise CodeObjectError(f"code for EF_AMDGPU_MACH 0x{flags & 0xFF:x}; executed are {known}")
    sections = _sections(data)
    symbols = _symbols(data, sections)
    metadata = _metadata(data, sections)
    kernels: dict[str, Kernel] = {}
    for name, (value, _, _) in symbols.items():
        if not name.endswith(".kd"):
            continue
        plain = name[: -len(".kd")]
        descriptor = parse_descriptor(_bytes_at(data, sections, value, _DESCRIPTOR_BYTES))
        if plain not in symbols:
            raise CodeObjectError(f"kernel {plain} has a descriptor and no code")
        start, size, index = symbols[plain]
        entry = value + descriptor.entry
        told = metadata.get(plain, {})
        kernels[plain] = Kernel(
            plain, arch, descriptor, _bytes_at(data, sections, start, size or _rest(sections[index], start)),
            entry - start, start, _arguments(told), int(told.get(".max_flat_workgroup_size", 1024)),
        )  # fmt: skip
    if not kernels:
        raise CodeObjectError("a code object without kernels")
    return kernels


def kernel(data: bytes, name: str, arch: str) -> Kernel:
    """One kernel of a code object for a chip.

    Raises:
        CodeObjectError: as `load`, or if it is code for another chip, or has no kernel of that name.
    """
    kernels = load(data)
    of = next(iter(kernels.values())).arch
    if of != arch:
        raise CodeObjectError(f"code for {of}, expected code for {arch}")
    if name not in kernels:
        raise CodeObjectError(f"no kernel {name!r} in the code object, which has {', '.join(sorted(kernels))}")
    return kernels[name]


def parse_descriptor(raw: bytes) -> Descriptor:
    """The 64 bytes of a kernel descriptor for a chip of the gfx90a family (GFX940 included).

    Raises:
        CodeObjectError: for what is not emulated: dynamic stacks and rounding modes other than nearest even.
    """
    lds, scratch, kernarg = struct.unpack_from("<III", raw, 0)
    entry = struct.unpack_from("<q", raw, 16)[0]
    rsrc3, rsrc1, rsrc2 = struct.unpack_from("<III", raw, 44)
    properties, preload = struct.unpack_from("<HH", raw, 56)
    if properties >> 11 & 1:
        raise CodeObjectError("the kernel uses a dynamic stack, which is not emulated")
    round_mode = rsrc1 >> 12 & 0xF
    if round_mode:
        raise CodeObjectError(f"FLOAT_ROUND_MODE {round_mode:#x}: only round to nearest even is emulated")
    return Descriptor(
        lds_bytes=lds, scratch_bytes=scratch, kernarg_bytes=kernarg, entry=entry,
        vgprs=((rsrc1 & 0x3F) + 1) * 8, accum_offset=((rsrc3 & 0x3F) + 1) * 4,
        denorm_32=rsrc1 >> 16 & 3, denorm_16_64=rsrc1 >> 18 & 3, round_mode=round_mode,
        dx10_clamp=bool(rsrc1 >> 21 & 1), ieee=bool(rsrc1 >> 23 & 1), fp16_overflow=bool(rsrc1 >> 26 & 1),
        user_sgprs=rsrc2 >> 1 & 0x1F, properties=properties, preload=(preload >> 7, preload & 0x7F),
        workgroup_ids=(bool(rsrc2 >> 7 & 1), bool(rsrc2 >> 8 & 1), bool(rsrc2 >> 9 & 1)),
        workgroup_info=bool(rsrc2 >> 10 & 1), private_segment=bool(rsrc2 & 1),
    )  # fmt: skip


@dataclass(frozen=True)
class _Section:
    kind: int
    address: int
    offset: int
    size: int
    link: int
    entry_size: int


def _sections(data: bytes) -> list[_Section]:
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    found = []
    for index in range(count):
        _, kind, _, address, offset, length, link, _, _, entry = struct.unpack_from(
            "<IIQQQQIIQQ", data, table + index * size
        )
        found.append(_Section(kind, address, offset, length, link, entry))
    return found


def _symbols(data: bytes, sections: list[_Section]) -> dict[str, tuple[int, int, int]]:
    """(value, size, section's index) of each named symbol that is defined."""
    found: dict[str, tuple[int, int, int]] = {}
    for section in sections:
        if section.kind not in (_SHT_SYMTAB, _SHT_DYNSYM):
            continue
        names = sections[section.link]
        for place in range(section.offset, section.offset + section.size, section.entry_size):
            name, _, _, index, value, size = struct.unpack_from("<IBBHQQ", data, place)
            if name and 0 < index < len(sections):
                start = names.offset + name
                found[data[start : data.index(b"\0", start)].decode()] = (value, size, index)
    return found


def _bytes_at(data: bytes, sections: list[_Section], address: int, size: int) -> bytes:
    for section in sections:
        if section.address and section.address <= address and address + size <= section.address + section.size:
            start = section.offset + address - section.address
            return data[start : start + size]
    raise CodeObjectError(f"no section holds {size} bytes at 0x{address:x}")


def _rest(section: _Section, address: int) -> int:
    return section.address + section.size - address


def _metadata(data: bytes, sections: list[_Section]) -> dict[str, dict[str, Any]]:
    """The metadata of each kernel by name; hand-written assembly may have none."""
    for section in sections:
        if section.kind != _SHT_NOTE:
            continue
        place, end = section.offset, section.offset + section.size
        while place + 12 <= end:
            name_size, size, kind = struct.unpack_from("<III", data, place)
            body = place + 12 + (name_size + 3) // 4 * 4
            if kind == _NT_AMDGPU_METADATA:
                told = msgspec.msgpack.decode(data[body : body + size])
                return {kernel[".name"]: kernel for kernel in told.get("amdhsa.kernels", [])}
            place = body + (size + 3) // 4 * 4
    return {}


def _arguments(told: dict[str, Any]) -> tuple[Argument, ...]:
    return tuple(
        Argument(int(one[".offset"]), int(one[".size"]), str(one[".value_kind"]), str(one.get(".name", "")))
        for one in told.get(".args", [])
    )
