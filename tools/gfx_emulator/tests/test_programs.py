# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Small programs in assembly: control flow, masks, memory, barriers, and what has to be reported."""

from __future__ import annotations

import re

import numpy as np
import pytest

from gfx_emulator import (
    AccessError,
    CodeObjectError,
    EmulatorError,
    HangError,
    Limits,
    Memory,
    NotImplementedInstruction,
    RaceError,
    load,
    machine,
    testing,
)

LANES = np.arange(64, dtype=np.uint32)
#: Loads the addresses of two buffers and makes v1 the byte offset of a work-item's word.
PROLOGUE = """
  s_load_dwordx4 s[4:7], s[0:1], 0x0
  v_lshlrev_b32 v1, 2, v0
  s_waitcnt lgkmcnt(0)
"""
STORE = """
  global_store_dword v1, v2, s[4:5]
  s_endpgm
"""


def words(count: int = 64) -> np.ndarray:
    return np.zeros(count, np.uint32)


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


@pytest.mark.parametrize("size, kind", [(1, "ubyte"), (1, "sbyte"), (2, "ushort"), (2, "sshort")])
def test_narrow_loads_are_extended(size: int, kind: str) -> None:
    source = np.random.default_rng(0).integers(0, 256, 64 * size, dtype=np.uint8)
    out = words()
    testing.run(
        testing.assembled(
            PROLOGUE
            + f"""
  v_mul_u32_u24 v3, {size}, v0
  global_load_{kind} v2, v3, s[6:7]
  s_waitcnt vmcnt(0)
"""
            + STORE
        ),
        [out, source],
    )
    signed = "i" if kind.startswith("s") else "u"
    assert (out.view(np.int32) == source.view(f"{signed}{size}").astype(np.int64).astype(np.int32)).all()


def test_wide_unaligned_accesses() -> None:
    source = np.arange(64 * 16 + 3, dtype=np.uint8)
    out = np.zeros(64 * 16 + 1, np.uint8)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_lshlrev_b32 v1, 4, v0
  global_load_dwordx4 v[4:7], v1, s[6:7] offset:3
  s_waitcnt vmcnt(0)
  global_store_dwordx4 v1, v[4:7], s[4:5] offset:1
  s_endpgm
"""
        ),
        [out, source],
    )
    assert (out[1:] == source[3:]).all()


def test_access_outside_names_instruction_lane_and_address() -> None:
    short = words(60)
    kernel = testing.assembled(PROLOGUE + "v_mov_b32 v2, 1" + STORE)
    with pytest.raises(
        AccessError, match=r"GLOBAL_STORE_DWORD at \+0x\w+ .*wave 0, lane 60, address 0x\w+: 240 bytes into"
    ):
        testing.run(kernel, [short, words()])


def test_a_store_that_begins_inside_and_ends_outside_is_refused() -> None:
    kernel = testing.assembled(
        PROLOGUE + "v_mov_b32 v2, 1\n v_mov_b32 v3, 1\n global_store_dwordx2 v1, v[2:3], s[4:5]\n s_endpgm"
    )
    with pytest.raises(AccessError, match="lane 63"):
        testing.run(kernel, [words(64), words()])


def test_scalar_load_outside_is_refused() -> None:
    kernel = testing.assembled("s_load_dword s4, s[0:1], 0x4000\n s_endpgm")
    with pytest.raises(EmulatorError, match=r"S_LOAD_DWORD .*scalar load outside"):
        testing.run(kernel, [])


def test_buffer_reads_zero_and_drops_writes_out_of_range() -> None:
    """A raw buffer resource of 32 words: what is beyond is no error, unlike beyond the allocation."""
    source, out = LANES.copy() + 100, words(64)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  s_mov_b32 s8, s6
  s_and_b32 s9, s7, 0xffff
  s_movk_i32 s10, 128
  s_mov_b32 s11, 0x27000
  buffer_load_dword v2, v1, s[8:11], 0 offen
  s_mov_b32 s12, s4
  s_and_b32 s13, s5, 0xffff
  s_movk_i32 s14, 192
  s_mov_b32 s15, 0x27000
  v_add_u32 v2, 1, v2
  s_waitcnt vmcnt(0)
  buffer_store_dword v2, v1, s[12:15], 0 offen
  s_endpgm
"""
        ),
        [out, source],
    )
    assert out.tolist() == [101 + i for i in range(32)] + [1] * 16 + [0] * 16


def test_local_memory_with_a_barrier() -> None:
    """Two waves exchange what they wrote."""
    out = words(128)
    testing.run(exchange(barrier=True), [out, words()], items=128)
    assert out.tolist() == list(range(64, 128)) + list(range(64))


@pytest.mark.parametrize("order", ["read after write", "write after read"])
def test_missing_barrier_is_reported(order: str) -> None:
    if order == "read after write":
        kernel, told = exchange(barrier=False), "DS_READ_B32 .*wave 0, lane 0.*wave 0 reads what wave 1 wrote"
    else:
        kernel, told = overwrite(), "DS_WRITE_B32 .*wave 1, lane 0.*wave 1 writes what wave 0 read"
    with pytest.raises(RaceError, match=told):
        testing.run(kernel, [words(128), words()], items=128)


def exchange(barrier: bool) -> object:
    return testing.assembled(
        PROLOGUE
        + f"""
  ds_write_b32 v1, v0
  s_waitcnt lgkmcnt(0)
  {"s_barrier" if barrier else ""}
  v_xor_b32 v3, 256, v1
  ds_read_b32 v2, v3
  s_waitcnt lgkmcnt(0)
"""
        + STORE,
        lds=512,
    )


def overwrite() -> object:
    """Wave 0 reads what wave 1 overwrites."""
    return testing.assembled(
        PROLOGUE
        + """
  v_readfirstlane_b32 s8, v0
  s_cmp_eq_u32 s8, 0
  v_and_b32 v3, 255, v1
  s_cbranch_scc0 second
  ds_read_b32 v2, v3
  s_branch end
second:
  ds_write_b32 v3, v0
end:
  v_mov_b32 v2, 0
"""
        + STORE,
        lds=512,
    )


def test_local_memory_outside_is_refused() -> None:
    kernel = testing.assembled(PROLOGUE + "ds_write_b32 v1, v0 offset:4\n s_endpgm", lds=256)
    with pytest.raises(AccessError, match=r"DS_WRITE_B32 .*lane 63, address 0x100: the workgroup has 256 bytes of LDS"):
        testing.run(kernel, [words(), words()])


def test_address_and_offset_of_local_memory_add_up_in_32_bits() -> None:
    """Compilers make negative addresses, which the instruction's offset brings back."""
    out = words()
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_add_u32 v3, 0xfffffff0, v1
  ds_write_b32 v3, v0 offset:16
  ds_add_u32 v3, v0 offset:16
  ds_read_b32 v2, v1
  s_waitcnt lgkmcnt(0)
"""
            + STORE,
            lds=256,
        ),
        [out, words()],
    )
    assert out.tolist() == [2 * lane for lane in range(64)]


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


def test_global_atomics_of_all_lanes_on_one_word() -> None:
    counter, out = words(1), words(128)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_mov_b32 v3, 0
  v_mov_b32 v2, 2
  global_atomic_add v2, v3, v2, s[6:7] sc0
  s_waitcnt vmcnt(0)
"""
            + STORE
        ),
        [out, counter],
        items=128,
    )
    assert counter.tolist() == [256]
    assert sorted(out.tolist()) == list(range(0, 256, 2))


def test_local_atomics_are_no_race() -> None:
    out = words(128)
    testing.run(
        testing.assembled(
            PROLOGUE
            + """
  v_mov_b32 v3, 0
  v_mov_b32 v4, 1
  ds_add_u32 v3, v4
  s_waitcnt lgkmcnt(0)
  s_barrier
  ds_read_b32 v2, v3
  s_waitcnt lgkmcnt(0)
"""
            + STORE,
            lds=64,
        ),
        [out, words()],
        items=128,
    )
    assert out.tolist() == [128] * 128


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


@pytest.mark.parametrize("data", [b"", b"\x7fELF\x02" + bytes(100)])
def test_what_is_no_code_object_is_refused(data: bytes) -> None:
    with pytest.raises(CodeObjectError, match=re.compile("not a 64-bit ELF|not AMDGPU")):
        load(data)


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
