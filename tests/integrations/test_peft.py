# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""peft's LoRA on te_dispatch's modules."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora.te import TeLinear

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling

from .states import DEVICE, assert_falls, assert_filled, assert_same, parameters, scales

SIZE, WIDE, ROWS = 32, 64, 32
TARGETS = ["linear", "norm_linear", "mlp"]
RECIPE = DelayedScaling(amax_history_len=4)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = te.Linear(SIZE, WIDE)
        self.norm_linear = te.LayerNormLinear(WIDE, SIZE)
        self.mlp = te.LayerNormMLP(SIZE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.norm_linear(self.linear(x)))


def _adapted(r: int = 16) -> PeftModel:
    torch.manual_seed(0)
    return get_peft_model(Net(), LoraConfig(r=r, lora_alpha=2 * r, target_modules=TARGETS))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(ROWS, SIZE, generator=generator).to(DEVICE) for _ in range(2))
    return x, y


def _train(model: PeftModel, steps: int = 10, enabled: bool = True) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x, y = _batch()
    x.requires_grad_()  # else the first layer, whose weight is frozen, has no gradient to cast
    losses = []
    for _ in range(steps):
        with te.autocast(enabled=enabled, recipe=RECIPE):
            out = model(x)
        loss = (out - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training() -> None:
    model = _adapted()
    for name in TARGETS:
        layer = getattr(model.base_model.model, name)
        assert type(layer) is TeLinear
        assert isinstance(layer.base_layer, (te.Linear, te.LayerNormLinear, te.LayerNormMLP))
    before = parameters(model)
    losses = _train(model)
    assert_falls(losses)
    assert_filled(model)
    changed = {name for name, value in parameters(model).items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".lora_A." in name or ".lora_B." in name}
    assert losses != _train(_adapted(), enabled=False)


@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()], ids=lambda recipe: type(recipe).__name__)
def test_the_product_is_that_of_the_layer_and_the_adapter(recipe: DelayedScaling | Float8CurrentScaling) -> None:
    """Forward and input gradient of an adapted layer are the sums of both parts', each in the precision of its own: the
    layer's in FP8, the adapter's in the parameters' dtype."""
    torch.manual_seed(0)
    plain = te.LayerNormLinear(SIZE, WIDE)
    alone = copy.deepcopy(plain)
    model = get_peft_model(torch.nn.Sequential(plain), LoraConfig(r=16, lora_alpha=32, target_modules=["0"]))
    layer = model.base_model.model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_()
    x = _batch()[0].requires_grad_()
    dy = torch.randn(ROWS, WIDE, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    with te.autocast(recipe=recipe):
        y = model(x)
    y.backward(dy)
    alone.requires_grad_(False)
    other = x.detach().clone().requires_grad_()
    with te.autocast(recipe=recipe):
        from_layer = alone(other)
    from_adapter = layer.lora_B["default"](layer.lora_A["default"](other)) * 2
    assert torch.equal(y, from_layer + from_adapter)
    (from_layer + from_adapter).backward(dy)
    assert torch.equal(x.grad, other.grad)
    assert not torch.equal(y, alone(other) + from_adapter)  # in high precision


def test_the_projection_of_a_transformer_layer_is_adapted() -> None:
    torch.manual_seed(0)
    plain = te.TransformerLayer(SIZE, WIDE, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(16, 2, SIZE, device=DEVICE)
    for _ in range(3):  # what the layer remembers of its calls must not outlast the change
        with te.autocast(recipe=Float8CurrentScaling()):
            before = plain(x)
        before.sum().backward()
    model = get_peft_model(torch.nn.Sequential(plain), LoraConfig(r=16, target_modules=["proj"]))
    adapter = plain.self_attention.proj
    assert type(adapter) is TeLinear
    with te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(model(x), before)
        with torch.no_grad():
            adapter.lora_B["default"].weight.normal_()
        after = model(x)
    assert not torch.equal(after, before)
    after.square().sum().backward()
    assert all(part["default"].weight.grad.any() for part in (adapter.lora_A, adapter.lora_B))


def test_adapters_switch_off() -> None:
    model = _adapted()
    torch.manual_seed(0)
    plain = Net()
    x, _ = _batch()
    _train(model)
    with torch.no_grad():
        adapted = model(x)
        with model.disable_adapter():
            assert torch.equal(model(x), plain(x))
    assert not torch.equal(adapted, plain(x))


def test_adapters_are_saved_and_loaded(tmp_path: Path) -> None:
    model = _adapted()
    _train(model)
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(Net(), tmp_path)
    assert_same(get_peft_model_state_dict(loaded), get_peft_model_state_dict(model))
    x, _ = _batch()
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert scales(loaded) == {}  # an adapter's file has adapters alone


def test_a_whole_model_is_restored_with_its_scales() -> None:
    model, other = _adapted(), _adapted()
    _train(model)
    other.load_state_dict(model.state_dict())
    assert_same(parameters(other), parameters(model))
    assert_same(scales(other), scales(model))
    assert _train(other, 3) == _train(model, 3)


def test_adapters_of_another_model_are_taken_over() -> None:
    model, other = _adapted(), _adapted()
    _train(model)
    set_peft_model_state_dict(other, get_peft_model_state_dict(model))
    assert_same(parameters(other), parameters(model))


def test_peft_refuses_to_merge_and_a_merge_by_hand_gives_the_same() -> None:
    model = get_peft_model(
        torch.nn.Sequential(te.Linear(SIZE, WIDE)), LoraConfig(r=16, lora_alpha=32, target_modules=["0"])
    )
    with pytest.raises(NotImplementedError, match="TeLinear does not support merge yet"):
        model.merge_and_unload()
    with pytest.raises(ValueError, match="does not support DoRA"):
        get_peft_model(torch.nn.Sequential(te.Linear(SIZE, WIDE)), LoraConfig(target_modules=["0"], use_dora=True))
    layer, merged = model.base_model.model[0], te.Linear(SIZE, WIDE)
    x = torch.randint(-2, 3, (ROWS, SIZE), device=DEVICE).float()
    with torch.no_grad():
        # Small whole numbers: every product and sum is exact, in whatever order.
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape))
        merged.bias.copy_(layer.base_layer.bias)
        merged.weight.copy_(
            layer.base_layer.weight
            + layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        )
        assert torch.equal(model(x), merged(x))


def test_unloading_gives_the_model_back() -> None:
    model = _adapted()
    _train(model)
    torch.manual_seed(0)
    plain, bare = Net(), model.unload()
    assert isinstance(bare, Net) and type(bare.mlp) is te.LayerNormMLP
    assert_same(parameters(bare), parameters(plain))


@pytest.mark.parametrize("target", ["layernorm_qkv", "layernorm_mlp", "proj"])
def test_parts_of_a_transformer_layer(target: str) -> None:
    torch.manual_seed(0)
    layer = te.TransformerLayer(SIZE, WIDE, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(8, ROWS // 8, SIZE, device=DEVICE)
    with te.autocast(recipe=Float8CurrentScaling()):
        before = layer(x)  # its parts have already returned more than one tensor here
        model = get_peft_model(torch.nn.Sequential(layer), LoraConfig(r=16, target_modules=[target]))
        assert torch.equal(model(x), before)  # an adapter starts as nothing
        model(x).square().sum().backward()
    adapted = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(adapted) == 2 and all(target in name and "lora_" in name for name in adapted)
    model.unload()
    with te.autocast(recipe=Float8CurrentScaling()):
        assert torch.equal(layer(x), before)
