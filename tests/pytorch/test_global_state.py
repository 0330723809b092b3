# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`FP8GlobalStateManager` tells what autocast does."""

from __future__ import annotations

import copy

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.pytorch.fp8 import global_state, scale_update
from te_dispatch.pytorch.fp8.global_state import FP8GlobalStateManager as Manager


def test_it_follows_nested_autocasts():
    assert not Manager.is_fp8_enabled() and not Manager.is_fp8_calibration()
    assert Manager.get_fp8_recipe() == DelayedScaling() and Manager.get_fp8_group() is None
    with te.autocast(recipe=Float8CurrentScaling()):
        assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() == Float8CurrentScaling()
        with te.autocast(enabled=False, calibrating=True):
            assert not Manager.is_fp8_enabled() and Manager.is_fp8_calibration()
        assert Manager.is_fp8_enabled()
    assert not Manager.is_fp8_enabled()


def test_a_state_is_entered_again():
    with te.autocast(recipe=Float8CurrentScaling()):
        state = Manager.get_autocast_state()
    Manager.set_autocast_state(state)
    assert Manager.get_fp8_recipe() == Float8CurrentScaling()
    Manager.set_autocast_state(None)
    assert not Manager.is_fp8_enabled()
    with pytest.raises(TypeError, match="get_autocast_state"):
        Manager.set_autocast_state((True, None))


def test_directions_are_named_as_modules_name_them():
    module = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    with te.autocast(recipe=DelayedScaling()):
        module(torch.randn(32, 32)).sum().backward()
    keys = [Manager.get_meta_tensor_key(forward=forward) for forward in (True, False)]
    assert keys == list(module.quantizers) == list(module.get_fp8_meta_tensors())


def test_reset_leaves_autocasts_and_drops_due_updates():
    module = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    context = te.autocast(recipe=DelayedScaling())
    context.__enter__()
    module(torch.randn(32, 32))
    Manager.reset()
    assert not Manager.is_fp8_enabled()
    before = module.state_dict()["_extra_state"].clone()
    with te.autocast(recipe=DelayedScaling()):
        pass
    assert torch.equal(before, module.state_dict()["_extra_state"])


def test_availability_comes_with_a_reason():
    for ask in (Manager.is_fp8_available, Manager.is_mxfp8_available, Manager.is_fp8_block_scaling_available):
        available, reason = ask()
        assert available == (reason == "")


def test_the_first_module_of_an_outermost_autocast_is_told_so():
    assert not Manager.is_first_fp8_module()
    for _ in range(2):
        with te.autocast(recipe=Float8CurrentScaling()):
            assert Manager.is_first_fp8_module() and not Manager.is_first_fp8_module()
            with te.autocast(recipe=DelayedScaling()):
                assert not Manager.is_first_fp8_module()
        assert not Manager.is_first_fp8_module()
    with te.autocast(recipe=Float8CurrentScaling()):
        pass
    assert not Manager.is_first_fp8_module()  # nobody asked inside, and nothing is inside now


def step(module: torch.nn.Module, x: torch.Tensor, region: object) -> torch.Tensor:
    with region:
        module(x).square().mean().backward()
    return module.state_dict()["_extra_state"].clone()


def test_an_autocast_is_entered_and_left_by_hand():
    torch.manual_seed(0)
    first = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    second, x, recipe = copy.deepcopy(first), torch.randn(32, 32), DelayedScaling()
    expected = step(first, x, te.autocast(recipe=recipe))
    state = Manager.get_autocast_state()
    Manager.autocast_enter(enabled=True, fp8_recipe=recipe)
    assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() == recipe
    Manager.autocast_enter(enabled=False)
    assert not Manager.is_fp8_enabled()
    Manager.autocast_exit(False, _graph=False)
    second(x).square().mean().backward()
    Manager.set_autocast_state(state)
    Manager.autocast_exit(True, _graph=False)
    assert not Manager.is_fp8_enabled() and torch.equal(second.state_dict()["_extra_state"], expected)
    with pytest.raises(RuntimeError, match="no autocast_enter is open"):
        Manager.autocast_exit(True, _graph=False)
    Manager.autocast_enter(enabled=True)
    Manager.reset()
    with pytest.raises(RuntimeError, match="no autocast_enter is open"):
        Manager.autocast_exit(True, _graph=False)


def test_scales_are_updated_when_it_is_asked_for():
    """As after a replay of a CUDA graph: amaxes are recorded, and nobody has seen the cast."""
    torch.manual_seed(0)
    first = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    second, x, recipe = copy.deepcopy(first), torch.randn(32, 32), DelayedScaling()
    expected = step(first, x, te.autocast(recipe=recipe))
    recorded = step(second, x, te.autocast(recipe=recipe, _graph=True))
    assert not torch.equal(recorded, expected)
    for group in scale_update.trainer().groups:
        group.dirty = False
    Manager.reduce_and_update_fp8_tensors(forward=True)
    tensors, reference = second.get_fp8_meta_tensors(), first.get_fp8_meta_tensors()
    assert torch.equal(tensors["scaling_fwd"][0], reference["scaling_fwd"][0])
    before = tensors["scaling_bwd"][0]
    second.fp8_state.scales.live()["backward"].history[0] = 100.0
    Manager.reduce_and_update_fp8_tensors(forward=False)
    assert not torch.equal(second.get_fp8_meta_tensors()["scaling_bwd"][0], before)


def test_states_of_modules_take_part_by_themselves():
    module = te.Linear(32, 32, device="cpu", params_dtype=torch.float32)
    Manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    step(module, torch.randn(32, 32), te.autocast(recipe=DelayedScaling()))
    Manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    with pytest.raises(TypeError, match="got a dict with scaling_fwd, whose scales nothing here updates"):
        Manager.add_fp8_tensors_to_global_buffer({"scaling_fwd": object()})


def test_casts_that_are_not_spared_are_warned_of_once(caplog, monkeypatch):
    monkeypatch.setattr(global_state, "_warned", [])
    Manager.set_skip_fp8_weight_update_tensor(False)
    assert not caplog.records and Manager.get_skip_fp8_weight_update_tensor() is None
    for _ in range(2):
        Manager.set_skip_fp8_weight_update_tensor(True)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "cache_quantized_params=True" in record.message


def test_keys_tell_directions_and_autocasts_apart():
    recipes = (DelayedScaling(), DelayedScaling(margin=1), Float8CurrentScaling())
    keys = {Manager.get_key_in_buffer(way, recipe, None) for way in (True, False) for recipe in recipes}
    assert len(keys) == 6 and Manager.get_key_in_buffer(True, DelayedScaling(), None) in keys
    for recipe in recipes:
        key = Manager.get_key_in_buffer(False, recipe, None)
        assert Manager.split_key_in_buffer(key) == (False, Manager.get_unique_autocast_key(recipe, None))
    assert (Manager.get_fwd_bwd_key(), Manager.get_fwd_bwd_key(forward=False)) == ("forward", "backward")
    assert Manager.get_buffer_info() == "buffer_index_and_autocast_key"
    group = object()
    assert Manager.get_unique_autocast_key(recipes[0], group) != Manager.get_unique_autocast_key(recipes[0])


def test_without_ranks_nothing_is_reduced():
    x = torch.randn(4)
    before = x.clone()
    Manager.reduce_tensor_across_group_op_max(x, None)
    assert torch.equal(x, before)


def test_what_is_not_there_says_what_to_use():
    with pytest.raises(AttributeError, match=r"has no 'restore_fp8_meta_tensors': .*activation_recompute_forward"):
        _ = Manager.restore_fp8_meta_tensors
    with pytest.raises(AttributeError, match=r"has no 'quantization_state': .*say what is in force"):
        _ = Manager.quantization_state
    with pytest.raises(AttributeError, match=r"FP8GlobalStateManager has no 'made_up'$"):
        _ = Manager.made_up
