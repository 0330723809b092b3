# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Forms of quantized data on the triton backend, in sizes of real layers, against PyTorch's own operations: the kit's
shapes are small, and reach one tile of most kernels."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, MXFP8Quantizer

forms = pytest.importorskip("te_dispatch_triton.quantize_forms")
many = pytest.importorskip("te_dispatch_triton.quantize_many")
single = pytest.importorskip("te_dispatch_triton.quantize")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
SHAPES = ((8192, 4096), (4096, 1028), (1031, 4099))


def record(shape: tuple[int, int], encoding: str = "e4m3fn") -> Quantized:
    torch.manual_seed(sum(shape))
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    scale = torch.full((1,), 0.37, device=DEVICE)
    return Quantized(
        data, None, scale, None, encoding, "tensor", CANONICAL_SCALES, shape, torch.bfloat16, DEVICE
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_values_of_both_copies(shape: tuple[int, int]) -> None:
    x = forms.transpose_quantized(record(shape))
    assert torch.equal(x.col_data, x.row_data.t())
    expected = (x.row_data.view(torch.float8_e4m3fn).float() * x.row_scale_inv).bfloat16()
    torch.testing.assert_close(forms.dequantize(x), expected, rtol=0, atol=0, equal_nan=True)
    x.row_data = x.row_scale_inv = None
    torch.testing.assert_close(forms.dequantize(x), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_encodings_convert(shape: tuple[int, int]) -> None:
    x = record(shape, "e4m3fnuz")
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    found = forms.convert_encoding(x, encoding="e4m3fn", count=count)
    values = x.row_data.view(torch.float8_e4m3fnuz).float() * 2
    read = found.row_data.view(torch.float8_e4m3fn).float()
    torch.testing.assert_close(read, values.clamp(-448, 448), rtol=0, atol=0, equal_nan=True)
    assert count.item() == (values.abs() > 448).sum().item()


@pytest.mark.parametrize("columns", [4096, 1030])
@pytest.mark.parametrize("parts", [7, 200])
def test_parts_are_padded(columns: int, parts: int) -> None:
    splits = torch.randint(0, 90, (parts,), generator=torch.Generator().manual_seed(parts)).tolist()
    padded = [-(-rows // 16) * 16 for rows in splits]
    x = torch.randn(sum(splits), columns, device=DEVICE, dtype=torch.bfloat16)
    found = forms.pad_rows(x, splits, padded)
    expected = [torch.cat((p, p.new_zeros(m - len(p), columns))) for p, m in zip(x.split(splits), padded)]
    assert torch.equal(found, torch.cat(expected))
    assert torch.equal(forms.unpad_rows(found, splits, padded), x)


@pytest.mark.parametrize("start", [0, 12345])
def test_shards_have_the_amaxes_and_codes_of_their_blocks(start: int) -> None:
    height, width, size = 1500, 3000, 2_900_000
    x = torch.randn(size, device=DEVICE)
    whole = torch.zeros(height * width, device=DEVICE)
    whole[start : start + size] = x
    tiles = torch.nn.functional.pad(whole.view(height, width), (0, 72, 0, 36)).view(12, 128, 24, 128)
    amax = torch.zeros(12, 24, device=DEVICE)
    shard = {"height": height, "width": width, "start": start, "block": 128}
    forms.partial_amax(x, amax, **shard)
    assert torch.equal(amax, tiles.abs().amax((1, 3)))
    scale = 448.0 / amax
    out = torch.zeros(size, dtype=torch.uint8, device=DEVICE)
    forms.partial_cast(x, out, scale, encoding="e4m3fn", **shard)
    scaled = (tiles * scale[:, None, :, None]).reshape(1536, 3072)[:height, :width].reshape(-1)[start : start + size]
    expected = scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("usage", ["row", "both"])
@pytest.mark.parametrize("kind", ["delayed", "current", "block_1d", "mxfp8"])
def test_many_parts_are_cast_as_each_alone(kind: str, usage: str) -> None:
    def quantizer() -> DelayedQuantizer | CurrentQuantizer | BlockQuantizer | MXFP8Quantizer:
        if kind == "delayed":
            ones = torch.ones(1, device=DEVICE)
            return DelayedQuantizer(scale=ones * 3, amax=torch.zeros(1, device=DEVICE))
        return {"current": CurrentQuantizer, "block_1d": BlockQuantizer, "mxfp8": MXFP8Quantizer}[kind]()

    splits = [1024, 0, 4096, 17, 512, *[256] * 40]
    x = torch.randn(sum(splits), 2048, device=DEVICE, dtype=torch.bfloat16)
    made, alone = [quantizer() for _ in splits], [quantizer() for _ in splits]
    found = many.split_quantize(x, splits, made, usage=usage)
    for part, result, one, q in zip(x.split(splits), found, alone, made):
        expected = single.quantize(part, one, usage=usage)
        for name in ("row_data", "col_data", "row_scale_inv", "col_scale_inv"):
            a, b = getattr(result, name), getattr(expected, name)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name
        if isinstance(q, DelayedQuantizer) and isinstance(one, DelayedQuantizer):
            assert q.amax is not None and one.amax is not None and torch.equal(q.amax, one.amax)
