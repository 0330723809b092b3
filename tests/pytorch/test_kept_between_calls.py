# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What modules keep from one call to the next, and what makes them drop it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch import ops
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from te_dispatch.pytorch.attention.dot_product import DotProductAttention
from te_dispatch.pytorch.autograd.apply import applied
from te_dispatch.pytorch.modules.dropout_add import dropout_add

PARTS = ("q", "k", "v")


def split_linear(**kwargs: Any) -> te.Linear:
    torch.manual_seed(0)
    layer = te.Linear(16, 48, device="cpu", parameters_split=PARTS, **kwargs)
    for part in PARTS:
        torch.nn.init.normal_(getattr(layer, f"{part}_bias"))
    return layer


def joined(layer: te.Linear, kind: str) -> torch.Tensor:
    return torch.cat([getattr(layer, f"{part}_{kind}").detach() for part in PARTS])


def in_place(layer: te.Linear) -> None:
    with torch.no_grad():
        layer.k_weight.mul_(2.0)


def other_data(layer: te.Linear) -> None:
    layer.k_weight.data = layer.k_weight.data * 2.0


def other_parameter(layer: te.Linear) -> None:
    layer.k_weight = torch.nn.Parameter(layer.k_weight.detach() * 2.0)


def other_order(layer: te.Linear) -> None:
    layer.q_weight, layer.v_weight = layer.v_weight, layer.q_weight


def swapped_data(layer: te.Linear) -> None:
    layer.q_weight.data, layer.v_weight.data = layer.v_weight.data, layer.q_weight.data


def turned(layer: te.Linear) -> None:
    square = torch.arange(256.0).reshape(16, 16)
    layer.k_weight.data.copy_(square)
    layer.k_weight.data = layer.k_weight.data.t()  # the same address, shape and dtype


def other_dtype(layer: te.Linear) -> None:
    layer.double().float()


def parametrized(layer: te.Linear) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2.0

    torch.nn.utils.parametrize.register_parametrization(layer, "k_weight", Doubled())


@pytest.mark.parametrize(
    "change",
    [in_place, other_data, other_parameter, other_order, swapped_data, turned, other_dtype, parametrized],
)
@pytest.mark.parametrize("recipe", [None, DelayedScaling()])
def test_a_split_weight_follows_its_parameters(change: Callable[[te.Linear], None], recipe: Any) -> None:
    layer, x = split_linear(), torch.randn(16, 16)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        layer(x), layer(x)
        change(layer)
        whole = te.Linear(16, 48, device="cpu")
        with torch.no_grad():
            whole.weight.copy_(joined(layer, "weight")), whole.bias.copy_(joined(layer, "bias"))
        if recipe is None:
            assert torch.equal(layer(x), whole(x))
        layer(x).square().sum().backward()
    if recipe is None:
        whole(x).square().sum().backward()
        if change is not parametrized:
            grads = torch.cat([getattr(layer, f"{part}_weight").grad for part in PARTS])
            assert torch.equal(grads, whole.weight.grad)
        else:
            original = layer.parametrizations.k_weight.original
            assert torch.equal(original.grad, 2.0 * whole.weight.grad[16:32])


def test_frozen_parts_and_a_returned_bias_of_a_split_weight() -> None:
    layer = split_linear(return_bias=True)
    layer.k_weight.requires_grad_(False)
    x = torch.randn(4, 16, requires_grad=True)
    out, bias = layer(x)
    (out + bias).sum().backward()
    assert layer.k_weight.grad is None
    for part in PARTS:
        assert torch.equal(getattr(layer, f"{part}_bias").grad, torch.full((16,), 4.0))
    for name in ("q_weight", "v_weight"):
        assert torch.equal(getattr(layer, name).grad, x.detach().sum(0).expand(16, 16))
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    x.grad = None
    layer(x)[0].sum().backward()
    assert x.grad is not None


def test_copies_share_no_weight_with_their_original() -> None:
    layer, x = split_linear(), torch.randn(4, 16)
    before = layer(x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        in_place(twin)
        assert torch.equal(layer(x), before) and not torch.equal(twin(x), before)


def test_a_split_weight_first_joined_in_inference_mode_trains() -> None:
    layer, x = split_linear(), torch.randn(4, 16, requires_grad=True)
    with torch.inference_mode():
        layer(x.detach())
    layer(x).sum().backward()
    assert layer.q_weight.grad is not None


MODULES = {
    "Linear": lambda: te.Linear(32, 32, device="cpu"),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu"),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu"),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_input_is_checked_though_others_passed(name: str) -> None:
    layer, good = MODULES[name](), torch.randn(4, 32)
    expected = layer(good)
    for bad, message in (
        (torch.randn(4, 31), "inp must be"),
        (good.double(), "inp must be"),
        (good.half(), "inp must be"),
        (good.to("meta"), "inp must be on"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(bad)
    with pytest.raises(TypeError, match="inp must be a tensor"):
        layer(good.tolist())
    assert torch.equal(layer(good.t().contiguous().t()), expected)  # not contiguous
    assert torch.equal(layer(good[0]), layer(good[:1])[0])
    assert layer(good[:0]).shape == (0, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(good).dtype == torch.bfloat16
    layer.bfloat16()
    with pytest.raises(ValueError, match=r"inp must be torch\.bfloat16"):
        layer(good)
    assert layer(good.bfloat16()).dtype == torch.bfloat16


def test_alignment_is_checked_though_other_recipes_passed() -> None:
    layer = te.Linear(48, 48, device="cpu")
    layer(torch.randn(8, 48))
    with te.autocast(recipe=DelayedScaling()):
        layer(torch.randn(16, 48))
        with pytest.raises(ValueError, match="divisible by 16"):
            layer(torch.randn(8, 48))


def test_scales_of_a_group_follow_their_members() -> None:
    """The operands of an update are put together once: other memory, maxima and members are seen by the next."""
    first, second = te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu")
    recipe = DelayedScaling(amax_history_len=4, margin=3)

    def step(layer: te.Linear, peak: float) -> float:
        with te.autocast(recipe=recipe):
            layer(torch.full((16, 16), peak))
        return float(layer.fp8_state.scales.forward.scale[0])

    assert step(first, 7.0) == 448 / 8 / 7
    assert step(second, 14.0) == 448 / 8 / 14  # a new member
    scales = first.fp8_state.scales.forward
    scales._adopt(*(t.clone() for t in (scales.history, scales.scale, scales.scale_amax)))
    first._forget_plan()
    assert step(first, 28.0) == 448 / 8 / 28  # other memory
    first.fp8_state.scales.forward.max_values = (224.0, 224.0)
    assert step(first, 56.0) == 224 / 8 / 56  # other maxima, whoever set them
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert step(second, 112.0) == 448 / 8 / 112  # other values in the same memory, and maxima that a new plan set back


def attention(**kwargs: Any) -> DotProductAttention:
    return DotProductAttention(2, 8, attention_dropout=0.0, qkv_format="bshd", **kwargs)


def qkv() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 6, 2, 8, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    "attribute, value",
    [("softmax_scale", 2.0), ("softcap", 0.5), ("attn_mask_type", "no_mask"), ("window_size", (1, 0)),
     ("softmax_type", "off-by-one")],
)  # fmt: skip
def test_attention_follows_its_attributes(attribute: str, value: Any) -> None:
    module, fresh = attention(), attention()
    before = module(*qkv())
    setattr(module, attribute, value)
    setattr(fresh, attribute, value)
    assert torch.equal(module(*qkv()), fresh(*qkv()))
    assert not torch.equal(module(*qkv()), before)


def test_attention_follows_its_arguments_and_surroundings() -> None:
    module = attention()
    q, k, v = qkv()
    causal = module(q, k, v)
    assert not torch.equal(module(q, k, v, attn_mask_type="no_mask"), causal)
    assert not torch.equal(module(q, k, v, window_size=(1, 0)), causal)
    assert torch.equal(module(q, k, v, window_size=[1, 0]), module(q, k, v, window_size=(1, 0)))
    assert not torch.equal(module(q, k, v, softcap=0.5), causal)
    assert torch.equal(module(q, k, v), causal)
    with pytest.raises(ValueError, match="value_layer"):
        module(q, k, v[:, :5])
    with pytest.raises(ValueError, match="float16"):
        module(q, k, v.half())
    with pytest.raises(ValueError, match="qkv_format"):
        module(q, k, v, qkv_format="hsbd")
    packed = torch.stack((q, k, v), 2)
    assert torch.equal(module(qkv_layer=packed), causal)
    with pytest.raises(ValueError, match="qkv_layer must have size 3"):
        module(qkv_layer=packed, qkv_interleave_dim=-2)
    seen: list[bool] = []

    def watch(operator: Any, accepted: Any, args: Any, result: Any) -> None:
        seen.append(args[list(operator.signature.parameters).index("deterministic")])

    with te_dispatch.core.scopes.observe(watch):
        module(q, k, v)
        torch.use_deterministic_algorithms(True)
        try:
            module(q, k, v)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, True]
    module.attention_dropout = 0.5
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_without_dropout_has_the_operators_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(64, 96, generator=generator).mul(2.0**-k).to(dtype).requires_grad_() for k in (0, 9))
    out = dropout_add(x, residual, 0.0)
    assert torch.equal(out, ops.dropout_add_fwd(x.detach(), residual.detach()).out)
    dy = torch.randn(64, 96, generator=generator).to(dtype)
    out.backward(dy)
    assert torch.equal(x.grad, dy) and torch.equal(residual.grad, dy)


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy * ctx.factor, None


def test_an_applied_function_is_its_apply() -> None:
    run = applied(_Double)
    x = torch.randn(3, requires_grad=True)
    run(x, 2.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="do not support the transforms of"):
        torch.func.grad(lambda t: run(t, 2.0).sum())(x)
    leaked: list[torch.Tensor] = []
    torch.func.grad(lambda t: (leaked.append(t), t.sum())[1])(x.detach())
    assert torch.equal(run(leaked[0], 2.0), 2.0 * x.detach())  # a wrapper that has outlived its transform
    assert torch.equal(torch.compile(lambda t: run(t, 3.0), backend="eager", fullgraph=True)(x), 3.0 * x)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling()], ids=["delayed", "current"]
)
def test_a_cached_weight_is_made_anew_for_another_parameter(recipe: Any) -> None:
    torch.manual_seed(0)
    layer, other = (te.Linear(32, 32, bias=False, device="cpu") for _ in range(2))
    x = torch.randn(16, 32)
    with te.autocast(recipe=recipe):
        first = layer(x, is_first_microbatch=True)
        assert torch.equal(layer(x, is_first_microbatch=False), first)
        layer.weight = torch.nn.Parameter(other.weight.detach().clone())
        assert torch.equal(layer(x, is_first_microbatch=False), other(x))


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear, te.LayerNormMLP], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_history_len=2), Float8CurrentScaling(), Float8BlockScaling()],
    ids=["delayed", "current", "block"],
)  # fmt: skip
def test_a_weight_that_inference_mode_cached_serves_training(kind: Any, recipe: Any) -> None:
    results = []
    for inference in (True, False):
        torch.manual_seed(0)
        layer = kind(32, 32, device="cpu")
        x = torch.randn(16, 32, requires_grad=True)
        if inference:
            with torch.inference_mode(), te.autocast(recipe=recipe):
                layer(x.detach().clone(), is_first_microbatch=True)
        with te.autocast(recipe=recipe):
            y = layer(x, is_first_microbatch=not inference)
        y.sum().backward()
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
