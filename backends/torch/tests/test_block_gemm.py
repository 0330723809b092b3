# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`scaled_mm_blocks` without a GPU: what it hands to PyTorch, and who gets it. The units' own numbers: `tests/gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.backend_kit import products as torch_products
from te_dispatch.core.errors import Declined
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.numerics.quantizers import BlockQuantizer
from te_dispatch.ops.shapes import ceil_div
from te_dispatch_torch import MANIFEST, gemm, quantize
from te_dispatch_torch.archs import ARCHS
from te_dispatch_torch.scales_layout import relayout_scales

U32 = 2.0**-24
QUANTIZERS = {"block_1d": BlockQuantizer(), "block_2d": BlockQuantizer(two_d=True, power_of_two=False)}
SHAPES = {"NT": ("mk", "nk"), "NN": ("mk", "kn"), "TN": ("km", "kn")}


def values_as_the_library_reads(data: torch.Tensor, scale: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Which scheme PyTorch's and cuBLASLt's rules find in a scale's shape and strides, and the values that it gives.

    A scale per row and 128 columns has unit stride down the rows; a scale per tile is row-major, and the library takes
    rows of a multiple of 4, which without padding only multiples of 512 columns have.
    """
    rows, blocks = data.shape[0], ceil_div(data.shape[1], 128)
    assert scale.dtype == torch.float32
    if scale.shape == (rows, blocks) and scale.stride(0) == 1 and (blocks == 1 or scale.stride(1) == rows):
        kind, wide = "1x128", scale
    else:
        assert scale.shape == (ceil_div(rows, 128), blocks) and scale.is_contiguous() and blocks % 4 == 0
        kind, wide = "128x128", scale.repeat_interleave(128, 0)[:rows]
    return kind, data.float() * wide.repeat_interleave(128, 1)[:, : data.shape[1]]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replaces `torch._scaled_mm` by its contract on the host; returns the schemes of the calls made."""
    calls: list[tuple[str, str]] = []

    def product(
        a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor, *, bias: torch.Tensor | None,
        out_dtype: torch.dtype, use_fast_accum: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert a.is_contiguous() and b.t().is_contiguous() and not any(s % 16 for s in (*a.shape, *b.shape))
        assert not use_fast_accum and out_dtype in (torch.float32, torch.bfloat16)
        assert bias is None or out_dtype == bias.dtype == torch.bfloat16
        (left, x), (right, y) = values_as_the_library_reads(a, a_scale), values_as_the_library_reads(b.t(), b_scale.t())
        assert (left, right) != ("128x128", "128x128"), "cuBLASLt has no such kernel"
        calls.append((left, right))
        z = x @ y.t()
        return (z if bias is None else z + bias).to(out_dtype)

    monkeypatch.setattr(torch_products, "scaled_mm", product)
    return calls


def operands(layout: str, sizes: dict[str, int], kinds: tuple[str, str], encodings: Any = ("e4m3fn",) * 2) -> list[Any]:
    made = []
    for axes, kind, encoding in zip(SHAPES[layout], kinds, encodings, strict=True):
        x = torch.randn([sizes[axis] for axis in axes], dtype=torch.bfloat16)
        x = x * torch.logspace(-2, 1, x.shape[1]).bfloat16()  # blocks of different magnitude
        q = QUANTIZERS[kind]
        made.append(quantize.quantize(x, BlockQuantizer(encoding, two_d=q.two_d), usage="both"))
    return made


def assert_equals_the_emulation(a: Any, b: Any, layout: str, k: int, **options: Any) -> None:
    """Both multiply the same values in fp32, in their own order: 2 k u of the sum of magnitudes, and one rounding."""
    got = gemm.scaled_mm_blocks(a, b, layout=layout, **options)
    want = gemm.emulated(a, b, layout=layout, **options)
    left, right = (
        quantize.values(x, gemm.operand_format(layout, name, x.scaling)[0]).double().abs()
        for name, x in (("a", a), ("b", b))
    )
    left, right = left.t() if layout[0] == "T" else left, right.t() if layout[1] == "T" else right
    size = (left @ right) * abs(options.get("alpha", 1.0)) + 8
    roundoff = {torch.float32: U32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[want.out.dtype]
    limit = (2 * k + 8) * U32 * size + 2 * roundoff * want.out.double().abs()
    assert got.out.dtype == want.out.dtype and ((got.out.double() - want.out.double()).abs() <= limit).all()
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert (mine is None) == (theirs is None)


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("a_kind", QUANTIZERS)
@pytest.mark.parametrize("b_kind", QUANTIZERS)
@pytest.mark.parametrize("k", [16, 128, 336, 512, 1024])
def test_scales_arrive_as_the_library_reads_them(library: Any, layout: str, a_kind: str, b_kind: str, k: int) -> None:
    a, b = operands(layout, {"m": 144, "n": 272, "k": k}, (a_kind, b_kind))
    for x, y in ((a, b), (relayouted(a), relayouted(b))):
        assert_equals_the_emulation(x, y, layout, k)
    one, tile = "1x128", "128x128"
    expected = (one, one)
    if k % 512 == 0:
        expected = (
            one if a_kind == "block_1d" or b_kind == "block_2d" else tile,
            one if b_kind == "block_1d" else tile,
        )
    assert library == [tuple(expected)] * 2


def relayouted(x: Any) -> Any:
    return relayout_scales(x, scale_layout="gemm_1d" if x.scaling == "block_1d" else "gemm_2d")


@pytest.mark.parametrize(
    "options",
    [
        {"out_dtype": torch.float32},
        {"out_dtype": torch.float16},
        {"alpha": 0.3},
        {"bias": torch.linspace(-1, 1, 32).bfloat16()},
        {"bias": torch.linspace(-1, 1, 32)},
        {"epilogue": "gelu"},
        {"epilogue": "dgelu", "aux": torch.linspace(-2, 2, 48 * 32).view(48, 32).bfloat16()},
        {"split_accumulator": False},
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_what_follows_the_product(library: Any, options: dict[str, Any]) -> None:
    a, b = operands("NT", {"m": 48, "n": 32, "k": 256}, ("block_1d", "block_2d"))
    # gelu and its derivative amplify an error by at most 1.13.
    assert_equals_the_emulation(a, b, "NT", 2 * 256, **options)
    assert len(library) == 1


def test_accumulate_and_mixed_encodings(library: Any) -> None:
    a, b = operands("TN", {"m": 48, "n": 32, "k": 256}, ("block_1d", "block_1d"), ("e5m2", "e4m3fn"))
    outs = []
    for run in (gemm.scaled_mm_blocks, gemm.emulated):
        out = torch.ones(48, 32)
        assert run(a, b, layout="TN", out=out, accumulate=True, epilogue="bgrad_a").out is out
        outs.append(out)
    size = float(outs[1].abs().max()) + float(quantize.values(a, "column").abs().max()) * 256
    torch.testing.assert_close(outs[0], outs[1], rtol=0.0, atol=2 * 256 * U32 * size * 256)


def test_it_declines_what_the_units_cannot_do(library: Any) -> None:
    for sizes in ({"m": 24, "n": 32, "k": 64}, {"m": 0, "n": 32, "k": 64}, {"m": 16, "n": 32, "k": 40}):
        a, b = operands("NT", sizes, ("block_1d", "block_2d"))
        with pytest.raises(Declined, match="multiples of 16, got M="):
            gemm.scaled_mm_blocks(a, b, layout="NT")
    a, b = (quantize.quantize(torch.randn(16, 32), QUANTIZERS["block_1d"], usage="row") for _ in range(2))
    with pytest.raises(Declined, match="column-wise"):
        gemm.scaled_mm_blocks(a, b, layout="TN")
    assert library == []


CALL = {"a.dtype": "e4m3fn", "b.dtype": "e4m3fn", "a.scaling": "block_1d", "b.scaling": "block_2d", "n": 64}
SOFTWARE = {"version.torch": "2.11.0+cu130", "version.cuda": "13.0"}


@pytest.mark.parametrize(
    ("vendor", "arch", "software", "call", "serves"),
    [
        ("nvidia", "sm_90", {}, {}, True),
        ("nvidia", "sm_90", {}, {"a.dtype": "e5m2", "b.scaling": "block_1d"}, True),
        ("nvidia", "sm_90", {}, {"a.dtype": "e5m2", "b.dtype": "e5m2"}, False),
        ("nvidia", "sm_90", {}, {"a.scaling": "tensor", "b.scaling": "tensor"}, False),
        ("nvidia", "sm_90", {}, {"a.scaling": "mxfp8", "b.scaling": "mxfp8"}, False),
        ("nvidia", "sm_90", {}, {"n": 24}, False),
        ("nvidia", "sm_90", {"version.torch": "2.8.1+cu129"}, {}, False),
        ("nvidia", "sm_90", {"version.cuda": "12.8"}, {}, False),
        ("nvidia", "sm_89", {}, {}, False),
        ("nvidia", "sm_100", {}, {}, False),
        ("amd", "gfx950", {}, {}, False),
    ],
)
def test_who_gets_it(vendor: str, arch: str, software: dict[str, str], call: dict[str, Any], serves: bool) -> None:
    (blocks,) = (i for i in MANIFEST.implementations if i.name == "scaled_mm_blocks")
    (emulated,) = (i for i in MANIFEST.implementations if i.name == "emulated_gemm")
    device = DeviceFacts("cuda", vendor, arch, table=ARCHS[vendor].get(arch), extra={**SOFTWARE, **software})
    verdicts = [condition.check({**CALL, **call}, device).holds for condition in blocks.requires]
    assert None not in verdicts and all(verdicts) == serves
    assert blocks.rank < emulated.rank and "plain_torch" not in blocks.traits
