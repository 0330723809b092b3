# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How te_dispatch sees the plugin: devices, decisions, composites, declines, and a model that trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_dispatch.core.devices import describe_device
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy.file import load_policy
from te_dispatch.core.resolve import resolve
from te_dispatch.core.scopes import MANAGER
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch_acme import probe

Ran = dict[tuple[str, str], tuple[str, ...]]


@contextmanager
def watched() -> Iterator[Ran]:
    """(operator, implementation) -> its pieces, of every call in the block."""
    ran: Ran = {}

    def note(operator: Any, accepted: Any, args: tuple[Any, ...], result: Any) -> None:
        pieces = tuple(piece.chosen.id for piece in accepted.pieces.values())
        ran[operator.name, accepted.id] = pieces

    with te_dispatch.observe(note):
        yield ran


def test_the_cpu_is_an_x1_because_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = MANAGER.device_facts(torch.device("cpu"))
    assert (facts.vendor, facts.arch, facts["encodings"]) == ("acme", "x1", ("e4m3fn", "e5m2"))
    monkeypatch.delenv("ACME_DEVICE")
    assert probe.probe(0) is None
    assert probe.unavailable() is None, "a chip that is not here makes the plugin useless, not broken"
    assert probe.doctor()[0][:2] == ("x1", "missing")


def test_an_x1_elsewhere_resolves_by_name() -> None:
    device = describe_device(MANAGER.snapshot, "acme:x1")
    call = {"a.dtype": "e4m3fn", "b.dtype": "e5m2", "a.scaling": "tensor", "b.scaling": "tensor", "layout": "NT"}
    call |= {"epilogue": None, "out_quantizer": None, "aux_quantizer": None}
    policy = load_policy("default", MANAGER.known())
    decision = resolve(OPERATORS["gemm"], {**call, "n": 64}, device, policy, MANAGER.snapshot)
    assert decision.chosen is not None
    assert decision.chosen.id == "acme.fp8_gemm"
    decision = resolve(OPERATORS["gemm"], {**call, "n": 60}, device, policy, MANAGER.snapshot)
    reasons = {rejected.id: rejected.reason for rejected in decision.rejected}
    assert reasons["acme.fp8_gemm"] == "n is 60, needs a multiple of 16"


def test_no_copy_is_made_that_the_unit_does_not_read() -> None:
    formats = ops.gemm_operand_format(torch.device("cpu"), "e5m2", "tensor", "e4m3fn", "tensor", "TN")
    assert formats == (("row", "canonical"), ("row", "canonical"))


def test_a_contracted_size_that_the_unit_cannot_read_goes_to_the_next_candidate() -> None:
    a, b = (ops.quantize(torch.randn(24, 32), CurrentQuantizer("e4m3fn"), usage="both") for _ in range(2))
    with watched() as ran:
        out = ops.gemm(a, b, layout="TN", out_dtype=torch.float32).out
    assert [name for operator, name in ran if operator == "gemm"] != ["acme.fp8_gemm"]
    x, y = (ops.dequantize(record, dtype=torch.float32).double() for record in (a, b))
    expected, magnitude = x.T @ y, x.abs().T @ y.abs()
    assert ((out - expected).abs() <= (24 + 6) * 2.0**-24 * magnitude).all()
    with te_dispatch.using(gemm="acme"), pytest.raises(te_dispatch.NoImplementation, match="multiples of 16, got 24"):
        ops.gemm(a, b, layout="TN")


def test_fused_calls_are_composed_of_the_primitives() -> None:
    x, gamma, weight = torch.randn(32, 64), torch.ones(64), torch.randn(48, 64)
    quantizer = CurrentQuantizer("e4m3fn")
    with watched() as ran:
        y = ops.rmsnorm_fwd(x, gamma, residual=x, quantizer=quantizer).y_quantized
        ops.activation_fwd(x, kind="swiglu", quantizer=quantizer)
        ops.gemm(y, ops.quantize(weight, quantizer, usage="row"), layout="NT", epilogue="gelu")
        ops.quantize_dbias(x, quantizer, usage="row")
    assert ran["rmsnorm_fwd", "composite.rmsnorm_then_quantize"] == ("acme.rmsnorm_fwd", "acme.quantize")
    assert ran["activation_fwd", "composite.activation_then_quantize"] == ("acme.activation_fwd", "acme.quantize")
    assert ran["gemm", "composite.gemm_then_epilogue"] == ("acme.fp8_gemm", "acme.activation_fwd")
    assert ran["quantize_dbias", "composite.quantize_then_sum"] == ("acme.quantize",)


def test_attention_is_composed_where_a_policy_asks_for_it() -> None:
    q, k, v = (torch.randn(2, 16, 2, 8, requires_grad=True) for _ in range(3))
    attention = te.DotProductAttention(2, 8, qkv_format="bshd", attention_dropout=0.0)

    def run() -> list[torch.Tensor]:
        out = attention(q, k, v, attn_mask_type="causal")
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    with te_dispatch.using(attention="composite"), watched() as ran:
        composed = run()
    assert set(ran["attention_fwd", "composite.unfused_attention"]) == {"acme.compiled_softmax_fwd", "acme.gemm"}
    with te_dispatch.using(attention="reference"):
        expected = run()
    for ours, theirs in zip(composed, expected):
        # fp32 throughout: sums of at most 16 terms, and softmax of scores below 2^4.
        bound = 2.0**-24 * 2**9 * (1 + theirs.detach().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=float(bound))


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), Float8CurrentScaling()], ids=["fp32", "delayed", "current"])
def test_a_transformer_layer_trains(recipe: Recipe | None) -> None:
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.1, attention_dropout=0.0, params_dtype=torch.float32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    x, target = torch.randn(16, 2, 64), torch.randn(16, 2, 64)
    losses = []
    with watched() as ran:
        for _ in range(12):
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                loss = (layer(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    elsewhere = {operator for (operator, name), pieces in ran.items() if not _on_acme(name, pieces)}
    assert elsewhere <= {"attention_fwd", "attention_bwd", "update_delayed_scales"}
    assert ("gemm", "acme.gemm" if recipe is None else "acme.fp8_gemm") in ran
    assert ("dropout_add_bwd", "acme.dropout_add_bwd") in ran


def _on_acme(name: str, pieces: tuple[str, ...]) -> bool:
    return all(part.startswith("acme.") for part in pieces or (name,))
