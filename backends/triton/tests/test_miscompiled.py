# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Wrong binaries are told by what the compiler wrote."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
from te_dispatch.numerics.quantizers import BlockQuantizer
from te_dispatch_triton import lanes, miscompiled, norm, targets, training
from te_dispatch_triton.crosscompile import matrix, run
from te_dispatch_triton.launch import Launch, recording

#: As LLVM writes the product of two numbers of bf16 that is asked for in fp16: converted first, multiplied in fp16.
IN_HALF = """
  %68 = fpext bfloat %67 to float, !dbg !28
  %69 = fptrunc float %68 to half
  %70 = insertelement <2 x half> poison, half %69, i64 0, !dbg !31
  %71 = shufflevector <2 x half> %70, <2 x half> poison, <2 x i32> zeroinitializer, !dbg !31
  %120 = fmul <2 x half> %71, %119, !dbg !31
"""


def test_arithmetic_in_half_precision_is_found() -> None:
    assert miscompiled.in_half(IN_HALF) == "%120 = fmul <2 x half> %71, %119"


@given(
    operation=st.sampled_from(("fadd", "fsub", "fmul", "fdiv", "frem")),
    flags=st.sampled_from(("", "contract ", "nnan nsz ")),
    lanes=st.integers(1, 16),
)
def test_whatever_the_arithmetic_is(operation: str, flags: str, lanes: int) -> None:
    wide = (lambda t: t) if lanes == 1 else (lambda t: f"<{lanes} x {t}>")
    text = "\n".join((
        f"  %w = fpext {wide('bfloat')} %x to {wide('float')}",
        f"  %h = fptrunc {wide('float')} %w to {wide('half')}",
        f"  %r = {operation} {flags}{wide('half')} %h, %y",
    ))  # fmt: skip
    assert (miscompiled.in_half(text) or "").startswith(f"%r = {operation}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fpext bfloat", "fpext half"),  # exact in fp16, and so is the rounding of the product
        ("fptrunc float %68 to half", "fptrunc float %68 to bfloat"),
        ("fmul <2 x half> %71, %119", "fmul <2 x float> %71, %119"),
        ("fmul <2 x half> %71, %119", "fmul <2 x half> %118, %119"),
        ("fptrunc float %68", "fptrunc float %1"),
    ],
)
def test_what_is_right_is_left_alone(before: str, after: str) -> None:
    assert before in IN_HALF and miscompiled.in_half(IN_HALF.replace(before, after)) is None


def _launch_of(kernel: str, call: Callable[[], object]) -> Launch:
    launches: list[Launch] = []
    with recording(launches):
        call()
    return next(one for one in launches if one.kernel.name == kernel)


def _columns() -> Launch:
    x, weights = torch.empty(16, 17, dtype=torch.float16), torch.empty(17)
    quantizer = BlockQuantizer(encoding="e5m2fnuz", common=True, scale_layout="gemm_1d")
    return _launch_of(
        "norm_columns",
        lambda: norm.layernorm_fwd(x, weights, beta=weights, quantizer=quantizer, usage="column", with_y=False),
    )


def _two_dtypes() -> Launch:
    x, bias = torch.empty(16, 128, dtype=torch.float16), torch.empty(128, dtype=torch.bfloat16)
    return _launch_of("dropout_forward", lambda: training.dropout_add_fwd(x, bias=bias))


def _three_dtypes() -> Launch:
    x, probs = torch.empty(16, 128, dtype=torch.bfloat16), torch.empty(16, 2, dtype=torch.bfloat16)
    rows, row_map = torch.empty(32, 128, dtype=torch.float16), torch.zeros(16, 2, dtype=torch.int32)
    return _launch_of("scatter_gradients", lambda: training.moe_unpermute_bwd(x, rows, row_map, probs=probs))


@pytest.mark.compiles
@pytest.mark.parametrize("launched", [_two_dtypes, _three_dtypes])
def test_arithmetic_with_bf16_is_not_done_in_fp16(hopper: targets.Target, launched: Callable[[], Launch]) -> None:
    assert miscompiled.found(matrix.compile_for(launched(), hopper).asm) is None


@pytest.mark.compiles
def test_the_form_that_triton_3_6_got_wrong(hopper: targets.Target) -> None:
    """Threads from 128 on put partial maxima of every third column of four into the fourth's place."""
    assert lanes.mixed(matrix.compile_for(_columns(), hopper).asm["ptx"]) is None


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("launched", "module", "function", "sign", "told", "message"),
    [
        (_columns, lanes, "mixed", ".visible .entry norm_columns", "a; b", "two numbers are mixed up: a; b"),
        (
            _three_dtypes, miscompiled, "in_half", "scatter_gradients", "%1 = fmul half",
            "converted to fp16 before arithmetic: %1 = fmul half",
        ),
    ],
)  # fmt: skip
def test_crosscompile_tells_it(
    hopper: targets.Target, monkeypatch: pytest.MonkeyPatch, launched: Callable[[], Launch], module: ModuleType,
    function: str, sign: str, told: str, message: str,
) -> None:  # fmt: skip
    launch = launched()
    assert run.row_of("sm_90", "a family", "a call", launch, {}).problem is None
    monkeypatch.setattr(module, function, lambda text: told if sign in text else None)
    problem = run.row_of("sm_90", "a family", "a call", launch, {}).problem
    assert problem is not None and message in problem
