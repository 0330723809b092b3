# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every instruction that is a function of its operands against the manuals' pseudocode, which ``tinygrad`` carries.

The pseudocode is interpreted number by number, with Python's integers and exact rational arithmetic; the emulator's
functions are vectorized and written by hand. Where the pseudocode is wrong, `LEFT_OUT` says so.
"""

from __future__ import annotations

import re

import numpy as np
import pytest

from gfx_emulator import Memory, decode, registry
from gfx_emulator.decode import Instruction
from gfx_emulator.lds import Lds
from gfx_emulator.pseudocode import CannotInterpret, Interpreter, Value, manual
from gfx_emulator.registers import VCC, Active, Batch

#: Instructions of the families below that are not compared.
LEFT_OUT = {
    **dict.fromkeys(
        (f"V_DIV_{step}_F{width}" for step in ("SCALE", "FMAS", "FIXUP") for width in (32, 64)),
        "contradict each other (`instructions/division.py`); divisions are tested in test_triton.py",
    ),
    "V_FRACT_F32": "gives 1 for small negative numbers, where the text of the manual has the number below",
    "V_FRACT_F64": "as V_FRACT_F32",
    "V_FREXP_EXP_I32_F32": "of zero it gives the exponent's field, hardware zero (LLVM, `llvm.amdgcn.frexp.exp`)",
    "S_BFE_I64": "shifts a 32-bit one by up to 64 places", "S_BFE_U64": "as S_BFE_I64",
    "V_RNDNE_F32": "adds 0.5 first, which rounds", "V_RNDNE_F64": "as V_RNDNE_F32",
}  # fmt: skip
EDGES = [
    0, 1, 2, 31, 32, 33, 63, 0x7F, 0x80, 0xFFFF, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF,
    0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFC00000, 0x00000001, 0x00800000, 0x3C00,
    0x7C00, 0x7E01, 0x7C01, 0x0400, 0xFC00, 0x00100000,
]  # fmt: skip


def operands(count: int, width: int, seed: int) -> np.ndarray:
    """uint64 ``[count, 64]``: edge cases of every kind in many pairs, and random bits."""
    random = np.random.default_rng(seed)
    wide = random.integers(0, 2**64, (count, 64), dtype=np.uint64)
    edges = np.array(EDGES, np.uint64)
    for row in range(count):
        wide[row, :40] = edges[random.integers(0, len(edges), 40)] | (
            edges[random.integers(0, len(edges), 40)] << np.uint64(32) if width == 64 else np.uint64(0)
        )
    return wide if width == 64 else wide & np.uint64(0xFFFFFFFF)


#: What accesses memory, other lanes or its own target, or has operands beside its sources.
ELSEWHERE = re.compile(
    r"V_(MFMA|MAD_MIX|READ|WRITE|PERMLANE|SWAP|ACCVGPR|PK_|CVT_.*(FP8|BF8)|FMAC|FMAMK|FMAAK|CMPX|NOP)"
    r"|S_(LOAD|CBRANCH|\w*K_|\w*SAVEEXEC)"
)


def names(prefix: str) -> list[str]:
    """Implemented instructions that are functions of their operands and whose pseudocode can be interpreted."""
    if decode.missing() is not None:
        return []
    code = manual()
    return sorted(
        name for name in registry.implemented()
        if name.startswith(prefix) and name in code and not ELSEWHERE.match(name) and name not in LEFT_OUT
        and re.search(r"\bS[01]\b", code[name]) and interpretable(code, name)
    )  # fmt: skip


def interpretable(code: dict[str, str], name: str) -> bool:
    try:
        for sources in ([0x3F800000, 3, 5], [0xC0200000, 0xBF800000, 0x40000000]):
            Interpreter(code, name, sources)
    except CannotInterpret as error:
        return "no number" in str(error)
    return True


def batch(waves: int) -> Batch:
    zeros = np.zeros(waves, np.int64)
    return Batch(Memory(), Lds(1, 0), zeros, zeros.astype(np.uint8), 16, 16)


def same(made_bits: int, expected: Value, width: int) -> bool:
    mask = (1 << width) - 1
    return made_bits & mask == expected.bits & mask


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", names("V_"))
def test_vector_instruction(name: str) -> None:
    code = manual()
    inputs = operands(3, 64 if re.search(r"64|PERM", name) else 32, len(name))
    machine = batch(1)
    for index in range(3):
        machine.vector[2 * index, 0] = inputs[index].astype(np.uint32)
        machine.vector[2 * index + 1, 0] = (inputs[index] >> np.uint64(32)).astype(np.uint32)
    carry = operands(1, 64, 7)[0, 63]
    machine.scalar[VCC], machine.scalar[VCC + 1] = int(carry) & 0xFFFFFFFF, int(carry) >> 32
    compares, with_carry = name.startswith("V_CMP"), "_CO_" in name
    fields = {
        "src0": 256, "src1": 258, "src2": 106 if with_carry or name == "V_CNDMASK_B32" else 260, "neg": 0, "abs": 0,
        "opsel": 0, "omod": 0, "clmp": 0, "vdst": 10 if compares else 262, "sdst": 12,
    }  # fmt: skip
    wide_form = "VOP3SD" if with_carry or "MAD_U64" in name or "MAD_I64" in name else "VOP3"
    with np.errstate(all="ignore"):
        registry.build(Instruction(0, 8, name, wide_form, fields), registry.Context("gfx950"))(
            Active(machine, slice(None))
        )
    width = (
        1
        if compares
        else int(re.findall(r"D0(?:\.[uifb]|.*?\.[uifb])(\d+)", code[name])[0])
        if "D0." in code[name]
        else 32
    )
    compared = 0
    for lane in range(64):
        given = [int(inputs[index, lane]) for index in range(3)]
        try:
            ran = Interpreter(code, name, given, carry=int(carry) >> lane & 1)
        except CannotInterpret as error:
            if "no number" in str(error) or str(error) == "trunc":
                continue
            raise
        got = int(machine.vector[6, 0, lane]) | int(machine.vector[7, 0, lane]) << 32
        if compares:
            got = int(machine.scalar[10 + lane // 32, 0]) >> lane % 32 & 1
        if re.match(r"V_CVT_F\d+_F\d+$", name) and np.isnan(ran.written["D0"].number()):
            # Which NaN a conversion gives is not said.
            assert np.isnan(Value(got & (1 << width) - 1, width, "f").number())
            continue
        if re.match(r"V_CVT_F\d+_F\d+$", name) and np.isnan(ran.written["D0"].number()):
            # Which NaN a conversion gives is not said.
            assert np.isnan(Value(got & (1 << width) - 1, width, "f").number())
            continue
        assert same(got, ran.written["D0"], width), (
            name,
            lane,
            [hex(one) for one in given],
            hex(got),
            ran.written["D0"],
        )
        if with_carry:
            flag = int(machine.scalar[12 + lane // 32, 0]) >> lane % 32 & 1
            assert flag == ran.written["VCC"].bits & 1, (name, lane, given)
        compared += 1
    assert compared > 10


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", names("S_"))
def test_scalar_instruction(name: str) -> None:
    code = manual()
    inputs = operands(2, 64 if "64" in name else 32, len(name))
    machine = batch(64)
    for index in range(2):
        machine.scalar[2 * index] = inputs[index].astype(np.uint32)
        machine.scalar[2 * index + 1] = (inputs[index] >> np.uint64(32)).astype(np.uint32)
    machine.scc[:] = np.arange(64) % 2 == 1
    fields = {"ssrc0": 0, "ssrc1": 2, "sdst": 4}
    registry.build(Instruction(0, 4, name, "SOP2", fields), registry.Context("gfx942"))(Active(machine, slice(None)))
    for wave in range(64):
        ran = Interpreter(code, name, [int(inputs[0, wave]), int(inputs[1, wave])], scc=wave % 2)
        got = int(machine.scalar[4, wave]) | int(machine.scalar[5, wave]) << 32
        told = name, [hex(int(one)) for one in inputs[:, wave]], ran.written
        if "D0" in ran.written:
            width = int(re.findall(r"D0\.[uifb](\d+)", code[name])[0])
            assert same(got, ran.written["D0"], width), (hex(got), *told)
        if "SCC" in ran.written:
            assert int(machine.scc[wave]) == ran.written["SCC"].bits, told


def test_most_instructions_are_compared() -> None:
    """A change of the tables' language would leave out what is compared now."""
    assert len(names("V_")) + len(names("S_")) > 240
