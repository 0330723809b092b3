# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Fp8Padding and Fp8Unpadding."""

from __future__ import annotations

import pytest
import torch

from te_dispatch.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.pytorch import Linear, autocast
from te_dispatch.pytorch.modules.padding import Fp8Padding, Fp8Unpadding, pad_to_multiple

SPLITS = [3, 0, 16, 17]


@pytest.mark.parametrize("align, padded", [(None, [16, 0, 16, 32]), (8, [8, 0, 16, 24])])
def test_rows_and_their_gradients(align: int | None, padded: list[int]) -> None:
    x = torch.randn(sum(SPLITS), 5, requires_grad=True)
    y, sizes = Fp8Padding(4, align)(x, SPLITS)
    assert sizes == padded and y.shape == (sum(padded), 5)
    parts = zip(y.split(padded), x.split(SPLITS), SPLITS)
    for part, rows, n in parts:
        assert torch.equal(part[:n], rows) and not part[n:].any()
    back = Fp8Unpadding(4, align)(y, SPLITS)
    assert torch.equal(back, x)
    dy = torch.randn_like(back)
    back.backward(dy)
    assert torch.equal(x.grad, dy)


@pytest.mark.parametrize(
    "recipe, padded",
    [
        (DelayedScaling(), 16),
        (Float8CurrentScaling(), 16),
        (MXFP8BlockScaling(), 32),
        (NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True), 128),
    ],
)
def test_rows_are_padded_to_what_the_recipe_in_force_takes(recipe: Recipe, padded: int) -> None:
    pad, unpad, linear = Fp8Padding(2), Fp8Unpadding(2), Linear(32, 32)
    x = torch.randn(8, 32)
    with autocast(recipe=recipe):
        y, sizes = pad(x, [3, 5])
        assert sizes == [padded, padded]
        linear(y)  # whose recipe takes no other number of rows
        assert torch.equal(unpad(y, [3, 5]), x)
        assert Fp8Padding(2, 8)(x, [3, 5])[1] == [8, 8]
    assert pad(x, [3, 5])[1] == [16, 16]


def test_a_custom_recipe_says_what_it_takes() -> None:
    assert CustomRecipe(qfactory=print, quantization_alignment=64).row_alignment() == 64


def test_the_gradient_of_padding_rows_is_dropped() -> None:
    x = torch.randn(3, 2, requires_grad=True)
    y, _ = Fp8Padding(1)(x, [3])
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))


def test_aligned_input_is_passed_through() -> None:
    x = torch.randn(32, 2)
    y, sizes = Fp8Padding(2)(x, [16, 16])
    assert y is x and sizes == [16, 16] and Fp8Unpadding(2)(x, [16, 16]) is x


def test_pad_to_multiple() -> None:
    assert pad_to_multiple([0, 1, 32, 33], 32) == [0, 32, 32, 64]


def test_errors() -> None:
    x = torch.zeros(4, 2)
    with pytest.raises(ValueError, match="num_gemms must be positive, got 0"):
        Fp8Padding(0)
    with pytest.raises(ValueError, match="align_size must be positive"):
        Fp8Unpadding(1, 0)
    with pytest.raises(ValueError, match="m_splits must hold num_gemms=2"):
        Fp8Padding(2)(x, [4])
    with pytest.raises(ValueError, match="m_splits must not be negative"):
        Fp8Padding(2)(x, [5, -1])
    with pytest.raises(ValueError, match=r"inp must be \(5, K\)"):
        Fp8Padding(1)(x, [5])
    with pytest.raises(ValueError, match=r"inp must be \(16, K\)"):
        Fp8Unpadding(1)(x, [4])
