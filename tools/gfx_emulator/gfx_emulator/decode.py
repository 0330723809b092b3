# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Machine code to instructions, by the tables of AMD's machine-readable manuals that ``tinygrad`` carries.

This is the one module that imports ``tinygrad``; what it decodes is turned into `Instruction`, whose fields are
integers as they are encoded.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from gfx_emulator.errors import NotImplementedInstruction

#: Fields of any format, by the names that tinygrad's formats have.
_FIELDS = (
    "abid", "abs", "acc", "acc_cd", "addr", "bank_mask", "bc", "blgp", "cbsz", "clmp", "data", "data0", "data1", "dpp",
    "dst_sel", "dst_unused", "gds", "glc", "idxen", "imm", "lds", "literal", "neg", "neg_hi", "nt", "offen", "offset",
    "offset0", "offset1", "omod", "opsel", "opsel_hi", "opsel_hi2", "row_mask", "s0", "s1", "saddr", "sbase", "sc0",
    "sc1", "scale_src0", "scale_src1", "sd", "sdata", "sdst", "simm16", "soffset", "soffset_en", "src0", "src0_abs",
    "src0_neg", "src0_sel", "src0_sext", "src1", "src1_abs", "src1_neg", "src1_sel", "src1_sext", "src2", "srsrc",
    "ssrc0", "ssrc1", "sve", "vaddr", "vdata", "vdst", "vsrc0", "vsrc1",
)  # fmt: skip
_ENCODING = re.compile(r"_E(32|64)$")
_LITERAL = 255
#: Numbers of operands that stand for another format: sub-dwords, neighbouring lanes, a literal.
_SELECTORS = frozenset({249, 250, _LITERAL})
#: (lowest bit, bits) of the fields that matrix instructions have where other packed ones have modifiers.
_MATRIX_FIELDS = {"cbsz": (8, 3), "abid": (11, 4), "acc_cd": (15, 1), "acc": (59, 2), "blgp": (61, 3)}
#: The upper half of V_MFMA_LD_SCALE_B32's first word.
_LOAD_SCALE = bytes.fromhex("acd3")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        offset: bytes from the start of the kernel's code.
        name: the manual's mnemonic without its encoding: ``V_ADD_F32``.
        form: the encoding: ``VOP2``, ``VOP2_DPP16``, ``DS``, ...
        fields: encoded values; operands are numbers of the 9-bit operand space (256 and up: vector registers).
    """

    offset: int
    size: int
    name: str
    form: str
    fields: dict[str, int]

    def __getitem__(self, field: str) -> int:
        return self.fields[field]

    def get(self, field: str, default: int = 0) -> int:
        return self.fields.get(field, default)

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value}" for key, value in self.fields.items() if value)
        return f"{self.name} at +0x{self.offset:x} ({self.form}: {shown})"


def missing() -> str | None:
    """Why nothing can be decoded here, None if it can."""
    if importlib.util.find_spec("tinygrad") is None:
        return "the package tinygrad, whose tables decode AMD's instructions, is not installed (it needs Python 3.11)"
    return None


def decode(text: bytes, start: int = 0) -> Iterator[Instruction]:
    """The instructions of a kernel's code from an offset on.

    Raises:
        NotImplementedInstruction: at bytes that the tables do not know.
        RuntimeError: without tinygrad.
    """
    reason = missing()
    if reason is not None:
        raise RuntimeError(reason)
    place = start
    while place < len(text):
        size, name, form, fields = _decoded(text[place : place + 16])
        if size == 0:
            raise NotImplementedInstruction(
                f"+0x{place:x}: no CDNA instruction begins with {text[place : place + 8].hex()}"
            )
        yield Instruction(place, size, name, form, fields)
        place += size


@functools.cache
def _decoder() -> Callable[[bytes, str], Any]:
    """tinygrad's; importing it sets Python's recursion limit, which is the process's own matter."""
    limit = sys.getrecursionlimit()
    try:
        from tinygrad.renderer.amd import decode_inst
    finally:
        sys.setrecursionlimit(limit)
    return decode_inst


#: What was decoded, by its own bytes alone: an instruction's first word says how long it is, so that no key is the
#: beginning of another one.
_known: dict[bytes, tuple[int, str, str, dict[str, int]]] = {}


def _decoded(data: bytes) -> tuple[int, str, str, dict[str, int]]:
    for size in (4, 8, 12, 16):
        found = _known.get(data[:size])
        if found is not None:
            return found
    found = _like_another(data) or _read(data)
    if found[0] and len(data) >= found[0]:
        _known[data[: found[0]]] = found
    return found


@functools.cache
def _fields_of(kind: Hashable) -> tuple[str, ...]:
    """Those of `_FIELDS` that a format has."""
    return tuple(name for name in _FIELDS if hasattr(kind, name))


class _Field:
    """Where a field stands in an instruction, and what its bits mean to the tables."""

    def __init__(self, name: str, bits: Any) -> None:
        self.name, self.low, self.mask, self._decode = name, bits.lo, bits.mask, bits.decode
        #: Operands of scalar instructions and of vector ones, among which are the numbers that name another format.
        self.selects = self.mask in (0xFF, 0x1FF) and getattr(bits, "_valid_range", (1,))[0] == 0
        self._values: dict[int, int] = {}

    def of(self, word: int) -> int:
        raw = word >> self.low & self.mask
        found = self._values.get(raw)
        if found is None:
            value = self._decode(raw)
            found = self._values[raw] = int(getattr(value, "offset", value))
        return found


@functools.cache
def _layout(kind: Any) -> tuple[_Field, ...]:
    """The fields of a format, in the order of `_FIELDS`."""
    bits = dict(kind._fields)
    return tuple(_Field(name, bits[name]) for name in _fields_of(kind))


@dataclass(frozen=True)
class _Opcode:
    """What instructions that differ in their operands alone have in common.

    Attributes:
        selecting: operands that may not name another format.
        literal: whether one follows that is no field of the format.
    """

    size: int
    name: str
    form: str
    fields: tuple[_Field, ...]
    selecting: tuple[_Field, ...]
    literal: bool


#: Opcodes that were read, by the bits that are not operands', for each set of such bits.
_opcodes: dict[int, dict[int, _Opcode]] = {}


def _like_another(data: bytes) -> tuple[int, str, str, dict[str, int]] | None:
    """An instruction that differs from one that was read before in its operands alone; None where none is known.

    Finding an instruction's format takes the tables a hundred times as long.
    """
    if len(data) < 8 or data[2:4] == _LOAD_SCALE:
        return None
    word = int.from_bytes(data[:8], "little")
    for mask, opcodes in _opcodes.items():
        one = opcodes.get(word & mask)
        if one is None or any(word >> field.low & field.mask in _SELECTORS for field in one.selecting):
            continue
        fields = {field.name: field.of(word) for field in one.fields}
        size = one.size
        if one.literal:
            fields["literal"] = int.from_bytes(data[size : size + 4], "little")
            size += 4
        return size, one.name, one.form, fields
    return None


def _learn(data: bytes, kind: Any, name: str, form: str, size: int, literal: bool) -> None:
    """Keep what `_like_another` needs of an instruction that was read."""
    if len(data) < 8 or data[2:4] == _LOAD_SCALE or name.startswith("V_MFMA"):
        return
    word, fields = int.from_bytes(data[:8], "little"), _layout(kind)
    free = [one for one in fields if not (one.selects and word >> one.low & one.mask in _SELECTORS)]
    mask = (1 << 8 * min(size, 8)) - 1
    for one in free:
        mask &= ~(one.mask << one.low)
    selecting = tuple(one for one in free if one.selects)
    _opcodes.setdefault(mask, {})[word & mask] = _Opcode(size, name, form, fields, selecting, literal)


def _read(data: bytes) -> tuple[int, str, str, dict[str, int]]:
    # The tables find the pair of a scale and its product by the second instruction alone: only where the first one is a
    # scale may they see both.
    seen = data if data[2:4] == _LOAD_SCALE else data[:8]
    try:
        found = _decoder()(seen, "cdna")
    except (ValueError, AssertionError):
        return 0, "", "", {}
    kind: Any = type(found)
    word = int(found._raw)
    fields = {field.name: field.of(word) for field in _layout(kind)}
    if found.op.name.startswith("V_MFMA") and "cbsz" not in fields:
        # The tables have some matrix instructions in the general packed format, of which they are a form.
        word = int.from_bytes(data[:8], "little")
        fields = {name: fields[name] for name in ("src0", "src1", "src2", "vdst")}
        fields |= {name: word >> low & (1 << bits) - 1 for name, (low, bits) in _MATRIX_FIELDS.items()}
    size = int(found.size())
    form = kind.__name__.removesuffix("_LIT")
    name = _ENCODING.sub("", found.op.name)
    operands = (fields.get(name) for name in ("src0", "src1", "src2", "ssrc0", "ssrc1"))
    literal = "literal" not in fields and _LITERAL in operands
    _learn(data, kind, name, form, size, literal)
    if literal:
        fields["literal"] = int.from_bytes(data[size : size + 4], "little")
        size += 4
    return size, name, form, fields
