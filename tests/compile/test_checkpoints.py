# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activation checkpoints inside compiled regions and around them: the bits of training without a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import te_dispatch
import te_dispatch.pytorch as te
from tests.compile.training import (
    ORDERS,
    RECIPES,
    assert_same,
    build,
    compiler,
    interleaved_with_aot_eager,
    refused,
    train,
)

pytestmark = pytest.mark.sampled(40)

MODULE = "LayerNormMLP gelu"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    te_dispatch.set_policy(None)


class Checkpointed(torch.nn.Module):
    """A module under a checkpoint; `function` is what becomes of the module, e.g. its compiled form."""

    def __init__(self, checkpoint=te.checkpoint, function=lambda module: module, name=MODULE, **options):
        super().__init__()
        self.module = build(name)
        self.function = function(self.module)
        self.checkpoint = checkpoint
        self.options = options

    def forward(self, x):
        return self.checkpoint(self.function, x, **self.options)


def without_reentry(function, x):
    return torch_checkpoint(function, x, use_reentrant=False)


def recomputing():
    """The module, which recomputes by itself."""
    module = build(MODULE)
    module.checkpoint = True
    return module


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
def test_a_module_that_recomputes_by_itself(recipe, order):
    expected = train(build(MODULE), RECIPES[recipe], order=order)
    assert_same(expected, train(recomputing(), RECIPES[recipe], order=order))
    assert_same(expected, train(recomputing(), RECIPES[recipe], compiler(), order=order))


def test_a_module_that_recomputes_by_itself_with_the_autocast_inside():
    with pytest.raises(Exception, match="checkpoint: delayed scaling is not supported"):
        train(recomputing(), RECIPES["delayed"], compiler(), inside=True)


@pytest.mark.parametrize("recipe", ["none", "current"])
@pytest.mark.parametrize("where", ["inside", "around"])
def test_without_state(recipe, where):
    expected = train(build(MODULE), RECIPES[recipe])
    if where == "inside":
        got = train(Checkpointed(), RECIPES[recipe], compiler())
    else:
        got = train(Checkpointed(function=compiler()), RECIPES[recipe])
    assert_same(expected, got)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", [None, "verify"])
def test_delayed_scaling_inside(order, policy):
    """`verify` is opaque, so that its recomputations call the implementations again; they must record nothing."""
    te_dispatch.set_policy(policy)
    expected = train(build(MODULE), RECIPES["delayed"], order=order)
    assert_same(expected, train(Checkpointed(), RECIPES["delayed"], compiler(), order=order))


def test_delayed_scaling_inside_under_inductor():
    te_dispatch.set_policy("verify")
    expected = train(build("Linear"), RECIPES["delayed"], order="1f1b")
    got = train(Checkpointed(name="Linear"), RECIPES["delayed"], compiler("inductor"), order="1f1b")
    assert_same(expected, got)


@interleaved_with_aot_eager
def test_checkpoints_nest():
    def twice(function, x):
        return te.checkpoint(lambda x: te.checkpoint(function, x), x)

    expected = train(build("Linear"), RECIPES["delayed"], order="ffbb")
    assert_same(expected, train(Checkpointed(twice, name="Linear"), RECIPES["delayed"], compiler(), order="ffbb"))


def test_the_products_are_recomputed_and_the_scales_are_not():
    graphs = {}

    def keep(label):
        def compile(graph, example_inputs):
            graphs[label] = str(graph.graph)
            return graph

        return compile

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=keep("forward"), bw_compiler=keep("backward"))
    te_dispatch.set_policy("verify")
    counts = {}
    for label, module in (("plain", build(MODULE)), ("checkpointed", Checkpointed())):
        torch._dynamo.reset()
        train(module, RECIPES["delayed"], lambda f: torch.compile(f, fullgraph=True, backend=backend), rows=(16,))
        text = graphs["backward"]
        counts[label] = (text.count("gemm@1:reference.gemm"), text.count("te_dispatch.snapshot"))
    assert graphs["forward"].count("te_dispatch.snapshot") == 4
    # Two dgrads and two wgrads, and the first product again; the scales of two gradients and no other.
    assert counts == {"plain": (4, 2), "checkpointed": (5, 2)}


def nested_in_ours(function, x):
    return te.checkpoint(lambda x: without_reentry(function, x), x)


@pytest.mark.parametrize("checkpoint", [without_reentry, nested_in_ours])
def test_pytorchs_own_checkpoint_inside_never_gives_other_gradients(checkpoint):
    """It has the compiler recompute the scales too, and reading them then raises.

    Older PyTorch (2.11) recomputes nothing that an autograd Function does, and the gradients are right.
    """
    module = Checkpointed(checkpoint, name="Linear")
    try:
        got = train(module, RECIPES["delayed"], compiler())
    except RuntimeError as error:
        assert "inside the compiled region use te_dispatch.pytorch.checkpoint" in str(error)
    else:
        assert torch.__version__ < "2.13"
        assert_same(train(build("Linear"), RECIPES["delayed"]), got)


def test_a_checkpoint_around_is_refused_with_delayed_scaling():
    with pytest.raises(RuntimeError, match="compiled module with delayed scaling runs inside a backward"):
        train(Checkpointed(function=compiler()), RECIPES["delayed"])


def test_an_autocast_inside_is_refused_with_delayed_scaling():
    with refused("put the autocast around the compiled call"):
        train(Checkpointed(), RECIPES["delayed"], compiler(), inside=True)


def test_a_context_fn_is_refused_with_delayed_scaling():
    options = {"use_reentrant": False, "context_fn": torch.utils.checkpoint.noop_context_fn}
    with refused("context_fn is not supported with delayed scaling inside a compiled region"):
        train(Checkpointed(**options), RECIPES["delayed"], compiler())
