# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Kinds of values: what each promises, of every dtype; and that a seed is all that data depend on."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from te_dispatch.conformance.case import Case
from te_dispatch.conformance.decoding import table
from te_dispatch.conformance.inputs import FAR, KINDS, SPECIAL, fill
from te_dispatch.conformance.maker import Maker
from te_dispatch.core import scopes
from te_dispatch.numerics.encodings import FP8_ENCODINGS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((), (0,), (1,), (31,), (3, 0, 4), (65, 127))


def _filled(kind: str, shape: tuple[int, ...] = (64, 96), dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return fill(kind, shape, dtype, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kind_has_every_shape_and_dtype(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x = _filled(kind, shape, dtype)
        assert (x.shape, x.dtype, x.is_contiguous()) == (torch.Size(shape), dtype, True)
        if kind not in SPECIAL:
            assert bool(x.isfinite().all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_the_same_bytes(kind: str) -> None:
    assert torch.equal(_filled(kind).view(torch.int32), _filled(kind).view(torch.int32))
    if kind != "zeros":
        other = fill(kind, (64, 96), torch.float32, torch.Generator().manual_seed(2))
        assert not torch.equal(_filled(kind).view(torch.int32), other.view(torch.int32))


@pytest.mark.slow
def test_data_come_from_the_case_s_id_alone() -> None:
    """Another process, with another global seed, makes the same bytes; another seed in the id makes others."""
    code = (
        "import torch, zlib; torch.manual_seed({seed})\n"
        "from te_dispatch.conformance.case import Case; from te_dispatch.conformance.maker import Maker\n"
        "from te_dispatch.core import scopes\n"
        "make = Maker(Case.parse('gemm.plain[values=normal]{suffix}'), scopes.MANAGER)\n"
        "print(zlib.crc32(make.tensor(33, 7, values='outlier').numpy().tobytes()), make.rng_state().tolist())"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code.format(seed=seed, suffix=suffix)], capture_output=True, text=True, check=True
        ).stdout
        for seed, suffix in ((1, ""), (2, ""), (1, "#1"))
    ]
    assert said[0] == said[1] != said[2]


def test_cases_have_data_of_their_own() -> None:
    one, other = (Maker(Case.parse(f"gemm.plain[m={m}]"), scopes.MANAGER).tensor(8) for m in (1, 2))
    assert not torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_uniform_reaches_both_ends(dtype: torch.dtype) -> None:
    exponents = _filled("log_uniform", (200, 200), dtype).abs().double().log2()
    info = torch.finfo(dtype)
    assert float(exponents.min()) < math.log2(info.tiny) + 2 and float(exponents.max()) > math.log2(info.max) - 2


@pytest.mark.parametrize("kind", ("nan", "inf"))
def test_special_values_are_in_every_stretch_and_of_both_signs(kind: str) -> None:
    flat = _filled(kind).flatten()
    special = flat.isnan() if kind == "nan" else flat.isinf()
    assert bool(special.reshape(-1, 32).any(-1).all()) and float(special.float().mean()) < 0.1
    assert len(set(torch.signbit(flat[special]).tolist())) == 2


def test_one_outlier_in_every_stretch() -> None:
    blocks = _filled("outlier").abs().reshape(-1, 32)
    assert bool(((blocks > 64).sum(-1) <= 1).all()) and float((blocks.amax(-1) > 64).float().mean()) > 0.9


def test_ties_are_midpoints_of_neighbouring_codes() -> None:
    x = _filled("ties").abs().double().unique()
    midpoints = set()
    for name in FP8_ENCODINGS:
        codes = table(name)
        codes = codes[codes.isfinite() & (codes >= 0)].unique()
        midpoints |= set(((codes[1:] + codes[:-1]) / 2).tolist())
    assert set(x.tolist()) <= midpoints and len(x) > 100


def test_saturation_is_on_both_sides_of_every_largest_value() -> None:
    x = _filled("saturation", (200, 200)).abs().double()
    for name in FP8_ENCODINGS:
        values = table(name)
        largest = float(values[values.isfinite()].max())
        assert bool(((x > largest) & (x < 1.25 * largest)).any()) and bool(((x < largest) & (x > 0.9 * largest)).any())


def test_denormals_are_subnormal_in_the_dtype_or_in_fp8() -> None:
    x = _filled("denormal").abs()
    assert float(x.max()) <= 2**-4 and bool((x[x > 0] < torch.finfo(torch.float32).tiny).any())


def test_zeros_have_both_signs() -> None:
    x = _filled("zeros")
    assert not x.any() and 0 < int(torch.signbit(x).sum()) < x.numel()


def test_one_sign_and_cancelling_are_opposites() -> None:
    assert bool((_filled("one_sign") >= 0.5).all())
    x = _filled("cancelling", (64, 256)).double()
    assert bool((x.sum(-1).abs() < 2**-5 * x.abs().sum(-1)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_far_mean_is_far_against_the_deviation(dtype: torch.dtype) -> None:
    x = _filled("far_mean", (64, 512), torch.float32)
    ratio = x.double().mean(-1) / x.double().std(-1)
    assert all(0.8 * abs(far) < abs(float(r)) < 1.2 * abs(far) for r, far in zip(ratio, FAR * 32))
    assert bool((_filled("far_mean", (2, 64), dtype)[1] < 0).all())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_squares_leave_the_range_only_where_they_are_meant_to(dtype: torch.dtype) -> None:
    def squares(kind: str) -> torch.Tensor:
        return _filled(kind, (64, 64), dtype).float().square()

    assert bool(squares("square_overflow").isinf().all()) and not squares("square_underflow").any()
    assert bool(squares("large_squares").sum().isfinite()) and float(squares("large_squares").min()) > 2.0**100
    assert bool(squares("huge").isinf().all())


def test_half_precision_s_own_squares_leave_its_range() -> None:
    assert bool(_filled("large_squares", dtype=torch.float16).square().isinf().all())
    small = _filled("square_underflow", dtype=torch.float16)
    assert bool(small.all()) and not small.square().any()


def test_constant_rows_differ_from_one_another_and_opposites_sum_to_zero() -> None:
    x = _filled("constant")
    assert bool((x == x[:, :1]).all()) and len(x[:, 0].unique()) == len(x)
    x = _filled("opposite", (8, 97), torch.bfloat16).double()
    assert bool((x.sum(-1) == 0).all()) and bool((x[:, :-1] != 0).any())


def test_special_values_stay_in_their_rows() -> None:
    x = _filled("special_rows", (64, 96))
    counts = torch.stack([x.isnan().sum(-1), (x == torch.inf).sum(-1), (x == -torch.inf).sum(-1)], -1)
    expected = torch.tensor([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 96]]).repeat(13, 1)[:64]
    assert torch.equal(counts, expected)


def test_the_last_rows_outweigh_all_others() -> None:
    for shape in ((70_000, 3), (200_000,)):
        x = _filled("late", shape).reshape(-1, shape[-1] if len(shape) > 1 else 1)
        assert float(x[:-16].abs().sum()) < 2 * float(x[-16:].abs().sum())


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="values: got 'nomral', expected one of: normal, "):
        _filled("nomral")
