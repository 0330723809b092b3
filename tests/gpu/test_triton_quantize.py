# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts of the Triton backend where the conformance kit's calls do not reach: every 16-bit value through the chip's own
conversions, graphs whose operands change, histories by the dozen, matrices beyond 2^31 elements.
"""

from __future__ import annotations

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

pytest.importorskip("triton")
native = pytest.importorskip("te_dispatch_triton.quantize")
scales = pytest.importorskip("te_dispatch_triton.scales")
portable = pytest.importorskip("te_dispatch_torch.quantize")
state = pytest.importorskip("te_dispatch_torch.state")

DEVICE = torch.device("cuda", 0)
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
ENCODINGS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


def delayed(encoding: str = "e4m3fn", common: bool = False, scale: float = 3.0) -> DelayedQuantizer:
    return DelayedQuantizer(
        encoding, common, scale=torch.full((1,), scale, device=DEVICE), amax=torch.zeros(1, device=DEVICE)
    )


def assert_same(a: Quantized, b: Quantized) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**120])
def test_every_16_bit_value(encoding: str, common: bool, scale: float) -> None:
    bits = torch.arange(65536, device=DEVICE).to(torch.int16).view(256, 256)
    # fp32: of whole tiles with both copies, NVIDIA's assembler 12.8 once made wrong columns (kernels.tile.apart).
    for x in (bits.view(torch.bfloat16), bits.view(torch.float16), bits.view(torch.bfloat16).float()):
        casts = (delayed(encoding, common, scale), BlockQuantizer(encoding, common))
        for quantizer in (*casts, BlockQuantizer(encoding, common, two_d=True)):
            made = native.quantize(x, quantizer, usage="both")
            assert_same(made, portable.quantize(x, quantizer, usage="both"))


def test_a_replay_reads_what_its_operands_hold_then() -> None:
    x, quantizer = torch.randn(300, 520, device=DEVICE).bfloat16(), delayed()
    casts: tuple[Any, ...] = (quantizer, CurrentQuantizer(), BlockQuantizer(), MXFP8Quantizer(), NVFP4Quantizer())
    histories = [torch.rand(16, 3, device=DEVICE) for _ in range(30)]
    factors = [torch.ones(3, device=DEVICE) for _ in range(30)]
    update = lambda module: module.update_delayed_scales(histories, factors, [[448.0] * 3] * 30)  # noqa: E731
    for cast in casts:
        native.quantize(x, cast, usage="both")
    update(scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [native.quantize(x, cast, usage="both") for cast in casts]
        update(scales)
    for _ in range(2):
        x.copy_(torch.randn(300, 520, device=DEVICE) * 5)
        for history in histories:
            history.copy_(torch.rand(16, 3, device=DEVICE))
        kept = [h.clone() for h in histories], [f.clone() for f in factors]
        graph.replay()
        for cast, found in zip(casts, made):
            assert_same(found, portable.quantize(x, cast, usage="both"))
        state.update_delayed_scales(*kept, [[448.0] * 3] * 30)
        for a, b in zip([*histories, *factors], [*kept[0], *kept[1]]):
            assert torch.equal(a, b)


@pytest.mark.parametrize("make", [delayed, CurrentQuantizer, BlockQuantizer], ids=["delayed", "current", "block_1d"])
def test_beyond_2_to_the_31_elements(make: Any, room: Any) -> None:
    rows, columns = (1 << 17) + 1, 1 << 14
    room(18)
    x = torch.empty((rows, columns), dtype=torch.bfloat16, device=DEVICE)
    for part in x.split(1 << 13):
        part.normal_()
    quantizer = make()
    made = native.quantize(x, quantizer, usage="both")
    amax = {"amax": native.compute_amax(x)} if quantizer.kind == "current" else {}
    tail = x[1 << 17 :]
    expected = portable.quantize(tail, quantizer, usage="both", **amax)
    assert torch.equal(made.row_data[1 << 17 :], expected.row_data)
    assert torch.equal(made.col_data[:, 1 << 17 :], expected.col_data)
    start = portable.quantize(x[:128], quantizer, usage="both", **amax)
    assert torch.equal(made.row_data[:128], start.row_data)
    assert torch.equal(made.col_data[:, :128], start.col_data)


@pytest.mark.parametrize("make", [delayed, BlockQuantizer], ids=["delayed", "block_1d"])
def test_sums_come_with_the_cast(make: Any) -> None:
    x = torch.randn(1000, 700, device=DEVICE)
    made = native.quantize_dbias(x, make(), usage="both")
    torch.testing.assert_close(made.dbias, x.double().sum(0).float(), rtol=1e-5, atol=1e-4)
    again = native.quantize_dbias(x, make(), usage="both")
    assert torch.equal(made.dbias, again.dbias)
