# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Cases of matrix products find the mistakes that they are there for."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance import casting
from te_dispatch.conformance.checks import find as find_check
from te_dispatch.conformance.coverage import goals_of
from te_dispatch.conformance.families.gemm import matrices, rules
from te_dispatch.conformance.families.grouped import groups
from te_dispatch.conformance.inputs import fill
from te_dispatch.conformance.rules import judge
from te_dispatch.conformance.space import Judged, find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from te_dispatch.numerics.encodings import encoding
from te_dispatch.numerics.quantized import Quantized
from tests.conformance.trials import Mistake, case_of, trial_of

Arguments = Mapping[str, Any]


def _values(space: str, implementation: str, mistake: Mistake | None = None, **values: str) -> None:
    find_check("values").run(trial_of(case_of("gemm", space, **values), implementation, mistake))


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """To the nearest of 10 explicit bits."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def _in_tf32(right: Subject, given: Arguments) -> Any:
    if given["a"].dtype != torch.float32:
        return right.call(given)
    return right.call({**given, "a": _tf32(given["a"]), "b": _tf32(given["b"])})


def _bf16_partial_sums(right: Subject, given: Arguments) -> Any:
    """Each 256 products are rounded to bf16, as where a split of k is reduced in the output's dtype."""
    made = right.call(given)
    a, b = (given[name].float() for name in "ab")
    pieces = zip(a.split(256, -1), b.split(256, -1))
    total = sum((x @ y.t()).bfloat16().float() for x, y in pieces)
    made.out.copy_(total)
    return made


def _keeps_what_out_held(right: Subject, given: Arguments) -> Any:
    """beta = 0 as a factor, so that NaN stays."""
    out = given.get("out")
    if out is None or given.get("accumulate"):
        return right.call(given)
    held = out.clone()
    made = right.call(given)
    made.out.add_(held * 0)
    return made


def _skips_zeros(right: Subject, given: Arguments) -> Any:
    """0 x Inf as 0."""
    a = given["a"]
    return right.call({**given, "a": torch.where(a.isinf(), torch.finfo(a.dtype).max / 2, a)})


def _shifted_scales(right: Subject, given: Arguments) -> Any:
    """Every block has the scale of its neighbour along k."""

    def shifted(x: Quantized) -> Quantized:
        parts = {n: getattr(x, n) for n in ("row_scale_inv", "col_scale_inv")}
        changed = {n: None if t is None else t.roll(1, -1) for n, t in parts.items()}
        return Quantized(
            x.row_data, x.col_data, changed["row_scale_inv"], changed["col_scale_inv"], x.encoding, x.scaling,
            x.scale_layout, x.shape, x.dtype, x.device, x.global_scale_inv,
        )  # fmt: skip

    return right.call({**given, "a": shifted(given["a"])})


def _zero_scale_as_one(right: Subject, given: Arguments) -> Any:
    a = given["a"]
    for scale in (a.row_scale_inv, a.col_scale_inv):
        if scale is not None:
            scale[scale == 0] = 1
    return right.call(given)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_tf32_is_not_fp32(layout: str) -> None:
    chosen = {"dtype": "fp32", "layout": layout, "shape": "16x8x4104", "values": "exact"}
    assert any(chosen.items() <= fixed.items() for fixed in find("gemm", "plain").fixed)
    _values("plain", "torch.matmul", **chosen)
    with pytest.raises(Failure, match="out"):
        _values("plain", "torch.matmul", _in_tf32, **chosen)


def test_partial_sums_in_bf16() -> None:
    with pytest.raises(Failure, match="out"):
        _values(
            "long", "torch.matmul", _bf16_partial_sums, mode="bf16", values="exact", layout="NT", shape="16x16x4096"
        )


def test_out_is_overwritten_whatever_it_held() -> None:
    with pytest.raises(Failure, match="out"):
        _values("plain", "torch.matmul", _keeps_what_out_held, out="given")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_times_inf_is_nan(dtype: str) -> None:
    chosen = {"dtype": dtype, "values": "inf_times_zero"}
    _values("plain", "torch.matmul", **chosen)
    with pytest.raises(Failure, match="out"):
        _values("plain", "torch.matmul", _skips_zeros, **chosen)


_ZERO = {"alpha": "0", "shape": "17x15x17", "out_dtype": "fp32"}


def _zero_alpha(right: Subject, given: Arguments, product: torch.Tensor | None = None, **other: Any) -> Any:
    """The product that BLAS gives without a look at the operands, or another."""
    made = right.call({**given, "a": torch.zeros_like(given["a"]), "b": torch.zeros_like(given["b"]), **other})
    if product is not None:
        made.out.add_(product)
    return made


@pytest.mark.parametrize("options", [{}, {"bias": "fp32", "out": "added"}, {"out": "given", "lead": "2"}])
@pytest.mark.parametrize("values", ["nan", "inf", "inf_times_zero", "normal"])
def test_alpha_zero_gives_zero_or_nan(values: str, options: dict[str, str]) -> None:
    chosen = {**_ZERO, "values": values, **options}
    _values("plain", "torch.matmul", **chosen)
    _values("plain", "torch.matmul", _zero_alpha, **chosen)
    finite = values == "normal"
    trial = trial_of(case_of("gemm", "plain", **chosen), "torch.matmul")
    given = trial.arguments()
    assert bool(given["a"].isfinite().all() & given["b"].isfinite().all()) is finite
    skipped = _zero_alpha(trial.subject, given)
    assert skipped.out.isfinite().all()
    # An oracle that skips the operands leaves NaN right too.
    plain = trial.subject.call(trial.arguments()).out
    judged = Judged(
        trial.case.values, trial.arguments(), {"out": skipped.out}, {"out": plain}, frozenset(), frozenset()
    )
    assert bool(plain.isnan().any()) is not finite
    assert judge("out", rules(judged)["out"], plain, skipped.out).passed
    with pytest.raises(Failure, match="out"):
        _values("plain", "torch.matmul", lambda right, given: _zero_alpha(right, given, torch.tensor(0.5)), **chosen)


@pytest.mark.parametrize("values", ["nan", "inf", "normal"])
@pytest.mark.parametrize("forgotten", ["bias", "accumulate"])
def test_alpha_zero_keeps_bias_and_accumulation(values: str, forgotten: str) -> None:
    chosen = {**_ZERO, "values": values, "bias": "fp32", "out": "added"}

    def forgets(right: Subject, given: Arguments) -> Any:
        return _zero_alpha(right, given, **{forgotten: None if forgotten == "bias" else False})

    with pytest.raises(Failure, match="out"):
        _values("plain", "torch.matmul", forgets, **chosen)


def test_alpha_zero_gives_nan_only_where_a_product_is_not_finite() -> None:
    def all_nan(right: Subject, given: Arguments) -> Any:
        return _zero_alpha(right, given, torch.tensor(torch.nan))

    for values in ("normal", "inf", "nan"):
        with pytest.raises(Failure, match=r"out.* is nan"):
            _values("plain", "torch.matmul", all_nan, **_ZERO, values=values)


@pytest.mark.parametrize("scaling", ["block_1d+block_2d", "block_2d+block_1d", "mxfp8+mxfp8"])
def test_the_scale_of_another_block(scaling: str) -> None:
    chosen = {"scaling": scaling, "shape": "144x272x272", "values": "tile_scales"}
    _values("quantized", "torch.emulated_gemm", **chosen)
    with pytest.raises(Failure, match="out"):
        _values("quantized", "torch.emulated_gemm", _shifted_scales, **chosen)


@pytest.mark.parametrize("scaling", ["current+current", "block_1d+block_1d"])
def test_a_scale_of_zero(scaling: str) -> None:
    chosen = {"scaling": scaling, "values": "zero_scale", "shape": "48x32x64"}
    _values("quantized", "torch.emulated_gemm", **chosen)
    with pytest.raises(Failure, match=r"out|inputs"):
        _values("quantized", "torch.emulated_gemm", _zero_scale_as_one, **chosen)


def test_neighbouring_blocks_have_other_scales() -> None:
    x = fill("tile_scales", (300, 600), torch.bfloat16, torch.Generator().manual_seed(0)).abs().float()
    for rows, columns in ((1, 128), (128, 1), (128, 128), (1, 32), (32, 1), (1, 16)):
        m, n = 300 // rows, 600 // columns
        blocks = x[: m * rows, : n * columns].reshape(m, rows, n, columns)
        # Of random numbers the largest say little where there are few: the mean of their logarithms says what was done.
        size = blocks.clamp_min(1e-30).log2().mean((1, 3))
        for along in (0, 1):
            moved = size.diff(dim=along).abs()
            assert moved.numel() and float(moved.mean()) > 0.4, (rows, columns, along)


@pytest.mark.parametrize("implementation", ["torch.emulated_gemm"])
def test_a_training_steps_fp8_products_are_always_judged(implementation: str) -> None:
    """Plain, per tensor, in every layout, with gradients in e5m2, whatever else is chosen."""
    goals = [dict(goal) for goal in goals_of(find("gemm", "quantized"))]
    for layout, pair in itertools.product(("NT", "NN", "TN"), ("e4m3fn+e4m3fn", "e5m2+e4m3fn")):
        wanted = {"scaling": "current+current", "layout": layout, "encodings": pair, "values": "normal"}
        assert any(wanted.items() <= goal.items() for goal in goals), wanted
        for shape in ("48x32x64", "32x16x4112"):
            _values("quantized", implementation, **{**wanted, "shape": shape})


def test_a_kernel_wrong_in_one_layout_of_one_pair() -> None:
    def wrong(right: Subject, given: Arguments) -> Any:
        hit = given["layout"] == "TN" and given["a"].encoding == "e5m2"
        return right.call({**given, "alpha": 3 * given.get("alpha", 1.0)} if hit else given)

    with pytest.raises(Failure, match="out"):
        _values("quantized", "torch.emulated_gemm", wrong, layout="TN", encodings="e5m2+e4m3fn")
    fixed = find("gemm", "quantized").fixed
    assert any(values.get("layout") == "TN" and values.get("encodings") == "e5m2+e4m3fn" for values in fixed)


@pytest.mark.parametrize(
    ("space", "implementation"), [("twice", "torch.matmul"), ("twice_quantized", "torch.emulated_gemm")]
)
def test_one_tensor_as_both_operands(space: str, implementation: str) -> None:
    def doubles_where_both_are_one(right: Subject, given: Arguments) -> Any:
        if given["a"] is given["b"]:
            return right.call({**given, "alpha": 2.0})
        return right.call(given)

    _values(space, implementation)
    with pytest.raises(Failure, match="out"):
        _values(space, implementation, doubles_where_both_are_one)


def test_products_of_integers_are_exact_only_alone() -> None:
    """A bias may be where accumulation starts."""

    def preloaded(right: Subject, given: Arguments) -> Any:
        made = right.call(given)
        total = given["bias"].expand(made.out.shape).clone()
        for x, y in zip(given["a"].split(64, -1), given["b"].split(64, -1)):
            total += x @ y.t()
        made.out.copy_(total)
        return made

    _values("plain", "torch.matmul", preloaded, dtype="fp32", shape="33x17x1032", bias="same", values="exact")


def _starting_from_out(dtype: torch.dtype) -> Mistake:
    """Accumulators start from the output's old values."""

    def kernel(right: Subject, given: Arguments) -> Any:
        made = right.call({**given, "out": given["out"].clone()})
        total = given["out"].to(dtype)
        for column, row in zip(given["a"].unbind(-1), given["b"].unbind(-1)):
            total = (total.float() + torch.outer(column, row)).to(dtype)
        return made._replace(out=given["out"].copy_(total))

    return kernel


def test_accumulators_may_start_from_what_is_added_to() -> None:
    """Small products are added to large numbers one by one: each addition rounds, as an order of a sum is free to."""
    values = {"dtype": "fp32", "shape": "31x37x41", "out": "added", "values": "tile_scales"}
    _values("plain", "torch.matmul", _starting_from_out(torch.float32), **values)
    with pytest.raises(Failure, match="out"):
        _values("plain", "torch.matmul", _starting_from_out(torch.bfloat16), **values)


def _on_fp8_units(group: Arguments, bits: int) -> torch.Tensor:
    """A product as FP8 units of sm_90 sum it: each term is cut to a multiple of 2^-bits of the largest one, whose
    exponent is the sum of the codes' exponents; those of subnormal codes are the smallest normal number's."""
    sides = []
    for name, operand in zip("ab", matrices(group["a"], group["b"], group["layout"])):
        record = group[name]
        scale = record.row_scale_inv if record.row_scale_inv is not None else record.col_scale_inv
        codes = operand / scale.double()
        exponents = codes.abs().log2().floor().clamp_min(1 - encoding(record.encoding).bias)
        sides.append((codes, torch.where(codes == 0, -torch.inf, exponents), scale.double()))
    (a, of_a, scale_a), (b, of_b, scale_b) = sides
    terms = a[:, :, None] * b[None]
    unit = torch.exp2((of_a[:, :, None] + of_b[None]).amax(1, keepdim=True) - bits)
    unit = torch.where(unit == 0, 1.0, unit)
    return ((terms / unit).trunc() * unit).sum(1) * scale_a * scale_b


@pytest.mark.parametrize("encoding_of_b", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("accumulation", ["default", "split"])
def test_sums_of_few_products_of_subnormal_codes(accumulation: str, encoding_of_b: str) -> None:
    """Little of a sum is left where its largest product, of a subnormal code, is aligned by a larger exponent."""
    case = case_of(
        "grouped_gemm", "quantized", rows="3+0+17", columns="128x272", layout="TN", splits="list", cast="current",
        b_encoding=encoding_of_b, accumulation=accumulation, dtype="bf16", out="new", out_dtype="fp32", bias="no",
        values="spread",
    )  # fmt: skip
    trial = trial_of(case, "torch.emulated_grouped_gemm")
    arguments, expected = trial.arguments(), trial.expected()

    def passes(bits: int) -> list[bool]:
        actual = {str(i): _on_fp8_units(group, bits).float() for i, group in enumerate(groups(arguments)) if i != 1}
        actual["1"] = expected["1"]
        of_case = trial.space.rules(Judged(case.values, arguments, expected, actual))
        return [judge(path, of_case[path], actual[path], expected[path]).passed for path in ("0", "2")]

    assert passes(13) == [True, True]
    assert not passes(10)[0]
    assert passes(8) == [False, False]


def test_where_no_code_is_subnormal_the_bound_is_of_the_values_themselves() -> None:
    x = Quantized(
        torch.tensor([[0x08, 0x38, 0x00, 0x7E]], dtype=torch.uint8), None, torch.tensor([2.0]), None, "e4m3fn",
        "tensor", "canonical", (1, 4), torch.bfloat16, torch.device("cpu"),
    )  # fmt: skip
    assert torch.equal(casting.values(x, lifted=True), casting.values(x))
    x.row_data[0] = torch.tensor([0x01, 0x87, 0x80, 0x09], dtype=torch.uint8)
    smallest = 2.0**-6
    assert (casting.values(x, lifted=True) / 2).tolist() == [[smallest, -smallest, -0.0, 9 * 2.0**-9]]
