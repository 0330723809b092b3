# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What modules tell frameworks of their quantization is what they do."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

RECIPE = DelayedScaling(amax_history_len=3)

BUILDERS: dict[str, Any] = {
    "Linear": lambda: te.Linear(32, 32, device="cpu", params_dtype=torch.float32),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, device="cpu", params_dtype=torch.float32),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 32, device="cpu", params_dtype=torch.float32),
}


@pytest.fixture(params=BUILDERS)
def module(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return BUILDERS[request.param]()


def step(module: Any, x: torch.Tensor, recipe: Any = RECIPE, **options: Any) -> torch.Tensor:
    with te.autocast(recipe=recipe):
        out = module(x, **options)
    (out.dequantize() if isinstance(out, te.QuantizedTensor) else out).square().sum().backward()
    return out.detach()


def test_metadata_is_that_of_the_last_quantized_call(module: Any) -> None:
    assert dict(module.fp8_meta) == {} and not module.fp8_initialized and not module.primary_weights_in_fp8
    module(torch.randn(16, 32))
    assert not module.fp8_initialized
    for recipe in (Float8CurrentScaling(), RECIPE):
        step(module, torch.randn(16, 32), recipe)
        assert module.fp8_initialized and not module.primary_weights_in_fp8
        assert dict(module.fp8_meta) == {"recipe": recipe, "fp8_group": None, "num_gemms": module.gemm_count}
    module(torch.randn(16, 32))
    assert module.fp8_meta["recipe"] == RECIPE and "recipe" in repr(module.fp8_meta)


def test_metadata_is_read_only_and_says_what_it_has(module: Any) -> None:
    with pytest.raises(KeyError, match="nothing before the module's first quantized call"):
        module.fp8_meta["recipe"]
    step(module, torch.randn(16, 32))
    with pytest.raises(KeyError, match="'fp8_max_fwd', it has 'recipe', 'fp8_group', 'num_gemms'"):
        module.fp8_meta["fp8_max_fwd"]
    with pytest.raises(KeyError, match="get_fp8_meta_tensors"):
        module.fp8_meta["scaling_fwd"]
    with pytest.raises(NotImplementedError, match="fp8_meta\\['recipe'\\] cannot be assigned"):
        module.fp8_meta["recipe"] = Float8CurrentScaling()
    assert "scaling_bwd" not in module.fp8_meta


def test_what_calls_need_is_made_without_a_call(module: Any) -> None:
    module.init_fp8_metadata(module.gemm_count)
    assert not module.fp8_initialized
    for autocast in ({"enabled": False}, {"enabled": True}, {"enabled": False, "calibrating": True}):
        module.fp8_initialized = False
        with te.autocast(recipe=RECIPE, **autocast):
            module.init_fp8_metadata(num_gemms=module.gemm_count)
        assert module.fp8_initialized == any(autocast.values())
    with pytest.raises(ValueError, match=f"num_gemms must be {module.gemm_count}, got 3"):
        module.init_fp8_metadata(3)


def test_making_it_anew_changes_no_result(module: Any) -> None:
    inputs = [torch.randn(16, 32) * (1 + i) for i in range(3)]
    other = copy.deepcopy(module)
    for x in inputs:
        expected = step(other, x)
        module.fp8_initialized = False
        assert not module.fp8_initialized
        assert torch.equal(step(module, x), expected)
    module.fp8_initialized = True
    module.fp8_initialized = False
    with pytest.raises(ValueError, match="fp8_initialized becomes True by a call"):
        module.fp8_initialized = True


def test_steps_that_are_reset_leave_no_trace(module: Any) -> None:
    fresh = copy.deepcopy(module)
    assert module.get_fp8_meta_tensors() is None
    module.reset_fp8_meta_tensors()
    options = {"fp8_output": True} if isinstance(module, te.Linear) else {}
    for scale in (100.0, 1.0, 30.0):
        step(module, scale * torch.randn(16, 32), **options)
    module.reset_fp8_meta_tensors()
    for scale, history, made_of in module.get_fp8_meta_tensors().values():
        assert (scale == 1).all() and not history.any() and not made_of.any()
    module.zero_grad()
    inputs = [torch.randn(16, 32) * (1 + i) for i in range(3)]
    for x in inputs:
        assert torch.equal(step(module, x, **options), step(fresh, x, **options))
    assert torch.equal(module.get_extra_state(), fresh.get_extra_state())


def test_tensors_are_copies_that_can_be_written_back(module: Any) -> None:
    for _ in range(2):
        step(module, torch.randn(16, 32))
    kept, state = module.get_fp8_meta_tensors(), module.get_extra_state().clone()
    assert list(kept) == ["scaling_fwd", "scaling_bwd"]
    count = module.gemm_count
    for name, number in (("scaling_fwd", 2 * count), ("scaling_bwd", count)):
        assert [tuple(tensor.shape) for tensor in kept[name]] == [(number,), (3, number), (number,)]
        assert not torch.equal(kept[name][0], torch.ones(number)) and kept[name][1].any()
    module.get_fp8_meta_tensors()["scaling_fwd"][0].zero_()  # a copy
    assert torch.equal(module.get_extra_state(), state)
    step(module, 50 * torch.randn(16, 32))
    assert not torch.equal(module.get_extra_state(), state)
    module.reset_fp8_meta_tensors(kept)
    assert torch.equal(module.get_extra_state(), state)
    module.reset_fp8_meta_tensors()
    changed = module.get_extra_state().clone()
    with pytest.raises(KeyError, match="has no 'scaling_bwd', it has 'scaling_fwd'"):
        module.reset_fp8_meta_tensors({"scaling_fwd": kept["scaling_fwd"]})
    with pytest.raises(ValueError, match=r"fp8_meta_tensors\['scaling_bwd'\] must be tensors of shapes"):
        module.reset_fp8_meta_tensors({**kept, "scaling_bwd": kept["scaling_bwd"][:2]})
    assert torch.equal(module.get_extra_state(), changed)


def test_a_reset_holds_for_a_recomputation_that_comes_later(module: Any) -> None:
    """A recomputation takes the scales of its first forward: those that were written."""
    step(module, 20 * torch.randn(16, 32))
    module.reset_fp8_meta_tensors()
    module.zero_grad()
    fresh, x = copy.deepcopy(module), torch.randn(16, 32)
    with te.autocast(recipe=RECIPE):
        te.checkpoint(module, x, use_reentrant=False).square().sum().backward()
    step(fresh, x)
    for own, other in zip(module.parameters(), fresh.parameters()):
        assert torch.equal(own.grad, other.grad)
    assert torch.equal(module.get_extra_state(), fresh.get_extra_state())


def test_attributes_are_set(module: Any) -> None:
    module.fast_setattr("sequence_parallel", True)
    module.module_setattr("ub_name", "qkv")
    assert module.sequence_parallel is True and module.ub_name == "qkv"
    with pytest.raises(AttributeError):
        module.fast_setattr("fp8_meta", {})


def test_attributes_tell_of_the_autocast_in_force(module: Any) -> None:
    def told() -> tuple[bool, bool, torch.dtype]:
        return module.fp8, module.fp8_calibration, module.activation_dtype

    assert told() == (False, False, torch.float32)
    with te.autocast(recipe=RECIPE):
        assert told() == (True, False, torch.float32)
        with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            assert told() == (False, True, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert told() == (False, False, torch.bfloat16)
        assert module(torch.randn(16, 32)).dtype == module.activation_dtype
    assert module.to(torch.float16).activation_dtype == torch.float16
    with pytest.raises(AttributeError):
        module.fp8 = True


#: Recipes of every kind of cast.
KINDS: dict[str, Any] = {
    "delayed": RECIPE,
    "current": Float8CurrentScaling(use_power_2_scales=True),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "nvfp4, plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_quantizers_cast_as_the_module_does(module: Any, kind: str) -> None:
    assert module.quantizers == {"scaling_fwd": [], "scaling_bwd": []}
    step(module, torch.randn(32, 32), KINDS[kind])
    found = module.quantizers
    assert {key: len(of) for key, of in found.items()} == {
        "scaling_fwd": 3 * module.gemm_count, "scaling_bwd": 2 * module.gemm_count
    }  # fmt: skip
    encodings = ("e4m3fn", "e5m2")
    for i, casts in enumerate(module.fp8_state.plan.gemms):
        told = (*found["scaling_fwd"][3 * i : 3 * i + 2], found["scaling_bwd"][2 * i])
        for quantizer, used in zip(told, (casts.input, casts.weight, casts.grad), strict=True):
            record = quantizer.cast(encodings, False)
            if kind == "delayed":
                assert record.scale is used.scale and record.amax is used.amax and record.encoding == used.encoding
            else:
                assert record == used
        assert told[2].stochastic is casts.stochastic and not told[0].stochastic
        edges = ((found["scaling_fwd"][3 * i + 2], told[0]), (found["scaling_bwd"][2 * i + 1], told[2]))
        for unused, like in edges:  # nothing left the module quantized
            mine, record = unused.cast(encodings, False), like.cast(encodings, False)
            assert type(unused) is type(like) and unused.stochastic is like.stochastic
            if kind == "delayed":
                assert mine.encoding == record.encoding and mine.scale.item() == 1 and mine.amax.item() == 0
                assert mine.scale is not record.scale and mine.amax is not record.amax
            else:
                assert mine == record


def test_another_class_of_recipe_is_warned_of_once(module: Any) -> None:
    x = torch.randn(32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for recipe in (DelayedScaling(), DelayedScaling(margin=1)):
            step(module, x, recipe)
    name = type(module).__name__
    with pytest.warns(UserWarning, match=f"{name}: Recipe type changed from DelayedScaling to MXFP8BlockScaling"):
        step(module, x, MXFP8BlockScaling())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(module, x, MXFP8BlockScaling())


def test_quantizers_of_what_leaves_a_module() -> None:
    module = te.Linear(32, 32, device="cpu")
    step(module, torch.randn(16, 32, requires_grad=True), Float8CurrentScaling(), fp8_output=True, fp8_grad=True)
    found = module.quantizers
    encodings = ("e4m3fn", "e5m2")
    assert found["scaling_fwd"][2].cast(encodings, False) == module.fp8_state.plan.boundary.output
    assert found["scaling_bwd"][1].cast(encodings, False) == module.fp8_state.plan.boundary.input_grad
    step(module, torch.randn(32, 32), CustomRecipe(lambda role: None))
    assert module.quantizers == {"scaling_fwd": [None] * 3, "scaling_bwd": [None] * 2}
