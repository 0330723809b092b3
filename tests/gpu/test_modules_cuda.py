# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Modules on a GPU: Transformer Engine's usage with only the import changed, every recipe, recompute, moves."""

from __future__ import annotations

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common import recipe
from tests.gpu.layer_losses import losses

RECIPES = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "block": recipe.Float8BlockScaling,
}


def test_readme_usage_runs_with_only_the_import_changed():
    torch.manual_seed(0)
    model = te.Linear(768, 3072, bias=True)
    inp = torch.randn(2048, 768, device="cuda")
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    with te.autocast(enabled=True, recipe=fp8_recipe):
        out = model(inp)
    loss = out.sum()
    loss.backward()
    assert model.weight.device.type == "cuda"
    assert torch.isfinite(model.weight.grad).all() and model.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_trains_in_fp8(name):
    found = losses(RECIPES[name], fuse_qkv_params=True)
    assert found[-1] < 0.9 * found[0], found


def test_fp8_state_moves_with_the_module_and_ignores_dtype_casts():
    module = te.Linear(64, 64, device="cpu")
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
        module(torch.randn(32, 64)).sum().backward()
    before = module.get_extra_state()
    module.cuda().bfloat16()
    assert before.numel() and torch.equal(module.get_extra_state(), before)
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
        module(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()


def _step(layer, x, delayed):
    with te.autocast(recipe=delayed):
        y = layer(x)
    y.float().square().sum().backward()
    return y.detach()


def test_scales_of_a_checkpoint_that_was_read_to_the_cpu_are_on_the_gpu_at_once(tmp_path):
    delayed = recipe.DelayedScaling(amax_history_len=4)
    saved, loaded, other = (te.Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(3))
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        _step(saved, x, delayed)
    torch.save(saved.state_dict(), tmp_path / "checkpoint")
    loaded.load_state_dict(torch.load(tmp_path / "checkpoint", map_location="cpu"))
    for direction in ("forward", "backward"):
        state, expected = (getattr(one.fp8_state.scales, direction) for one in (loaded, saved))
        assert torch.equal(state.history, expected.history) and torch.equal(state.scale, expected.scale)
    _step(other, x, delayed)  # updates every state of the recipe
    assert torch.equal(_step(loaded, x, delayed), _step(saved, x, delayed))


def test_a_model_that_went_to_the_cpu_does_not_stop_the_training_of_another():
    delayed = recipe.DelayedScaling(amax_history_len=5)
    gone, stays = (te.Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    _step(gone, x, delayed)
    _step(stays, x, delayed)
    gone.to("cpu")
    before = stays.fp8_state.scales.forward.scale.clone()
    _step(stays, 2 * x, delayed)
    assert not torch.equal(stays.fp8_state.scales.forward.scale, before)
    gone.to("cuda")
    _step(gone, x, delayed)
    assert gone.fp8_state.scales.forward.group is stays.fp8_state.scales.forward.group


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_recompute_equals_no_recompute_by_bits(name, reentrant):
    found = []
    for recompute in (False, True):
        torch.manual_seed(3)
        layer = te.LayerNormMLP(128, 256, params_dtype=torch.bfloat16)
        x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(3):
            with te.autocast(enabled=True, recipe=RECIPES[name]()):
                y = te.checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            y.float().pow(2).sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters())])
    for a, b in zip(*found):
        assert torch.equal(a, b)


def test_a_backward_thread_keeps_the_policy_of_its_forward():
    module = te.Linear(64, 64, params_dtype=torch.bfloat16)
    x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ran: list[str] = []
    with te_dispatch.observe(lambda operator, accepted, args, result: ran.append(f"{operator.name}:{accepted.id}")):
        y = module(x)
        forward = len(ran)
    y.sum().backward()  # the scope is closed, and CUDA backwards run in another thread
    assert forward > 0 and len(ran) > forward
