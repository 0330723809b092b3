# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`Linear`: values, gradients, arguments, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_dispatch.core import scopes

from .bounds import Bounded, assert_same_sum, deviation_of_std
from .gemm_oracle import RECIPES, assert_within, frozen, product_bound, seen_by_gemm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _linear(*args: Any, **kwargs: Any) -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(*args, device="cpu", **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 24), (0, 24), (3, 0, 24)])
def test_high_precision_against_float64(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    layer = _linear(24, 40, bias=bias, params_dtype=dtype)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(shape).to(dtype).requires_grad_()
    y = layer(x)
    assert (y.dtype, tuple(y.shape)) == (dtype, (*shape[:-1], 40))
    dy = torch.randn(y.shape).to(dtype)
    y.backward(dy)
    rows, grads, w = x.detach().double().reshape(-1, 24), dy.double().reshape(-1, 40), layer.weight.detach().double()
    expected, bound = rows @ w.T, product_bound(rows, w.T, dtype)
    if bias:
        shift = layer.bias.detach().double()
        expected, bound = expected + shift, bound + torch.finfo(dtype).eps * shift.abs()
        sums, ones = grads.sum(0), torch.ones(1, grads.shape[0], dtype=torch.float64)
        assert_within(layer.bias.grad[None], sums[None], product_bound(ones, grads, dtype))
    assert_within(y.reshape(-1, 40), expected, bound)
    assert_within(x.grad.reshape(-1, 24), grads @ w, product_bound(grads, w, dtype))
    assert_within(layer.weight.grad, grads.T @ rows, product_bound(grads.T, rows, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_quantized_against_float64_of_the_same_operands(name: str, dtype: torch.dtype) -> None:
    layer = _linear(64, 96, params_dtype=dtype)
    recipe = RECIPES[name]
    for _ in range(2):  # the second step has other delayed scales
        x = (torch.randn(2, 32, 64) * 4).to(dtype).requires_grad_()
        layer.zero_grad()
        with te.autocast(recipe=recipe):
            with torch.no_grad():
                layer(x)  # builds the plan
            casts = layer.fp8_state.plan.gemms[0]
            q_x, q_w, q_g = (frozen(q) for q in (casts.input, casts.weight, casts.grad))
            y = layer(x)
        dy = torch.randn(y.shape).to(dtype)
        y.backward(dy)
        rows, grads = x.detach().reshape(-1, 64), dy.reshape(-1, 96)
        a, b = seen_by_gemm(rows, q_x, casts.fprop[0][0]), seen_by_gemm(layer.weight, q_w, casts.fprop[1][0])
        assert_within(y.reshape(-1, 96), a @ b.T, product_bound(a, b.T, dtype))
        g, b = seen_by_gemm(grads, q_g, casts.dgrad[0][0]), seen_by_gemm(layer.weight, q_w, casts.dgrad[1][0])
        assert_within(x.grad.reshape(-1, 64), g @ b, product_bound(g, b, dtype))
        g, a = seen_by_gemm(grads, q_g, casts.wgrad[0][0]), seen_by_gemm(rows, q_x, casts.wgrad[1][0])
        assert_within(layer.weight.grad, g.T @ a, product_bound(g.T, a, dtype))
        ones = torch.ones(1, grads.shape[0], dtype=torch.float64)
        exact = grads.double()
        assert_within(layer.bias.grad[None], exact.sum(0)[None], product_bound(ones, exact, dtype))
    assert (q_x.scale.item() != 1) if name == "delayed" else True


@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_gradients_only_where_wanted(recipe: Any) -> None:
    torch.manual_seed(1)
    x, dy = torch.randn(16, 32), torch.randn(16, 48)

    def run(frozen_names: set[str], input_grad: bool) -> dict[str, torch.Tensor | None]:
        layer = _linear(32, 48)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name not in frozen_names)
        inp = x.clone().requires_grad_(input_grad)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            layer(inp).backward(dy)
        return {"inp": inp.grad, **{n: p.grad for n, p in layer.named_parameters()}}

    everything = run(set(), True)
    for frozen_names, input_grad in (
        ({"weight"}, True), ({"bias"}, True), (set(), False), ({"weight", "bias"}, True), ({"weight"}, False),
    ):  # fmt: skip
        got = run(frozen_names, input_grad)
        for name, value in got.items():
            if name in frozen_names or (name == "inp" and not input_grad):
                assert value is None
            elif name == "bias":  # by itself it is summed in another order
                assert_same_sum(value, everything[name], dy)
            else:
                assert torch.equal(value, everything[name]), (name, frozen_names, input_grad)


def test_only_the_copies_that_are_read_are_made() -> None:
    layer = _linear(32, 32)
    x = torch.randn(16, 32)
    usages: list[tuple[str, str]] = []

    def watch(operator: Any, accepted: Any, args: tuple[Any, ...], result: Any) -> None:
        if getattr(operator, "name", operator) == "quantize":
            usages.append(args[2])

    with scopes.observe(watch), te.autocast(recipe=Float8CurrentScaling()):
        with torch.no_grad():
            layer(x)
        casts = layer.fp8_state.plan.gemms[0]
        assert usages == [casts.fprop[0][0], casts.fprop[1][0]]
        usages.clear()
        layer(x)  # the input needs no gradient: the weight needs no second copy
    assert usages == [casts.input_usage[1], casts.fprop[1][0]]


def test_weight_is_quantized_once_per_step() -> None:
    layer = _linear(32, 32, init_method=lambda w: torch.nn.init.normal_(w))
    x = torch.randn(16, 32, requires_grad=True)
    recipe = DelayedScaling(amax_history_len=4)

    def run(first: bool | None) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return layer(x, is_first_microbatch=first).detach()

    def differs(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a - b).norm() / b.norm()).item()

    fresh = run(True)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    # Every element of an e4m3 operand is off by at most 2^-4 of itself; the weight was halved.
    assert differs(run(False), fresh) < 0.125
    assert differs(run(None), 0.5 * fresh) < 0.125
    history = layer.fp8_state.scales.forward.history
    assert (history[:, 1] != 0).sum() == 2 and (history[:, 0] != 0).sum() == 3
    assert differs(run(True), 0.5 * fresh) < 0.125


@pytest.mark.parametrize("split", [("q", "k_", "v"), {"q": 32, "kv": 16}])
@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()])
def test_parameters_split(split: Any, recipe: Any) -> None:
    layer = _linear(16, 48, parameters_split=split)
    parts = ["q", "k", "v"] if isinstance(split, tuple) else ["q", "kv"]
    assert {n for n, _ in layer.named_parameters()} == {f"{p}_{w}" for p in parts for w in ("weight", "bias")}
    whole = _linear(16, 48)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([getattr(layer, f"{p}_weight") for p in parts]))
        for part in parts:
            torch.nn.init.normal_(getattr(layer, f"{part}_bias"))
        whole.bias.copy_(torch.cat([getattr(layer, f"{p}_bias") for p in parts]))
    x = torch.randn(16, 16)
    for detached in (False, True):  # parts that share memory, then parts that do not
        if detached:
            for part in parts:
                parameter = getattr(layer, f"{part}_weight")
                parameter.data = parameter.data.clone()
            layer.zero_grad()
            whole.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            a, b = layer(x), whole(x)
        assert torch.equal(a, b)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.equal(torch.cat([getattr(layer, f"{p}_weight").grad for p in parts]), whole.weight.grad)
        assert torch.equal(torch.cat([getattr(layer, f"{p}_bias").grad for p in parts]), whole.bias.grad)


def test_return_bias_leaves_it_to_the_caller() -> None:
    layer = _linear(16, 16, return_bias=True)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(4, 16)
    out, bias = layer(x)
    assert torch.equal(bias, layer.bias)
    assert (Bounded(x) @ Bounded(layer.weight).T + Bounded(layer.bias)).holds(out + bias)
    assert _linear(16, 16, bias=False, return_bias=True)(x)[1] is None


def test_initialization() -> None:
    layer = _linear(512, 256)
    assert abs(layer.weight.std().item() / 0.023 - 1) < deviation_of_std(512 * 256)
    assert abs(layer.weight.mean().item()) < 4 * 0.023 / (512 * 256) ** 0.5
    assert layer.bias.eq(0).all()
    custom = _linear(16, 16, init_method=lambda w: torch.nn.init.constant_(w, 3.0))
    assert custom.weight.eq(3).all()
    with torch.no_grad():
        custom.weight.zero_()
    custom.reset_parameters(defer_init=True)
    assert custom.weight.eq(0).all()
    custom.reset_parameters()
    assert custom.weight.eq(3).all()
    assert te.Linear(16, 16, device="meta").weight.device.type == "meta"


@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_torch_autocast_decides_the_dtype(recipe: Any) -> None:
    layer = _linear(32, 32)
    x = torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()  # inside, where torch.autocast is on for the backward too
    assert x.grad.dtype == torch.float32 and layer.weight.grad.dtype == torch.float32
    inner, x.grad, layer.weight.grad = (x.grad, layer.weight.grad), None, None
    if recipe is None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        y.sum().backward()
        assert torch.equal(inner[0], x.grad) and torch.equal(inner[1], layer.weight.grad)


@pytest.mark.parametrize("recipe", [None, Float8CurrentScaling()])
def test_strided_inputs_and_gradients(recipe: Any) -> None:
    layer = _linear(32, 32)
    base = torch.randn(32, 16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        a, b = layer(base.t()), layer(base.t().contiguous())
        assert torch.equal(a, b)
        (grad_sum,) = torch.autograd.grad(a.sum(), base)  # an expanded gradient: all strides 0
        (grad_ones,) = torch.autograd.grad(b, base, torch.ones(16, 32))
    assert torch.equal(grad_sum, grad_ones)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_stay_in_their_row(value: float) -> None:
    layer = _linear(32, 32)
    x = torch.randn(16, 32)
    x[3, 5] = value
    y = layer(x)
    assert not y[3].isfinite().any() and y[:3].isfinite().all() and y[4:].isfinite().all()
    with te.autocast(recipe=DelayedScaling()):
        y = layer(x)
    # The cast keeps NaN and saturates Inf.
    assert y[3].isnan().all() == (value != value)
    assert y[:3].isfinite().all() and y[4:].isfinite().all()
    assert layer.fp8_state.scales.forward.scale[0].isfinite()


@pytest.mark.parametrize(
    ("inp", "error", "words"),
    [
        (torch.randn(4, 15), ValueError, r"inp must be \(\.\.\., 16\), got shape \(4, 15\)"),
        (torch.randn(()), ValueError, "inp"),
        (torch.randn(4, 16, dtype=torch.float64), ValueError, "inp must be torch.float32.*got torch.float64"),
        (torch.randn(4, 16).bfloat16(), ValueError, "inp must be torch.float32.*got torch.bfloat16"),
        (torch.empty(4, 16, device="meta"), ValueError, "inp must be on cpu.*got meta"),
        ([1.0] * 16, TypeError, "inp must be a tensor, got list"),
    ],
)
def test_bad_inputs_are_refused_before_anything_is_written(inp: Any, error: type[Exception], words: str) -> None:
    layer = _linear(16, 16)
    with te.autocast(recipe=DelayedScaling()):
        layer(torch.randn(16, 16))
        before = layer.fp8_state.scales.forward.history.clone()
        with pytest.raises(error, match=words):
            layer(inp)
        assert torch.equal(layer.fp8_state.scales.forward.history, before)


@pytest.mark.parametrize(
    ("sizes", "rows", "recipe", "words"),
    [
        ((24, 32), 16, Float8CurrentScaling(), "in_features.*divisible by 16, got 24"),
        ((32, 40), 16, Float8CurrentScaling(), "out_features.*divisible by 16, got 40"),
        ((32, 32), 12, DelayedScaling(), "rows.*divisible by 16, got 12.*Fp8Padding"),
        ((32, 32), 16, MXFP8BlockScaling(), "rows.*divisible by 32, got 16.*Fp8Padding"),
    ],
)
def test_alignment_is_refused_by_name(sizes: tuple[int, int], rows: int, recipe: Any, words: str) -> None:
    layer = _linear(*sizes)
    with te.autocast(recipe=recipe), pytest.raises(ValueError, match=rf"(?s){words}"):
        layer(torch.randn(rows, sizes[0]))


@pytest.mark.parametrize("frozen", ["q", "k", None])
def test_parts_of_a_divided_weight_take_gradients(frozen: str | None) -> None:
    layer = te.Linear(64, 96, parameters_split=("q", "k", "v"), device="cpu")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen or "nothing"))
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match=r"rows.*divisible by 16, got 8"):
        layer(torch.randn(8, 64))
    layer.requires_grad_(False)
    with te.autocast(recipe=DelayedScaling()):
        assert layer(torch.randn(8, 64)).shape == (8, 96)


def test_the_first_forward_of_a_reentrant_checkpoint_is_one_of_training() -> None:
    """It runs without gradients, and its backward contracts the rows all the same."""
    layer, x = _linear(32, 32), torch.randn(8, 32, requires_grad=True)
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match=r"rows.*divisible by 16, got 8"):
        te.checkpoint(layer, x, use_reentrant=True)


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP"])
@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling, Float8BlockScaling])
def test_rows_need_only_be_divisible_by_8_where_no_weight_takes_a_gradient(name: str, recipe: Any) -> None:
    """As in Transformer Engine. The result is that of the same rows among others; x takes its gradient."""
    layer = getattr(te, name)(64, 128, params_dtype=torch.float32, device="cpu")
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x = torch.randn(32, 64)
    x[8:] = x[:8].repeat(3, 1)  # the same maxima
    eight = x[:8].clone().requires_grad_()
    with te.autocast(recipe=recipe()):
        out = layer(eight)
        with torch.no_grad():
            want = layer(x)[:8]
            assert torch.equal(out, layer(x[:24])[:8]) and torch.equal(out, want)
            with pytest.raises(ValueError, match=r"rows.*divisible by 8 where no weight takes a gradient, got 12"):
                layer(x[:12])
        out.sum().backward()
        assert eight.grad is not None and bool(eight.grad.isfinite().all())
        for parameter in layer.parameters():
            parameter.requires_grad_(True)
        with pytest.raises(ValueError, match=r"rows.*divisible by 16, got 8"):
            layer(eight)
        with torch.no_grad():
            assert torch.equal(layer(eight), out)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"ub_overlap_ag": True}, {"ub_overlap_rs": True},
        {"ub_overlap_rs_dgrad": True}, {"ub_bulk_dgrad": True}, {"ub_bulk_wgrad": True},
        {"symmetric_ar_type": "multimem_all_reduce"},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)  # fmt: skip
def test_unsupported_arguments_name_themselves(kwargs: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=f"Linear: {next(iter(kwargs))}="):
        te.Linear(16, 16, device="cpu", **kwargs)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"in_features": 0}, "in_features"),
        ({"out_features": 2.0}, "out_features"),
        ({"parameters_split": ("a", "b", "c")}, "parameters_split"),
        ({"parameters_split": {"a": 3}}, "parameters_split"),
        ({"parameters_split": ("a", "a")}, "parameters_split"),
    ],
)
def test_bad_arguments_are_refused_by_name(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        te.Linear(**{"in_features": 16, "out_features": 16, "device": "cpu", **args})


def test_second_derivatives_are_refused_not_lost() -> None:
    layer = _linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)


def test_backward_runs_under_the_forwards_policy() -> None:
    layer = _linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    calls: list[str] = []
    with scopes.observe(lambda operator, accepted, args, result: calls.append(getattr(operator, "name", operator))):
        y = layer(x)
    assert calls == ["gemm"]
    y.sum().backward()
    assert calls == ["gemm"] * 3


def test_operators_are_called_as_declared() -> None:
    """The module's arithmetic is that of the operators, and nothing else's."""
    layer = _linear(32, 32)
    x = torch.randn(16, 32)
    with te.autocast(recipe=Float8CurrentScaling()):
        y = layer(x)
        casts = layer.fp8_state.plan.gemms[0]
    a, b = (ops.quantize(t.detach(), q, usage="both") for t, q in ((x, casts.input), (layer.weight, casts.weight)))
    out = ops.gemm(a, b, layout="NT", bias=layer.bias.detach(), out_dtype=x.dtype, split_accumulator=False).out
    assert torch.equal(y, out)
