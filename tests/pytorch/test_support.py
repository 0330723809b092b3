# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's questions after support are answered by what would run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_dispatch.core import scopes
from te_dispatch.core.policy import Numerics, Policy
from te_dispatch.pytorch.fp8 import support

CASES: list[tuple[str, Recipe]] = [
    ("fp8", DelayedScaling()),
    ("fp8", Float8CurrentScaling()),
    ("fp8_block_scaling", Float8BlockScaling()),
    ("mxfp8", MXFP8BlockScaling()),
    ("nvfp4", NVFP4BlockScaling()),
]


@pytest.mark.parametrize(("name", "recipe"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
def test_what_is_available_runs_and_what_is_not_does_not(name: str, recipe: Recipe) -> None:
    asked, checked = getattr(te, f"is_{name}_available"), getattr(support, f"check_{name}_support")
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(32, 32)
    assert asked() is True and asked(return_reason=True) == checked() == (True, "")
    support.check_recipe_support(recipe)
    with te.autocast(recipe=recipe), torch.no_grad():
        assert layer(x).shape == x.shape
    with te_dispatch.using(gemm="cuda"):
        assert asked() is False
        available, why = asked(return_reason=True)
        assert (
            not available and "no installed backend multiplies" in why and "te-dispatch explain gemm layout=NT" in why
        )
        with pytest.raises(RuntimeError, match="no installed backend multiplies"):
            support.check_recipe_support(recipe)
        with te.autocast(recipe=recipe), torch.no_grad(), pytest.raises(te_dispatch.NoImplementation):
            layer(x)


def test_a_recipe_that_asks_for_more_than_there_is_is_not_supported() -> None:
    with pytest.raises(NotImplementedError, match="check_recipe_support: DelayedScaling asks for fp8_dpa=True"):
        support.check_recipe_support(DelayedScaling(fp8_dpa=True))


def test_bf16_is_available() -> None:
    assert support.is_bf16_compatible() is True
    assert te.is_bf16_available() is True and te.is_bf16_available(return_reason=True) == (True, "")


@pytest.mark.parametrize(
    ("number", "version"), [(91900, (9, 19, 0)), (90100, (9, 1, 0)), (8907, (8, 9, 7)), (92003, (9, 20, 3))]
)
def test_version_of_cudnn(number: int, version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    assert te.get_cudnn_version() == version


def test_what_is_not_there_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RuntimeError, match="no cuDNN"):
        te.get_cudnn_version()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="no CUDA or ROCm device"):
        te.get_device_compute_capability()


def test_autocast_is_what_its_block_is_given() -> None:
    made: Any = te.autocast(enabled=False)
    with made as given:
        assert given is made
    with te.fp8_autocast(enabled=False) as given:
        assert isinstance(given, te.autocast)


@pytest.mark.parametrize(
    ("encodings", "forward", "backward"),
    [
        ((), torch.float8_e4m3fn, torch.float8_e5m2),
        (("e4m3fnuz", "e5m2fnuz"), torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    ],
)
def test_the_dtype_of_casts_is_the_devices_own(
    encodings: Any, forward: torch.dtype, backward: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "device_encodings", lambda device: encodings)
    for recipe in (DelayedScaling(), Float8CurrentScaling(fp8_format=Format.HYBRID)):
        found = [support.get_fp8_torch_dtype(recipe, fprop_tensor) for fprop_tensor in (True, False)]
        assert found == [forward, backward]
        assert [support.get_fp8_max(recipe, way) for way in (True, False)] == [torch.finfo(d).max for d in found]
        numbers = [support.get_fp8_te_dtype(recipe, way) for way in (True, False)]
        assert numbers == [te.DType.kFloat8E4M3, te.DType.kFloat8E5M2]  # families, whatever the encoding
    assert support.get_fp8_torch_dtype(MXFP8BlockScaling(), fprop_tensor=False) == forward
    for ask in (support.get_fp8_torch_dtype, support.get_fp8_max, support.get_fp8_te_dtype):
        with pytest.raises(ValueError, match=f"{ask.__name__}: NVFP4BlockScaling casts to 4 bits"):
            ask(NVFP4BlockScaling())
    assert support.get_fp4_te_dtype(NVFP4BlockScaling()) is te.DType.kFloat4E2M1
    with pytest.raises(ValueError, match="get_fp4_te_dtype: DelayedScaling does not cast to 4 bits"):
        support.get_fp4_te_dtype(DelayedScaling())


def test_which_copies_the_backwards_products_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is the copy whose last dimension is contracted: the column-wise one, in a backward."""
    assert support.is_non_tn_fp8_gemm_supported() is False
    with te_dispatch.using(gemm="cuda"):
        assert support.is_non_tn_fp8_gemm_supported() is False  # nothing serves them here
    asked = []

    def rows(device: torch.device, *operands: str) -> Any:
        asked.append(operands)
        return ("row", "canonical"), ("row", "canonical")

    monkeypatch.setattr(support.ops, "gemm_operand_format", rows)
    assert support.is_non_tn_fp8_gemm_supported() is True
    assert [operands[-1] for operands in asked] == ["NN", "TN"]


def test_casts_that_all_devices_share_saturate_where_all_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "device_encodings", lambda device: ("e4m3fnuz", "e5m2fnuz"))
    with scopes.policy(Policy(name="common", numerics=Numerics(fp8_portability="common"))):
        assert support.get_fp8_max(DelayedScaling()) == 224.0


@pytest.mark.parametrize(
    ("recipe", "rows"),
    [(DelayedScaling(), 16), (MXFP8BlockScaling(), 32), (NVFP4BlockScaling(), 128), (Float8BlockScaling(), 16)],
)
def test_rows_are_padded_as_a_recipe_needs(recipe: Recipe, rows: int) -> None:
    assert support.get_align_size_for_quantization(recipe) == rows
    with te.autocast(recipe=recipe):
        padded, counts = te.Fp8Padding(1)(torch.randn(3, 32), [3])
    assert padded.shape[0] == counts[0] == rows
