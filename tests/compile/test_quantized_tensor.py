# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantized edges between modules, compiled whole, against eager: outputs, gradients and FP8 state, bit for bit."""

from __future__ import annotations

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.numerics.quantizers import CurrentQuantizer
from tests.compile.training import DEVICE, ORDERS, RECIPES, assert_same, autocast, compiler, inputs, train

pytestmark = pytest.mark.sampled(40)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    te_dispatch.set_policy(None)


class Edges(torch.nn.Module):
    """Layers that hand on quantized outputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = te.Linear(32, 48, device=DEVICE)
        self.second = te.Linear(48, 32, device=DEVICE)
        self.third = te.LayerNormLinear(32, 32, return_layernorm_output=True, device=DEVICE)
        self.fourth = te.Linear(32, 32, bias=False, device=DEVICE)

    def forward(self, x):
        hidden = self.second(self.first(x, fp8_output=True), fp8_output=True)
        out, normed = self.third(hidden, fp8_output=True)
        return self.fourth(out) + normed  # no product beside the sum: a compiler makes one rounding of the two


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "none"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_edges_inside_a_compiled_region(recipe, backend):
    expected = train(Edges(), RECIPES[recipe])
    assert_same(expected, train(Edges(), RECIPES[recipe], compiler(backend)))


@pytest.mark.parametrize("order", ORDERS)
def test_delayed_scaling_with_the_autocast_inside(order):
    rows = (16,) * 4
    expected = train(Edges(), RECIPES["delayed"], inside=True, order=order, rows=rows)
    assert_same(expected, train(Edges(), RECIPES["delayed"], compiler(), inside=True, order=order, rows=rows))


def test_dynamic_rows():
    rows = (16, 32, 8)
    expected = train(Edges(), RECIPES["delayed"], rows=rows)
    assert_same(expected, train(Edges(), RECIPES["delayed"], compiler(dynamic=True), rows=rows))


def test_inductor_with_opaque_implementations():
    te_dispatch.set_policy("verify")
    expected = train(Edges(), RECIPES["delayed"])
    assert_same(expected, train(Edges(), RECIPES["delayed"], compiler("inductor")))


def test_the_state_of_the_edges_is_updated():
    eager, compiled = Edges(), Edges()
    train(eager, RECIPES["delayed"])
    train(compiled, RECIPES["delayed"], compiler())
    for a, b in (
        (getattr(m, n).fp8_state.scales.output for m in (eager, compiled)) for n in ("first", "second", "third")
    ):
        assert a.scale.item() != 1
        assert torch.equal(a.scale, b.scale) and torch.equal(a.history, b.history)


def layer(seed):
    torch.manual_seed(seed)
    return te.Linear(32, 32, device=DEVICE)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_quantized_tensor_enters_a_compiled_region(recipe):
    def run(consumer_of):
        first, second = layer(0), layer(1)
        consumer, found = consumer_of(second), []
        for x in inputs((16, 16)):
            with autocast(RECIPES[recipe]):
                y = consumer(first(x, fp8_output=True))
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        return {"all": found + [p.grad for module in (first, second) for p in module.parameters()]}

    assert_same(run(lambda module: module), run(compiler()))


def test_one_leaves_a_compiled_region_without_gradients_only():
    first = layer(0)
    function = compiler()(lambda x: first(x, fp8_output=True))
    x = inputs((16,))[0]
    with autocast(RECIPES["current"]):
        with torch.no_grad():
            expected, got = first(x, fp8_output=True), function(x)
        assert isinstance(got, te.QuantizedTensor) and torch.equal(expected.record.row_data, got.record.row_data)
        with pytest.raises(Exception, match=r"cannot leave a compiled region.*dequantize"):
            function(x)


def test_a_compiled_backward_takes_the_values_of_a_quantized_gradient():
    first, second, seen = layer(0), layer(1), []
    x = inputs((16,))[0]
    with autocast(RECIPES["current"]):
        hidden = compiler()(first)(x)
        hidden.register_hook(seen.append)
        second(hidden, fp8_grad=True).square().sum().backward()
    assert isinstance(seen[0], te.QuantizedTensor)
    got = [x.grad, first.weight.grad, first.bias.grad]
    other, x.grad = layer(0), None
    with autocast(RECIPES["current"]):
        other(x).backward(seen[0].dequantize())
    for a, b in zip(got, [x.grad, other.weight.grad, other.bias.grad], strict=True):
        assert torch.equal(a, b)


def test_quantized_gradients_are_refused_by_name():
    first = layer(0)
    with autocast(RECIPES["current"]), pytest.raises(Exception, match="fp8_grad=True is not supported in a compiled"):
        compiler()(lambda x: first(x, fp8_grad=True))(inputs((16,))[0])


def test_plain_operations_on_a_quantized_tensor_compile():
    x = inputs((16,))[0]

    def run(x):
        y = te.QuantizedTensor.quantize(x, CAST)
        return (y * 2 + y.dequantize()).sum(0), y.view(-1, 32)[:8].detach()

    expected, part = run(x)
    (grad,) = torch.autograd.grad(expected.sum(), x)
    got, other = compiler()(run)(x)
    (again,) = torch.autograd.grad(got.sum(), x)
    assert torch.equal(expected, got) and torch.equal(grad, again)
    assert isinstance(other, te.QuantizedTensor) and torch.equal(part, other)


CAST = CurrentQuantizer()
