# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scales that move to another encoding, portability or margin: made from their amaxes, to the bits of a run there."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.fp8 import recipe_casts, scale_update
from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales, StateError

CPU = torch.device("cpu")
LARGEST = torch.finfo(torch.float32).max
OCP, FNUZ = ("e4m3fn", "e5m2"), ("e4m3fnuz", "e5m2fnuz")


def _mean(history: torch.Tensor) -> torch.Tensor:
    return history.mean(0)


def _halved(amax: torch.Tensor, scale: torch.Tensor, fp8_max: torch.Tensor, recipe: Any) -> torch.Tensor:
    return fp8_max / amax / 2


#: Where casts saturate, of one tensor each: the encodings' own maxima and the common ones.
MAXIMA = st.lists(st.sampled_from([448.0, 240.0, 224.0, 57344.0, 28672.0]), min_size=3, max_size=3)
TARGETS = st.tuples(MAXIMA, st.integers(-2, 3))
AMAXES = st.one_of(
    st.floats(0, LARGEST, width=32), st.sampled_from([0.0, 2.0**-149, 1e-38, LARGEST, float("inf"), float("nan")])
)
ROWS = st.lists(AMAXES, min_size=3, max_size=3)


def _bits(state: DelayedScales) -> list[list[int]]:
    return [t.flatten().view(torch.int32).tolist() for t in (state.history, state.scale, state.scale_amax)]


def _reloaded(state: DelayedScales) -> DelayedScales:
    """Saved and loaded; itself with a NaN in its history, which no cast records and which is refused."""
    file = io.BytesIO()
    torch.save(state.as_data(), file)
    file.seek(0)
    data = torch.load(file, weights_only=True)
    if state.history.isnan().any():
        with pytest.raises(StateError, match="amax_history must be not negative and not NaN, got nan"):
            DelayedScales.from_data(data, state.count, "state")
        return state
    return DelayedScales.from_data(data, state.count, "state")


def _bind(state: DelayedScales, target: tuple[list[float], int], algorithm: Any) -> None:
    recipe = DelayedScaling(amax_history_len=3, margin=target[1], amax_compute_algo=algorithm, reduce_amax=False)
    scale_update.trainer().group(recipe, None, CPU, True).add(state)
    state.retarget(*target)


def _update(state: DelayedScales, row: list[float]) -> None:
    state.history[0].copy_(torch.tensor(row))
    assert state.group is not None
    state.group.update()


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("algorithm", ["max", "most_recent", _mean])
@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    journey=st.lists(st.tuples(TARGETS, ROWS, st.booleans()), min_size=1, max_size=4),
    detour=TARGETS,
    end=TARGETS,
)
def test_a_journey_leaves_the_bits_of_a_run_that_stayed(
    backend: str, algorithm: Any, journey: list[Any], detour: Any, end: Any
) -> None:
    """Updates under changing targets, saved and loaded on the way, there and back: as under the last one throughout."""
    traveller, settled = DelayedScales.fresh(3, 3, CPU), DelayedScales.fresh(3, 3, CPU)
    with te_dispatch.using(update_delayed_scales=backend):
        _bind(settled, end, algorithm)
        for target, row, reloads in journey:
            _bind(traveller, target, algorithm)
            _update(traveller, row)
            _update(settled, row)
            if reloads:
                traveller = _reloaded(traveller)
        for target in (end, detour, end):
            _bind(traveller, target, algorithm)
        assert _bits(traveller) == _bits(settled)
        _bind(traveller, detour, algorithm)
        traveller = _reloaded(traveller)
        _bind(traveller, end, algorithm)
        assert _bits(traveller) == _bits(settled)


@hypothesis.settings(deadline=None)
@hypothesis.given(amaxes=ROWS, start=TARGETS, end=TARGETS)
def test_the_rebuilt_scale_is_the_formula(amaxes: list[float], start: Any, end: Any) -> None:
    """RN32(RN32(max 2^-margin) / amax), computed in float64, whose 53 bits make both roundings one."""
    state = DelayedScales.fresh(3, 3, CPU)
    _bind(state, start, "most_recent")
    _update(state, amaxes)
    _bind(state, end, "most_recent")
    amax = torch.tensor(amaxes)
    made = (torch.tensor(end[0], dtype=torch.float64) * 2.0 ** -end[1] / amax.double()).float().clamp_max(LARGEST)
    usable = (amax > 0) & amax.isfinite()
    assert torch.equal(state.scale, torch.where(usable, made, 1.0))
    assert torch.equal(state.scale_amax, torch.where(usable, amax, 0.0))


def test_a_ratio_would_not_do() -> None:
    """The amax is stored because 448/amax times 240/448 is not 240/amax: this one amax tells the two apart."""
    amax = torch.tensor([0.7])
    state = DelayedScales(torch.zeros(2, 1), 448 / amax, amax.clone(), [448.0])
    state.retarget([240.0], 0)
    assert torch.equal(state.scale, 240 / amax)
    assert not torch.equal(state.scale, (448 / amax) * (torch.tensor(240.0) / 448))


@hypothesis.settings(deadline=None)
@hypothesis.given(amax=st.floats(2.0**-60, 2.0**60, width=32), start=MAXIMA, end=MAXIMA)
def test_scales_of_unknown_amax_follow_by_the_ratio(amax: float, start: Any, end: Any) -> None:
    """A state saved before amaxes were: within three roundings, of 2^-24 each, of RN32(max / amax), itself one off."""
    data = {
        "amax_history": torch.zeros(3, 3),
        "scale": torch.tensor(start) / torch.tensor(amax),
        "max_values": list(start),
    }
    state = DelayedScales.from_data(data, 3, "state")
    assert state.scale_amax.isnan().all()
    state.retarget(start, 0)
    assert torch.equal(state.scale, data["scale"])
    state.retarget(end, 0)
    exact = torch.tensor(end, dtype=torch.float64) / amax
    assert ((state.scale.double() - exact).abs() <= exact * ((1 + 2.0**-24) ** 3 - 1)).all()
    _bind(state, (end, 0), "max")
    _update(state, [amax] * 3)
    assert torch.equal(state.scale, torch.tensor(end) / torch.tensor(amax))
    assert torch.equal(state.scale_amax, torch.full((3,), amax))


def test_a_users_formula_leaves_the_amax_unknown() -> None:
    recipe = DelayedScaling(amax_history_len=2, scaling_factor_compute_algo=_halved, reduce_amax=False)
    state = DelayedScales.fresh(2, 2, CPU)
    state.retarget([448.0, 448.0], 0)
    scale_update.trainer().group(recipe, None, CPU, True).add(state)
    _update(state, [2.0, 0.0])
    assert state.scale.tolist() == [112, 1] and state.scale_amax.isnan().tolist() == [True, False]
    state.retarget([224.0, 224.0], 3)  # whether the user's formula reads the margin is not known
    assert state.scale.tolist() == [56, 1]


def test_scales_that_no_amax_has_made_are_1_everywhere() -> None:
    state = DelayedScales.fresh(2, 2, CPU)
    state.retarget([448.0, 448.0], 0)
    state.retarget([240.0, 448.0], 2)
    assert state.scale.tolist() == [1, 1] and state.scale_amax.tolist() == [0, 0]


def test_retargeting_keeps_memory_and_versions() -> None:
    """Captured graphs hold addresses; a backward to come that has read the scale must not find its version changed."""
    amaxes = torch.tensor([1.0, torch.nan])
    state = DelayedScales(torch.zeros(2, 2), torch.full((2,), 448.0), amaxes, [448.0, 448.0])
    before = [(t.data_ptr(), t._version) for t in (state.history, state.scale, state.scale_amax)]
    frozen = state.frozen_scales()
    state.retarget([240.0, 240.0], 0)
    assert state.scale.tolist() == [240, 240]
    assert [(t.data_ptr(), t._version) for t in (state.history, state.scale, state.scale_amax)] == before
    assert frozen[0] == 448 and state.frozen_scales()[0] == 240


# -- modules ------------------------------------------------------------------------------------------------------


def _layer() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(32, 32, device="cpu")


def _train(layer: te.Linear, recipe: DelayedScaling, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with te.autocast(recipe=recipe):
            y = layer(torch.randn(16, 32, generator=generator))
        y.backward(torch.randn(16, 32, generator=generator))


def _layer_bits(layer: te.Linear) -> list[list[list[int]]]:
    assert layer.fp8_state.scales.forward is not None and layer.fp8_state.scales.backward is not None
    return [_bits(layer.fp8_state.scales.forward), _bits(layer.fp8_state.scales.backward)]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, ...]], None]:
    """Pretend from here on that this device has these encodings. Layers that have a plan keep it."""
    return lambda encodings: monkeypatch.setattr(recipe_casts, "device_encodings", lambda device: encodings)


@pytest.mark.parametrize(("source", "target"), [(OCP, FNUZ), (FNUZ, OCP)])
@pytest.mark.parametrize("policy", ["default", "portable"])
def test_a_checkpoint_from_the_other_encoding(on: Any, source: Any, target: Any, policy: str) -> None:
    recipe = DelayedScaling(amax_history_len=4, margin=1)
    with te_dispatch.policy(policy):
        on(source)
        trained = _layer()
        _train(trained, recipe, range(3))
        file = io.BytesIO()
        torch.save(trained.state_dict(), file)
        file.seek(0)
        on(target)
        native, moved = _layer(), _layer()
        _train(native, recipe, range(3))
        moved.load_state_dict(torch.load(file, weights_only=True))
        assert _layer_bits(moved) != _layer_bits(native)  # nothing has run since: scales are still the source's
        moved.fp8_state._build(moved, recipe, CPU, None)
        assert _layer_bits(moved) == _layer_bits(native)
        _train(moved, recipe, range(3, 5))
        _train(native, recipe, range(3, 5))
        assert _layer_bits(moved) == _layer_bits(native)


def test_another_margin_in_the_middle_of_training() -> None:
    """It holds from the next cast on, not from the update after it."""
    changed, settled = _layer(), _layer()
    _train(changed, DelayedScaling(amax_history_len=4), range(3))
    _train(settled, DelayedScaling(amax_history_len=4, margin=3), range(4))
    _train(changed, DelayedScaling(amax_history_len=4, margin=3), range(3, 4))
    assert _layer_bits(changed) == _layer_bits(settled)
    changed.fp8_state._build(changed, DelayedScaling(amax_history_len=4), CPU, None)
    assert torch.equal(changed.fp8_state.scales.forward.scale, 8 * settled.fp8_state.scales.forward.scale)
