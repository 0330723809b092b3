# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``fp8_output`` and ``fp8_grad``: what leaves a module quantized, and what the next one does with it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.core import scopes
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer
from te_dispatch.pytorch.fp8.extra_state import decoded

from .bounds import Bounded
from .gemm_oracle import RECIPES, assert_within, frozen, product_bound

ROWS, WIDE = 32, 64
DELAYED = DelayedScaling(amax_history_len=4)


def _linear(seed: int = 0, **kwargs: Any) -> te.Linear:
    torch.manual_seed(seed)
    return te.Linear(WIDE, WIDE, device="cpu", **kwargs)


def _called(function: Any) -> list[str]:
    """Operators that `function` calls."""
    calls: list[str] = []
    with scopes.observe(lambda operator, accepted, args, result: calls.append(getattr(operator, "name", operator))):
        function()
    return calls


def _refuse_quantized_tensors(operator: Any, accepted: Any, args: Any, result: Any) -> None:
    """An observer: kernels read memory, which a `QuantizedTensor` does not have."""
    assert not any(isinstance(arg, te.QuantizedTensor) for arg in args), operator


def _same_record(a: Any, b: Any) -> bool:
    names = ("row_data", "row_scale_inv", "global_scale_inv")
    pairs = [(getattr(a, name), getattr(b, name)) for name in names]
    tags = [(x.encoding, x.scaling, tuple(x.shape), x.dtype) for x in (a, b)]
    return tags[0] == tags[1] and all(x is y or torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_the_output_is_the_cast_of_the_products_float32_sums(name: str, bias: bool, dtype: torch.dtype) -> None:
    layer = _linear(bias=bias, params_dtype=dtype)
    for _ in range(2):  # the second step has other delayed scales
        x = torch.randn(2, 16, WIDE).to(dtype)
        with te.autocast(recipe=RECIPES[name]):
            with torch.no_grad():
                layer(x, fp8_output=True)
            casts, cast = layer.fp8_state.plan.gemms[0], frozen(layer.fp8_state.plan.boundary.output)
            a, b = (
                ops.quantize(t.detach(), frozen(q), usage="both")
                for t, q in ((x, casts.input), (layer.weight, casts.weight))
            )
            y = layer(x, fp8_output=True)
        assert isinstance(y, te.QuantizedTensor) and (y.dtype, y.shape) == (dtype, (2, 16, WIDE))
        sums = ops.gemm(
            a, b, layout="NT", bias=layer.bias.detach() if bias else None, out_dtype=torch.float32,
            split_accumulator=casts.fprop_split,
        ).out  # fmt: skip
        expected = ops.quantize(sums, cast, usage="row")
        expected.dtype = dtype
        assert _same_record(y.record, expected)
    assert name != "delayed" or cast.scale.item() != 1


@pytest.mark.parametrize("name", RECIPES)
def test_the_next_module_takes_it_without_another_cast(name: str) -> None:
    """And gives the bits of a step by hand: the same record, cast once, in both GEMMs that read it."""
    first, second = _linear(0), _linear(1)
    recipe = RECIPES[name]
    with te.autocast(recipe=recipe), torch.no_grad():
        second(torch.randn(ROWS, WIDE))
    casts = second.fp8_state.plan.gemms[0]
    q_w, q_g = frozen(casts.weight), frozen(casts.grad)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    with te.autocast(recipe=recipe):
        hidden = first(x, fp8_output=True)
        hidden.retain_grad()
        results: list[torch.Tensor] = []
        calls = _called(lambda: results.append(second(hidden)))
        q_g = frozen(casts.grad)
    assert calls.count("quantize") == 1  # the weight's
    assert calls.count("dequantize") == 0
    (y,), dy = results, torch.randn(ROWS, WIDE)
    y.backward(dy)
    record = hidden.record
    if record.col_data is None:
        record = ops.transpose_quantized(record)
    w = ops.quantize(second.weight.detach(), q_w, usage="both")
    g = ops.quantize(dy, q_g, usage="both")
    out = ops.gemm(record, w, layout="NT", bias=second.bias.detach(), split_accumulator=casts.fprop_split).out
    assert torch.equal(y, out)
    dw = ops.gemm(g, record, layout="TN", split_accumulator=casts.wgrad_split).out
    assert torch.equal(second.weight.grad, dw)
    dx = ops.gemm(g, w, layout="NN", split_accumulator=casts.dgrad_split).out
    assert type(hidden.grad) is torch.Tensor and torch.equal(hidden.grad, dx)
    assert x.grad is not None and first.weight.grad is not None


def test_casting_the_same_output_by_hand_gives_the_same_bits() -> None:
    """float32, where nothing is rounded between the product's sums and the cast."""
    first, second = _linear(0), _linear(1)
    twins = copy.deepcopy(first), copy.deepcopy(second)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    with te.autocast(recipe=Float8CurrentScaling()):
        y = second(first(x, fp8_output=True))
        by_hand = twins[1](te.QuantizedTensor.quantize(twins[0](other), CurrentQuantizer("e4m3fn"), "row"))
        recast = twins[1](twins[0](other))
    assert torch.equal(y, by_hand) and torch.equal(y, recast)
    dy = torch.randn_like(y)
    y.backward(dy)
    by_hand.backward(dy)
    assert torch.equal(x.grad, other.grad)
    for a, b in zip((first, second), twins):
        assert torch.equal(a.weight.grad, b.weight.grad) and torch.equal(a.bias.grad, b.bias.grad)


@pytest.mark.parametrize("made", [BlockQuantizer("e4m3fn"), CurrentQuantizer("e5m2"), None])
def test_another_format_is_cast_again(made: Any) -> None:
    layer = _linear()
    x = torch.randn(ROWS, WIDE)
    if made is None:  # in the right format, but with the copy alone that the product does not read
        given = te.QuantizedTensor.quantize(x, CurrentQuantizer("e4m3fn"), "column")
    else:
        given = te.QuantizedTensor.quantize(x, made)
    with te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(layer(given), layer(given.dequantize()))


def test_a_block_scaled_row_alone_serves_inference_and_is_cast_again_for_training() -> None:
    from te_dispatch.common.recipe import Float8BlockScaling

    layer = _linear()
    given = te.QuantizedTensor.quantize(torch.randn(ROWS, WIDE), BlockQuantizer("e4m3fn"), "row")
    with te.autocast(recipe=Float8BlockScaling()):
        with torch.no_grad():
            layer(given)  # builds the plan
            assert _called(lambda: layer(given)).count("quantize") == 1
        calls = _called(lambda: layer(given).sum().backward())
    reads_column = layer.fp8_state.plan.gemms[0].input_usage[1] != "row"
    assert calls.count("dequantize") == int(reads_column)


@pytest.mark.parametrize("name", RECIPES)
def test_the_gradient_leaves_quantized_and_is_taken_as_it_is(name: str) -> None:
    first, second = _linear(0), _linear(1)
    recipe = RECIPES[name]
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    for _ in range(2):
        x.grad = None
        first.zero_grad()
        seen: list[torch.Tensor] = []
        casts: list[Any] = []

        def step(dy: torch.Tensor, seen: list[torch.Tensor] = seen, casts: list[Any] = casts) -> None:
            with te.autocast(recipe=recipe):
                hidden = first(x)
                hidden.register_hook(seen.append)
                y = second(hidden, fp8_grad=True)
                casts.extend(
                    frozen(q) for q in (second.fp8_state.plan.gemms[0].grad, second.fp8_state.plan.boundary.input_grad)
                )
            y.backward(dy)

        dy = torch.randn(ROWS, WIDE)
        calls = _called(functools.partial(step, dy=dy))
        g_cast, cast = casts
        (grad,) = seen
        assert isinstance(grad, te.QuantizedTensor) and grad.shape == x.shape
        gemms = second.fp8_state.plan.gemms[0]
        g = ops.quantize(dy, g_cast, usage="both")
        w = ops.quantize(second.weight.detach(), frozen(gemms.weight), usage="both")
        if name != "delayed":  # whose weight scale has moved on since
            sums = ops.gemm(g, w, layout="NN", out_dtype=torch.float32, split_accumulator=gemms.dgrad_split).out
            assert _same_record(grad.record, ops.quantize(sums, cast, usage="row"))
        # The second module's own gradient is cast; the first's comes cast, and only its column sums are taken.
        assert calls.count("quantize_dbias") == 1 and calls.count("dequantize") == 1
        record = grad.record if grad.record.col_data is not None else ops.transpose_quantized(grad.record)
        plan = first.fp8_state.plan.gemms[0]
        w1 = ops.quantize(first.weight.detach(), frozen(plan.weight), usage="both")
        if name != "delayed":
            dx = ops.gemm(record, w1, layout="NN", split_accumulator=plan.dgrad_split).out
            assert torch.equal(x.grad, dx)
            inp = ops.quantize(x.detach(), plan.input, usage="both")
            dw = ops.gemm(record, inp, layout="TN", split_accumulator=plan.wgrad_split).out
            assert torch.equal(first.weight.grad, dw)
        exact = ops.dequantize(grad.record, dtype=torch.float32).double()
        ones = torch.ones(1, ROWS, dtype=torch.float64)
        assert_within(first.bias.grad[None], exact.sum(0)[None], product_bound(ones, exact, torch.float32))
    if name == "delayed":
        assert cast.scale.item() != 1 and cast.scale.item() != g_cast.scale.item()


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_plain_edges(name: str) -> None:
    """Against the same two layers with plain edges, whose second layer casts the same float32 values.

    So everything is equal, bit for bit. Delayed scaling keeps one scale for the first layer's output and another for
    the second's input, but both start at 1 and see the same amaxes.
    """
    layers = _linear(0), _linear(1)
    plain = copy.deepcopy(layers)
    for step in range(3):
        x = torch.randn(ROWS, WIDE, requires_grad=True)
        other = x.detach().clone().requires_grad_()
        with te.autocast(recipe=RECIPES[name]):
            y = layers[1](layers[0](x, fp8_output=True))
            z = plain[1](plain[0](other))
        assert torch.equal(y, z), step
        dy = torch.randn_like(y)
        y.backward(dy)
        z.backward(dy)
        assert torch.equal(x.grad, other.grad)
        for a, b in zip(layers, plain):
            assert torch.equal(a.weight.grad, b.weight.grad)


def _cast(x: Bounded, encoding: str) -> Bounded:
    """x after a per-tensor cast by its own amax and back: docs/numerics.md, "cast and back"."""
    half_ulp, half_subnormal, maximum = {"e4m3fn": (2.0**-4, 2.0**-10, 448.0), "e5m2": (2.0**-3, 2.0**-17, 57344.0)}[
        encoding
    ]
    magnitude = x.value.abs() + x.error
    scale_inv = magnitude.max() / maximum * (1 + 2.0**-22)
    rounding = torch.maximum(half_ulp * magnitude, half_subnormal * scale_inv) + 3 * 2.0**-24 * magnitude
    return Bounded(x.value, x.error + rounding)


def test_gradients_against_unquantized_ones() -> None:
    """Two layers with quantized edges both ways, against float64 without any cast, by running error analysis."""
    first, second = _linear(0, bias=False), _linear(1, bias=False)
    x, dy = torch.randn(ROWS, WIDE, requires_grad=True), torch.randn(ROWS, WIDE)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = second(first(x, fp8_output=True), fp8_grad=True)
    y.backward(dy)
    w1, w2 = (_cast(Bounded(layer.weight), "e4m3fn") for layer in (first, second))
    inp = _cast(Bounded(x), "e4m3fn")
    hidden = _cast(inp @ w1.T, "e4m3fn")
    grad = _cast(Bounded(dy), "e5m2")
    hidden_grad = _cast(grad @ w2, "e5m2")
    for what, got, want in (
        ("y", y, hidden @ w2.T),
        ("dx", x.grad, hidden_grad @ w1),
        ("dw2", second.weight.grad, grad.T @ hidden),
        ("dw1", first.weight.grad, hidden_grad.T @ inp),
    ):
        off = (got.detach().double() - want.value).abs()
        assert (off <= want.error).all(), what
        assert off.max() > 0, what
    exact = (x.detach().double() @ first.weight.detach().double().T) @ second.weight.detach().double().T
    assert torch.equal((hidden @ w2.T).value, exact)


def test_layernorm_linear_at_both_ends() -> None:
    torch.manual_seed(0)
    norm_layer, layer = te.LayerNormLinear(WIDE, WIDE, device="cpu"), _linear(1)
    x = torch.randn(ROWS, WIDE, requires_grad=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        hidden = layer(x, fp8_output=True)
        y = norm_layer(hidden, fp8_output=True, fp8_grad=True)
        values = norm_layer(hidden.detach().dequantize())
    assert isinstance(y, te.QuantizedTensor)
    cast = ops.quantize(values.detach(), CurrentQuantizer("e4m3fn"), usage="row")
    assert _same_record(y.record, cast)
    grads: list[torch.Tensor] = []
    hidden.register_hook(grads.append)
    y.square().sum().backward()
    assert isinstance(grads[0], te.QuantizedTensor) and grads[0].record.encoding == "e5m2"
    leaf = hidden.detach().dequantize().requires_grad_()
    with te.autocast(recipe=Float8CurrentScaling()):
        again = norm_layer(leaf)
    again.backward(2 * y.detach().dequantize())
    assert _same_record(grads[0].record, ops.quantize(leaf.grad, CurrentQuantizer("e5m2"), usage="row"))
    assert x.grad.isfinite().all() and layer.weight.grad.ne(0).any()


@pytest.mark.parametrize("module", ["LayerNormMLP", "LayerNorm", "RMSNorm", "MultiheadAttention", "TransformerLayer"])
def test_other_modules_take_the_values(module: str) -> None:
    torch.manual_seed(0)
    made: Any = {
        "LayerNormMLP": lambda: te.LayerNormMLP(WIDE, WIDE, device="cpu"),
        "LayerNorm": lambda: te.LayerNorm(WIDE, device="cpu"),
        "RMSNorm": lambda: te.RMSNorm(WIDE, device="cpu"),
        "MultiheadAttention": lambda: te.MultiheadAttention(WIDE, 4, attention_dropout=0.0, device="cpu"),
        "TransformerLayer": lambda: te.TransformerLayer(
            WIDE, WIDE, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
        ),
    }[module]()
    given = te.QuantizedTensor.quantize(torch.randn(16, 2, WIDE), CurrentQuantizer())
    values, given = given.dequantize().requires_grad_(), given.requires_grad_()
    with scopes.observe(_refuse_quantized_tensors), te.autocast(recipe=Float8CurrentScaling()):
        for x in (given, values):
            out = made(x)
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
            grads = [x.grad, *(p.grad for p in made.parameters())]
            if x is given:
                first, before = out, [None if g is None else g.clone() for g in grads]
                made.zero_grad()
    assert torch.equal(first, out)
    assert all(a is b or torch.equal(a, b) for a, b in zip(before, grads))


@pytest.mark.parametrize("module", ["LayerNormMLP", "LayerNorm", "TransformerLayer"])
def test_quantized_gradients_reach_every_module(module: str) -> None:
    """From a layer with fp8_grad behind it: as if the values had come."""
    torch.manual_seed(0)
    made: Any = {
        "LayerNormMLP": lambda: te.LayerNormMLP(WIDE, WIDE, device="cpu"),
        "LayerNorm": lambda: te.LayerNorm(WIDE, device="cpu"),
        "TransformerLayer": lambda: te.TransformerLayer(
            WIDE, WIDE, 4, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
        ),
    }[module]()
    layer, x = _linear(1), torch.randn(16, 2, WIDE, requires_grad=True)
    seen: list[torch.Tensor] = []
    with scopes.observe(_refuse_quantized_tensors), te.autocast(recipe=Float8CurrentScaling()):
        hidden = made(x)
        hidden.register_hook(seen.append)
        layer(hidden, fp8_grad=True).square().sum().backward()
    assert isinstance(seen[0], te.QuantizedTensor)
    got = [x.grad, *(p.grad for p in made.parameters())]
    x.grad = None
    made.zero_grad()
    with te.autocast(recipe=Float8CurrentScaling()):
        made(x).backward(seen[0].dequantize())
    want = [x.grad, *(p.grad for p in made.parameters())]
    for a, b in zip(got, want):
        # A gradient that is cast again from its own values keeps them (the scale is the same or a finer one), and
        # column sums are of the same values in another order.
        torch.testing.assert_close(a, b, rtol=0, atol=32 * 2.0**-24 * 64 * b.abs().max().item())


@pytest.mark.parametrize("how", ["none", "off", "empty"])
def test_nothing_is_quantized_without_fp8(how: str) -> None:
    """As in Transformer Engine: fp8_output and fp8_grad act where FP8 is on."""
    layer = _linear()
    x = torch.randn(0 if how == "empty" else ROWS, WIDE, requires_grad=True)
    with te.autocast(enabled=how == "empty", recipe=DELAYED):
        y = layer(x, fp8_output=True, fp8_grad=True)
    y.sum().backward()
    assert type(y) is torch.Tensor and type(x.grad) is torch.Tensor
    if how != "empty":
        assert torch.equal(y, layer(x))
        given = te.QuantizedTensor.quantize(torch.randn(ROWS, WIDE), CurrentQuantizer())
        assert torch.equal(layer(given), layer(given.dequantize()))


def test_the_state_of_the_edges_is_made_when_asked_for_saved_and_restored() -> None:
    layer, plain = _linear(), _linear()
    x = torch.randn(ROWS, WIDE, requires_grad=True)

    def step(module: te.Linear, **how: bool) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            y = module(x, **how)
        y.sum().backward()
        return y.detach()

    step(plain)
    assert set(decoded(plain.get_extra_state(), "state")) == {"forward", "backward"}
    for _ in range(2):
        step(layer, fp8_output=True, fp8_grad=True)
    assert layer.fp8_state.scales.output.scale.item() != 1 and layer.fp8_state.scales.input_grad.scale.item() != 1
    saved = layer.state_dict()
    other = _linear()
    other.load_state_dict(saved)
    assert torch.equal(other.fp8_state.scales.output.history, layer.fp8_state.scales.output.history)
    for module in (layer, other, copy.deepcopy(layer)):
        module.zero_grad()
    a, b = step(layer, fp8_output=True, fp8_grad=True), step(other, fp8_output=True, fp8_grad=True)
    assert _same_record(a.record, b.record)
    assert torch.equal(layer.fp8_state.scales.input_grad.scale, other.fp8_state.scales.input_grad.scale)
    plain.load_state_dict(layer.state_dict())  # into a module that has not asked yet
    assert _same_record(step(plain, fp8_output=True).record, step(layer, fp8_output=True).record)


@pytest.mark.parametrize("recipe", [DELAYED, Float8CurrentScaling()])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_is_bitwise(recipe: Any, reentrant: bool) -> None:
    def run(checkpointed: bool) -> list[torch.Tensor]:
        layers = _linear(0), _linear(1)
        found = []
        for seed in range(3):
            x = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(seed)).requires_grad_()

            def body(x: torch.Tensor) -> torch.Tensor:
                return layers[1](layers[0](x, fp8_output=True), fp8_grad=True)

            with te.autocast(recipe=recipe):
                y = te.checkpoint(body, x, use_reentrant=reentrant) if checkpointed else body(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad, layers[0].weight.grad.clone(), layers[1].weight.grad.clone()]
        for layer in layers:
            for scales in layer.fp8_state.scales.live().values():
                found += [scales.history, scales.scale]
        return found

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_return_bias_and_torch_autocast() -> None:
    layer = _linear(return_bias=True)
    with te.autocast(recipe=Float8CurrentScaling()):
        out, bias = layer(torch.randn(ROWS, WIDE), fp8_output=True)
    assert isinstance(out, te.QuantizedTensor) and bias is not None
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(recipe=Float8CurrentScaling()):
        out, _ = layer(torch.randn(ROWS, WIDE), fp8_output=True)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
@pytest.mark.parametrize("first", [None, True])
def test_a_quantized_weight_enters_the_products_as_it_is(kind: str, recipe: Any, first: bool | None) -> None:
    torch.manual_seed(0)
    layer = getattr(te, kind)(WIDE, WIDE, device="cpu")
    other = copy.deepcopy(layer)
    layer.weight = torch.nn.Parameter(te.QuantizedTensor.quantize(layer.weight.detach(), CurrentQuantizer()))
    with torch.no_grad():  # with a scale, the values' own cast gives the codes back
        other.weight.copy_(layer.weight.detach().dequantize() if recipe is None else other.weight)
    x = torch.randn(ROWS, WIDE)
    results = []
    for module in (layer, other):
        inp = x.clone().requires_grad_()

        def step(module: Any = module, inp: torch.Tensor = inp) -> None:
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(inp, is_first_microbatch=first)
            y.square().sum().backward()
            results.append([y, inp.grad, module.weight.grad])

        calls = _called(step)
        if module is layer and recipe is not None:
            # Of the input alone, which a norm in front writes itself, and of the gradient, which has a cast of its own.
            assert calls.count("quantize") == (kind == "Linear")
    for a, b in zip(*results):
        assert torch.equal(a, b)
