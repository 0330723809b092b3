# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every quantize path equals the reference, bit for bit: codes, scales, recorded amax."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch_backend_support import assert_same_bits, every_bf16, fp4_quantizers, quantizers, random_bits, same_bits

from te_dispatch.numerics.encodings import ENCODINGS, FP8_ENCODINGS
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from te_dispatch_torch import quantize, scales_layout, state
from te_dispatch_torch.encodings import decode, encode_, encode_bits

reference = pytest.importorskip("te_dispatch_reference.quantize")


def _ties(encoding: str) -> torch.Tensor:
    """Every value of the encoding, the midpoints between neighbours and both fp32 neighbours of each, both signs."""
    points = torch.arange(ENCODINGS[encoding].max_code + 1, dtype=torch.uint8)
    values = decode(points, encoding)
    mid = torch.cat((values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.03125, values[-1:] * 2))
    near = torch.cat((mid, torch.nextafter(mid, mid + 1), torch.nextafter(mid, mid - 1)))
    special = torch.tensor([math.inf, math.nan, 0.0, 2.0**-149, 3.4e38])
    all_ = torch.cat((near, -near, special, -special))
    return torch.cat((all_, all_.new_zeros(-len(all_) % 16))).view(-1, 16)


def _inputs(encoding: str) -> Iterator[torch.Tensor]:
    yield every_bf16()
    yield _ties(encoding)
    yield (torch.randn(3, 5, 150) * 3).half()  # edge blocks of every kind
    yield torch.zeros(4, 33)
    yield torch.full((2, 16), math.nan)
    yield torch.empty(0, 32)


@pytest.mark.parametrize("two_d", [False, True])
@pytest.mark.parametrize("common", [False, True])
def test_negative_zero_of_fp4(common: bool, two_d: bool) -> None:
    """Common portability writes +0 for everything that rounds to -0, FP4 values too."""
    x = torch.tensor([-0.0, -0.1, 0.1, -6.0, 6.0, -0.25, 0.25, -math.inf] * 4).view(2, 16)
    x = torch.cat((x, x * 2.0**-20))
    quantizer = NVFP4Quantizer(common=common, two_d=two_d)
    got = quantize.quantize(x, quantizer, usage="both")
    assert_same_bits(got, reference.quantize(x, quantizer, usage="both"), f"common={common}")
    nibbles = torch.stack((got.row_data & 0xF, got.row_data >> 4))
    assert bool((nibbles == 8).any()) is not common


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("encoding", FP8_ENCODINGS)
def test_all_casts(encoding: str, common: bool) -> None:
    for x in _inputs(encoding):
        for mine, theirs in zip(quantizers(encoding, common), quantizers(encoding, common), strict=True):
            got = quantize.quantize(x, mine, usage="both")
            assert_same_bits(got, reference.quantize(x, theirs, usage="both"), f"{mine.kind} of {tuple(x.shape)}")
            if isinstance(mine, DelayedQuantizer) and mine.amax is not None:
                assert_same_bits(mine.amax, theirs.amax, "amax")
                assert float(mine.amax) > 0 or not (x == x).any() or not x.any()


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("encoding", FP8_ENCODINGS)
def test_two_million_random_patterns(encoding: str, common: bool) -> None:
    x = random_bits(1 << 21, seed=2 * FP8_ENCODINGS.index(encoding) + common).view(2048, 1024)
    q = [DelayedQuantizer(encoding, common, scale=torch.tensor([0.75])) for _ in range(2)]
    assert_same_bits(quantize.quantize(x, q[0], usage="row"), reference.quantize(x, q[1], usage="row"))


@pytest.mark.parametrize("encoding", FP8_ENCODINGS)
def test_random_patterns_through_block_scales(encoding: str) -> None:
    x = random_bits(1 << 16, seed=7).view(256, 256)
    for q in (BlockQuantizer(encoding), BlockQuantizer(encoding, two_d=True), MXFP8Quantizer(encoding)):
        assert_same_bits(quantize.quantize(x, q, usage="both"), reference.quantize(x, q, usage="both"), q.scaling)


def test_fp4() -> None:
    small = torch.randn(64, 96) * torch.logspace(-12, 3, 96)  # block scales down to zero
    for x in (small, small.bfloat16()[:, :35], random_bits(1 << 14, 3).view(128, 128), *_inputs("e4m3fn")):
        for q in fp4_quantizers():
            assert_same_bits(quantize.quantize(x, q, usage="both"), reference.quantize(x, q, usage="both"), str(q))


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("encoding", FP8_ENCODINGS)
def test_integer_encoder_equals_cast(encoding: str, common: bool) -> None:
    """The path of devices without float8 casts."""
    info = ENCODINGS[encoding]
    limit, negative_zero = (info.common_max, False) if common else (info.max, info.negative_zero)
    for x in (random_bits(1 << 20, 5), _ties(encoding).flatten(), every_bf16().float().flatten()):
        bits = encode_bits(x, encoding, limit, negative_zero)
        assert torch.equal(encode_(x.clone(), encoding, limit, negative_zero), bits)


@pytest.mark.parametrize("usage", ["row", "column", "both"])
def test_usage_makes_what_was_asked(usage: str) -> None:
    x = torch.randn(40, 48)
    for q in (*quantizers("e4m3fn", False), *fp4_quantizers()):
        got = quantize.quantize(x, q, usage=usage)
        assert (got.row_data is not None) == (usage != "column") == (got.row_scale_inv is not None)
        assert (got.col_data is not None) == (usage != "row") == (got.col_scale_inv is not None)
        assert_same_bits(got, reference.quantize(x, q, usage=usage), f"{q.kind} {usage}")


def test_given_amax() -> None:
    x = torch.randn(32, 32)
    for amax in (5.0, 0.0, math.inf, math.nan, 1e-44):
        given = torch.tensor([amax])
        for q in (CurrentQuantizer(), CurrentQuantizer(power_of_two=True), NVFP4Quantizer()):
            assert_same_bits(
                quantize.quantize(x, q, usage="both", amax=given), reference.quantize(x, q, usage="both", amax=given)
            )


def test_out_and_noop_flag() -> None:
    x, y = torch.randn(32, 32), torch.randn(32, 32)
    q = DelayedQuantizer(scale=torch.tensor([3.0]), amax=torch.zeros(1))
    out = quantize.quantize(x, q, usage="both")
    before, amax = out.row_data.clone(), q.amax.clone()
    kept = quantize.quantize(y * 9, q, usage="both", out=out, noop_flag=torch.ones(1))
    assert kept is out and torch.equal(out.row_data, before) and torch.equal(q.amax, amax)
    quantize.quantize(y * 9, q, usage="both", out=out, noop_flag=torch.zeros(1))
    assert not torch.equal(out.row_data, before) and q.amax > amax
    assert_same_bits(out, quantize.quantize(y * 9, q, usage="both"))


def test_scale_inv_never_aliases_the_state() -> None:
    q = DelayedQuantizer(scale=torch.tensor([2.0]))
    made = quantize.quantize(torch.randn(16, 16), q, usage="both")
    q.scale.fill_(8.0)
    assert made.row_scale_inv.item() == made.col_scale_inv.item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantize(dtype: torch.dtype) -> None:
    x = torch.randn(4, 9, 50)
    everything = [q for e in FP8_ENCODINGS for q in quantizers(e, False)] + fp4_quantizers()
    for q in everything:
        for usage in ("row", "column"):
            made = quantize.quantize(x, q, usage=usage)
            assert_same_bits(quantize.dequantize(made, dtype=dtype), reference.dequantize(made, dtype=dtype), str(q))


@pytest.mark.parametrize("shape", [(200, 300), (0, 160), (0, 32)])
def test_relayout_is_the_references_and_undoes_itself(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    layouts = {"block_1d": "gemm_1d", "block_2d": "gemm_2d", "mxfp8": "swizzled_32x4x4", "nvfp4": "swizzled_32x4x4"}
    for q in (BlockQuantizer(), BlockQuantizer(two_d=True), MXFP8Quantizer(), NVFP4Quantizer()):
        made = quantize.quantize(x, q, usage="both")
        moved = scales_layout.relayout_scales(made, scale_layout=layouts[q.scaling])
        assert_same_bits(moved, reference.relayout_scales(made, scale_layout=layouts[q.scaling]), q.scaling)
        assert_same_bits(scales_layout.relayout_scales(moved, scale_layout="canonical"), made, q.scaling)


def test_relayout_gives_scales_of_their_own_where_nothing_moves() -> None:
    """One block row, or blocks in a multiple of 4: the layouts coincide, but a record's scales are its own."""
    for q, shape in ((BlockQuantizer("e4m3fn"), (8, 64)), (BlockQuantizer("e4m3fn", two_d=True), (128, 512))):
        layout = "gemm_2d" if q.two_d else "gemm_1d"
        made = quantize.quantize(torch.ones(shape), q, usage="both")
        moved = scales_layout.relayout_scales(made, scale_layout=layout)
        back = scales_layout.relayout_scales(moved, scale_layout="canonical")
        for one, other in ((moved.row_scale_inv, back.row_scale_inv), (moved.col_scale_inv, back.col_scale_inv)):
            assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(1, 64), (3, 64), (64, 1), (1, 1)])
@pytest.mark.parametrize("q", [CurrentQuantizer(), BlockQuantizer(two_d=True)], ids=["tensor", "block_2d"])
def test_the_two_copies_are_no_one_memory(q: CurrentQuantizer | BlockQuantizer, shape: tuple[int, int]) -> None:
    """Also for one row or column, whose transpose is contiguous without a copy."""
    made = quantize.quantize(torch.randn(shape), q, usage="both")
    turned = quantize.transpose_quantized(quantize.quantize(torch.randn(shape), q, usage="row"))
    for record in (made, turned):
        assert record.row_data.data_ptr() != record.col_data.data_ptr()
        # One scale of a whole tensor serves both copies.
        assert q.scaling == "tensor" or record.row_scale_inv.data_ptr() != record.col_scale_inv.data_ptr()


def test_transpose() -> None:
    for q in (CurrentQuantizer(), BlockQuantizer(two_d=True)):
        made = quantize.quantize(torch.randn(3, 50, 130), q, usage="row")
        assert_same_bits(quantize.transpose_quantized(made), reference.transpose_quantized(made))
    with pytest.raises(ValueError, match="block_1d"):
        quantize.transpose_quantized(quantize.quantize(torch.randn(4, 4), BlockQuantizer(), usage="row"))


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_delayed_update(algorithm: str, length: int) -> None:
    history = torch.rand(length, 9) * 10
    history[0, 1], history[0, 2], history[-1, 3], history[0, 4] = 0.0, math.inf, math.nan, math.nan
    history[:, 5] = 0.0
    history[0, 6], history[:, 7] = 1e-42, 1e-42  # an infinite scale
    scales, maxima = torch.rand(9) + 0.5, [448.0, 57344.0, 240.0] * 3
    for margin in (0, 3):
        mine, theirs = (history.clone(), scales.clone()), (history.clone(), scales.clone())
        for module, (h, s) in ((state, mine), (reference, theirs)):
            module.update_delayed_scales([h], [s], [maxima], algorithm=algorithm, margin=margin)
        assert_same_bits(mine, theirs)
        assert not same_bits(mine[1], scales)


@pytest.mark.parametrize("pair", [("e4m3fn", "e4m3fnuz"), ("e5m2", "e5m2fnuz")])
def test_convert_encoding(pair: tuple[str, str]) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for source, target in (pair, pair[::-1]):
        made = quantize.quantize(torch.randn(16, 16), CurrentQuantizer(source), usage="both")
        made.row_data, made.col_data = codes, codes.t().contiguous()
        counts = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        got = state.convert_encoding(made, encoding=target, count=counts[0])
        assert_same_bits(got, reference.convert_encoding(made, encoding=target, count=counts[1]))
        assert torch.equal(*counts) and (counts[0] > 0) == target.endswith(("fn", "m2"))
        if counts[0]:
            with pytest.raises(ValueError, match="error"):
                state.convert_encoding_checked(made, encoding=target, overflow="error")
        else:
            assert_same_bits(state.convert_encoding_checked(made, encoding=target, overflow="error"), got)


def test_shards_cover_the_matrix() -> None:
    height, width, block = 200, 300, 128
    x = torch.randn(height * width)
    for start, end in ((0, 7), (250, 33_000), (33_000, 60_000), (60_000, 60_000)):
        amax = [torch.rand(2, 3) for _ in range(1)] * 2
        grids = amax[0].clone(), amax[0].clone()
        for module, grid in ((state, grids[0]), (reference, grids[1])):
            module.partial_amax(x[start:end], grid, height=height, width=width, start=start, block=block)
        assert_same_bits(*grids)
        outs = [torch.zeros(end - start, dtype=torch.uint8) for _ in range(2)]
        for module, out in ((state, outs[0]), (reference, outs[1])):
            module.partial_cast(
                x[start:end], out, grids[0], height=height, width=width, start=start, block=block, encoding="e4m3fn"
            )
        assert_same_bits(*outs)
    whole = torch.zeros(1, 1)
    state.partial_amax(x[:100], whole, height=height, width=width, start=0, block=0)
    assert whole.item() == x[:100].abs().max().item()


def test_rows_and_lists() -> None:
    x, splits, padded = torch.randn(35, 20), [0, 3, 32], [16, 16, 32]
    wide = quantize.pad_rows(x, splits, padded)
    assert_same_bits(wide, reference.pad_rows(x, splits, padded))
    assert_same_bits(quantize.unpad_rows(wide, splits, padded), x)
    qs = [CurrentQuantizer() for _ in splits]
    assert_same_bits(
        quantize.split_quantize(x, splits, qs, usage="both"), reference.split_quantize(x, splits, qs, usage="both")
    )
    xs = [torch.randn(4, 8), torch.randn(16, 3)]
    assert_same_bits(
        quantize.multi_tensor_quantize(xs, qs[:2], usage="row"), [quantize.quantize(t, qs[0], usage="row") for t in xs]
    )
    out = torch.zeros(1)
    assert state.compute_amax(x, out=out) is out
    assert_same_bits(out, reference.compute_amax(x))


def test_dbias_rounds_once() -> None:
    """fp32 sums of m terms: m ulps of fp32 on sum |x|, then half an ulp of bf16 (2^-8 relative)."""
    x = torch.randn(300, 40).bfloat16()
    got = quantize.quantize_dbias(x, CurrentQuantizer(), usage="row")
    exact, size = x.double().sum(0), x.double().abs().sum(0)
    assert ((got.dbias.double() - exact).abs() <= 2**-8 * exact.abs() + 300 * 2**-24 * size).all()
    assert_same_bits(got.quantized, quantize.quantize(x, CurrentQuantizer(), usage="row"))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"usage": "rows"}, "usage"),
        ({"usage": "row", "noop_flag": torch.ones(1)}, "noop_flag"),
        ({"usage": "row", "x": torch.ones(4, 4, dtype=torch.float64)}, "x: got dtype"),
        ({"usage": "row", "amax": torch.ones(1), "quantizer": MXFP8Quantizer()}, "amax"),
        ({"usage": "both", "out": "row"}, "out"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, object], named: str) -> None:
    call = {"x": torch.ones(4, 4), "quantizer": CurrentQuantizer(), **arguments}
    if call.get("out") == "row":
        call["out"] = quantize.quantize(torch.ones(4, 4), CurrentQuantizer(), usage="row")
    with pytest.raises(ValueError, match=named):
        quantize.quantize(call.pop("x"), call.pop("quantizer"), **call)
