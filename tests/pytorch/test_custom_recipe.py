# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`CustomRecipe`: a factory that says what a built-in recipe says gives its bits; what is mixed; how often it is
asked; copies, checkpoints, cached weights, quantized edges."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from tests.pytorch.custom_factories import E4M3, E5M2, EQUALS, MODULES, current, made, mxfp8, same, seen


@pytest.mark.parametrize("recipe", EQUALS)
@pytest.mark.parametrize("module", MODULES)
def test_a_factory_that_says_what_a_recipe_says_gives_its_bits(module: str, recipe: str) -> None:
    builtin, factory = EQUALS[recipe]
    theirs = seen(made(module), builtin(), steps=3)
    assert same(seen(made(module), CustomRecipe(factory), steps=3), theirs)
    assert not same(theirs, seen(made(module), None))


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear"])
def test_backward_override(module: str, override: str) -> None:
    asked = []

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        asked.append(role.tensor_type)
        return mxfp8(role)

    theirs = seen(made(module), MXFP8BlockScaling(backward_override=override))
    assert same(seen(made(module), CustomRecipe(factory, backward_override=override)), theirs)
    assert asked == ["input", "weight"]


def delayed(scales: dict[str, float]) -> tuple[Any, dict[str, te.Float8Quantizer]]:
    """A factory of quantizers with scales of their own, and those it has made."""
    quantizers: dict[str, te.Float8Quantizer] = {}

    def factory(role: te.QuantizerRole) -> te.Float8Quantizer:
        kind = role.tensor_type
        dtype = E5M2 if kind == "grad_output" else E4M3
        quantizers[kind] = te.Float8Quantizer(torch.tensor([scales[kind]]), torch.zeros(1), dtype)
        return quantizers[kind]

    return factory, quantizers


@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear"])
def test_scales_of_the_users_own(module: str) -> None:
    """The first step of delayed scaling has scales of 1; later ones are for whoever made the quantizers to set."""
    factory, quantizers = delayed({"input": 1.0, "weight": 1.0, "grad_output": 1.0})
    layer, x = made(module), torch.randn(32, 2, 64, generator=torch.Generator().manual_seed(1))
    assert same(seen(layer, CustomRecipe(factory)), seen(made(module), DelayedScaling()))
    weight = layer.weight.detach()
    assert quantizers["weight"].amax == weight.abs().max() and quantizers["grad_output"].amax > 0
    if module == "Linear":
        assert quantizers["input"].amax == x.abs().max()
    before = seen(layer, CustomRecipe(factory))
    quantizers["weight"].scale.fill_(512.0)
    assert not same(seen(layer, CustomRecipe(factory)), before)


# -- high precision beside quantized products ---------------------------------------------------------------------


@pytest.mark.parametrize("none", [None, te.IdentityQuantizer()], ids=["None", "IdentityQuantizer"])
@pytest.mark.parametrize("module", MODULES)
def test_a_module_may_stay_in_high_precision(module: str, none: Any) -> None:
    assert same(seen(made(module), CustomRecipe(lambda role: none), steps=2), seen(made(module), None))


@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear"])
def test_a_gradient_in_high_precision_meets_the_values_of_the_forwards_operands(module: str) -> None:
    def factory(role: te.QuantizerRole) -> te.Quantizer | None:
        return None if role.tensor_type == "grad_output" else mxfp8(role)

    theirs = seen(made(module), MXFP8BlockScaling(backward_override="dequantized"), steps=2)
    assert same(seen(made(module), CustomRecipe(factory), steps=2), theirs)


def only(part: str) -> Any:
    return lambda role: mxfp8(role) if role.name.endswith(part) else None


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("quantized", ["fc1", "fc2"])
def test_one_product_of_an_mlp_in_high_precision(quantized: str, checkpoint: bool) -> None:
    """It gives what the two modules that it is made of give."""
    mlp = te.LayerNormMLP(64, 128, activation="relu", checkpoint=checkpoint)
    first, second = te.LayerNormLinear(64, 128, name="a.fc1"), te.Linear(128, 64, name="a.fc2")
    with torch.no_grad():
        first.weight.copy_(mlp.fc1_weight)
        second.weight.copy_(mlp.fc2_weight)
        for bias in (mlp.fc1_bias, mlp.fc2_bias):
            bias.normal_()
        first.bias.copy_(mlp.fc1_bias)
        second.bias.copy_(mlp.fc2_bias)
    both = torch.nn.ModuleList([first, second])
    recipe = CustomRecipe(only(quantized))
    theirs = seen(both, recipe, call=lambda x: second(torch.relu(first(x))))
    for _ in range(2):
        ours = seen(mlp, recipe)
        for name, tensor in zip(("out", "dx", "gamma", "beta", "w1", "b1", "w2", "b2"), ours, strict=True):
            expected = dict(zip(("out", "dx", "gamma", "beta", "w1", "b1", "w2", "b2"), _ordered(both, theirs)))[name]
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5, msg=name)
    assert not same(ours, seen(mlp, None)) and not same(ours, seen(mlp, CustomRecipe(mxfp8)))


def _ordered(both: torch.nn.Module, found: list[torch.Tensor]) -> list[torch.Tensor]:
    of = dict(zip([name for name, _ in both.named_parameters()], found[2:], strict=True))
    names = ("0.layer_norm_weight", "0.layer_norm_bias", "0.weight", "0.bias", "1.weight", "1.bias")
    return [*found[:2], *(of[name] for name in names)]


def test_modules_may_differ_by_name() -> None:
    """Attention's projections in one kind, the MLP in another."""
    asked = set()

    def factory(role: te.QuantizerRole) -> te.Quantizer:
        asked.add(role.name)
        return current(role) if "attention" in role.name else mxfp8(role)

    layer = made("TransformerLayer", name="layer")
    mixed = seen(layer, CustomRecipe(factory))
    assert asked == {
        "layer.self_attention.layernorm_linear_qkv",
        "layer.self_attention.proj",
        "layer.layernorm_mlp.fc1",
        "layer.layernorm_mlp.fc2",
    }
    assert not any(same(mixed, seen(layer, CustomRecipe(one))) for one in (current, mxfp8))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, {"linear_qkv", "proj"}),
        ({"input_layernorm": True}, {"layernorm_linear_qkv", "proj"}),
        ({"attention_type": "cross"}, {"linear_q", "linear_kv", "proj"}),
        ({"attention_type": "cross", "input_layernorm": True}, {"layernorm_linear_q", "linear_kv", "proj"}),
    ],
)
def test_names_of_attentions_projections(arguments: dict[str, Any], names: set[str]) -> None:
    module = te.MultiheadAttention(64, 4, name="attention", device="cpu", **arguments)
    parts = [part for part in module.children() if isinstance(part, (te.Linear, te.LayerNormLinear))]
    assert {part.name for part in parts} == {f"attention.{name}" for name in names}


# -- how often a factory is asked ---------------------------------------------------------------------------------


class Counting:
    """A factory that notes what it was asked."""

    def __init__(self) -> None:
        self.roles: list[te.QuantizerRole | None] = []

    def __call__(self, role: te.QuantizerRole | None) -> te.Quantizer:
        self.roles.append(role)
        return current(role)


@pytest.mark.parametrize(("module", "weights"), [("Linear", 1), ("LayerNormLinear", 1), ("LayerNormMLP", 2)])
def test_a_factory_is_asked_once(module: str, weights: int) -> None:
    factory, layer = Counting(), made(module, name="a")
    recipe = CustomRecipe(factory)
    seen(layer, recipe, steps=3)
    names = ["a"] if weights == 1 else ["a.fc1", "a.fc2"]
    kinds = ("input", "weight", "grad_output")
    assert factory.roles == [te.QuantizerRole("linear", kind, name) for name in names for kind in kinds]
    with te_dispatch.policy("portable"):  # another plan
        seen(layer, recipe)
    seen(layer, Float8CurrentScaling())
    seen(layer, CustomRecipe(factory))  # an equal recipe
    layer.eval()
    with torch.no_grad(), te.autocast(recipe=recipe):
        layer(torch.randn(32, 64))
    assert len(factory.roles) == 3 * weights
    seen(layer, CustomRecipe(factory, quantization_alignment=16))
    assert len(factory.roles) == 6 * weights


def test_roles_of_modules() -> None:
    """What one product hands to the next has the role of whoever reads it, as in Transformer Engine."""
    mlp = made("LayerNormMLP")
    mlp.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
    forward = mlp.get_quantizer_roles(fwd=True, num_quantizers=6)
    assert [str(role) for role in forward] == [
        "module_type=linear|tensor_type=input|name=fc1",
        "module_type=linear|tensor_type=weight|name=fc1",
        "module_type=linear|tensor_type=input|name=fc2",
        "module_type=linear|tensor_type=input|name=fc2",
        "module_type=linear|tensor_type=weight|name=fc2",
        "module_type=linear|tensor_type=input|name=next",
    ]
    backward = mlp.get_quantizer_roles(fwd=False, num_quantizers=4)
    assert [role and (role.tensor_type, role.name) for role in backward] == [
        ("grad_output", "fc1"), None, ("grad_output", "fc2"), ("grad_output", "fc1")
    ]  # fmt: skip


class OfOnesOwn(te.LayerNormMLP):
    """A module that says of its tensors what `answer` returns."""

    answer: Any = None

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> Any:
        return self.answer(num_quantizers)


def test_roles_of_a_class_of_ones_own() -> None:
    factory, module = Counting(), OfOnesOwn(64, 128)
    module.answer = lambda count: None
    seen(module, CustomRecipe(factory))
    assert factory.roles == [te.QuantizerRole()] * 6
    module.fp8_initialized = False
    module.answer = lambda count: [te.QuantizerRole("mine", str(i)) for i in range(count)]
    seen(module, CustomRecipe(factory))
    assert [role.tensor_type for role in factory.roles[6:]] == ["0", "1", "0", "3", "4", "2"]
    module.fp8_initialized, module.answer = False, lambda count: [None]
    with pytest.raises(ValueError, match=r"get_quantizer_roles\(fwd=True\) must return 6 roles, got 1"):
        seen(module, CustomRecipe(factory))


def test_many_recipes_leave_no_trace() -> None:
    layer, expected = made("Linear"), seen(made("Linear"), Float8CurrentScaling())
    for _ in range(40):
        assert same(seen(layer, CustomRecipe(Counting())), expected)
    assert len(layer.fp8_state.roles.known) <= 64


# -- what else modules do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints(module: str, use_reentrant: bool) -> None:
    layer = made(module)
    for factory in (current, only("fc1")):
        recipe = CustomRecipe(factory)
        plain = seen(layer, recipe)
        for run in (te.checkpoint, torch.utils.checkpoint.checkpoint):
            again = seen(layer, recipe, call=lambda x, run=run: run(layer, x, use_reentrant=use_reentrant))
            assert same(again, plain)


def test_a_checkpoint_repeats_high_precision_under_another_recipe() -> None:
    layer, x = made("Linear"), torch.randn(32, 64)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
    with te.autocast(recipe=CustomRecipe(lambda role: None)):
        out = torch.utils.checkpoint.checkpoint(lambda y: layer(y).square(), x, use_reentrant=False)
    with te.autocast(recipe=MXFP8BlockScaling()):
        (again,) = torch.autograd.grad(out.sum(), layer.weight)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("module", ["Linear", "LayerNormMLP"])
@pytest.mark.parametrize("factory", [mxfp8, only("fc1"), lambda role: None], ids=["all", "fc1", "none"])
def test_cached_weights(module: str, factory: Any) -> None:
    layer, recipe = made(module), CustomRecipe(factory)
    expected = seen(layer, recipe)
    for first in (True, False):
        assert same(seen(layer, recipe, call=lambda x, first=first: layer(x, is_first_microbatch=first)), expected)


@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear"])
def test_what_leaves_a_module_quantized(module: str) -> None:
    factory, layer, x = Counting(), made(module), torch.randn(32, 64)
    layer.output_quantizer_role = te.QuantizerRole("linear", "input", "next")

    def leaves(recipe: Any) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            out = layer(given, fp8_output=True, fp8_grad=True)
        assert isinstance(out, te.QuantizedTensor)
        out.dequantize().square().sum().backward()
        assert isinstance(given.grad, te.QuantizedTensor)
        return [out.dequantize(), given.grad.dequantize()]

    theirs = leaves(Float8CurrentScaling())
    assert same(leaves(CustomRecipe(factory)), theirs) and same(leaves(CustomRecipe(factory)), theirs)
    assert factory.roles[3:] == [te.QuantizerRole("linear", "input", "next"), None]


def test_an_output_that_stays_in_high_precision() -> None:
    layer, x = made("Linear"), torch.randn(32, 64)
    with te.autocast(recipe=CustomRecipe(lambda role: None if role is None else mxfp8(role))):
        out = layer(x, fp8_output=True, fp8_grad=True)
        assert type(out) is torch.Tensor and torch.equal(out, layer(x))
    with te.autocast(recipe=CustomRecipe(lambda role: None)):
        assert torch.equal(layer(x, fp8_output=True), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_compiled() -> None:
    torch._dynamo.reset()
    layer, recipe = made("Linear"), CustomRecipe(current)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same(seen(layer, recipe, call=compiled), seen(layer, recipe))


def test_an_autocast_in_a_compiled_region_says_what_to_do() -> None:
    torch._dynamo.reset()
    recipe, layer = CustomRecipe(current), made("Linear")

    @torch.compile(fullgraph=True, backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            return layer(x)

    with pytest.raises(Exception, match=r"CustomRecipe\.qfactory must not be a function inside a compiled region"):
        step(torch.randn(32, 64))


def test_copies() -> None:
    recipe = CustomRecipe(mxfp8, quantization_alignment=32)
    for again in (copy.copy(recipe), copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert again == recipe and hash(again) == hash(recipe) and again.row_alignment() == 32
        assert same(seen(made("Linear"), again), seen(made("Linear"), recipe))
    assert recipe != CustomRecipe(current, quantization_alignment=32)
    layer = made("Linear")
    layer.output_quantizer_role = te.QuantizerRole("linear", "input", "next")
    expected = seen(layer, CustomRecipe(lambda role: mxfp8(role)))  # a function that cannot be pickled
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same(seen(again, CustomRecipe(mxfp8)), expected)
        assert again.output_quantizer_role == layer.output_quantizer_role


def test_the_pages_example() -> None:
    page = (Path(__file__).parents[2] / "docs" / "custom_recipe.md").read_text(encoding="utf-8")
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(compile(code, "docs/custom_recipe.md", "exec"), found)
    layer, head, recipe = found["layer"], found["head"], found["recipe"]
    assert all(parameter.grad is not None for module in (layer, head) for parameter in module.parameters())
    x = torch.randn(32, 64)
    with te.autocast(recipe=recipe):
        assert torch.equal(head(x), torch.nn.functional.linear(x, head.weight, head.bias))
    plans = {
        name: module.fp8_state.plan for name, module in layer.named_modules() if getattr(module, "fp8_state", None)
    }
    kinds = {name: [casts.input.kind for casts in plan.gemms] for name, plan in plans.items()}
    attention = {"self_attention.layernorm_qkv": ["mxfp8"], "self_attention.proj": ["mxfp8"]}
    assert kinds == {**attention, "layernorm_mlp": ["current", "current"]}
