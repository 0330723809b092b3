# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""MXFP8 in 32x32 tiles and NVFP4 that maps amaxes to 4 or 6: what the contract promises, of both implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import te_dispatch_reference.quantize as of_reference
import te_dispatch_torch.quantize as of_torch
from te_dispatch import ops
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.core.manifest import Manifest
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    ERRORS,
    SCALE_MAXIMA,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4Quantizer,
    options_of,
    quantizer_of,
)

BACKENDS = pytest.mark.parametrize("backend", (of_torch, of_reference), ids=("torch", "reference"))
PARTS = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")
CHOOSING = [
    NVFP4FourOverSixQuantizer(two_d=two_d, scale_max=top, error=error)
    for two_d in (False, True)
    for top in SCALE_MAXIMA
    for error in ERRORS
]


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    """Normal numbers of rows of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float())


def values(record: Quantized) -> torch.Tensor:
    return ops.dequantize(record, dtype=torch.float32).double()


def unpacked(data: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.stack((data & 0xF, data >> 4), -1).flatten(-2)[..., :columns]


# -- MXFP8 in tiles -----------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("shape", ((64, 96), (33, 65), (3, 5, 40), (1, 1), (0, 16), (16, 0)))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_both_copies_of_tiles_hold_the_same_codes_and_scales(backend: Any, shape: Any, dtype: torch.dtype) -> None:
    x = data(*shape).to(dtype)
    made = backend.quantize(x, MXFP8TileQuantizer(), usage="both")
    m, k = x.numel() // shape[-1] if shape[-1] else shape[0], shape[-1]
    assert made.scaling == "mxfp8"
    assert torch.equal(made.row_data.reshape(m, k), made.col_data)
    assert made.row_scale_inv.shape == (m, -(-k // 32)) and made.col_scale_inv.shape == (-(-m // 32), k)
    # A tile's scale, once for each of its lines.
    assert torch.equal(made.row_scale_inv[::32].repeat_interleave(32, 0)[:m], made.row_scale_inv)
    assert torch.equal(made.row_scale_inv[::32].repeat_interleave(32, 1)[:, :k], made.col_scale_inv)
    for usage, parts in (("row", ("row_data", "row_scale_inv")), ("column", ("col_data", "col_scale_inv"))):
        alone = backend.quantize(x, MXFP8TileQuantizer(), usage=usage)
        assert all(torch.equal(getattr(alone, part), getattr(made, part)) for part in parts)
        assert sum(getattr(alone, part) is not None for part in PARTS) == 2


@BACKENDS
def test_a_tile_is_a_block_of_its_amax(backend: Any) -> None:
    """Where all blocks of a tile have one amax, tiles are ordinary MXFP8; else their scale is the largest of those."""
    x = data(64, 64)
    x[:, ::32] = 300.0
    x[::32] = 300.0
    tiles, blocks = (backend.quantize(x, q, usage="both") for q in (MXFP8TileQuantizer(), MXFP8Quantizer()))
    assert all(torch.equal(getattr(tiles, part), getattr(blocks, part)) for part in PARTS[:4])
    y = data(64, 64)
    tiles, blocks = (backend.quantize(y, q, usage="row") for q in (MXFP8TileQuantizer(), MXFP8Quantizer()))
    assert torch.equal(tiles.row_scale_inv[::32], blocks.row_scale_inv.reshape(2, 32, 2).amax(1))
    # Half a spacing of e4m3, or half its smallest subnormal, of the tile's scale.
    scale = torch.exp2(tiles.row_scale_inv.double() - 127).repeat_interleave(32, 1)
    assert ((values(tiles) - y).abs() <= torch.maximum(y.abs() * 2.0**-4, scale * 2.0**-10)).all()


@BACKENDS
def test_products_read_tiles_as_mxfp8(backend: Any) -> None:
    """Forward and input gradient multiply the same weights."""
    x, w = data(64, 96, seed=2), data(128, 96, seed=3)
    weight = backend.quantize(w, MXFP8TileQuantizer(), usage="both")
    seen = values(weight)
    inputs, grad = (backend.quantize(t, MXFP8Quantizer(), usage="row") for t in (x, data(64, 128, seed=4)))
    for a, layout, want in ((inputs, "NT", values(inputs) @ seen.t()), (grad, "NN", values(grad) @ seen)):
        got = ops.gemm(a, weight, layout=layout, out_dtype=torch.float32).out.double()
        reach = values(a).abs() @ (seen.abs().t() if layout == "NT" else seen.abs())
        assert ((got - want).abs() <= 256 * 2.0**-24 * reach).all()


# -- 4 over 6 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantizer", [*CHOOSING, MXFP8TileQuantizer(), MXFP8TileQuantizer("e5m2", True)], ids=repr)
def test_the_reference_and_torch_agree_by_bits(quantizer: Any) -> None:
    inputs = [data(33, 65), data(2, 8, 40, seed=2).bfloat16(), torch.zeros(17, 16), data(16, 16) * 1e38]
    inputs[0][3, 4], inputs[0][20, 30] = torch.inf, torch.nan
    for x in inputs:
        for usage in ("both", "row", "column"):
            made, want = (backend.quantize(x, quantizer, usage=usage) for backend in (of_torch, of_reference))
            for part in PARTS:
                got, expected = getattr(made, part), getattr(want, part)
                assert got is expected is None or torch.equal(got, expected), (part, usage)


def measured(error: torch.Tensor, quantizer: Any) -> torch.Tensor:
    """float64 sums over each block or tile."""
    error = error.double().abs() if quantizer.error == "MAE" else error.double().square()
    rows = 16 if quantizer.two_d else 1
    return error.unflatten(0, (-1, rows)).unflatten(-1, (-1, 16)).sum((1, 3))


def block_errors(x: torch.Tensor, record: Quantized, quantizer: Any) -> torch.Tensor:
    return measured(values(record) - x, quantizer)


@BACKENDS
@pytest.mark.parametrize("two_d", (False, True))
@pytest.mark.parametrize("error", ERRORS)
def test_no_block_errs_by_more_than_plain_nvfp4(backend: Any, two_d: bool, error: str) -> None:
    """With the same span of scales 6 is plain NVFP4. Values, and errors as the cast sees them, are rounded to float32:
    a few parts in 2^24 of each |x| or x^2, and sums of 256 in 8 additions as much."""
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(6))
    quantizer = NVFP4FourOverSixQuantizer(two_d=two_d, scale_max=448, error=error)
    made, plain = (backend.quantize(x, q, usage="both") for q in (quantizer, NVFP4Quantizer(two_d=two_d)))
    assert torch.equal(made.global_scale_inv, plain.global_scale_inv)
    got, of_plain = (block_errors(x, record, quantizer) for record in (made, plain))
    assert (got <= of_plain + measured(x, quantizer) * 2.0**-19).all()
    chosen = made.row_scale_inv != plain.row_scale_inv
    assert chosen.any() and not chosen.all()
    six = ~chosen[:: 16 if two_d else 1]
    assert torch.equal(got[six], of_plain[six]) and (got[~six] < of_plain[~six]).all()


@BACKENDS
def test_256_leaves_room_for_the_scales_of_4(backend: Any) -> None:
    """A block of the tensor's amax has scale 256 if it maps to 6 and 384 if to 4; of 448, 4 cannot be had in full."""
    row = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4)
    six, four = row.clone(), row.clone()
    six[0] = 6.0
    found = {}
    for top in SCALE_MAXIMA:
        for name, x in (("six", six), ("four", four)):
            made = backend.quantize(x.reshape(1, 16), NVFP4FourOverSixQuantizer(scale_max=top), usage="row")
            codes = torch.tensor([made.row_scale_inv.item()], dtype=torch.uint8)
            found[top, name] = codes.view(torch.float8_e4m3fn).float().item()
            if (top, name) != (448, "four"):
                assert torch.allclose(values(made), x.double().reshape(1, 16), rtol=1e-6)
    assert found == {(256, "six"): 256.0, (256, "four"): 384.0, (448, "six"): 448.0, (448, "four"): 448.0}


@BACKENDS
@pytest.mark.parametrize("error", ERRORS)
def test_the_measures_differ_and_ties_go_to_6(backend: Any, error: str) -> None:
    """A block (6, 1.5, 0 ...) with S = 256 is exact either way, so 6 stays. Each measure's choice is the better one by
    it."""
    tie = torch.zeros(1, 16)
    tie[0, :2] = torch.tensor([6.0, 1.5])
    quantizer = NVFP4FourOverSixQuantizer(error=error)
    made = backend.quantize(tie, quantizer, usage="row")
    assert made.row_scale_inv.item() == 0x78  # 256
    x = data(512, 16, seed=7)
    picked = [backend.quantize(x, replace(quantizer, error=e), usage="row").row_scale_inv for e in ERRORS]
    assert not torch.equal(*picked)
    by = [backend.quantize(x, replace(quantizer, error=e), usage="row") for e in ERRORS]
    sums = [block_errors(x, record, quantizer) for record in by]
    own, other = (0, 1) if error == "MAE" else (1, 0)
    assert (sums[own] <= sums[other] * (1 + 2.0**-18)).all() and (sums[own] < sums[other]).any()


@BACKENDS
@pytest.mark.parametrize("error", ERRORS)
def test_tiles_choose_once_for_both_copies(backend: Any, error: str) -> None:
    x = data(48, 80)
    made = backend.quantize(x, NVFP4FourOverSixQuantizer(two_d=True, error=error), usage="both")
    assert torch.equal(unpacked(made.row_data, 80).t(), unpacked(made.col_data, 48))
    assert torch.equal(made.row_scale_inv[::16].t(), made.col_scale_inv[::16])
    column = backend.quantize(x, NVFP4FourOverSixQuantizer(two_d=True, error=error), usage="column")
    assert torch.equal(column.col_data, made.col_data) and column.row_data is None
    flat = NVFP4FourOverSixQuantizer(error=error)
    turned = backend.quantize(x.t().contiguous(), flat, usage="row")
    assert torch.equal(backend.quantize(x, flat, usage="column").col_data, turned.row_data)


@BACKENDS
def test_nan_leaves_its_block_at_6_and_an_amax_that_is_given_is_used(backend: Any) -> None:
    x = torch.tensor([4.0, 3.0, 2.0, 1.0] * 8).reshape(2, 16)
    x[1, 5] = torch.nan
    quantizer = NVFP4FourOverSixQuantizer()
    made = backend.quantize(x, quantizer, usage="row")
    codes = made.row_scale_inv.flatten().view(torch.float8_e4m3fn).float().tolist()
    assert codes == [384.0, 256.0]
    given = backend.quantize(x, quantizer, usage="row", amax=torch.full((1,), 8.0))
    assert given.global_scale_inv.item() == pytest.approx(8.0 / 1536, rel=1e-6)
    assert given.row_scale_inv.flatten().view(torch.float8_e4m3fn).float().tolist() == [192.0, 128.0]


# -- both ---------------------------------------------------------------------------------------------------------


@BACKENDS
def test_bad_arguments(backend: Any) -> None:
    x = data(16, 32)
    with pytest.raises(ValueError, match=r"scale_max: got 300, expected 256 or 448"):
        NVFP4FourOverSixQuantizer(scale_max=300)
    with pytest.raises(ValueError, match=r"error: got 'mae', expected MAE or MSE"):
        NVFP4FourOverSixQuantizer(error="mae")
    with pytest.raises(ValueError, match=r"rng_state: given with a nvfp4_4over6 quantizer"):
        backend.quantize(x, NVFP4FourOverSixQuantizer(), usage="row", rng_state=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"amax: given with a mxfp8_2d quantizer"):
        backend.quantize(x, MXFP8TileQuantizer(), usage="row", amax=torch.ones(1))
    with pytest.raises(ValueError, match=r"quantizer: got encoding 'e4m3fn' with nvfp4_4over6, expected e2m1"):
        backend.quantize(x, NVFP4FourOverSixQuantizer("e4m3fn"), usage="row")
    with pytest.raises(ValueError, match=r"quantizer: got encoding 'e2m1' with mxfp8_2d"):
        backend.quantize(x, MXFP8TileQuantizer("e2m1"), usage="row")


@BACKENDS
def test_tiles_round_stochastically_to_the_same_codes_both_ways(backend: Any) -> None:
    x = data(64, 64)
    made, other = (
        backend.quantize(x, MXFP8TileQuantizer(), usage="both", rng_state=torch.tensor([seed, 0])) for seed in (1, 2)
    )
    assert torch.equal(made.row_data, made.col_data) and not torch.equal(made.row_data, other.row_data)


@pytest.mark.parametrize("quantizer", [*CHOOSING, MXFP8TileQuantizer("e5m2", True)], ids=repr)
def test_quantizers_come_back_from_their_options(quantizer: Any) -> None:
    options = options_of(quantizer)
    assert options is not None and quantizer_of(options) == quantizer


#: Operators that cast -> the fact that says how.
CASTING = {
    **dict.fromkeys(("quantize", "quantize_dbias", "activation_fwd", "activation_bwd"), "quantizer"),
    **dict.fromkeys(("layernorm_fwd", "rmsnorm_fwd"), "quantizer"),
    **dict.fromkeys(("split_quantize", "multi_tensor_quantize"), "quantizers"),
}


@pytest.mark.parametrize("package", ("te_dispatch_triton", "te_dispatch_cuda"))
@pytest.mark.parametrize("kind, like", (("mxfp8_2d", "mxfp8"), ("nvfp4_4over6", "nvfp4")))
def test_kernels_that_do_not_make_them_decline_by_their_requirements(package: str, kind: str, like: str) -> None:
    manifest: Manifest = pytest.importorskip(package).MANIFEST
    device = DeviceFacts("cuda", "nvidia", "sm_100")
    declined = set()
    for implementation in manifest.implementations:
        op = implementation.op.partition("@")[0]
        if op in CASTING:
            conditions = [c for c in implementation.requires if CASTING[op] in c.reads()]
            assert [c.check({CASTING[op]: kind}, device).holds for c in conditions] == [False], op
            assert all(c.check({CASTING[op]: like}, device).holds for c in conditions), op
            declined.add(op)
    assert declined == set(CASTING)
