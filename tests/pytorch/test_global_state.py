# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`FP8GlobalStateManager` tells what autocast does."""

from __future__ import annotations

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
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
