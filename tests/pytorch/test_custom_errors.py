# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a `CustomRecipe` cannot serve is refused before anything runs, with the role and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import CustomRecipe
from tests.pytorch.custom_factories import E4M3, E5M2, block, current, made, mxfp8, same, seen

INPUT = r"input \(role module_type=linear\|tensor_type=input\|name=a\)"
WEIGHT = r"weight \(role module_type=linear\|tensor_type=weight\|name=a\)"
GRADIENT = r"grad_output \(role module_type=linear\|tensor_type=grad_output\|name=a\)"


def by_tensor(**given: Any) -> Any:
    """A factory that returns what is given for a tensor, MXFP8 for the others."""
    return lambda role: given.get(role.tensor_type, mxfp8(role))


def raising(role: te.QuantizerRole) -> te.Quantizer:
    raise KeyError(f"nothing for {role.name}")


class OfMyOwn(te.Quantizer):
    pass


FP4, ROTATED = te.NVFP4Quantizer(), te.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
STOCHASTIC = te.NVFP4Quantizer(stochastic_rounding=True)
TILES = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)
ROWS = te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)

BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a string": (lambda role: "mxfp8", TypeError, rf"must return a quantizer .* got 'mxfp8' for Linear's {INPUT}"),
    "a class": (by_tensor(weight=te.MXFP8Quantizer), TypeError, rf"must return a quantizer .* for Linear's {WEIGHT}"),
    "raises": (raising, RuntimeError, rf"qfactory raised KeyError for Linear's {INPUT}: 'nothing for a'"),
    "no factory of roles": (lambda: None, RuntimeError, rf"qfactory raised TypeError for Linear's {INPUT}"),
    "a class of one's own": (
        by_tensor(grad_output=OfMyOwn(rowwise=True, columnwise=True)), NotImplementedError,
        rf"Linear's {GRADIENT}: OfMyOwn: no operator casts .* return one of te_dispatch.pytorch.tensor",
    ),
    "hybrid": (
        lambda role: te.HybridQuantizer(rowwise_quantizer=FP4, columnwise_quantizer=mxfp8(role)), NotImplementedError,
        rf"Linear's {INPUT}: HybridQuantizer is not supported yet",
    ),
    "an option": (
        lambda role: te.NVFP4Quantizer(row_scaled_nvfp4=True), NotImplementedError,
        rf"Linear's {INPUT}: NVFP4Quantizer: row_scaled_nvfp4=True is not supported yet",
    ),
    "input in NVFP4": (
        by_tensor(input=FP4), NotImplementedError,
        rf"NVFP4Quantizer \(NVFP4\) for Linear's {INPUT} and .* \(MXFP8\) for Linear's {WEIGHT}: .*one kind",
    ),
    "gradient per tensor": (
        by_tensor(grad_output=te.Float8CurrentScalingQuantizer(E5M2, "cpu")), NotImplementedError,
        rf"one scale per tensor\) for Linear's {GRADIENT} and .* for Linear's {WEIGHT}: .*same kind",
    ),
    "input in high precision": (
        by_tensor(input=None), NotImplementedError, rf"high precision for Linear's {INPUT} .*quantizers for both"
    ),
    "weight in high precision": (
        by_tensor(weight=te.IdentityQuantizer()), NotImplementedError, rf"high precision for Linear's {WEIGHT}"
    ),
    "gradient alone": (by_tensor(input=None, weight=None), NotImplementedError, "return quantizers for both"),
    "tiles twice": (by_tensor(input=TILES, weight=TILES, grad_output=ROWS), NotImplementedError, "block_scaling_dim=1"),
    "tiles for gradients": (
        by_tensor(input=ROWS, weight=TILES, grad_output=TILES), NotImplementedError, rf"{GRADIENT}.*block_scaling_dim=1"
    ),
    "a rotated weight": (
        by_tensor(input=ROTATED, weight=ROTATED, grad_output=ROTATED), NotImplementedError,
        rf"{WEIGHT}.*return a quantizer without with_rht",
    ),
    "a rotated gradient alone": (
        by_tensor(input=FP4, weight=FP4, grad_output=ROTATED), NotImplementedError, "agree in with_rht"
    ),
    "a stochastic input": (
        by_tensor(input=STOCHASTIC, weight=FP4, grad_output=FP4), NotImplementedError,
        rf"{INPUT}: only gradients are rounded",
    ),
    "a scale elsewhere": (
        lambda role: te.Float8Quantizer(torch.ones(1, device="meta"), torch.zeros(1, device="meta"), E4M3), ValueError,
        rf"{INPUT} has its scale on meta, the module runs on cpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_factories(case: str) -> None:
    factory, error, message = BAD[case]
    layer = made("Linear", name="a")
    good = CustomRecipe(mxfp8)
    before = seen(layer, good)
    with pytest.raises(error, match=message) as raised:
        seen(layer, CustomRecipe(factory))
    assert str(raised.value).startswith("CustomRecipe: ")
    assert same(seen(layer, good), before)


def test_the_cause_is_kept() -> None:
    with pytest.raises(RuntimeError) as raised:
        seen(made("Linear"), CustomRecipe(raising))
    assert isinstance(raised.value.__cause__, KeyError)


def test_an_answer_that_was_bad_is_asked_for_again() -> None:
    answers: list[Any] = ["nothing", *map(mxfp8, [None] * 3)]
    recipe, layer = CustomRecipe(lambda role: answers.pop(0)), made("Linear")
    with pytest.raises(TypeError, match="got 'nothing'"):
        seen(layer, recipe)
    assert same(seen(layer, recipe), seen(made("Linear"), CustomRecipe(mxfp8)))
    assert not answers


def test_one_gradient_of_an_mlp_in_high_precision() -> None:
    recipe = CustomRecipe(by_tensor(grad_output=None))
    with pytest.raises(NotImplementedError, match=r"LayerNormMLP's grad_output .*name=fc1.*or none for the three"):
        seen(made("LayerNormMLP"), recipe)


def test_what_leaves_the_module() -> None:
    def leaves(factory: Any) -> None:
        with te.autocast(recipe=CustomRecipe(factory)):
            made("Linear", name="a")(torch.randn(32, 64), fp8_output=True)

    with pytest.raises(
        RuntimeError, match=r"raised AttributeError for Linear's output \(role None\).*with None unless"
    ):
        leaves(lambda role: mxfp8(role) if role.tensor_type else None)
    with pytest.raises(NotImplementedError, match=r"output \(role None\): an output is not rounded stochastically"):
        leaves(lambda role: STOCHASTIC if role is None else mxfp8(role))
    layer = made("Linear")
    for name in ("output_quantizer_role", "grad_input_quantizer_role"):
        with pytest.raises(TypeError, match=name):
            setattr(layer, name, "input")


@pytest.mark.parametrize(
    ("factory", "rows", "features"), [(mxfp8, 32, 48), (mxfp8, 16, 64), (current, 8, 64), (block, 24, 64)]
)
def test_dimensions_that_products_refuse(factory: Any, rows: int, features: int) -> None:
    layer, x = te.Linear(features, 96), torch.randn(rows, features)
    with (
        te.autocast(recipe=CustomRecipe(factory)),
        pytest.raises(ValueError, match=r"under CustomRecipe .*divisible by"),
    ):
        layer(x)


def test_rows_without_a_gradient_of_a_weight() -> None:
    layer = made("Linear")
    with torch.no_grad(), te.autocast(recipe=CustomRecipe(current)):
        assert layer(torch.randn(8, 64)).shape == (8, 96)
    with torch.no_grad(), te.autocast(recipe=CustomRecipe(mxfp8)), pytest.raises(ValueError, match="divisible by 32"):
        layer(torch.randn(8, 64))


@pytest.mark.parametrize(("alignment", "error"), [(0, ValueError), (-16, ValueError), (1.5, TypeError)])
def test_quantization_alignment(alignment: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="quantization_alignment"):
        CustomRecipe(mxfp8, quantization_alignment=alignment)
