# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Small programs in assembly: arithmetic, control flow, masks, barriers, and what has to be reported."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

from gfx_emulator import (
    CodeObjectError,
    EmulatorError,
    HangError,
    Limits,
    Memory,
    NotImplementedInstruction,
    code_object,
    load,
    machine,
    testing,
)
from gfx_emulator.testing import PROLOGUE, STORE, words


def test_scalar_arithmetic_and_carries(arch: str) -> None:
    out = words(4)
    testing.run(
        testing.assembled(
            """
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_mov_b32 s8, 0xffffffff
  s_add_u32 s8, s8, 2          ; 1, carry
  s_addc_u32 s9, 7, 0          ; 8
  s_sub_u32 s10, 3, 5          ; -2, borrow
  s_subb_u32 s11, 10, 0        ; 9
  v_mov_b32 v0, 0
  v_mov_b32 v2, s8
  v_mov_b32 v3, s9
  v_mov_b32 v4, s10
  v_mov_b32 v5, s11
  s_waitcnt lgkmcnt(0)
  global_store_dwordx4 v0, v[2:5], s[4:5]
  s_endpgm
""",
            arch,
        ),
        [out],
    )
    assert out.tolist() == [1, 8, 2**32 - 2, 9]


def test_loop_counts_per_wave() -> None:
    """Sum of 1 to workgroup + 1, by a scalar loop that ends at a different time in every wave."""
    out = words(5 * 64)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  s_add_u32 s8, s2, 1
  s_mov_b32 s9, 0
loop:
  s_add_u32 s9, s9, s8
  s_sub_u32 s8, s8, 1
  s_cmp_lg_u32 s8, 0
  s_cbranch_scc1 loop
  s_lshl_b32 s10, s2, 8
  v_add_u32 v1, s10, v1
  v_mov_b32 v2, s9
"""
            + STORE
        ),
        [out, words()],
        grid=5,
    )
    assert out.reshape(5, 64).T.tolist() == [[1, 3, 6, 10, 15]] * 64


def test_exec_masks_nest_and_join() -> None:
    """if lane >= 16: (if lane >= 32: 3 else: 2) else: 1, with the masks that compilers make."""
    out = words()
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_mov_b32 v2, 1
  v_cmp_le_u32 vcc, 16, v0
  s_and_saveexec_b64 s[8:9], vcc
  s_cbranch_execz outer
  v_mov_b32 v2, 2
  v_cmp_le_u32 vcc, 32, v0
  s_and_saveexec_b64 s[10:11], vcc
  v_mov_b32 v2, 3
  s_or_b64 exec, exec, s[10:11]
outer:
  s_or_b64 exec, exec, s[8:9]
"""
            + STORE
        ),
        [out, words()],
    )
    assert out.tolist() == [1] * 16 + [2] * 16 + [3] * 32


def test_mixed_precision_multiply_adds() -> None:
    """1.5 (a half) times 2 (fp32) plus -|-0.25| (the upper half): as fp32, and as halves that keep the other one."""
    out = words(64)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_mov_b32 v3, 0x3e00
  v_mov_b32 v4, 2.0
  v_mov_b32 v5, 0xb4001234
  v_fma_mix_f32 v6, v3, v4, -|v5| op_sel:[0,0,1] op_sel_hi:[1,0,1]
  v_mov_b32 v7, 0x11112222
  v_fma_mixlo_f16 v7, v3, v4, -|v5| op_sel:[0,0,1] op_sel_hi:[1,0,1]
  v_mov_b32 v8, 0x11112222
  v_fma_mixhi_f16 v8, v3, v4, v5 op_sel:[0,0,1] op_sel_hi:[1,0,1]
  v_mov_b32 v1, 0
  global_store_dwordx3 v1, v[6:8], s[4:5]
  s_endpgm
"""
        ),
        [out, words()],
    )
    assert out[0] == np.array(2.75, np.float32).view(np.uint32)
    assert out[1:3].tolist() == [0x11114180, 0x41802222]


def test_constants_of_packed_instructions_are_in_both_halves() -> None:
    out = words(64)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_mov_b32 v4, 2.0
  v_mov_b32 v5, 4.0
  v_pk_fma_f32 v[6:7], v[4:5], v[4:5], 1.0
  v_pk_add_f32 v[8:9], v[4:5], 1.0 op_sel_hi:[1,0]
  v_mov_b32 v1, 0
  global_store_dwordx4 v1, v[6:9], s[4:5]
  s_endpgm
"""
        ),
        [out, words()],
    )
    assert out[:4].view(np.float32).tolist() == [5, 17, 3, 5]


def test_an_instruction_with_no_active_lane_writes_nothing() -> None:
    out = words()
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_mov_b32 v2, 5
  s_mov_b64 exec, 0
  v_mov_b32 v2, 6
  global_store_dword v1, v2, s[4:5]
  s_mov_b64 exec, -1
"""
            + STORE
        ),
        [out, words()],
    )
    assert out.tolist() == [5] * 64


def test_barrier_that_waves_skip_counts_those_that_ended() -> None:
    out = words(128)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_readfirstlane_b32 s8, v0
  s_cmp_eq_u32 s8, 0
  s_cbranch_scc1 end
  s_barrier
  v_mov_b32 v2, 1
  global_store_dword v1, v2, s[4:5]
end:
  s_endpgm
"""
        ),
        [out, words()],
        items=128,
    )
    assert out.tolist() == [0] * 64 + [1] * 64


def test_endless_loop_ends_with_an_error() -> None:
    kernel = testing.assembled("loop:\n s_branch loop\n s_endpgm")
    with pytest.raises(
        HangError, match=r"more than 5000 instructions executed; 1 waves have not ended; wave 0 .*S_BRANCH"
    ):
        machine.launch(kernel, Memory(), (1,), (64,), bytes(64), limits=Limits(instructions=5000))


def test_a_wave_that_waits_for_another_lets_it_run() -> None:
    """Workgroup 0 spins until workgroup 1, which stands later in the code, has stored a flag."""
    flag, out = words(64), words(64)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  s_cmp_eq_u32 s2, 1
  s_cbranch_scc1 sets
spin:
  global_load_dword v2, v1, s[6:7] sc1
  s_waitcnt vmcnt(0)
  v_cmp_eq_u32 vcc, 7, v2
  s_cbranch_vccz spin
"""
            + STORE.replace(
                "s_endpgm", "s_endpgm\nsets:\n v_mov_b32 v2, 7\n global_store_dword v1, v2, s[6:7] sc1\n s_endpgm"
            )
        ),
        [out, flag],
        grid=2,
    )
    assert out.tolist() == [7] * 64


def test_partial_workgroup_has_inactive_lanes() -> None:
    out = words(100)
    testing.run(testing.assembled(PROLOGUE + "v_add_u32 v2, 1, v0" + STORE), [out, words()], items=100)
    assert out.tolist() == list(range(1, 101))


def test_unknown_opcode_raises_with_its_name() -> None:
    kernel = testing.assembled("v_cubeid_f32 v0, v1, v2, v3\n s_endpgm")
    with pytest.raises(NotImplementedInstruction, match="V_CUBEID_F32 is not implemented"):
        testing.run(kernel, [])


def test_an_opcode_that_is_not_reached_is_no_error() -> None:
    testing.run(testing.assembled("s_branch end\n v_cubeid_f32 v0, v1, v2, v3\nend:\n s_endpgm"), [])


def test_registers_beyond_the_kernels_are_refused() -> None:
    kernel = testing.assembled("v_mov_b32 v60, 1\n s_endpgm", vgprs=16, accum_offset=8)
    with pytest.raises(EmulatorError, match=r"V_MOV_B32 .*a register that it has not"):
        testing.run(kernel, [])


def test_code_for_another_chip_is_refused() -> None:
    with pytest.raises(CodeObjectError, match="EF_AMDGPU_MACH 0x3f; executed are gfx942"):
        testing.assembled("s_endpgm", arch="gfx90a")


def test_a_kernel_is_asked_for_by_name_and_chip() -> None:
    data = testing.assembled_code("s_endpgm", "gfx942")
    assert code_object.kernel(data, "program", "gfx942") == load(data)["program"]
    with pytest.raises(CodeObjectError, match=r"^code for gfx942, expected code for gfx950$"):
        code_object.kernel(data, "program", "gfx950")
    with pytest.raises(CodeObjectError, match=r"^no kernel 'programs' in the code object, which has program$"):
        code_object.kernel(data, "programs", "gfx942")


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02" + bytes(100)])
def test_what_is_no_code_object_is_refused(data: bytes) -> None:
    with pytest.raises(CodeObjectError, match=re.compile("not a 64-bit ELF|not AMDGPU")):
        load(data)


def test_decoding_leaves_the_recursion_limit_alone() -> None:
    text = (
        "import sys; from gfx_emulator import decode; before = sys.getrecursionlimit(); list(decode.decode(bytes(4))); "
    )
    assert subprocess.run([sys.executable, "-c", text + "assert sys.getrecursionlimit() == before"]).returncode == 0


def test_too_few_arguments_are_refused() -> None:
    with pytest.raises(EmulatorError, match="8 bytes of arguments, it has 64"):
        machine.launch(testing.assembled("s_endpgm"), Memory(), (1,), (64,), bytes(8))


def test_results_do_not_depend_on_how_many_waves_run_together() -> None:
    kernel = testing.assembled(
        PROLOGUE + "s_lshl_b32 s10, s2, 8\n v_add_u32 v1, s10, v1\n v_mul_u32_u24 v2, 3, v1" + STORE
    )
    results = []
    for waves in (1, 3, 64):
        out, memory = words(7 * 64), Memory()
        segment = np.array([memory.register(out), 0], np.int64).tobytes().ljust(64, b"\0")
        machine.launch(kernel, memory, (7,), (64,), segment, limits=Limits(waves=waves))
        results.append(out.tolist())
    assert results[0] == results[1] == results[2] == [12 * i for i in range(7 * 64)]


def _sets_mode(text: str) -> list[int]:
    """What a program computes that sets a part of MODE."""
    out = words()
    testing.run(testing.assembled(f"{PROLOGUE}{text}\n  v_mov_b32 v2, 7\n{STORE}"), [out])
    return [int(x) for x in out]


def test_rounding_to_nearest_may_be_set_again() -> None:
    """As LLVM does behind a write of another part of MODE; other roundings are not emulated."""
    for place in ("2, 2", "0, 4"):
        assert _sets_mode(f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, {place}), 0") == [7] * 64
    for place, value in (("2, 2", 3), ("0, 2", 1), ("4, 4", 0)):
        with pytest.raises(NotImplementedInstruction, match="hardware register 1, bits"):
            _sets_mode(f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, {place}), {value}")
