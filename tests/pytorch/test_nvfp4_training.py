# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`NVFP4BlockScaling` at its defaults: what is rotated, what is rounded stochastically, and what that draws."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import NVFP4BlockScaling, QParams
from te_dispatch.numerics import hadamard
from te_dispatch.numerics.quantized import Quantized, single_copy
from te_dispatch.numerics.quantizers import NVFP4HadamardQuantizer, NVFP4Quantizer
from te_dispatch.pytorch.fp8.casts import build_plan
from te_dispatch.pytorch.randomness import draw_rng_state
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor

from .gemm_oracle import assert_within, product_bound, seen_by_gemm

pytestmark = pytest.mark.sampled(5)

RECIPE = NVFP4BlockScaling()
MATRIX = torch.tensor(hadamard.matrix(), dtype=torch.float64)
MODULES = {
    "Linear": lambda: te.Linear(64, 96),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128),
    "TransformerLayer": lambda: te.TransformerLayer(64, 128, 4),
}


def made(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[kind]()


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(module: Any, x: torch.Tensor, recipe: Any, seed: int = 5, call: Any = None, **how: Any) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters; `seed` is the generator's before the backward."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(4)  # of dropout
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x, **how) if call is None else call(module, x)
    torch.manual_seed(seed)
    y.backward(data(*y.shape, seed=2))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(p, q) for p, q in zip(a, b, strict=True)]


def column(record: Quantized) -> torch.Tensor:
    """float64 (M, K): the rotated values of the column-wise copy."""
    return ops.dequantize(single_copy(record, "column"), dtype=torch.float32).double()


def test_a_linear_multiplies_rotated_and_stochastically_rounded_operands() -> None:
    """Against the same casts by hand, and products in float64."""
    module, x, dy = made("Linear"), data(32, 4, 64), data(32, 4, 96, seed=2)
    _, dx, dw, db = step(module, x, RECIPE, seed=9)
    torch.manual_seed(9)
    rotating = NVFP4HadamardQuantizer()
    dyq = ops.quantize(dy, rotating, usage="both", rng_state=draw_rng_state(dy.device))
    xq = ops.quantize(x, rotating, usage="both")
    rows = ops.dequantize(single_copy(dyq, "row"), dtype=torch.float32).double().reshape(128, 96)
    weight = seen_by_gemm(module.weight, NVFP4Quantizer(two_d=True), "column")
    assert_within(dx.reshape(128, 64), rows @ weight, product_bound(rows, weight, torch.float32))
    left, right = column(dyq).reshape(128, 96).t(), column(xq).reshape(128, 64)
    assert_within(dw, left @ right, product_bound(left, right, torch.float32))
    assert torch.allclose(db, dy.sum((0, 1)), rtol=1e-5, atol=1e-5)  # a sum of 128 numbers in float32


def cast_error(x: torch.Tensor, rows: int, spacings: float) -> torch.Tensor:
    """Bound on the error of an NVFP4 cast of (R, C), blocks of 16 along C and `rows` along R.

    In units of a block's scale values are at most 2 apart: nearest errs by half a spacing, stochastic by one. The
    scale, amax / 6, is an e4m3 number: off by 2^-4 of itself, or half the smallest subnormal, 2^-10 of the tensor's
    scale; where it is too small, values above 6 of it saturate.
    """
    tiles = x.abs().unflatten(0, (-1, rows)).unflatten(-1, (-1, 16)).amax((1, 3), keepdim=True)
    off = tiles / 6 * 2.0**-4 + x.abs().max() / 2688 * 2.0**-10
    found = 2 * spacings * (tiles / 6 + off) + 6 * off
    return found.expand(-1, rows, -1, 16).flatten(2).flatten(0, 1)


def test_a_linear_is_near_high_precision() -> None:
    """|AB - ab| <= |A| e_b + e_a |B| + e_a e_b of casts within e, and of the products' own rounding."""
    module, x, dy = made("Linear"), data(128, 64), data(128, 96, seed=2)
    y, dx, dw, _ = step(module, x, RECIPE)
    weight, wide_x, wide_dy = module.weight.detach().double(), x.double(), dy.double()

    def rotated(t: torch.Tensor) -> torch.Tensor:
        return (t.t().unflatten(1, (-1, 16)) @ MATRIX).flatten(1)

    def check(got: torch.Tensor, want: torch.Tensor, a: Any, b: Any) -> None:
        (a, a_error), (b, b_error) = a, b
        bound = a.abs() @ b_error + a_error @ b.abs() + a_error @ b_error
        assert_within(got, want, bound + product_bound(a.abs() + a_error, b.abs() + b_error, torch.float32))

    w_error = cast_error(weight, 16, 0.5)
    bias = module.bias.detach().double()
    check(y, wide_x @ weight.t() + bias, (wide_x, cast_error(wide_x, 1, 0.5)), (weight.t(), w_error.t()))
    check(dx, wide_dy @ weight, (wide_dy, cast_error(wide_dy, 1, 1.0)), (weight, w_error))
    left, right = rotated(wide_dy), rotated(wide_x)
    sides = (left, cast_error(left, 1, 1.0)), (right.t(), cast_error(right, 1, 0.5).t())
    check(dw, wide_dy.t() @ wide_x, *sides)


@pytest.mark.parametrize("kind", MODULES)
def test_every_module_trains_near_high_precision_and_draws_from_the_generator(kind: str) -> None:
    """Per operand a cast to nearest leaves a relative error of some 0.12 of normal data, a stochastic one 0.17 = 0.12
    sqrt 2. They add up as independent ones do: of the eight operands of four products, 0.17 sqrt 8 = 0.48."""
    module, x = made(kind), data(32, 4, 64)
    wide, first, again, other = (
        step(module, x, recipe, seed) for recipe, seed in ((None, 5), (RECIPE, 5), (RECIPE, 5), (RECIPE, 6))
    )
    assert all(same(first, again))
    assert torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    names = ["y", "dx", *(name for name, _ in module.named_parameters())]
    for name, got, want in zip(names, first, wide, strict=True):
        if name.endswith("key_bias"):  # 0 but for rounding: it shifts all logits of a row alike
            continue
        assert (got - want).norm() <= 0.5 * want.norm(), name


def test_a_forward_and_a_backward_without_stochastic_rounding_draw_nothing() -> None:
    module, x = made("LayerNormMLP"), data(32, 64)
    before = torch.get_rng_state()
    with te.autocast(recipe=RECIPE):
        y = module(x.requires_grad_())
    assert torch.equal(torch.get_rng_state(), before)
    y.sum().backward()
    assert not torch.equal(torch.get_rng_state(), before)
    first, other = (step(module, x.detach(), NVFP4BlockScaling(disable_stochastic_rounding=True), s) for s in (1, 2))
    assert all(same(first, other))


def test_the_mean_of_stochastic_gradients_comes_to_the_gradient() -> None:
    """Gradients of x on a grid of weights that FP4 holds: the error of a mean of n unbiased ones is one's, over
    sqrt n = 8. A third is left for what saturates and for chance; nearest stays where it is."""
    module = te.Linear(32, 32, bias=False)
    with torch.no_grad():
        module.weight.copy_(6.0 * torch.eye(32))
    x = data(64, 32)
    want = step(module, x, None)[1]
    draws = [step(module, x, RECIPE, seed)[1] for seed in range(64)]
    one = (draws[0] - want).norm()
    assert (sum(draws) / 64 - want).norm() < one / 3
    nearest = step(module, x, NVFP4BlockScaling(disable_stochastic_rounding=True))[1]
    assert (nearest - want).norm() > one / 3


@pytest.mark.parametrize("kind", ("LayerNormMLP", "TransformerLayer"))
@pytest.mark.parametrize("how", ("te", "reentrant", "not_reentrant"))
def test_a_recomputed_step_is_the_same(kind: str, how: str) -> None:
    """Gradients are drawn once for each backward, which no recomputation repeats."""
    module, x = made(kind), data(32, 4, 64)

    def call(module: Any, x: torch.Tensor) -> torch.Tensor:
        if how == "te":
            return te.checkpoint(module, x)  # type: ignore[no-any-return]
        return torch_checkpoint(module, x, use_reentrant=how == "reentrant")  # type: ignore[no-any-return]

    assert all(same(step(module, x, RECIPE), step(module, x, RECIPE, call=call)))


def test_what_leaves_quantized_enters_as_it_is() -> None:
    torch.manual_seed(0)
    first, second = te.Linear(64, 64), te.Linear(64, 64)
    x = data(32, 64).requires_grad_()
    with te.autocast(recipe=RECIPE):
        hidden = first(x, fp8_output=True)
        assert isinstance(hidden, QuantizedTensor) and hidden._scaling == "nvfp4_rht"
        y = second(hidden, fp8_grad=True)
    torch.manual_seed(3)
    y.backward(data(32, 64, seed=2))
    quantized = [x.grad, first.weight.grad, second.weight.grad]
    assert all(t.isfinite().all() for t in quantized)
    first.zero_grad(), second.zero_grad()
    x.grad = None
    plain = second(first(x))
    plain.backward(data(32, 64, seed=2))
    for got, want in zip(quantized, (x.grad, first.weight.grad, second.weight.grad), strict=True):
        assert (got - want).norm() <= 0.5 * want.norm()  # two products, as above


def casts(recipe: Any) -> Any:
    return build_plan(recipe, torch.device("cpu"), None, 1, None, None).gemms[0]


def test_knobs_and_assigned_casts_reach_the_quantizers(monkeypatch: pytest.MonkeyPatch) -> None:
    rotating, plain, tiles = NVFP4HadamardQuantizer(), NVFP4Quantizer(), NVFP4Quantizer(two_d=True)

    def found(recipe: Any) -> Any:
        made = casts(recipe)
        return made.input, made.weight, made.grad, made.stochastic

    assert found(NVFP4BlockScaling()) == (rotating, tiles, rotating, True)
    assert found(NVFP4BlockScaling(disable_rht=True)) == (plain, tiles, plain, True)
    assert found(NVFP4BlockScaling(disable_stochastic_rounding=True)) == (rotating, tiles, rotating, False)
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_RHT", "1")
    monkeypatch.setenv("NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING", "1")
    assert found(NVFP4BlockScaling()) == (plain, tiles, plain, False)
    assigned = NVFP4BlockScaling()
    assigned.fp4_quant_fwd_inp = QParams(random_hadamard_transform=True)
    assigned.fp4_quant_bwd_grad = QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert found(assigned) == (rotating, tiles, rotating, True)


ROTATED = QParams(random_hadamard_transform=True)


@pytest.mark.parametrize(
    ("assigned", "words"),
    [
        ({"fp4_quant_fwd_weight": ROTATED}, "fp4_quant_fwd_weight.random_hadamard_transform=True"),
        ({"fp4_quant_fwd_inp": QParams()}, "fp4_quant_fwd_inp.random_hadamard_transform=False with"),
        ({"fp4_quant_bwd_grad": QParams(stochastic_rounding=True)}, "fp4_quant_bwd_grad's False"),
        ({"fp4_quant_fwd_inp": dataclasses.replace(ROTATED, fp4_2d_quantization=True)}, "fp4_quant_fwd_inp with both"),
        ({"fp4_quant_fwd_inp": dataclasses.replace(ROTATED, stochastic_rounding=True)}, "only gradients are rounded"),
        ({"fp4_quant_fwd_weight": QParams(stochastic_rounding=True)}, "only gradients are rounded"),
    ],
)
def test_casts_that_do_not_go_together_are_refused(assigned: dict[str, QParams], words: str) -> None:
    recipe = NVFP4BlockScaling()
    for name, cast in assigned.items():
        setattr(recipe, name, cast)
    with pytest.raises(NotImplementedError, match=words):
        te.autocast(recipe=recipe)


def test_a_compiled_step_is_the_eager_one() -> None:
    """Traced, with PyTorch's own operators for the random numbers; inductor has a generator of its own."""
    module, x = made("Linear"), data(32, 64)

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return module(x)  # type: ignore[no-any-return]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert all(same(step(module, x, RECIPE), step(module, x, RECIPE, call=compiled)))
