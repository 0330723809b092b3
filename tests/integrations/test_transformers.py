# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""transformers' Trainer, which trains in FP8 through accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from accelerate.state import AcceleratorState
from accelerate.utils import convert_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import te_dispatch.pytorch as te

from .states import (
    DEVICE,
    TRAINER_REFUSED,
    assert_falls,
    assert_filled,
    assert_same,
    gemm_modules,
    parameters,
    scales,
)

pytestmark = pytest.mark.skipif(bool(TRAINER_REFUSED), reason=TRAINER_REFUSED or "-")

VOCABULARY, TOKENS, STEPS = 64, 16, 8


@pytest.fixture(autouse=True)
def fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``accelerate launch --mixed_precision fp8 --fp8_backend te`` sets; TrainingArguments cannot say it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
    monkeypatch.setenv("ACCELERATE_FP8_AMAX_HISTORY_LEN", "4")


def _model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=TOKENS,
        )
    )


def _data() -> list[dict[str, torch.Tensor]]:
    """Sentences that go up by one, from anywhere: quickly learnt."""
    starts = torch.randint(0, VOCABULARY, (64,), generator=torch.Generator().manual_seed(1))
    rows = [(start + torch.arange(TOKENS)) % VOCABULARY for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def _trainer(where: Path, model: LlamaForCausalLM, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(where),
        use_cpu=DEVICE == "cpu",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=_data(), eval_dataset=_data()[:8])


def _converted(trainer: Trainer) -> Trainer:
    """With te_dispatch's modules already in the model; needs the Accelerator that making the Trainer makes."""
    with torch.no_grad():
        convert_model(trainer.model)
    return trainer


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(tmp_path / "fp8", _model())
    trainer.train()
    assert trainer.accelerator.mixed_precision == "fp8"
    names = [name for name, module in gemm_modules(trainer.model)]
    assert len(names) == 2 * 7 + 1  # of each layer's attention 4, of its MLP 3; the head
    assert not [name for name, module in trainer.model.named_modules() if type(module) is torch.nn.Linear]
    assert_falls(_losses(trainer))
    assert_filled(trainer.model)
    assert trainer.model.lm_head.fp8_state.scales.forward.history.shape[0] == 4

    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    monkeypatch.delenv("ACCELERATE_FP8_BACKEND")  # by itself, it has accelerate convert the model and run it in FP8
    other = _trainer(tmp_path / "bf16", _model(), bf16=True)
    other.train()
    assert gemm_modules(other.model) == []
    assert _losses(other) != _losses(trainer)
    assert _losses(other) == pytest.approx(_losses(trainer), rel=0.1)


def test_gradient_accumulation_and_checkpointing(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    plain, recomputed = (
        _trainer(tmp_path / str(checkpointing), _model(), activation_checkpointing=checkpointing, **options)
        for checkpointing in (False, True)
    )
    for trainer in (plain, recomputed):
        trainer.train()
        assert_filled(trainer.model)
    assert _losses(plain) == _losses(recomputed)
    assert_same(scales(plain.model), scales(recomputed.model))


def test_evaluation_is_in_high_precision(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, _model())
    trainer.train()
    before = scales(trainer.model)
    found = trainer.evaluate()["eval_loss"]
    assert_same(scales(trainer.model), before)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    rows = torch.stack([row["input_ids"] for row in _data()[:8]]).to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        expected = [model(input_ids=part, labels=part).loss.item() for part in rows.split(4)]
    # The mean over 8 rows, each with the loss of its batch, in float32: 8 roundings by 2^-24.
    assert found == pytest.approx(sum(expected) / 2, rel=8 * 2**-24)


def test_resuming_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    """Of a model that was converted before its checkpoint is read: the scales are read too."""
    whole = _converted(_trainer(tmp_path, _model()))
    whole.train()
    resumed = _converted(_trainer(tmp_path, _model(seed=1)))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert _losses(resumed) == _losses(whole)  # the first half is read from the checkpoint
    assert_same(parameters(resumed.model), parameters(whole.model))
    assert_same(scales(resumed.model), scales(whole.model))


def test_resuming_without_conversion_starts_the_scales_anew(tmp_path: Path) -> None:
    """The Trainer reads a checkpoint before accelerate converts the model: `torch.nn.Linear` has no place for scales.
    The weights are those of the checkpoint, and training goes on from scales of 1."""
    whole = _trainer(tmp_path, _model())
    whole.train()
    resumed = _trainer(tmp_path, _model(seed=1))
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert _losses(resumed) != _losses(whole)
    assert _losses(resumed) == pytest.approx(_losses(whole), rel=0.05)


def test_save_pretrained(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path / "training", _model())
    trainer.train()
    trained = trainer.model
    trained.save_pretrained(tmp_path / "saved")

    plain = LlamaForCausalLM.from_pretrained(tmp_path / "saved").to(DEVICE)
    assert gemm_modules(plain) == []
    assert_same(parameters(plain), parameters(trained))

    converted = _converted(_trainer(tmp_path / "training", _model(seed=1))).model
    assert isinstance(converted.lm_head, te.Linear)
    converted.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert_same(parameters(converted), parameters(trained))
    assert_same(scales(converted), scales(trained))
