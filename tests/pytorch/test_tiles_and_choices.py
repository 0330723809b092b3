# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`MXFP8BlockScaling(enable_2d_quantization=True)` and NVFP4's 4 over 6 in modules."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
from te_dispatch.numerics.quantizers import (
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
)
from te_dispatch.pytorch.fp8.casts import build_plan

from .gemm_oracle import assert_within, product_bound, seen_by_gemm


def chooses(scope: str = "all", **how: Any) -> NVFP4BlockScaling:
    return NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, nvfp4_4over6=scope, **how)


RECIPES: dict[str, Callable[[], Any]] = {
    "mxfp8_2d": lambda: MXFP8BlockScaling(enable_2d_quantization=True),
    "4over6": chooses,
    "4over6 flat": lambda: chooses(disable_2d_quantization=True, nvfp4_4over6_err_mode="MSE"),
    "4over6 weights": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="weights"),
}
PLAIN: dict[str, Callable[[], Any]] = {
    "mxfp8_2d": MXFP8BlockScaling,
    "4over6": lambda: chooses("none"),
    "4over6 flat": lambda: chooses("none", disable_2d_quantization=True),
    "4over6 weights": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
}
EVERY = pytest.mark.parametrize("name", RECIPES)
MODULES: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te.Linear(64, 96),
    "LayerNormLinear": lambda: te.LayerNormLinear(64, 96),
    "LayerNormMLP": lambda: te.LayerNormMLP(64, 128),
}


def made(kind: str) -> Any:
    """With weights whose rows differ in magnitude, so that a tile's blocks do."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    spread_rows(module)
    return module


def spread_rows(module: Any) -> None:
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim == 2:
                p.mul_(torch.exp2(1.0 - torch.arange(len(p)) % 12).unsqueeze(1))


def data(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(module: Any, x: torch.Tensor, recipe: Any, call: Any = None) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x) if call is None else call(module, x)
    y.backward(data(*y.shape, seed=2))
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(p, q) for p, q in zip(a, b, strict=True)]


def casts(recipe: Any) -> Any:
    found = build_plan(recipe, torch.device("cpu"), None, 1, None, None).gemms[0]
    return found.input, found.weight, found.grad


def test_knobs_reach_the_quantizers(monkeypatch: pytest.MonkeyPatch) -> None:
    mx, plain, tiles = MXFP8Quantizer(), NVFP4Quantizer(), NVFP4Quantizer(two_d=True)
    choosing = NVFP4FourOverSixQuantizer
    assert casts(MXFP8BlockScaling(enable_2d_quantization=True)) == (mx, MXFP8TileQuantizer(), mx)
    assert casts(chooses()) == (choosing(), choosing(two_d=True), plain)
    assert casts(chooses("weights")) == (plain, choosing(two_d=True), plain)
    assert casts(chooses("activations")) == (choosing(), tiles, plain)
    assert casts(chooses(disable_2d_quantization=True))[1] == choosing()
    for scope, (of_input, of_weight) in {
        "none": (448, 448), "weights": (448, 256), "activations": (256, 448), "all": (256, 256),
    }.items():  # fmt: skip
        found = casts(chooses(nvfp4_4over6_e4m3_use_256=scope, nvfp4_4over6_err_mode="MSE"))
        assert found[:2] == (
            choosing(scale_max=of_input, error="MSE"), choosing(two_d=True, scale_max=of_weight, error="MSE"),
        )  # fmt: skip
    rotating = NVFP4HadamardQuantizer()
    assert casts(NVFP4BlockScaling(nvfp4_4over6="weights")) == (rotating, choosing(two_d=True), rotating)
    monkeypatch.setenv("NVTE_NVFP4_4OVER6", "weights")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_E4M3_USE_256", "none")
    monkeypatch.setenv("NVTE_NVFP4_4OVER6_ERR_MODE", "mse")
    assert casts(NVFP4BlockScaling())[1] == choosing(two_d=True, scale_max=448, error="MSE")


@pytest.mark.parametrize("scope", ("activations", "all"))
def test_inputs_that_choose_are_not_rotated(scope: str) -> None:
    with pytest.raises(NotImplementedError, match=f"nvfp4_4over6='{scope}' with a random Hadamard transform of inputs"):
        te.autocast(recipe=NVFP4BlockScaling(nvfp4_4over6=scope))


@pytest.mark.parametrize("name", ("mxfp8_2d", "4over6", "4over6 flat"))
def test_a_linear_multiplies_what_its_quantizers_make(name: str) -> None:
    module, x, dy = made("Linear"), data(64, 64), data(64, 96, seed=2)
    y, dx, dw, _ = step(module, x, RECIPES[name]())
    of_input, of_weight, of_grad = casts(RECIPES[name]())
    bias = module.bias.detach().double()
    for got, (a, a_cast, a_side), (b, b_cast, b_side), turn in (
        (y - module.bias, (x, of_input, "row"), (module.weight, of_weight, "row"), lambda a, b: (a, b.t())),
        (dx, (dy, of_grad, "row"), (module.weight, of_weight, "column"), lambda a, b: (a, b)),
        (dw, (dy, of_grad, "column"), (x, of_input, "column"), lambda a, b: (a.t(), b)),
    ):
        left, right = turn(seen_by_gemm(a, a_cast, a_side), seen_by_gemm(b, b_cast, b_side))
        assert_within(got, left @ right, product_bound(left, right, torch.float32) + 2.0**-22 * bias.abs().max())


def test_forward_and_backward_multiply_the_same_tiles() -> None:
    """dx of a unit gradient and y of a unit input read the same numbers."""
    module = te.Linear(64, 64, bias=False)
    spread_rows(module)
    recipe = MXFP8BlockScaling(enable_2d_quantization=True)
    with te.autocast(recipe=recipe):
        forward = module(torch.eye(64))
    x = torch.zeros(64, 64, requires_grad=True)
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(torch.eye(64))
    assert torch.equal(forward, x.grad.t())
    with te.autocast(recipe=MXFP8BlockScaling()):
        blocks = module(torch.eye(64))
    assert not torch.equal(blocks, forward)


@EVERY
@pytest.mark.parametrize("kind", MODULES)
def test_every_module_trains_near_high_precision(kind: str, name: str) -> None:
    """Bounds of relative errors: FP8's casts leave 0.03 per operand, FP4's 0.12, of up to six operands."""
    module, x = made(kind), data(64, 2, 64)
    wide, first, plain = (step(module, x, recipe) for recipe in (None, RECIPES[name](), PLAIN[name]()))
    assert not any(same(first, plain)[:2])
    limit = 0.1 if name == "mxfp8_2d" else 0.35
    for got, want, (parameter, _) in zip(first[2:], wide[2:], module.named_parameters(), strict=True):
        assert (got - want).norm() <= limit * want.norm(), parameter
    for got, want in zip(first[:2], wide[:2], strict=True):
        assert (got - want).norm() <= limit * want.norm()


@EVERY
@pytest.mark.parametrize("how", ("te", "torch"))
def test_a_recomputed_step_is_the_same(name: str, how: str) -> None:
    module, x, recipe = made("LayerNormMLP"), data(32, 64), RECIPES[name]()

    def call(module: Any, x: torch.Tensor) -> torch.Tensor:
        if how == "te":
            return te.checkpoint(module, x)  # type: ignore[no-any-return]
        return torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)  # type: ignore[no-any-return]

    assert all(same(step(module, x, recipe), step(module, x, recipe, call)))


def test_a_compiled_step_is_the_eager_one() -> None:
    """The recipe is known by its fields inside."""
    module, x, recipe = made("Linear"), data(32, 64), RECIPES["mxfp8_2d"]()

    def run(module: Any, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return module(x)  # type: ignore[no-any-return]

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert all(same(step(module, x, recipe), step(module, x, recipe, compiled)))


def test_a_compiled_forward_is_the_eager_one() -> None:
    module, x, recipe = made("Linear"), data(32, 64), RECIPES["4over6"]()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), te.autocast(recipe=recipe):
            return module(x)  # type: ignore[no-any-return]

    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))


@EVERY
def test_weights_kept_quantized_are_written_by_their_quantizer(name: str) -> None:
    recipe = RECIPES[name]()
    quantizer = casts(recipe)[1]
    module = made("Linear")
    new = module.weight.detach().clone()
    kept = te.QuantizedTensor.quantize(torch.zeros(96, 64), quantizer, usage="both")
    kept.copy_(new)
    want = ops.quantize(new, quantizer, usage="both")
    for part in ("row_data", "col_data", "row_scale_inv", "col_scale_inv"):
        assert torch.equal(getattr(kept, f"_{part}"), getattr(want, part)), part
    again = copy.deepcopy(pickle.loads(pickle.dumps(kept)))
    assert again._quantizer == quantizer and torch.equal(again._row_data, kept._row_data)
    x = data(32, 64)
    first = step(module, x, recipe)
    module.weight = torch.nn.Parameter(again)
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(module(x), first[0])


@EVERY
def test_recipes_come_back_from_their_fields(name: str) -> None:
    recipe = RECIPES[name]()
    fields = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    again = type(recipe)(**fields)
    assert again == recipe and again != PLAIN[name]() and casts(again) == casts(recipe)
    module, x = made("Linear"), data(32, 64)
    first = step(module, x, recipe)
    assert not same(first, step(module, x, PLAIN[name]()))[0]
    assert all(same(first, step(module, x, again)))
