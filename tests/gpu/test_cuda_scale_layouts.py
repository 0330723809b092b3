# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Block scales that casts lay out as cuBLASLt reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import Float8BlockScaling
from te_dispatch.core import scopes
from te_dispatch.numerics.quantizers import BlockQuantizer
from te_dispatch.ops.gemm import operand_format as default_format

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="cuBLASLt multiplies with such scales on sm_90 alone",
)
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(272, 400, params_dtype=torch.bfloat16),
    "LayerNormLinear": lambda: te.LayerNormLinear(272, 400, params_dtype=torch.bfloat16),
    "LayerNormMLP": lambda: te.LayerNormMLP(272, 400, params_dtype=torch.bfloat16, activation="swiglu"),
}


def _steps(name: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    module = MODULES[name]()
    found = []
    for _ in range(3):
        x = torch.randn(160, 272, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        module.zero_grad()
        with te.autocast(recipe=Float8BlockScaling()):
            y = module(x)
        y.backward(torch.randn_like(y))
        found += [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
    return module, found


@pytest.mark.parametrize("name", MODULES)
def test_modules_compute_the_same_bits_with_scales_laid_out_by_casts(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_dispatch_cuda import gemm

    module, found = _steps(name)
    casts = module.fp8_state.plan.gemms[0]
    assert (casts.input.scale_layout, casts.weight.scale_layout, casts.grad.scale_layout, casts.relays) == (
        "gemm_1d", "gemm_2d", "gemm_1d", False,
    )  # fmt: skip
    monkeypatch.setattr(gemm, "operand_format", default_format)
    monkeypatch.setattr(scopes.MANAGER.functions, "_declared", {})  # the function before
    with te_dispatch.using(gemm="cuda"):  # the format is looked up once under one policy
        module, expected = _steps(name)
    assert module.fp8_state.plan.gemms[0].input.scale_layout == "canonical"
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_no_kernel_lays_them_out_between_cast_and_product() -> None:
    module = te.Linear(768, 272, params_dtype=torch.bfloat16)
    x = torch.randn(256, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with te.autocast(recipe=Float8BlockScaling()):
            module(x).sum().backward()

    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("cast_blocks" in name for name in names)
    assert not any("lay_out" in name or "relayout" in name for name in names)


@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_products_read_both_layouts(layout: str) -> None:
    m, k, n = 272, 400, 144
    shapes = (k, m) if layout[0] == "T" else (m, k), (n, k) if layout[1] == "T" else (k, n)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    products = []
    for scales in ("canonical", "gemm_1d"):
        x, y = (ops.quantize(t, BlockQuantizer(scale_layout=scales), usage="both") for t in (a, b))
        assert x.scale_layout == scales
        products.append(ops.gemm(x, y, layout=layout).out)
    assert torch.equal(*products)


def test_casts_of_another_backend_write_what_the_product_reads(tmp_path: Path) -> None:
    file = tmp_path / "casts.yaml"
    file.write_text("version: 1\nrules:\n  - {op: quantize, prefer: [triton]}\n")
    _, expected = _steps("Linear")
    te_dispatch.set_policy(file)
    try:
        module, found = _steps("Linear")
    finally:
        te_dispatch.set_policy(None)
    assert module.fp8_state.plan.gemms[0].input.scale_layout == "gemm_1d"
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_the_cast_into_a_record_fills_padding_too() -> None:
    x = torch.randn(150, 300, device="cuda", dtype=torch.bfloat16)
    for quantizer in (BlockQuantizer(scale_layout="gemm_1d"), BlockQuantizer(two_d=True, scale_layout="gemm_2d")):
        out = ops.quantize(x, quantizer, usage="both")
        expected = out.row_scale_inv.clone(), out.col_scale_inv.clone()
        for scales in (out.row_scale_inv, out.col_scale_inv):
            scales.fill_(torch.nan)
        assert ops.quantize(x, quantizer, usage="both", out=out) is out
        assert torch.equal(out.row_scale_inv, expected[0]) and torch.equal(out.col_scale_inv, expected[1])
        assert (expected[0] == 0).any() and not expected[0].isnan().any()


def test_what_comes_canonical_is_laid_out_for_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from te_dispatch_cuda import gemm

    def run() -> torch.Tensor:
        torch.manual_seed(0)
        first, second = (te.Linear(*sizes, params_dtype=torch.bfloat16) for sizes in ((272, 400), (400, 272)))
        x = torch.randn(160, 272, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad(), te.autocast(recipe=Float8BlockScaling()):
            between = first(x, fp8_output=True)
            assert isinstance(between, te.QuantizedTensor) and between.record.scale_layout == "canonical"
            return second(between)

    laid_out = run()
    monkeypatch.setattr(gemm, "operand_format", default_format)
    monkeypatch.setattr(scopes.MANAGER.functions, "_declared", {})  # the function before
    with te_dispatch.using(gemm="cuda"):  # the format is looked up once under one policy
        found = run()
    assert torch.equal(laid_out, found)
