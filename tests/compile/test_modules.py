# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every module, compiled whole, forward and backward, against eager: outputs, gradients and FP8 state, bit for bit."""

from __future__ import annotations

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from tests.compile.training import (
    DEVICE,
    MODULES,
    RECIPES,
    UNQUANTIZED,
    assert_same,
    build,
    compiler,
    inputs,
    interleaved_with_aot_eager,
    train,
)

pytestmark = pytest.mark.sampled(40)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    te_dispatch.set_policy(None)


def compare(name, recipe, backend="aot_eager", dynamic=False, **how):
    expected = train(build(name), RECIPES[recipe], **how)
    got = train(build(name), RECIPES[recipe], compiler(backend, dynamic), **how)
    assert_same(expected, got)


CASES = [(n, r) for n in MODULES for r in RECIPES if r == "none" or n not in UNQUANTIZED]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_autocast_outside(name, recipe):
    compare(name, recipe)


@pytest.mark.parametrize(("name", "recipe"), [(n, "delayed") for n in MODULES if n not in UNQUANTIZED])
def test_autocast_inside(name, recipe):
    compare(name, recipe, inside=True)


@pytest.mark.parametrize("name", [n for n in MODULES if n not in UNQUANTIZED])
def test_a_module_that_ran_eagerly_compiles_under_another_recipe(name):
    """What it knows of its eager calls is forgotten while it is traced: no guard may be on that."""
    module, eager = build(name), build(name)
    for before, recipe in (("none", "current"), ("current", "delayed"), ("none", "current")):
        for one in (module, eager):
            train(one, RECIPES[before])
        assert_same(train(eager, RECIPES[recipe]), train(module, RECIPES[recipe], compiler("aot_eager", False)))


@interleaved_with_aot_eager
@pytest.mark.parametrize("order", ["ffbb", "1f1b"])
@pytest.mark.parametrize("inside", [False, True])
def test_other_orders(order, inside):
    compare("LayerNormMLP gelu", "delayed", order=order, inside=inside, rows=(16,) * 4)


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_dynamic_rows(recipe):
    compare("Linear", recipe, dynamic=True, inside=True, rows=(16, 32, 8))


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP swiglu"])
@pytest.mark.parametrize("inside", [False, True])
def test_inductor_is_exact_with_opaque_implementations(name, inside):
    te_dispatch.set_policy("verify")
    compare(name, "delayed", "inductor", inside=inside)


@pytest.mark.parametrize("policy", ["default", "verify"])
def test_inductor_takes_passes_in_any_order(policy):
    """Inlined and opaque implementations write amaxes in ways of their own; all of what is not a sum is exact."""
    te_dispatch.set_policy(policy)
    expected = train(build("Linear"), RECIPES["delayed"], order="1f1b")
    got = train(build("Linear"), RECIPES["delayed"], compiler("inductor"), order="1f1b")
    assert_same({what: expected[what] for what in ("out", "dx", "state")}, got)


@pytest.mark.parametrize(("name", "recipe"), [("Linear", "delayed"), ("LayerNormLinear", "none")])
def test_inductor_with_inlined_implementations(name, recipe):
    """Only sums may differ, and only on the CPU: inductor re-associates them, in bias gradients and norms.

    A sum of n float32 terms in another order moves by a few times its rounding error, sqrt(n) 2^-24 of the sum of
    magnitudes; 1e-5 of the largest entry holds for these sizes with a wide margin. A norm's output that moves in its
    last bit may move an FP8 code, so that the quantized case is a module without a norm.
    """
    expected = train(build(name), RECIPES[recipe])
    got = train(build(name), RECIPES[recipe], compiler("inductor"))
    for what, values in expected.items():
        for a, b in zip(values, got[what], strict=True):
            bias_gradient = what == "grads" and a.dim() == 1
            if DEVICE.type == "cpu" and what != "state" and (name != "Linear" or bias_gradient):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * a.abs().max().item())
            else:
                assert torch.equal(a, b), what


@pytest.mark.skipif(DEVICE.type == "cpu", reason="sums written in PyTorch are inlined on the CPU")
@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize("name", [n for n in MODULES if n not in UNQUANTIZED])
def test_inductor_is_exact_off_the_cpu(name, recipe):
    expected = train(build(name), RECIPES[recipe])
    got = train(build(name), RECIPES[recipe], compiler("inductor"))
    assert_same(expected, got)


def test_the_second_step_compiles_nothing():
    graphs = 0

    def counting(module, example_inputs):
        nonlocal graphs
        graphs += 1
        return module.forward

    module = build("LayerNormMLP gelu")
    train(module, DelayedScaling(amax_history_len=4), lambda f: torch.compile(f, fullgraph=True, backend=counting))
    assert graphs == 1


def microbatches(module, function, recipe):
    found = []
    for _ in range(2):
        for i, x in enumerate(inputs((16, 16, 16))):
            with te.autocast(recipe=recipe):
                y = function(x, is_first_microbatch=i == 0)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad, alpha=0.01)
                p.grad = None
        found.append(module.weight.detach().clone())
    return found


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_cached_weights(recipe):
    eager, compiled = build("Linear"), build("Linear")
    expected = microbatches(eager, eager, RECIPES[recipe])
    got = microbatches(compiled, compiler()(compiled), RECIPES[recipe])
    assert_same({"microbatches": expected}, {"microbatches": got})


def test_recipe_switch_moves_the_scales_as_in_eager():
    """Another history length is other memory: graphs of the first recipe are traced again, not run on the old one."""

    def run(function):
        found = []
        for length in (4, 8, 4):
            for x in inputs((16, 16)):
                with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
                    y = function(x)
                y.square().sum().backward()
                found += [y.detach(), x.grad]
        return found

    assert_same({"steps": run(build("Linear"))}, {"steps": run(compiler()(build("Linear")))})


def test_eager_and_compiled_steps_share_the_state():
    def run(step):
        module = build("LayerNormLinear")
        functions = (module, compiler()(module))
        found = []
        for i, x in enumerate(inputs((16,) * 4)):
            with te.autocast(recipe=RECIPES["delayed"]):
                y = functions[step(i)](x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        return found

    assert_same({"steps": run(lambda i: 0)}, {"steps": run(lambda i: i % 2)})


def test_torch_autocast_around_the_region():
    def run(function):
        (x,) = inputs((16,))
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16), te.autocast(recipe=RECIPES["current"]):
            y = function(x)
        y.float().square().sum().backward()
        return [y.detach().float(), x.grad]

    assert_same({"x": run(build("LayerNormMLP gelu"))}, {"x": run(compiler()(build("LayerNormMLP gelu")))})


def test_inductor_with_several_scaled_blocks():
    """The emulated product of block-scaled operands is one loop with the casts, which read blocks and not elements."""
    torch.manual_seed(0)
    module = te.Linear(128, 384, device=DEVICE)
    x = torch.randn(32, 128, device=DEVICE, requires_grad=True)
    dy = torch.randn(32, 384, device=DEVICE)

    def step(run):
        with te.autocast(recipe=RECIPES["block"]):
            y = run(x)
        return y.detach(), *torch.autograd.grad(y, [x, module.weight], dy)

    for name, want, got in zip(("y", "dx", "dw"), step(module), step(compiler("inductor")(module)), strict=True):
        assert torch.equal(want, got), name


@pytest.mark.parametrize("operands", ["qqq", "qkk", "qqv", "qkq"])
def test_attention_to_the_same_tensor(operands):
    """As in self attention without projections."""
    module = te.DotProductAttention(2, 8, attention_dropout=0.0, attn_mask_type="no_mask")
    torch.manual_seed(0)
    given = {name: torch.randn(6, 2, 2, 8, requires_grad=True) for name in sorted(set(operands))}

    def step(function):
        out = function(*(given[name] for name in operands))
        out.sum().backward()
        found = [out.detach(), *(x.grad for x in given.values())]
        for x in given.values():
            x.grad = None
        return found

    expected = step(module)
    found = step(torch.compile(module, fullgraph=True, backend="aot_eager"))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
