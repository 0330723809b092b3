# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`autocast`: nesting, and when delayed scaling's states update."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.core import scopes
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import current_state
from te_dispatch.pytorch.fp8.global_state import FP8GlobalStateManager

RECIPE = DelayedScaling(amax_history_len=3)


def _linear(**kwargs: Any) -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(32, 32, device="cpu", **kwargs)


def _quantizes(layer: te.Linear) -> bool:
    calls: list[str] = []
    with scopes.observe(lambda operator, accepted, args, result: calls.append(getattr(operator, "name", operator))):
        layer(torch.randn(16, 32))
    return "quantize" in calls


def test_innermost_decides_and_outer_is_restored() -> None:
    layer = _linear()
    assert not _quantizes(layer)
    with te.autocast(recipe=RECIPE):
        assert _quantizes(layer)
        with te.autocast(enabled=False):
            assert not _quantizes(layer)
            with te.autocast(recipe=Float8CurrentScaling()):
                assert _quantizes(layer)
                assert current_state().recipe == Float8CurrentScaling()
            assert not _quantizes(layer)
        assert _quantizes(layer)
        assert current_state().recipe == RECIPE
    assert current_state() is None


def test_restored_after_an_exception_without_updating() -> None:
    layer = _linear()
    with pytest.raises(KeyError), te.autocast(recipe=RECIPE):
        layer(torch.randn(16, 32))
        with te.autocast(enabled=False):
            raise KeyError
    assert current_state() is None
    assert layer.fp8_state.scales.forward.scale.eq(1).all()
    assert layer.fp8_state.scales.forward.history[0].gt(0).all()


def test_one_object_can_be_entered_again() -> None:
    region = te.autocast(recipe=RECIPE)
    for _ in range(2):
        with region, region:
            assert current_state().enabled
    assert current_state() is None


def test_equal_recipes_share_a_plan() -> None:
    layer = _linear()
    plans = []
    for _ in range(2):
        with te.autocast(recipe=DelayedScaling(amax_history_len=3)):
            layer(torch.randn(16, 32))
        plans.append(layer.fp8_state.plan)
    assert plans[0] is plans[1]


def test_threads_have_their_own() -> None:
    seen: list[Any] = []
    with te.autocast(recipe=RECIPE):
        thread = threading.Thread(target=lambda: seen.append(current_state()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_older_name_takes_older_arguments() -> None:
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE, fp8_group=None):
        assert current_state().recipe == RECIPE
    with te.autocast():
        assert current_state().recipe == te.get_default_recipe() == DelayedScaling()


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"recipe": "delayed"}, TypeError, "recipe must be a recipe.*got 'delayed'"),
    ],
)
def test_bad_arguments(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        te.autocast(**kwargs)


def test_leaving_an_autocast_of_a_graph_updates_nothing() -> None:
    layer, recipe = _linear(), DelayedScaling(amax_history_len=3)
    with te.autocast(recipe=recipe, _graph=True):
        assert FP8GlobalStateManager.fp8_graph_capturing()
        layer(torch.randn(16, 32))
    assert not FP8GlobalStateManager.fp8_graph_capturing()
    forward = layer.fp8_state.scales.forward
    recorded = forward.history[0].clone()
    assert bool((recorded > 0).all()) and forward.scale.tolist() == [1.0, 1.0]
    with te.autocast(recipe=recipe):
        assert not FP8GlobalStateManager.fp8_graph_capturing()
        layer(torch.zeros(16, 32))
    assert torch.equal(forward.history[-1], recorded) and not bool(forward.history[0].any())


# -- updates ------------------------------------------------------------------------------------------------------


def _expected_scale(amax: torch.Tensor, max_value: float, margin: int = 0) -> torch.Tensor:
    return torch.tensor(max_value * 2.0**-margin, dtype=torch.float32) / amax


def test_scales_follow_the_formula_over_steps() -> None:
    layer = _linear()
    recipe = DelayedScaling(amax_history_len=3, margin=1)
    amaxes, grad_amaxes = [], []
    for step in range(5):
        x = torch.randn(16, 32) * (5 - step)
        dy = torch.randn(16, 32) * (step + 1)
        amaxes.append(x.abs().max())
        grad_amaxes.append(dy.abs().max())
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(dy)
        # The largest of the three newest amaxes: row 0 holds one of the three until it rolls.
        assert torch.equal(layer.fp8_state.scales.forward.scale[0], _expected_scale(max(amaxes[-3:]), 448.0, 1))
        assert torch.equal(layer.fp8_state.scales.forward.scale[1], _expected_scale(layer.weight.abs().max(), 448.0, 1))
        assert torch.equal(layer.fp8_state.scales.backward.scale[0], _expected_scale(max(grad_amaxes[-3:]), 57344.0, 1))


def test_most_recent_forgets_at_once() -> None:
    layer = _linear()
    for factor in (10.0, 1.0):
        x = torch.randn(16, 32) * factor
        with te.autocast(recipe=DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")):
            layer(x)
    assert torch.equal(layer.fp8_state.scales.forward.scale[0], _expected_scale(x.abs().max(), 448.0))


def test_forward_updates_once_at_the_outermost_exit() -> None:
    layer = _linear()
    with te.autocast(recipe=RECIPE):
        for factor in (1, 3, 2):
            with te.autocast(recipe=RECIPE):
                layer(torch.full((16, 32), float(factor)))
            assert layer.fp8_state.scales.forward.scale[0] == 1
    history = layer.fp8_state.scales.forward.history
    assert history[:, 0].tolist() == [0, 0, 3]
    assert layer.fp8_state.scales.forward.scale[0] == _expected_scale(torch.tensor(3.0), 448.0)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_leaves_no_trace_in_the_training(without: Any) -> None:
    torch.manual_seed(0)
    evaluated, plain = _linear(), _linear()
    evaluated.load_state_dict(plain.state_dict())
    for step in range(3):
        with without(), te.autocast(recipe=RECIPE):
            evaluated(torch.full((16, 32), 500.0), is_first_microbatch=True)
        x = torch.randn(16, 32)
        results = []
        for layer in (evaluated, plain):
            with te.autocast(recipe=RECIPE):
                y = layer(x, is_first_microbatch=False if step else None)
            y.square().sum().backward()
            results.append(
                [
                    y.detach(),
                    layer.fp8_state.scales.forward.history.clone(),
                    layer.fp8_state.scales.backward.scale.clone(),
                ]
            )
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_an_evaluation_uses_the_scales_in_force() -> None:
    layer = _linear()
    x = torch.randn(16, 32)
    with te.autocast(recipe=RECIPE):
        layer(x)
    with te.autocast(recipe=RECIPE):
        expected = layer(x).detach()
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        assert torch.equal(layer(x), expected)


def test_native_reentrant_checkpoint_under_no_grad_is_inference() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = _linear()

    def run(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return layer(x)

    with torch.no_grad():
        checkpoint(run, torch.randn(16, 32), use_reentrant=True)
    assert layer.fp8_state.scales.forward.scale.eq(1).all()
    checkpoint(run, torch.randn(16, 32, requires_grad=True), use_reentrant=True)
    assert layer.fp8_state.scales.forward.scale.ne(1).all()


def test_untouched_modules_keep_their_history_and_scale() -> None:
    used, idle = _linear(), _linear()
    with te.autocast(recipe=RECIPE):
        used(torch.randn(16, 32)), idle(torch.randn(16, 32))
    history, scale = idle.fp8_state.scales.forward.history.clone(), idle.fp8_state.scales.forward.scale.clone()
    before = used.fp8_state.scales.forward.history.clone()
    with te.autocast(recipe=RECIPE):
        used(torch.randn(16, 32))
    assert torch.equal(idle.fp8_state.scales.forward.history, history)
    assert torch.equal(idle.fp8_state.scales.forward.scale, scale)
    assert not torch.equal(used.fp8_state.scales.forward.history, before)


def test_all_modules_update_in_one_call() -> None:
    calls: list[list[torch.Tensor]] = []

    def watch(operator: Any, accepted: Any, args: Any, result: Any) -> None:
        if operator.name == "update_delayed_scales":
            calls.append(args[0])

    def sizes(direction: str) -> list[int]:
        """Of the calls for this model. What other tests' autocasts left to update is updated beside it."""
        own = {getattr(part.fp8_state.scales, direction).history.data_ptr() for part in model}
        return [len(call) for call in calls if own & {history.data_ptr() for history in call}]

    recipe = DelayedScaling(amax_history_len=2, margin=3)  # a group of its own
    model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"), te.LayerNormMLP(32, 32, device="cpu"))
    with scopes.observe(watch):
        with te.autocast(recipe=recipe):
            y = model(torch.randn(16, 32, requires_grad=True))
        assert sizes("forward") == [2]
        y.sum().backward()
        assert sizes("forward") == sizes("backward") == [2]


def test_backward_updates_once_per_backward_not_per_module() -> None:
    model = torch.nn.Sequential(_linear(), _linear())
    x = torch.randn(16, 32, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        a, b = model(x), model(x)
    (a.sum() + b.sum()).backward()
    for layer in model:
        assert (layer.fp8_state.scales.backward.history != 0).sum() == 1
    with te.autocast(recipe=RECIPE):
        a, b = model(x), model(x)
    a.sum().backward()
    b.sum().backward()
    for layer in model:
        assert (layer.fp8_state.scales.backward.history != 0).sum() == 2  # length 3: rows 1 and 2


def test_callables_replace_both_formulas() -> None:
    seen: list[Any] = []

    def mean_amax(history: torch.Tensor) -> torch.Tensor:
        return history.mean(0)

    def half_scale(amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, recipe: Any) -> torch.Tensor:
        seen.append((scale.clone(), fp8_max.clone(), recipe))
        return fp8_max / amax / 2

    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo=mean_amax, scaling_factor_compute_algo=half_scale)
    layer = _linear()
    with te.autocast(recipe=recipe):
        layer(torch.full((16, 32), 4.0))
    assert layer.fp8_state.scales.forward.scale[0] == 448 / 2.0 / 2
    assert layer.fp8_state.scales.forward.history[:, 0].tolist() == [0, 4]
    assert seen[0][0].eq(1).all() and seen[0][1].tolist() == [448, 448] and seen[0][2] == recipe


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_the_slow_path_equals_the_operator(algorithm: str) -> None:
    """A custom function that computes the default must give the default, special amaxes included."""

    def default(history: torch.Tensor) -> torch.Tensor:
        return history[0].clone() if algorithm == "most_recent" else history.nan_to_num(0.0, torch.inf).amax(0)

    results = []
    for amax_algo in (algorithm, default):
        recipe = DelayedScaling(amax_history_len=3, margin=1, amax_compute_algo=amax_algo)
        layer = _linear()
        layer.fp8_state._build(layer, recipe, torch.device("cpu"), None).join()
        state = layer.fp8_state.scales.forward
        for row in ((2.0, 3.0), (torch.inf, 1e-38), (0.0, 5.0)):
            state.history[0].copy_(torch.tensor(row))
            state.group.update()
        results.append((state.history.clone(), state.scale.clone()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_wrong_shape_from_a_callable_is_refused() -> None:
    layer = _linear()
    with (
        pytest.raises(ValueError, match=r"amax_compute_algo must return a tensor of shape \(2,\), got \(\)"),
        te.autocast(recipe=DelayedScaling(amax_history_len=2, amax_compute_algo=lambda h: h.max())),
    ):
        layer(torch.randn(16, 32))


def _hidden_error(layer: te.LayerNormMLP, x: torch.Tensor) -> float:
    """How far FP8 operands can move an element of gelu(norm(x) W^T).

    A value cast to e4m3 and back is off by at most 2^-4 of itself, or half the smallest subnormal, 2^-10 of a scale_inv
    of amax / 448; products of two such values carry both errors, and gelu stretches them by at most 1.13. float32
    rounding, a 2^19th of that, disappears in the 1.13.
    """
    normed = torch.nn.functional.layer_norm(x.double(), (32,)).abs()
    weight = layer.fc1_weight.detach().double().abs()
    off = [t * 2**-4 + t.max() / 448 * 2**-10 for t in (normed, weight)]
    return float(1.13 * ((normed + off[0]) @ (weight + off[1]).T - normed @ weight.T).max())


@pytest.mark.parametrize(
    ("make", "hidden"),
    [
        (lambda: te.Linear(32, 32, device="cpu"), None),
        (lambda: te.LayerNormLinear(32, 32, device="cpu"), None),
        (lambda: te.LayerNormMLP(32, 32, device="cpu"), 2),
    ],
)
def test_calibrating_records_amaxes_in_high_precision(make: Any, hidden: int | None) -> None:
    torch.manual_seed(0)
    layer = make()
    x = torch.randn(16, 32)
    plain = layer(x)
    with te.autocast(enabled=False, calibrating=True, recipe=RECIPE):
        assert torch.equal(layer(x), plain)
    calibrated = layer.fp8_state.scales.forward.scale.clone()
    assert calibrated.ne(1).all()
    with te.autocast(recipe=RECIPE):
        layer(x)
    # What calibration saw is what the casts see, up to the rounding of what lies behind the first cast.
    scale = layer.fp8_state.scales.forward.scale
    seen = [i for i in range(scale.numel()) if i != hidden]
    assert torch.equal(scale[seen], calibrated[seen])
    if hidden is not None:
        amaxes = [448 / s.double() for s in (calibrated[hidden], scale[hidden])]
        assert amaxes[0] <= amaxes[1] <= amaxes[0] + _hidden_error(layer, x)


def test_a_module_dropped_between_steps_leaves_the_group() -> None:
    import gc

    recipe = DelayedScaling(amax_history_len=2, margin=5)
    kept, dropped = _linear(), _linear()
    with te.autocast(recipe=recipe):
        kept(torch.randn(16, 32)), dropped(torch.randn(16, 32))
    group = kept.fp8_state.plan.forward_group
    assert len(group.states()) == 2
    del dropped
    gc.collect()
    assert len(group.states()) == 1
    assert scale_update.trainer().group(kept.fp8_state.plan.recipe, None, torch.device("cpu"), True) is group
