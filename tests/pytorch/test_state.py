# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Delayed-scaling state as part of a module: dtype casts, device moves, copies, checkpoints."""

from __future__ import annotations

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
from te_dispatch.pytorch.fp8.extra_state import decoded
from te_dispatch.pytorch.fp8.module_scales import ModuleScales

RECIPE = DelayedScaling(amax_history_len=4)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        te.Linear(32, 32, device="cpu"), te.LayerNormLinear(32, 32, device="cpu"), te.LayerNormMLP(32, 32, device="cpu")
    )


def _step(model: torch.nn.Module, recipe: DelayedScaling = RECIPE, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 32, generator=generator).to(next(model.parameters()).dtype)
    with te.autocast(recipe=recipe):
        y = model(x)
    y.square().sum().backward()
    return y.detach()


def _tensors(model: torch.nn.Module) -> list[torch.Tensor]:
    states = [s for m in model for s in (m.fp8_state.scales.forward, m.fp8_state.scales.backward)]
    return [t for s in states for t in (s.history, s.scale, s.scale_amax)]


def _as_dict(layer: Any) -> dict[str, Any]:
    """The state as it was saved before it was a tensor of bytes."""
    states = layer.fp8_state.scales.live()
    return {"format": 1, "recipe": "delayed", **{key: scales.as_data() for key, scales in states.items()}}


def _with_dicts(model: torch.nn.Module) -> dict[str, Any]:
    """A checkpoint from then."""
    state: dict[str, Any] = model.state_dict()
    for name, module in model.named_modules():
        key = f"{name}._extra_state" if name else "_extra_state"
        if key in state:
            state[key] = _as_dict(module)
    return state


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def test_state_is_neither_parameter_nor_buffer() -> None:
    model = _model()
    names = {n for n, _ in model.named_parameters()}
    _step(model)
    assert {n for n, _ in model.named_parameters()} == names
    assert not list(model.named_buffers())


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double", "float"])
def test_dtype_casts_do_not_touch_it(cast: str) -> None:
    model = _model()
    for seed in range(2):
        _step(model, seed=seed)
    before = [t.clone() for t in _tensors(model)]
    getattr(model, cast)()
    assert all(t.dtype == torch.float32 for t in _tensors(model))
    assert _same(_tensors(model), before)
    if cast != "double":
        assert _step(model).dtype == next(model.parameters()).dtype


def test_it_follows_device_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with one device: every state is told where its module's parameters went."""
    from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales

    model = _model()
    _step(model)
    before = [t.clone() for t in _tensors(model)]
    moved: list[torch.device] = []
    monkeypatch.setattr(DelayedScales, "move", lambda self, device: moved.append(device))
    model.to("cpu")
    model.to_empty(device="cpu")
    assert moved == [torch.device("cpu")] * 12
    model.to("meta")  # holds no values: the state stays where it is
    assert len(moved) == 12
    assert _same(_tensors(model), before)


def test_moving_takes_every_tensor_along_and_rebuilds_the_views() -> None:
    """A move to other memory, with meta as the only other device there is everywhere."""
    from te_dispatch.pytorch.fp8.delayed_scales import DelayedScales

    state = DelayedScales.fresh(3, 2, torch.device("cpu"))
    state._adopt(state.history.clone(), state.scale.clone(), state.scale_amax.clone())
    state.amax_views[1].fill_(7)
    state.scale_views[0].fill_(3)
    assert state.history[0].tolist() == [0, 7] and state.scale.tolist() == [3, 1]
    state.move(torch.device("meta"))
    parts = [state.history, state.scale, state.scale_amax, *state.amax_views, *state.scale_views]
    assert {t.device.type for t in parts} == {"meta"}


def test_a_state_that_moves_leaves_its_group() -> None:
    """A group updates on one device: a model that trained and went elsewhere is none of its business."""
    gone, stays = _model(), _model()
    _step(gone)
    _step(stays)
    states = [scales for module in gone for scales in module.fp8_state.scales.live().values()]
    groups = [scales.group for scales in states]
    assert all(scales in group.states() for scales, group in zip(states, groups))
    for scales in states:
        scales.move(torch.device("meta"))
    assert not any(scales in group.states() for scales, group in zip(states, groups))
    before = _tensors(stays)[1].clone()
    _step(stays, seed=2)  # reads and writes tensors of every member
    assert not torch.equal(_tensors(stays)[1], before)


def test_round_trip_is_bitwise_and_strict(tmp_path: Path) -> None:
    model = _model()
    for seed in range(3):
        _step(model, seed=seed)
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=True)
    other = _model()
    assert other.load_state_dict(loaded, strict=True) == torch.nn.modules.module._IncompatibleKeys([], [])
    assert _same(_tensors(other), _tensors(model))
    model.zero_grad()
    for seed in range(3, 6):
        assert torch.equal(_step(model, seed=seed), _step(other, seed=seed))
    assert _same(_tensors(other), _tensors(model))
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_loading_into_a_running_model_keeps_its_memory() -> None:
    model, other = _model(), _model()
    _step(model, seed=1)
    _step(other, seed=2)
    addresses = [t.data_ptr() for t in _tensors(other)]
    other.load_state_dict(model.state_dict())
    assert [t.data_ptr() for t in _tensors(other)] == addresses
    assert _same(_tensors(other), _tensors(model))


def test_saved_state_is_a_snapshot() -> None:
    model = _model()
    _step(model)
    saved = model.state_dict()
    state = saved["0._extra_state"].clone()
    _step(model, seed=9)
    assert torch.equal(saved["0._extra_state"], state)
    assert not torch.equal(model.state_dict()["0._extra_state"], state)


def test_high_precision_models_have_an_empty_state_and_load_their_torch_twins() -> None:
    layer = te.Linear(16, 16, device="cpu")
    assert list(layer.state_dict()) == ["weight", "bias", "_extra_state"]
    assert layer.state_dict()["_extra_state"].shape == (0,)
    layer.load_state_dict(torch.nn.Linear(16, 16).state_dict())


def test_checkpoint_without_extra_state_loads_strictly() -> None:
    model = _model()
    _step(model)
    state = {k: v for k, v in model.state_dict().items() if not k.endswith("_extra_state")}
    other = _model()
    other.load_state_dict(state, strict=True)
    assert torch.isfinite(_step(other)).all()
    with pytest.raises(RuntimeError, match="weight"):  # what else is missing is still an error
        other.load_state_dict({k: v for k, v in state.items() if k != "0.weight"}, strict=True)


def test_a_checkpoint_without_extra_state_changes_no_scale_of_a_model_that_ran() -> None:
    model = _model()
    made_before = {k: v.clone() for k, v in model.state_dict().items()}
    assert not any(value.numel() for key, value in made_before.items() if key.endswith("_extra_state"))
    _step(model)
    before = [tensor.clone() for tensor in _tensors(model)]
    model.load_state_dict(made_before, strict=True)
    assert _same(_tensors(model), before) and any((m.fp8_state.scales.forward.scale != 1).any() for m in model)


@pytest.mark.parametrize("length", [1, 2, 4, 9])
def test_another_history_length_keeps_the_newest_steps(length: int) -> None:
    model = _model()
    for seed in range(4):
        _step(model, seed=seed)
    other = _model()
    other.load_state_dict(model.state_dict())
    old = [t.clone() for t in _tensors(other)]
    recipe = DelayedScaling(amax_history_len=length)
    for layer in other:
        layer.fp8_state._build(layer, DelayedScaling(amax_history_len=length), torch.device("cpu"), None)
    kept = min(length, 4) - 1
    for new, before in zip(_tensors(other), old):
        if new.dim() == 1:
            assert torch.equal(new, before)
            continue
        assert new.shape[0] == length
        assert torch.equal(new[length - kept :], before[4 - kept :])
        assert new[: length - kept].eq(0).all()
    _step(other, recipe)
    assert other[0].fp8_state.scales.forward.history.shape[0] == length
    assert other[0].fp8_state.scales.forward.history[0].eq(0).all()


def test_extra_state_says_what_made_each_scale() -> None:
    model = _model()
    for seed in range(2):
        _step(model, recipe=DelayedScaling(amax_history_len=4, margin=2), seed=seed)
    saved = decoded(model[0].get_extra_state(), "state")
    for data, maximum in ((saved["forward"], 448.0), (saved["backward"], 57344.0)):
        assert set(data) == {"amax_history", "scale", "scale_amax", "max_values", "margin"}
        assert data["scale_amax"].dtype == torch.float32 and data["margin"] == 2
        assert torch.equal(data["scale_amax"], data["amax_history"].amax(0))
        assert torch.equal(data["scale"], torch.tensor(maximum) / 4 / data["scale_amax"])


def test_a_state_from_before_amaxes_were_saved_loads() -> None:
    """Scales as they were, their amaxes unknown until the next update."""
    model, other = _model(), _model()
    for seed in range(2):
        _step(model, seed=seed)
    old = _with_dicts(model)
    for key in [k for k in old if k.endswith("_extra_state")]:
        for direction in ("forward", "backward"):
            del old[key][direction]["scale_amax"], old[key][direction]["margin"]
    other.load_state_dict(old)
    for module, theirs in zip(other, model):
        for name in ("forward", "backward"):
            mine, old_state = (getattr(one.fp8_state.scales, name) for one in (module, theirs))
            assert torch.equal(mine.scale, old_state.scale) and mine.scale_amax.isnan().all()
    model.zero_grad()
    assert torch.equal(_step(model, seed=2), _step(other, seed=2))
    assert _same(_tensors(other), _tensors(model))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent(how: str) -> None:
    model = _model()
    _step(model)
    if how == "deepcopy":
        model.zero_grad()
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    assert _same(_tensors(other), _tensors(model))
    before = [t.clone() for t in _tensors(model)]
    first = _step(other, seed=5)
    assert _same(_tensors(model), before)
    assert torch.equal(_step(model, seed=5), first)
    assert _same(_tensors(other), _tensors(model))


def test_state_made_in_inference_mode_can_train() -> None:
    model = _model()
    with torch.inference_mode(), te.autocast(recipe=RECIPE):
        model(torch.randn(16, 32))
    _step(model)
    assert all(not t.is_inference() for t in _tensors(model))
    assert all(m.fp8_state.scales.forward.scale.ne(1).all() for m in model)


def _changed(path: str, value: Any) -> Any:
    """The extra state of a trained `Linear` with one member replaced, or without it (...)."""
    layer = te.Linear(32, 32, device="cpu")
    _step(torch.nn.Sequential(layer))
    state: Any = _as_dict(layer)
    *keys, last = path.split(".")
    inner = state
    for key in keys:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return state


NAN, INF = float("nan"), float("inf")
MALFORMED: list[tuple[str, Any, str]] = [
    ("forward.scale", torch.tensor([1.0, NAN]), "forward, scale must be finite and above 0, got nan at [1]"),
    ("forward.scale", torch.tensor([0.0, 1.0]), "forward, scale must be finite and above 0, got 0.0"),
    ("backward.scale", torch.tensor([-1.0]), "backward, scale must be finite and above 0, got -1.0"),
    ("backward.scale", torch.tensor([INF]), "backward, scale must be finite and above 0, got inf"),
    ("forward.scale", torch.ones(3), "forward, scale must be (2,), got shape (3,)"),
    ("forward.scale", [1.0, 1.0], "forward, scale must be a tensor, got list"),
    ("forward.scale", ..., "forward, scale must be a tensor, got none among amax_history, scale_amax, max_values"),
    (
        "forward.amax_history",
        torch.full((4, 2), -1.0),
        "forward, amax_history must be not negative and not NaN, got -1.0 at [0, 0]",
    ),
    (
        "backward.amax_history",
        torch.tensor([[0.0], [2.0], [NAN], [1.0]]),
        "backward, amax_history must be not negative and not NaN, got nan at [2, 0]",
    ),
    ("forward.amax_history", torch.ones(4, 2).to_sparse(), "forward, amax_history must be a dense tensor"),
    ("forward.amax_history", [[1.0, 1.0]], "forward, amax_history must be a tensor, got list"),
    ("forward.scale", torch.tensor([1.0, 1e300], dtype=torch.float64), "forward, scale must be finite and above 0"),
    ("forward.scale", torch.tensor([1.0, 1e-60], dtype=torch.float64), "forward, scale must be finite and above 0"),
    ("forward.scale_amax", torch.ones(2, dtype=torch.int32), "forward, scale_amax must be float32, got torch.int32"),
    (
        "forward.amax_history",
        torch.ones(4, 2, dtype=torch.int64),
        "forward, amax_history must be float32, got torch.int",
    ),
    ("forward.amax_history", torch.zeros(4), "forward, amax_history must be (length, 2), got shape (4,)"),
    (
        "backward.scale_amax",
        torch.tensor([INF]),
        "backward, scale_amax must be finite and not negative, or NaN, got inf",
    ),
    ("forward.max_values", [448.0], "forward, max_values must be 2 numbers, got [448.0]"),
    ("forward.max_values", "448", "forward, max_values must be 2 numbers, got '448'"),
    ("forward.max_values", 448.0, "forward, max_values must be 2 numbers, got 448.0"),
    ("forward.max_values", [448.0, True], "forward, max_values must be finite and above 0, got True"),
    ("forward.max_values", [448.0, NAN], "forward, max_values must be finite and above 0, got nan"),
    ("forward.max_values", [448.0, 10**400], "forward, max_values must be finite and above 0, got 1000"),
    ("forward.max_values", ["a", "b"], "forward, max_values must be finite and above 0, got 'a'"),
    ("forward.max_values", [0.0, 448.0], "forward, max_values must be finite and above 0, got 0.0"),
    ("backward.margin", "1", "backward, margin must be an int, got '1'"),
    ("backward.margin", 1.5, "backward, margin must be an int, got 1.5"),
    ("backward.margin", 2000, "backward, margin must be from -1000 to 1000, got 2000"),
    ("backward", ..., "extra state must have 'backward', got forward"),
    ("backward", None, "backward must be a dict, got NoneType"),
    ("sideways", {}, "extra state has no 'sideways', only forward, backward, output, input_grad"),
    ("format", 7, "extra state must be a tensor of bytes, or a dict of format 1, got 7"),
]


@pytest.mark.parametrize(
    ("path", "value", "words"), MALFORMED, ids=[f"{path}-{i}" for i, (path, *_) in enumerate(MALFORMED)]
)
def test_a_malformed_state_is_refused_before_anything_changes(path: str, value: Any, words: str) -> None:
    model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"))
    _step(model, seed=3)
    before = [t.clone() for t in _tensors(model)]
    state = {**model.state_dict(), "0._extra_state": _changed(path, value)}
    with pytest.raises(
        RuntimeError, match=re.escape(f"0._extra_state: Linear: {'' if 'extra' in words else 'extra state, '}{words}")
    ):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=re.escape(words)):
        model[0].set_extra_state(state["0._extra_state"])
    assert _same(_tensors(model), before)


def test_what_training_leaves_in_a_history_loads() -> None:
    """An infinite activation leaves an infinite amax, a NaN leaves none: neither state is refused."""
    layer = te.Linear(32, 32, device="cpu")
    x = torch.randn(16, 32)
    x[0, 0], x[1, 1] = INF, NAN
    with te.autocast(recipe=RECIPE):
        layer(x)
    history = layer.fp8_state.scales.forward.history
    assert history[:, 0].isinf().any() and not history.isnan().any()
    loaded = te.Linear(32, 32, device="cpu")
    loaded.load_state_dict(layer.state_dict())
    assert torch.equal(loaded.fp8_state.scales.forward.history, layer.fp8_state.scales.forward.history)


def test_a_state_in_another_floating_dtype_loads_in_float32() -> None:
    layer, other = te.Linear(32, 32, device="cpu"), te.Linear(32, 32, device="cpu")
    _step(torch.nn.Sequential(layer))
    state = _with_dicts(layer)
    state["_extra_state"]["forward"]["amax_history"] = state["_extra_state"]["forward"]["amax_history"].double()
    other.load_state_dict(state)
    assert other.fp8_state.scales.forward.history.dtype == torch.float32
    assert torch.equal(other.fp8_state.scales.forward.history, layer.fp8_state.scales.forward.history)


def test_a_step_that_was_interrupted_leaves_a_state_that_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = te.Linear(32, 32, device="cpu")
    fitted = ModuleScales._fitted

    def interrupted(self: ModuleScales, key: str, *args: Any) -> Any:
        if key == "backward":
            raise KeyboardInterrupt
        return fitted(self, key, *args)

    monkeypatch.setattr(ModuleScales, "_fitted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _step(torch.nn.Sequential(layer))
    monkeypatch.undo()
    assert layer.fp8_state.scales.forward is not None
    te.Linear(32, 32, device="cpu").load_state_dict(layer.state_dict())
    _step(torch.nn.Sequential(layer))
    assert layer.get_extra_state().numel()
