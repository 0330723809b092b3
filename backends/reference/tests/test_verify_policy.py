# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The shipped policy `verify`: a TransformerLayer with dropout, and an optimizer step, wholly on the reference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.common import recipe

te = pytest.importorskip("te_dispatch.pytorch")

HIDDEN, FFN, HEADS, B, S = 32, 64, 4, 2, 8
RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}
#: Draws of dropout are each backend's own, so a comparison takes them from one.
DRAWS = ("dropout_add_fwd", "dropout_add_bwd", "attention_fwd", "attention_bwd")


def step(
    dropout: float, scope: Callable[[], AbstractContextManager[object]], name: str = "none"
) -> tuple[dict[str, torch.Tensor], dict[str, set[str]]]:
    """One forward in `scope` and its backward after it: results by name, and the implementations that ran."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, hidden_dropout=dropout, attention_dropout=dropout)
    x = torch.randn(S, B, HIDDEN, requires_grad=True)
    ran: dict[str, set[str]] = {}
    torch.manual_seed(1)
    with te_dispatch.observe(lambda op, accepted, args, result: ran.setdefault(op.name, set()).add(accepted.id)):
        with scope(), te.autocast(enabled=name != "none", recipe=RECIPES[name]):
            out = layer(x)
        out.square().sum().backward()
    grads = {n: p.grad for n, p in layer.named_parameters()}
    return {"out": out.detach(), "x": x.grad, **grads}, ran


def verify() -> AbstractContextManager[object]:
    return te_dispatch.policy("verify")


@pytest.mark.parametrize("name", RECIPES)
def test_every_decision_of_a_layer_with_dropout_is_the_references(name: str) -> None:
    found, ran = step(0.25, verify, name)
    assert {"gemm", "layernorm_fwd", "layernorm_bwd", *DRAWS} <= set(ran)
    assert (name == "none") != ("quantize" in ran)
    assert {i.partition(".")[0] for ids in ran.values() for i in ids} == {"reference"}, ran
    assert all(value.isfinite().all() and value.any() for value in found.values())


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_layer_is_close_to_the_default_policys(dropout: float) -> None:
    """float32 against float64 with one rounding per operator. A chain of 12 operators forward and 24 with the
    backward errs, to first order, by at most the sum of theirs; none sums more than FFN terms, or S B + FFN for a
    weight's gradient, of u = 2^-24 each, with 8 more operations around the sum; and none amplifies what comes in by
    more than the row that it sums, which the largest magnitude of the result stands for.
    """

    def default() -> AbstractContextManager[object]:
        return te_dispatch.using(**dict.fromkeys(DRAWS, "reference")) if dropout else nullcontext()

    found, ran = step(dropout, default)
    want, _ = step(dropout, verify)
    others = {i for operator, ids in ran.items() for i in ids if not dropout or operator not in DRAWS}
    assert others and not any(i.startswith("reference.") for i in others), "the default is something else"
    for key, value in want.items():
        roundings = 12 * (FFN + 8) if key == "out" else 24 * (FFN + S * B + 8)
        # A bias of the keys moves every score of a row alike, so its gradient is 0 but for the rounding of its terms,
        # which are of the size of those of the queries' bias.
        size = want[key.replace("key_bias", "query_bias")].abs().max()
        limit = roundings * 2.0**-24 * float(size)
        assert (found[key] - value).abs().max() <= limit, key
    if dropout:
        dry, _ = step(0.0, verify)
        assert not torch.equal(dry["out"], want["out"]), "something was dropped"


def test_the_same_generator_gives_the_same_layer() -> None:
    (first, _), (second, _) = (step(0.25, verify) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_an_optimizer_step_is_the_references() -> None:
    torch.manual_seed(0)
    weights, grads = [torch.randn(4, 3)], [torch.randn(4, 3)]
    exact = weights[0].double().requires_grad_()
    exact.grad = grads[0].double()
    moments = [torch.zeros(4, 3)], [torch.zeros(4, 3)]
    ran: list[str] = []
    with verify(), te_dispatch.observe(lambda op, accepted, args, result: ran.append(accepted.id)):
        assert ops.multi_tensor_l2norm(grads).item() == pytest.approx(float(exact.grad.norm()), rel=2.0**-23)
        ops.multi_tensor_adam(weights, grads, *moments, lr=0.1, weight_decay=0.01)
    torch.optim.AdamW([exact], lr=0.1, weight_decay=0.01).step()
    assert ran == ["reference.multi_tensor_l2norm", "reference.multi_tensor_adam"]
    # One rounding of values below 4; the two float64 computations differ by far less.
    assert (weights[0].double() - exact.detach()).abs().max() <= 4 * 2.0**-24
