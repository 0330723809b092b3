# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""accelerate with ``mixed_precision="fp8"``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TERecipeKwargs, convert_model, has_transformer_engine_layers
from accelerate.utils.dataclasses import FP8BackendType

import te_dispatch.pytorch as te
from te_dispatch.common import recipe, recipe_arguments
from tests.pytorch import ranks

from .states import DEVICE, assert_falls, assert_filled, assert_same, parameters, scales

SIZE, WIDE, ROWS = 32, 64, 32


@pytest.fixture(autouse=True)
def nothing_was_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes warn once a process."""
    monkeypatch.setattr(recipe_arguments, "_warned", set())


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(SIZE, WIDE), torch.nn.GELU(), torch.nn.LayerNorm(WIDE), torch.nn.Linear(WIDE, SIZE)
    ).to(DEVICE)


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, SIZE, generator=generator).to(DEVICE) for _ in range(2))
    return x, y


def _prepared(handler: TERecipeKwargs | None = None, **options: Any) -> tuple[Accelerator, torch.nn.Module, Any]:
    handlers = [] if handler is None else [handler]
    accelerator = Accelerator(cpu=DEVICE == "cpu", mixed_precision="fp8", kwargs_handlers=handlers, **options)
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer


def _step(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, step: int) -> float:
    x, y = _batch(step)
    loss = (model(x) - y).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _forward_scales(model: torch.nn.Module) -> Any:
    return model[0].fp8_state.scales.forward


def test_training_is_te_dispatch_in_the_precision_asked_for() -> None:
    """The losses are those, bit for bit, of a loop by hand over te_dispatch's modules in FP8, and not those of BF16."""
    accelerator, model, optimizer = _prepared(TERecipeKwargs(amax_history_len=4, amax_compute_algo="max"))
    assert accelerator.fp8_backend == FP8BackendType.TE
    assert [type(module) for module in model] == [te.Linear, torch.nn.GELU, te.LayerNorm, te.Linear]
    found = [_step(accelerator, model, optimizer, 0) for _ in range(10)]
    assert_falls(found)
    assert_filled(model)

    def by_hand(enabled: bool) -> list[float]:
        plain = _model()
        with torch.no_grad():
            convert_model(plain)
        sgd = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        losses = []
        for _ in range(10):
            x, y = _batch(0)
            with (
                te.autocast(enabled=enabled, recipe=recipe.DelayedScaling(amax_history_len=4)),
                torch.autocast(DEVICE, torch.bfloat16),
            ):
                out = plain(x)
            loss = (out.float() - y).square().mean()
            loss.backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(loss.item())
        return losses

    assert found == by_hand(enabled=True)
    assert found != by_hand(enabled=False)


def test_without_a_handler_te_dispatch_is_found() -> None:
    accelerator, model, optimizer = _prepared()
    assert accelerator.fp8_backend == FP8BackendType.TE
    assert_falls([_step(accelerator, model, optimizer, 0) for _ in range(10)])
    assert _forward_scales(model).history.shape[0] == 1024


def test_layers_with_dimensions_that_fp8_cannot_take_stay_torchs() -> None:
    Accelerator(cpu=DEVICE == "cpu", mixed_precision="fp8")
    model = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.Linear(16, 16))
    convert_model(model)
    # accelerate leaves the later layers of the same container too.
    assert [type(layer) for layer in model] == [torch.nn.Linear, torch.nn.Linear]
    assert not has_transformer_engine_layers(model)


@torch.no_grad()
def test_convert_model_keeps_values() -> None:
    Accelerator(cpu=DEVICE == "cpu", mixed_precision="fp8")
    plain, converted = _model(), _model()
    assert not has_transformer_engine_layers(plain)
    convert_model(converted, _convert_ln=False)
    assert [type(module) for module in converted][2:] == [torch.nn.LayerNorm, te.Linear]
    convert_model(converted)
    assert isinstance(converted[2], te.LayerNorm)
    assert has_transformer_engine_layers(converted)
    assert_same(parameters(converted), parameters(plain))


# -- each field of TERecipeKwargs ---------------------------------------------------------------------------------


def test_every_field_is_tested() -> None:
    tested = {name.removeprefix("test_field_") for name in globals() if name.startswith("test_field_")}
    assert tested == set(TERecipeKwargs.__dataclass_fields__)


def test_field_use_autocast_during_eval() -> None:
    outputs = []
    for use in (False, True):
        accelerator, model, optimizer = _prepared(TERecipeKwargs(use_autocast_during_eval=use))
        for step in range(2):
            _step(accelerator, model, optimizer, step)
        model.eval()
        with torch.no_grad():
            outputs.append(model(_batch(0)[0]))
            plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            with torch.autocast(DEVICE, torch.bfloat16):
                high_precision = plain(_batch(0)[0]).float()
        AcceleratorState._reset_state(reset_partial_state=True)
    assert torch.equal(outputs[0], high_precision)
    assert not torch.equal(outputs[1], high_precision)


def _after_steps(batches: Callable[[int], torch.Tensor], steps: int, handler: Callable[[], TERecipeKwargs]) -> Any:
    """The forward scales of the first layer."""
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model, _ = _prepared(handler())
    for step in range(steps):
        accelerator.backward(model(batches(step)).square().mean())
    return _forward_scales(model)


def test_field_margin() -> None:
    none, three = (
        _after_steps(lambda step: _batch(0)[0], 1, lambda margin=margin: TERecipeKwargs(margin=margin))
        for margin in (0, 3)
    )
    assert none.margin == 0 and three.margin == 3
    assert torch.equal(three.scale, none.scale / 8)


def test_field_interval() -> None:
    """Accepted with a warning, and every step updates the scales."""
    with pytest.warns(UserWarning, match="DelayedScaling: interval has no effect: scales are updated at every step"):
        found = _after_steps(lambda step: _batch(0)[0] * 2**step, 2, lambda: TERecipeKwargs(interval=16))
    assert found.scale_amax[0] == _batch(0)[0].bfloat16().abs().max() * 2


def test_field_fp8_format() -> None:
    gradient_maxima = {}
    for name in ("HYBRID", "E4M3"):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model, optimizer = _prepared(TERecipeKwargs(fp8_format=name))
        _step(accelerator, model, optimizer, 0)
        assert _forward_scales(model).max_values == (448.0, 448.0)
        gradient_maxima[name] = model[0].fp8_state.scales.backward.max_values
    assert gradient_maxima == {"HYBRID": (57344.0,), "E4M3": (448.0,)}
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match=r"fp8_format must be one of Format.E4M3, Format.HYBRID, got Format.E5M2"):
        _prepared(TERecipeKwargs(fp8_format="E5M2"))


def test_field_amax_history_len() -> None:
    found = _after_steps(lambda step: _batch(step)[0], 3, lambda: TERecipeKwargs(amax_history_len=5))
    assert found.history.shape == (5, 2)
    amaxes = [_batch(step)[0].bfloat16().abs().max().item() for step in range(3)]
    assert found.history[:, 0].tolist() == [0, 0, *amaxes]


def test_field_amax_compute_algo() -> None:
    """``max`` remembers a batch 64 times larger. accelerate does not pass on ``most_recent``, which is its own default:
    the recipe then has the default of Transformer Engine, which is ``max`` too."""
    assert TERecipeKwargs(amax_compute_algo="max").to_kwargs() == {"amax_compute_algo": "max"}
    assert TERecipeKwargs(amax_compute_algo="most_recent").to_kwargs() == {}
    assert recipe.DelayedScaling().amax_compute_algo == "max"
    largest = _batch(0)[0].bfloat16().abs().max()
    for algorithm in ("max", "most_recent"):
        found = _after_steps(
            lambda step: _batch(0)[0] * (64 if step == 0 else 1),
            2,
            lambda algorithm=algorithm: TERecipeKwargs(amax_compute_algo=algorithm),
        )
        assert found.history[-1, 0] == largest
        assert found.scale_amax[0] == 64 * largest


def test_field_override_linear_precision() -> None:
    """Accepted with a warning: all products are in FP8 all the same."""
    with pytest.warns(UserWarning, match="override_linear_precision has no effect: all products are quantized"):
        accelerator, model, optimizer = _prepared(TERecipeKwargs(override_linear_precision=(False, False, True)))
    found = [_step(accelerator, model, optimizer, step) for step in range(3)]
    AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator, model, optimizer = _prepared(TERecipeKwargs(override_linear_precision=(False, False, False)))
    assert found == [_step(accelerator, model, optimizer, step) for step in range(3)]


def test_field_use_mxfp8_block_scaling() -> None:
    accelerator, model, optimizer = _prepared(TERecipeKwargs(use_mxfp8_block_scaling=True))
    plain = _model()
    with torch.no_grad():
        convert_model(plain)
        model.train()
        found = model(_batch(0)[0])
        with te.autocast(recipe=recipe.MXFP8BlockScaling()), torch.autocast(DEVICE, torch.bfloat16):
            expected = plain(_batch(0)[0])
        with torch.autocast(DEVICE, torch.bfloat16):
            high_precision = plain(_batch(0)[0])
    assert torch.equal(found, expected.float())
    assert not torch.equal(found, high_precision.float())
    assert_falls([_step(accelerator, model, optimizer, 0) for _ in range(10)])
    assert scales(model) == {}
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(ValueError, match="amax_history_len"):
        _prepared(TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4))


def test_recipe_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that ``accelerate launch`` and ``accelerate config`` set."""
    for name, value in (
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
        ("ACCELERATE_FP8_BACKEND", "TE"),
        ("ACCELERATE_FP8_AMAX_HISTORY_LEN", "3"),
        ("ACCELERATE_FP8_FORMAT", "E4M3"),
        ("ACCELERATE_FP8_MARGIN", "1"),
    ):
        monkeypatch.setenv(name, value)
    accelerator = Accelerator(cpu=DEVICE == "cpu")
    model = _model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    _step(accelerator, model, optimizer, 0)
    assert accelerator.mixed_precision == "fp8"
    assert _forward_scales(model).history.shape[0] == 3
    assert _forward_scales(model).margin == 1
    assert model[0].fp8_state.scales.backward.max_values == (448.0,)


# -- what a training loop does besides --------------------------------------------------------------------------------


def test_save_state_and_load_state(tmp_path: Path) -> None:
    """A fresh model goes on with the weights, scales and losses of the one that was saved, bit for bit."""

    def prepared() -> tuple[Accelerator, torch.nn.Module, Any]:
        AcceleratorState._reset_state(reset_partial_state=True)
        return _prepared(TERecipeKwargs(amax_history_len=4))

    accelerator, model, optimizer = prepared()
    for step in range(3):
        _step(accelerator, model, optimizer, step)
    accelerator.save_state(str(tmp_path))
    saved = parameters(model), scales(model)
    later = [_step(accelerator, model, optimizer, step) for step in range(3, 6)]

    accelerator, model, optimizer = prepared()
    assert scales(model) == {}
    accelerator.load_state(str(tmp_path))
    assert_same(parameters(model), saved[0])
    assert_same(scales(model), saved[1])
    assert_filled(model)
    assert [_step(accelerator, model, optimizer, step) for step in range(3, 6)] == later


def test_save_model_writes_scales(tmp_path: Path) -> None:
    accelerator, model, optimizer = _prepared(TERecipeKwargs(amax_history_len=4))
    for step in range(3):
        _step(accelerator, model, optimizer, step)
    accelerator.save_model(model, str(tmp_path))
    other = _model()
    with torch.no_grad():
        convert_model(other)
    from safetensors.torch import load_file

    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(parameters(other), parameters(model))
    assert_same(scales(other), scales(model))


def test_clip_grad_norm() -> None:
    accelerator, model, _ = _prepared(TERecipeKwargs(amax_history_len=4))
    x, y = _batch(0)
    accelerator.backward((model(x) - y).square().mean())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for copy, p in zip(copies, model.parameters()):
        copy.grad = p.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(copies, 0.25)
    assert norm > 0.25
    assert torch.equal(accelerator.clip_grad_norm_(model.parameters(), 0.25), norm)
    for copy, p in zip(copies, model.parameters()):
        assert torch.equal(p.grad, copy.grad)


def test_gradient_accumulation() -> None:
    """Two calls a step: the optimizer waits for the second, and takes the mean of what each gave by itself."""
    accelerator, model, optimizer = _prepared(TERecipeKwargs(amax_history_len=4), gradient_accumulation_steps=2)
    start = parameters(model)
    gradients = []
    for step in range(2):
        with accelerator.accumulate(model):
            x, y = _batch(step)
            accelerator.backward((model(x) - y).square().mean())
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
            optimizer.step()
            changed = any(not torch.equal(p, start[name]) for name, p in model.named_parameters())
            assert changed == (step == 1)
            optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())

    # By hand, with the same state of the scales, one call after the other and their gradients apart.
    other = _model()
    with torch.no_grad():
        convert_model(other)
    total = {name: torch.zeros_like(p) for name, p in other.named_parameters()}
    for step in range(2):
        x, y = _batch(step)
        with (
            te.autocast(recipe=recipe.DelayedScaling(amax_history_len=4)),
            torch.autocast(DEVICE, torch.bfloat16),
        ):
            out = other(x)
        ((out.float() - y).square().mean() / 2).backward()
        for name, p in other.named_parameters():
            total[name] += p.grad
            p.grad = None
    assert_same(gradients[1], total)
    assert_same(scales(model), scales(other))


def test_unwrapping_ends_fp8() -> None:
    """What `unwrap_model` gives computes in high precision: its forward is the model's own again."""
    accelerator, model, optimizer = _prepared(TERecipeKwargs(amax_history_len=4))
    _step(accelerator, model, optimizer, 0)
    unwrapped = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain = _model()
    with torch.no_grad():
        convert_model(plain)
    plain.load_state_dict(unwrapped.state_dict())
    assert torch.equal(unwrapped(_batch(0)[0]), plain(_batch(0)[0]))


# -- two processes ------------------------------------------------------------------------------------------------


def data_parallel(rank: int) -> None:
    """Run on every rank: DDP as accelerate sets it up, with one state of the scales."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks.WORLD), LOCAL_WORLD_SIZE="2")
    accelerator, model, optimizer = _prepared(TERecipeKwargs(amax_history_len=4))
    assert accelerator.num_processes == ranks.WORLD
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    x, y = _batch(rank)
    x = x * (1 + 3 * rank)
    for _ in range(5):
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert_filled(model)
    for name, tensor in {**parameters(model), **scales(model)}.items():
        first, second = accelerator.gather(tensor[None])
        assert torch.equal(first, second), name
    largest = (_batch(1)[0] * 4).bfloat16().abs().max()
    assert model.module[0].fp8_state.scales.forward.history[-1, 0] == largest  # of the other rank, on rank 0


def test_data_parallel(tmp_path: Path) -> None:
    ranks.run(data_parallel, tmp_path)
