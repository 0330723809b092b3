# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A binary in which the compiler mixed two numbers up is found in its PTX."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from te_dispatch_triton import lanes

#: As Triton 3.6 wrote it for norm_columns: threads from 128 on get a bit of %r100 in %r131.
MIXED = """
.reqntid 256
    mov.u32         %r96, %tid.x;
    shr.u32         %r100, %r96, 3;
    and.b32         %r103, %r96, 31;
    mul.wide.u32    %rd135, %r100, 268435456;
    cvt.u64.u32     %rd136, %r103;
    shl.b64         %rd137, %rd136, 34;
    or.b64          %rd138, %rd135, %rd137;
    shr.u64         %rd141, %rd138, 32;
    mov.b64         {_, %r131}, %rd138;
    or.b32          %r132, %r131, 1;
"""


def test_what_a_compiler_wrote_is_found() -> None:
    told = lanes.mixed(MIXED)
    assert told is not None and "mul.wide.u32 %rd135, %r100, 268435456" in told and "or.b64 %rd138" in told


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("%rd135, %rd137;", "%rd137, %rd135;"),
        ("mul.wide.u32    %rd135, %r100, 268435456;", "cvt.u64.u32 %rd9, %r100;\n    shl.b64 %rd135, %rd9, 28;"),
        ("shr.u32         %r100, %r96, 3;", "ld.global.b32 %r100, [%rd1];"),
        ("shr.u64         %rd141, %rd138, 32;", ""),
        ("mov.b64         {_, %r131}, %rd138;", "cvt.u32.u64 %r131, %rd141;"),
        ("or.b32          %r132, %r131, 1;", "and.b32 %r132, %r131, 127;"),
        (".reqntid 256", ""),
    ],
)
def test_other_ways_to_write_it_are_found(before: str, after: str) -> None:
    assert before in MIXED and lanes.mixed(MIXED.replace(before, after)) is not None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("shr.u32         %r100, %r96, 3;", "and.b32 %r100, %r96, 15;"),  # 4 bits and 28 are 32
        ("shr.u32         %r100, %r96, 3;", "bfe.u32 %r100, %r96, 3, 4;"),
        ("shr.u32         %r100, %r96, 3;", "shr.u32 %r100, %r96, 6;"),
        (".reqntid 256", ".reqntid 128"),  # 4 bits again
        ("or.b32          %r132, %r131, 1;", "and.b32 %r132, %r131, 126;"),
        ("268435456", "4"),
        ("or.b32          %r132, %r131, 1;", "st.global.b64 [%rd1], %rd138;"),  # a 64-bit number that is wanted whole
        ("%rd136, 34", "%rd136, 30"),
        ("mul.wide.u32    %rd135, %r100, 268435456;", "cvt.u64.u32 %rd135, %r100;"),
    ],
)
def test_what_is_right_is_left_alone(before: str, after: str) -> None:
    assert before in MIXED and lanes.mixed(MIXED.replace(before, after)) is None
