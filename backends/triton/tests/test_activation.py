# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activations where the conformance kit's smoke calls do not reach: every function, cast and gradient, by bytes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch.ops.activation import GATED, KINDS
from te_dispatch_triton import activation, launch, quantize, targets

CPU = torch.device("cpu")
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
QUANTIZERS: dict[str, Any] = {
    "delayed": lambda: DelayedQuantizer("e5m2", scale=torch.full((1,), 3.0), amax=torch.zeros(1)),
    "current": CurrentQuantizer,
    "block_1d": BlockQuantizer,
    "block_2d": lambda: BlockQuantizer(two_d=True),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
    "nvfp4_2d": lambda: NVFP4Quantizer(two_d=True),
}


def operands(kind: str, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns * (2 if kind in GATED else 1), generator=generator).bfloat16() * 4
    return x, torch.randn(rows, columns, generator=generator).bfloat16()


def assert_same(a: Quantized, b: Quantized) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


@pytest.mark.interpreted
@pytest.mark.parametrize("shape, usage", [((36, 128), "both"), ((37, 130), "row"), ((37, 130), "both")])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("cast", QUANTIZERS)
def test_casts_have_the_bytes_of_the_values_and_a_cast(
    cast: str, kind: str, usage: str, shape: tuple[int, int]
) -> None:
    """By lines, tiles or four rows at a time, one half by one program or by two, through memory where blocks straddle
    the halves."""
    x, dy = operands(kind, *shape)
    fused, apart = QUANTIZERS[cast](), QUANTIZERS[cast]()
    made = activation.activation_fwd(x, kind=kind, quantizer=fused, usage=usage, with_out=True)
    plain = activation.activation_fwd(x, kind=kind, out_dtype=torch.float32).out
    assert torch.equal(made.out, plain.bfloat16())
    assert_same(made.out_quantized, quantize.quantize(plain, apart, usage=usage))
    gradient = activation.activation_bwd(dy, x, kind=kind, quantizer=fused, usage=usage, with_dx=True, with_dbias=True)
    values = activation.activation_bwd(dy.float(), x, kind=kind, with_dbias=True)
    assert torch.equal(gradient.dx, values.dx.bfloat16())
    assert_same(gradient.dx_quantized, quantize.quantize(values.dx, apart, usage=usage))
    torch.testing.assert_close(gradient.dbias.float(), values.dx.double().sum(0).float(), rtol=8e-3, atol=1e-4)
    if cast == "delayed":
        assert torch.equal(fused.amax, apart.amax)


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_forward(kind: str) -> None:
    """Central differences in float64 of the portable implementation, where no corner is near."""
    portable = pytest.importorskip("te_dispatch_torch.activation")
    x, _ = operands(kind, 8, 64)
    x = torch.where(x.abs() < 0.05, 1.0, x.float())
    x = torch.where((x.abs() - 7.0).abs() < 0.05, 6.0, x)
    dx = activation.activation_bwd(torch.ones(8, 64), x, kind=kind).dx.double()
    step = 1e-6

    def forward(at: torch.Tensor) -> torch.Tensor:
        return portable._forward(kind, at, None)

    halves = (slice(0, 64), slice(64, 128)) if kind in GATED else (slice(0, 64),)
    for half in halves:
        moved = torch.zeros_like(x, dtype=torch.float64)
        moved[:, half] = step
        expected = (forward(x.double() + moved) - forward(x.double() - moved)) / (2 * step)
        torch.testing.assert_close(dx[:, half], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str) -> None:
    """Neither of them may overflow on the way to a number, or lose a NaN."""
    ends = torch.tensor([-3e38, -1e10, -200.0, -90.0, 90.0, 200.0, 1e10, -0.0])
    x = torch.cat((ends, torch.ones(8)), 0)[None] if kind in GATED else ends[None]
    portable = pytest.importorskip("te_dispatch_torch.activation")
    found, expected = activation.activation_fwd(x, kind=kind).out, portable.activation_fwd(x, kind=kind).out
    assert torch.allclose(found.nan_to_num(7.0), expected.nan_to_num(7.0), rtol=1e-5, atol=1e-33)
    if "relu" not in kind and kind != "clamped_swiglu":
        assert activation.activation_fwd(torch.full((1, 4), torch.nan), kind=kind).out.isnan().all()


@pytest.mark.interpreted
@pytest.mark.parametrize("record", ["delayed", "block_1d"])
def test_records_are_decoded(record: str) -> None:
    """As they are read where one scale serves, else first; without the copy by rows too."""
    x, dy = operands("gelu", 12, 130)
    for usage in ("row", "column"):
        quantized = quantize.quantize(x, QUANTIZERS[record](), usage=usage)
        forms = pytest.importorskip("te_dispatch_torch.quantize")
        values = forms.dequantize(quantized, dtype=torch.float32)
        found = activation.activation_bwd(dy, quantized, kind="gelu").dx
        assert torch.equal(found, activation.activation_bwd(dy, values, kind="gelu").dx)


def test_arguments_are_checked() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"^kind: "):
        activation.activation_fwd(x, kind="tanh")
    with pytest.raises(ValueError, match=r"^dy: "):
        activation.activation_bwd(x, x, kind="swiglu")


@pytest.mark.parametrize(
    "rows, options, kernels",
    [
        (64, {}, ["activation_tiles"]),
        (64, {"cast": "delayed", "usage": "both"}, ["activation_columns"]),
        (63, {"cast": "delayed", "usage": "both"}, ["activation_tiles"]),
        (64, {"cast": "current", "usage": "both"}, ["activation_maxima", "activation_columns"]),
        (64, {"cast": "block_1d", "usage": "both"}, ["activation_columns"]),
        (63, {"cast": "block_2d", "usage": "both"}, ["activation_tiles"]),
        (64, {"cast": "mxfp8", "usage": "both"}, ["activation_tiles"]),
    ],
)
def test_kernels(rows: int, options: dict[str, str], kernels: list[str]) -> None:
    """Four rows at a time where there are whole fours; one pass but for the current scale."""
    x = torch.empty(rows, 256)
    made: list[launch.Launch] = []
    quantizer = QUANTIZERS[options["cast"]]() if options else None
    targets.pretend(CPU, targets.target_for("nvidia", "sm_90", 100))
    try:
        with launch.recording(made):
            activation.activation_fwd(x, kind="swiglu", quantizer=quantizer, usage=options.get("usage", "row"))
    finally:
        targets.pretend(CPU, None)
    assert [each.kernel.name for each in made] == kernels


@pytest.mark.parametrize("kind, cast, kernel", [
    ("gelu", "block_1d", "activation_columns"), ("swiglu", "block_1d", "activation_tiles"),
    ("gelu", "block_2d", "activation_tiles"),
])  # fmt: skip
def test_kernels_of_gradients_in_blocks(kind: str, cast: str, kernel: str) -> None:
    """Four rows at a time where one program has the registers for what it casts."""
    x, dy = operands(kind, 128, 128)
    made: list[launch.Launch] = []
    targets.pretend(CPU, targets.target_for("nvidia", "sm_90", 100))
    try:
        with launch.recording(made):
            activation.activation_bwd(dy, x, kind=kind, quantizer=QUANTIZERS[cast](), usage="both", with_dbias=True)
    finally:
        targets.pretend(CPU, None)
    assert [each.kernel.name for each in made] == [kernel, "sum_columns"]


@pytest.mark.compiles
@pytest.mark.parametrize("backward, loads", [(False, 8), (True, 12)])
def test_all_of_a_tile_is_on_its_way_before_arithmetic(backward: bool, loads: int) -> None:
    """In Hopper's binaries: its assembler would rather save registers (`kernels.activation_tiles`)."""
    from te_dispatch_triton.crosscompile.matrix import compile_for
    from te_dispatch_triton.crosscompile.unwritten import disassembly

    target = targets.target_for("nvidia", "sm_90")
    made: list[launch.Launch] = []
    x, dy = (torch.empty(8192, columns, dtype=torch.bfloat16) for columns in (16384, 8192))
    options: dict[str, Any] = {"kind": "swiglu", "quantizer": QUANTIZERS["delayed"](), "usage": "both"}
    targets.pretend(CPU, target)
    try:
        with launch.recording(made):
            activation.activation_bwd(dy, x, **options) if backward else activation.activation_fwd(x, **options)
    finally:
        targets.pretend(CPU, None)
    (one,) = made
    before = disassembly(compile_for(one, target).asm["cubin"]).split("MUFU.EX2")[0]
    assert len(re.findall(r"LDG\.E\.(?:64|128)", before)) == loads
