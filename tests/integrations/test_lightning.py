# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Lightning's TransformerEnginePrecision, through Fabric and through the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import lightning
from lightning.fabric.plugins import TransformerEnginePrecision as FabricPrecision
from lightning.pytorch.plugins import TransformerEnginePrecision as TrainerPrecision

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, Format, Recipe

from .states import DEVICE, assert_falls, assert_filled, assert_same, gemm_modules, parameters, scales

SIZE, WIDE, ROWS = 32, 64, 32
# The plugin asks PyTorch for an autocast on CUDA, whatever the device, for operations other than FP8's.
pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available.*Disabling autocast")

AS_DICT = {"fp8_format": "HYBRID", "amax_history_len": 4, "amax_compute_algo": "max"}
AS_OBJECT = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4, amax_compute_algo="max")


def _net() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(SIZE, WIDE), torch.nn.GELU(), torch.nn.LayerNorm(WIDE), torch.nn.Linear(WIDE, SIZE)
    )


def _seeded(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return _net()


def _batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, SIZE, generator=generator).to(DEVICE) for _ in range(2))
    return x, y


# -- Fabric -------------------------------------------------------------------------------------------------------


def _fabric(**options: Any) -> lightning.Fabric:
    options.setdefault("weights_dtype", torch.bfloat16)
    return lightning.Fabric(accelerator=DEVICE, devices=1, plugins=FabricPrecision(**options))


def _set_up(fabric: lightning.Fabric, model: torch.nn.Module) -> tuple[Any, Any]:
    """The model first: Lightning converts its layers, and the optimizer is to have the parameters of the new ones."""
    model = fabric.setup_module(model)
    return model, fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _step(fabric: lightning.Fabric, model: Any, optimizer: Any, step: int = 0) -> float:
    x, y = _batch(step)
    loss = (model(x) - y).square().mean()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _by_hand(recipe: Recipe, enabled: bool = True) -> list[float]:
    """The losses of the same training in a loop over te_dispatch's modules."""
    plain = _seeded()
    model = torch.nn.Sequential(
        te.Linear(SIZE, WIDE, params_dtype=torch.bfloat16), torch.nn.GELU(),
        te.LayerNorm(WIDE, params_dtype=torch.bfloat16), te.Linear(WIDE, SIZE, params_dtype=torch.bfloat16),
    )  # fmt: skip
    model.load_state_dict(plain.to(torch.bfloat16).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        x, y = _batch()
        with te.autocast(enabled=enabled, recipe=recipe):
            out = model(x.bfloat16())
        loss = (out.float() - y).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_fabric_leaves_an_optimizer_that_was_made_before_without_the_new_layers() -> None:
    plain = _seeded()
    model, optimizer = _fabric().setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert not trained & {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("recipe", [AS_DICT, AS_OBJECT], ids=["dict", "object"])
def test_fabric(recipe: Any) -> None:
    """The losses are those, bit for bit, of a loop by hand over te_dispatch's modules in FP8, and not those of BF16."""
    fabric = _fabric(recipe=recipe)
    model, optimizer = _set_up(fabric, _seeded())
    assert [type(layer) for layer in model.module] == [te.Linear, torch.nn.GELU, te.LayerNorm, te.Linear]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    losses = [_step(fabric, model, optimizer) for _ in range(10)]
    assert_falls(losses)
    assert_filled(model.module)
    assert model.module[0].fp8_state.scales.forward.history.shape[0] == 4
    assert losses == _by_hand(AS_OBJECT)
    assert losses != _by_hand(AS_OBJECT, enabled=False)


def test_fabric_by_the_name_of_the_precision() -> None:
    fabric = lightning.Fabric(accelerator=DEVICE, devices=1, precision="transformer-engine")
    model, optimizer = _set_up(fabric, _seeded())
    losses = [_step(fabric, model, optimizer) for _ in range(10)]
    assert_filled(model.module)
    assert losses == _by_hand(DelayedScaling())


def test_fabric_with_another_recipe_than_delayed_scaling() -> None:
    fabric = _fabric(recipe=Float8CurrentScaling())
    model, optimizer = _set_up(fabric, _seeded())
    assert [_step(fabric, model, optimizer) for _ in range(10)] == _by_hand(Float8CurrentScaling())
    assert scales(model.module) == {}


def test_replace_layers() -> None:
    for replace, expected in ((None, te.Linear), (True, te.Linear), (False, torch.nn.Linear)):
        model = _fabric(replace_layers=replace).setup_module(_seeded())
        assert type(model.module[0]) is expected
        assert_same(parameters(model.module), parameters(_seeded().to(DEVICE, torch.bfloat16)))


def test_layers_with_dimensions_that_fp8_cannot_take_stay_torchs() -> None:
    with pytest.warns(UserWarning, match="dimensions are divisible by 8 and 16"):
        model = _fabric().setup_module(torch.nn.Sequential(torch.nn.Linear(32, 24)))
    assert type(model.module[0]) is torch.nn.Linear


def test_init_module() -> None:
    """With ``replace_layers=True`` the model is made of te_dispatch's layers to begin with, without a second copy."""
    fabric = _fabric(replace_layers=True, recipe=AS_DICT)
    with fabric.init_module():
        made = _seeded()
    assert [type(layer) for layer in made] == [te.Linear, torch.nn.GELU, te.LayerNorm, te.Linear]
    assert {parameter.dtype for parameter in made.parameters()} == {torch.bfloat16}
    assert torch.nn.Linear is not te.Linear
    before = dict(made.named_parameters())
    model, optimizer = _set_up(fabric, made)
    assert all(parameter is before[name] for name, parameter in model.module.named_parameters())
    assert_falls([_step(fabric, model, optimizer) for _ in range(10)])
    assert_filled(model.module)


def test_fabric_checkpoint(tmp_path: Path) -> None:
    """A fresh model goes on with the weights, scales and losses of the one that was saved, bit for bit."""
    fabric = _fabric(recipe=AS_DICT)
    model, optimizer = _set_up(fabric, _seeded())
    for step in range(3):
        _step(fabric, model, optimizer, step)
    fabric.save(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    saved = parameters(model.module), scales(model.module)
    later = [_step(fabric, model, optimizer, step) for step in range(3, 6)]

    model, optimizer = _set_up(fabric, _seeded(seed=1))
    fabric.load(tmp_path / "checkpoint", {"model": model, "optimizer": optimizer})
    assert_same(parameters(model.module), saved[0])
    assert_same(scales(model.module), saved[1])
    assert [_step(fabric, model, optimizer, step) for step in range(3, 6)] == later


# -- Trainer ------------------------------------------------------------------------------------------------------


class Lit(lightning.LightningModule):
    """Makes its layers where Lightning asks for them, so that they are te_dispatch's before a checkpoint is read."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.net: torch.nn.Sequential | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = _seeded(self.seed)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        loss = (self.net(x) - y).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("validation", (self.net(batch[0]) - batch[1]).float().square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class MadeAtOnce(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net = _seeded()


def _trainer(where: Path, steps: int, **options: Any) -> lightning.Trainer:
    precision = {"plugins": TrainerPrecision(weights_dtype=torch.bfloat16, **options)} if options else {
        "precision": "transformer-engine"
    }  # fmt: skip
    return lightning.Trainer(
        accelerator=DEVICE, devices=1, max_steps=steps, gradient_clip_val=1.0, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=where, **precision,
    )  # fmt: skip


def _loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader([_batch() for _ in range(10)], batch_size=None)


@pytest.mark.parametrize("recipe", [AS_DICT, AS_OBJECT, None], ids=["dict", "object", "name"])
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_trainer(recipe: Any, tmp_path: Path) -> None:
    model = MadeAtOnce()
    trainer = _trainer(tmp_path, 10, **({} if recipe is None else {"recipe": recipe}))
    trainer.fit(model, _loader(), _loader())  # validates in inference mode, twice before the first step
    assert trainer.callback_metrics["validation"] < 0.9 * model.losses[0]
    assert [type(layer) for layer in model.net] == [te.Linear, torch.nn.GELU, te.LayerNorm, te.Linear]
    assert_falls(model.losses)
    assert_filled(model)
    assert model.net[0].fp8_state.scales.forward.history.shape[0] == (1024 if recipe is None else 4)


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_trainer_reads_a_checkpoint_before_it_replaces_layers(tmp_path: Path) -> None:
    """Layers that are PyTorch's when a checkpoint is read have no place for scales."""
    trainer = _trainer(tmp_path, 2, recipe=AS_DICT)
    trainer.fit(MadeAtOnce(), _loader())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*_extra_state"):
        _trainer(tmp_path, 4, recipe=AS_DICT).fit(MadeAtOnce(), _loader(), ckpt_path=tmp_path / "two.ckpt")


@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_trainer_checkpoint(tmp_path: Path) -> None:
    """A training that is interrupted and resumed has the bits of one that never stopped, weights and scales."""
    options = {"recipe": AS_DICT, "replace_layers": True}
    whole = Lit()
    _trainer(tmp_path, 10, **options).fit(whole, _loader())
    assert len(gemm_modules(whole)) == 2

    half = Lit()
    trainer = _trainer(tmp_path, 5, **options)
    trainer.fit(half, _loader())
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = Lit(seed=1)
    _trainer(tmp_path, 10, **options).fit(resumed, _loader(), ckpt_path=tmp_path / "half.ckpt")
    assert half.losses + resumed.losses == whole.losses
    assert_same(parameters(resumed), parameters(whole))
    assert_same(scales(resumed), scales(whole))
    assert_filled(resumed)
