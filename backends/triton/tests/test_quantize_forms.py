# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Operators on records, parts and shards beyond the conformance kit: every byte, many parts, tables of many tensors."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, NVFP4Quantizer
from te_dispatch_triton.implementations import quantize_forms as manifest

DTYPES = {
    "e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2fnuz": torch.float8_e5m2fnuz,
}  # fmt: skip


def record(data: torch.Tensor, encoding: str = "e4m3fn", scale: float = 1.0) -> Quantized:
    return Quantized(
        data, None, torch.full((1,), scale), None, encoding, "tensor", CANONICAL_SCALES, tuple(data.shape),
        torch.float32, data.device,
    )  # fmt: skip


def test_only_the_check_of_overflow_reads_back() -> None:
    claims = {i.name: i.claims for i in manifest.IMPLEMENTATIONS}
    without = {name for name, claimed in claims.items() if "no_host_sync" not in claimed}
    assert without == {"convert_encoding_checked"}
    assert "capturable" not in claims["convert_encoding_checked"]


@pytest.mark.interpreted
def test_arguments_are_checked_before_anything_else() -> None:
    from te_dispatch_triton import quantize_forms as forms

    x = record(torch.zeros(4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"^scale_layout: "):
        forms.relayout_scales(x, scale_layout="gemm_1d")
    with pytest.raises(ValueError, match=r"^encoding: "):
        forms.convert_encoding(x, encoding="e5m2fnuz")
    with pytest.raises(ValueError, match=r"^padded_splits: "):
        forms.pad_rows(torch.zeros(4, 4), [4], [3])


@pytest.mark.interpreted
@pytest.mark.parametrize("encoding", DTYPES)
def test_every_code_reads_as_pytorch_reads_it(encoding: str) -> None:
    from te_dispatch_triton import quantize_forms as forms

    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    found = forms.dequantize(record(codes, encoding))
    torch.testing.assert_close(found, codes.view(DTYPES[encoding]).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("source", "target", "largest"), [("e4m3fnuz", "e4m3fn", 448.0), ("e5m2fnuz", "e5m2", 57344.0)]
)
@pytest.mark.parametrize("rows", [4, 257])
def test_every_code_converts_there_and_back(source: str, target: str, largest: float, rows: int) -> None:
    """In words of four codes, and where the number of codes does not divide by four (257 rows of one)."""
    from te_dispatch_triton import quantize_forms as forms

    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[: 256 if rows == 4 else 257].view(rows, -1)
    count = torch.full((1,), 10)
    there = forms.convert_encoding(record(codes, source, 0.5), encoding=target, count=count)
    values = codes.view(DTYPES[source]).float() * 2
    expected = values.clamp(-largest, largest)
    assert there.row_data is not None and there.row_scale_inv is not None
    found = there.row_data.view(DTYPES[target]).float()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert there.row_scale_inv.item() == 0.25
    assert count.item() == 10 + int((values.abs() > largest).sum())
    back = forms.convert_encoding(there, encoding=source)
    assert back.row_data is not None
    torch.testing.assert_close(back.row_data.view(DTYPES[source]).float() * 2, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(128, 256), (132, 4), (4, 260), (8, 12), (130, 131), (5, 8)])
def test_transposes_by_words_and_by_bytes(shape: tuple[int, int]) -> None:
    from te_dispatch_triton import quantize_forms as forms

    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    column = forms.transpose_quantized(record(data)).col_data
    assert column is not None and torch.equal(column, data.t())


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e5m2, torch.float64, torch.complex64])
def test_rows_of_more_parts_than_a_launch_takes(dtype: torch.dtype) -> None:
    from te_dispatch_triton import quantize_forms as forms

    generator = torch.Generator().manual_seed(0)
    splits = torch.randint(0, 4, (300,), generator=generator).tolist()
    padded = [-(-rows // 4) * 4 for rows in splits]
    x = torch.randint(0, 2, (sum(splits), 3), generator=generator).to(dtype)
    found = forms.pad_rows(x, splits, padded)
    parts = [torch.cat((p, p.new_zeros(more - len(p), 3))) for p, more in zip(x.split(splits), padded)]
    assert torch.equal(found.view(torch.uint8), torch.cat(parts).view(torch.uint8))
    assert torch.equal(forms.unpad_rows(found, splits, padded).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.interpreted
def test_a_shard_leaves_blocks_that_it_misses() -> None:
    from te_dispatch_triton import quantize_forms as forms

    amax = torch.full((2, 3), -1.0)
    x = torch.arange(1.0, 11.0)
    forms.partial_amax(x, amax, height=200, width=300, start=150 * 300 + 250, block=128)
    assert amax.tolist() == [[-1.0, -1.0, -1.0], [-1.0, 6.0, 10.0]]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("kind", "usage"),
    [
        ("delayed", "both"), ("delayed", "column"), ("current", "row"), ("block_1d", "row"), ("block_2d", "both"),
        ("nvfp4", "both"),
    ],
)  # fmt: skip
def test_many_tensors_are_cast_as_each_alone(kind: str, usage: str) -> None:
    """More tensors than a launch writes into the table, some empty, quantizers that differ in what is compiled in."""
    from te_dispatch_triton import quantize, quantize_many

    generator = torch.Generator().manual_seed(2)
    rows = [*torch.randint(0, 40, (19,), generator=generator).tolist(), 0, 131]
    x = torch.randn(sum(rows), 48, generator=generator)

    def quantizers() -> list[object]:
        made: list[object] = []
        for i in range(len(rows)):
            if kind == "delayed":
                amax = None if i % 3 == 2 else torch.full((1,), i / 8)
                made.append(DelayedQuantizer(scale=torch.full((1,), 1.0 + i), amax=amax))
            elif kind == "current":
                made.append(CurrentQuantizer(power_of_two=i % 2 == 0, epsilon=i / 4))
            elif kind == "nvfp4":
                made.append(NVFP4Quantizer(two_d=i % 2 == 0))
            else:
                made.append(BlockQuantizer(two_d=kind == "block_2d", epsilon=i / 4))
        return made

    many, alone = quantizers(), quantizers()
    found = quantize_many.split_quantize(x, rows, many, usage=usage)  # type: ignore[arg-type]
    names = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
    for part, record_, one, q in zip(x.split(rows), found, alone, many, strict=True):
        expected = quantize.quantize(part, one, usage=usage)  # type: ignore[arg-type]
        for name in names:
            a, b = getattr(record_, name), getattr(expected, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name
        if isinstance(q, DelayedQuantizer) and q.amax is not None:
            assert torch.equal(q.amax, one.amax)  # type: ignore[attr-defined]


@pytest.mark.compiles
@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4", "block_1d", "block_2d"])
def test_launches_cover_the_padding_of_scales(scaling: str) -> None:
    """As a GPU's configuration launches them, whose tiles may be smaller than the padding."""
    from te_dispatch.ops.shapes import data_shapes, laid_out_shapes
    from te_dispatch_triton import quantize_forms as forms
    from te_dispatch_triton import targets
    from te_dispatch_triton.launch import Launch, recording

    layout = {"block_1d": "gemm_1d", "block_2d": "gemm_2d"}.get(scaling, "swizzled_32x4x4")
    dtype = torch.float32 if scaling[:5] == "block" else torch.uint8
    data, scales = data_shapes((10, 40), scaling)[0], laid_out_shapes((10, 40), scaling, CANONICAL_SCALES)[0]
    whole = torch.ones(1) if scaling == "nvfp4" else None
    device = torch.device("cpu")
    x = Quantized(
        torch.empty(data, dtype=torch.uint8), None, torch.empty(scales, dtype=dtype), None,
        "e2m1" if scaling == "nvfp4" else "e4m3fn", scaling, CANONICAL_SCALES, (10, 40), torch.bfloat16, device, whole,
    )  # fmt: skip
    launches: list[Launch] = []
    targets.pretend(device, targets.target_for("nvidia", "sm_90"))
    try:
        with recording(launches):
            made = forms.relayout_scales(x, scale_layout=layout)
    finally:
        targets.pretend(device, None)
    assert made.row_scale_inv is not None
    br, bb = launches[0].constants[-2:]
    rows, columns = made.row_scale_inv.shape if layout != "gemm_1d" else made.row_scale_inv.t().shape
    assert launches[0].grid[0] == -(-rows // br) * -(-columns // bb)


@pytest.mark.interpreted
@pytest.mark.parametrize(("width", "start"), [(300, 123), (257, 0), (300, 256), (100, 7)])
def test_casts_of_shards_by_runs_and_by_tiles(width: int, start: int) -> None:
    """Runs that cross a row's end, rows that a run would not fit into."""
    from te_dispatch_triton import quantize_forms as forms

    height, size = 200, 200 * width - start - 5
    across = -(-width // 128)
    scale = torch.exp2(torch.arange(2.0 * across) - 3).view(2, across)
    x = torch.randn(size, generator=torch.Generator().manual_seed(5))
    out = torch.full((size,), 7, dtype=torch.uint8)
    forms.partial_cast(x, out, scale, height=height, width=width, start=start, block=128, encoding="e4m3fn")
    place = torch.arange(start, start + size)
    factor = scale[place // width // 128, place % width // 128]
    assert torch.equal(out, (x * factor).to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.compiles
@pytest.mark.parametrize("usage", ["row", "both"])
@pytest.mark.parametrize("block", [False, True])
def test_kernels_compile_where_sizes_are_one(usage: str, block: bool) -> None:
    """Triton makes a constant of a parameter that is 1, which the interpreter does not."""
    from te_dispatch_triton import quantize_many, targets
    from te_dispatch_triton.crosscompile.matrix import compile_for
    from te_dispatch_triton.launch import Launch, recording

    device, target = torch.device("cpu"), targets.target_for("nvidia", "sm_90")
    quantizer = BlockQuantizer() if block else DelayedQuantizer(scale=torch.ones(1))
    launches: list[Launch] = []
    targets.pretend(device, target)
    try:
        with recording(launches):
            quantize_many.split_quantize(torch.empty(3, 1), [1, 1, 1], [quantizer] * 3, usage=usage)
    finally:
        targets.pretend(device, None)
    assert compile_for(launches[-1], target).asm["cubin"]
