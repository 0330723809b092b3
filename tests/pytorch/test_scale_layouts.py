# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules whose products read block scales in a layout of their own: casts write it, and nothing is laid out after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import te_dispatch.pytorch as te
import te_dispatch_torch.gemm as products
from te_dispatch.common.recipe import Float8BlockScaling
from te_dispatch.core import scopes
from te_dispatch.ops.gemm import operand_format

from .capturing import made, step

RECIPE = Float8BlockScaling()
Format = Callable[[str, str, str], tuple[str, str]]


def _turned(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    return operand_format(layout, operand, scaling)[0], {"block_1d": "gemm_1d"}.get(scaling, "canonical")


def _all_laid_out(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    return operand_format(layout, operand, scaling)[0], {"block_1d": "gemm_1d", "block_2d": "gemm_2d"}[scaling]


def _turned_in_wgrad(layout: str, operand: str, scaling: str) -> tuple[str, str]:
    return operand_format(layout, operand, scaling)[0], "gemm_1d" if layout == "TN" else "canonical"


def _as(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.emulated, "operand_format", format, raising=False)
    monkeypatch.setattr(scopes.MANAGER.functions, "_declared", {})  # the function before
    monkeypatch.setattr(scopes.capture(), "operand_formats", {})  # and its answers


@pytest.mark.parametrize("format", [_turned, _all_laid_out, _turned_in_wgrad])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_steps_give_the_bits_of_canonical_scales(name: str, format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made(name)
    expected = [step(plain, RECIPE, seed) for seed in range(3)]
    _as(format, monkeypatch)
    module = made(name)
    for seed in range(3):
        for a, b in zip(step(module, RECIPE, seed), expected[seed], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("format", [_turned, _all_laid_out])
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_casts_write_what_products_read(name: str, format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    _as(format, monkeypatch)
    read: set[tuple[str, str]] = set()
    called: set[str] = set()

    def note(operator: object, accepted: object, args: tuple[object, ...], result: object) -> None:
        called.add(getattr(operator, "name", str(operator)))
        if getattr(operator, "name", "") == "gemm":
            read.update((x.scaling, x.scale_layout) for x in args[:2])  # type: ignore[attr-defined]

    module = made(name)
    with scopes.observe(note):
        step(module, RECIPE, 0)
    assert "relayout_scales" not in called
    assert read == {("block_1d", "gemm_1d"), ("block_2d", format("NT", "b", "block_2d")[1])}


def test_readers_that_differ_leave_the_cast_canonical(monkeypatch: pytest.MonkeyPatch) -> None:
    _as(_turned_in_wgrad, monkeypatch)
    module = made("Linear")
    step(module, RECIPE, 0)
    casts = module.fp8_state.plan.gemms[0]
    assert casts.relays and {q.scale_layout for q in (casts.input, casts.weight, casts.grad)} == {"canonical"}


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_such_steps_are_captured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _as(_turned, monkeypatch)
    module = made(name)
    for seed in range(2):
        step(module, RECIPE, seed)
    assert module.captured_calls.signatures and next(iter(module.captured_calls.signatures)).options.program.backwards


def test_what_leaves_a_module_is_canonical(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[te.QuantizedTensor, torch.Tensor]:
        torch.manual_seed(0)
        first, second = te.Linear(64, 64, device="cpu"), te.Linear(64, 64, device="cpu")
        with te.autocast(recipe=RECIPE), torch.no_grad():
            between = first(torch.randn(32, 64), fp8_output=True)
            return between, second(between)

    _, expected = run()
    _as(_turned, monkeypatch)
    between, out = run()
    assert isinstance(between[:16], te.QuantizedTensor)  # which other layouts do not give
    assert torch.equal(out, expected)
