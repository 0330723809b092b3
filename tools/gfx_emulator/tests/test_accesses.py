# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Small programs in assembly that access memory: sizes, bounds, local memory and its races, atomics."""

from __future__ import annotations

import numpy as np
import pytest

from gfx_emulator import (
    AccessError,
    EmulatorError,
    RaceError,
    testing,
)
from gfx_emulator.testing import PROLOGUE, STORE, words

LANES = np.arange(64, dtype=np.uint32)


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
