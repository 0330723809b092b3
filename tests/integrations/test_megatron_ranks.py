# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Megatron Core's GPT with its Transformer Engine layers, divided among two ranks: tensor and sequence parallelism."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

from tests.pytorch import ranks

from . import test_megatron as one_rank


def _passes(model: GPTModel) -> float:
    """As on one rank; gradients that are those of a rank's tokens are added up, as Megatron's optimizers have it."""
    loss = one_rank.two_microbatches(model)
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(parameter.grad, group=parallel_state.get_tensor_model_parallel_group())
    return loss


def _losses(tensor_ranks: int, **options: Any) -> list[float]:
    """Of ten steps."""
    parallel_state.initialize_model_parallel(tensor_ranks, 1)
    try:
        model = one_rank.gpt(options.pop("recipe"), tensor_model_parallel_size=tensor_ranks, **options)
        return one_rank.train(model, 10, _passes)
    finally:
        parallel_state.destroy_model_parallel()


def _divided(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
            patch.setattr(torch.cuda, "synchronize", lambda: None)
            # Its random states are those of CUDA; nothing here is dropped.
            patch.setattr(CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext())
        for layer, sequence_parallel in (({}, False), ({}, True), (one_rank.LLAMA, True)):
            whole = _losses(1, recipe=None, **layer)
            one_rank.assert_falls(whole)
            # Sums over ranks are rounded in another order; amaxes of parts are their own.
            for recipe, bound in ((None, 1e-4), ("delayed", 0.01), ("tensorwise", 0.01)):
                divided = _losses(2, recipe=recipe, sequence_parallel=sequence_parallel, **layer)
                assert divided == pytest.approx(whole, rel=bound), (recipe, sequence_parallel)
                assert recipe is None or divided != whole


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    ranks.run(_divided, tmp_path)
