# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Results depend on arguments alone, whatever a caller has set for PyTorch's own operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch import ops
from te_dispatch.conformance.checks.values import default_dtype
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer

SETTINGS: dict[str, Any] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
}


def _record(*shape: int) -> Any:
    return ops.quantize(torch.randn(*shape), CurrentQuantizer(), usage="row")


def _product() -> Any:
    a, b = torch.randn(16, 32), torch.randn(8, 32)
    return lambda: ops.gemm(a, b, layout="NT").out


def _quantized_product() -> Any:
    a, b = _record(16, 32), _record(16, 32)
    return lambda: ops.gemm(a, b, layout="NT").out


def _groups() -> Any:
    a, b = [torch.randn(3, 8), torch.randn(5, 8)], [torch.randn(4, 8), torch.randn(4, 8)]
    return lambda: torch.cat(ops.grouped_gemm(a, b, layout="NT"))


def _quantized_groups() -> Any:
    a, b = [_record(16, 32), _record(16, 32)], [_record(16, 32), _record(16, 32)]
    return lambda: torch.cat(ops.grouped_gemm(a, b, layout="NT"))


def _attention(**options: Any) -> Any:
    q, k, v = (torch.randn(9, 2, 4, 16) for _ in range(3))

    def call() -> Any:
        made = ops.attention_fwd(q, k, v, layout="sbhd", **options)
        dq = ops.attention_bwd(q, q, k, v, made.out, made.lse, saved=made.saved, layout="sbhd", **options).dq
        return torch.cat((made.out.flatten(), made.lse.flatten(), dq.flatten()))

    return call


CALLS: dict[str, Any] = {
    "product": _product,
    "quantized_product": _quantized_product,
    "groups": _groups,
    "quantized_groups": _quantized_groups,
    "attention": _attention,
    "dropped": lambda: _attention(dropout_p=0.2, rng_state=torch.tensor([3, 5])),
    "alibi": lambda: _attention(bias_type="alibi"),
    "off-by-one": lambda: _attention(softmax_type="off-by-one"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", CALLS)
def test_same_bits(name: str, setting: str) -> None:
    torch.manual_seed(0)
    call = CALLS[name]()
    alone = call()
    with SETTINGS[setting]():
        there = call()
    assert there.dtype == alone.dtype and torch.equal(there, alone)


def test_compiled_product_is_outside_of_autocast() -> None:
    a, b = torch.randn(16, 32), torch.randn(8, 32)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ops.gemm(a, b, layout="NT").out

    expected = product(a, b)
    compiled = torch.compile(product, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        made = compiled(a, b)
    assert made.dtype == torch.float32 and torch.equal(made, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_no_graph_hangs_on_what_is_written(autocast: bool) -> None:
    """A quantizer's amax that required a gradient would keep the graph of every cast before it."""
    x = torch.randn(16, 32, requires_grad=True)
    amax, params = torch.zeros(1), [torch.randn(4, requires_grad=True)]
    state = [[torch.zeros(4)], [torch.zeros(4)]]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        made = ops.quantize(x, DelayedQuantizer(scale=torch.ones(1), amax=amax), usage="row")
        product = ops.gemm(x, x, layout="NT").out
        ops.multi_tensor_adam(params, [torch.ones(4)], *state, lr=0.1)
    assert float(amax) == float(x.detach().abs().max())
    assert not any(t.requires_grad for t in (amax, made.row_data, made.row_scale_inv, product, *state[0], *state[1]))
    assert torch.is_grad_enabled() and params[0].requires_grad and params[0].is_leaf
