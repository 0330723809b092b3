# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Megatron Core's GPT with its Transformer Engine layers, on one rank.

Its schedules need CUDA; the loop here does what they do: it declares the first microbatch of each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.extensions import transformer_engine as extension
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

import te_dispatch.pytorch as te

from .states import assert_falls, assert_same, parameters, scales

LAYERS, HIDDEN, VOCABULARY, SEQUENCE, BATCH = 2, 64, 128, 64, 4
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
#: RMSNorm, SwiGLU, grouped queries, rotary embedding, no biases: Llama's layer.
LLAMA = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "num_query_groups": 2,
    "add_bias_linear": False,
    "apply_rope_fusion": True,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def calls_of_cuda() -> Iterator[None]:
    """Two calls that its rotary embedding and its checkpoints make even where everything is on the CPU."""
    if torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        yield


@pytest.fixture(autouse=True)
def no_random_states() -> None:
    """Its tracker counts as in use once a recomputation has set its states, and CPUs cannot add any."""
    get_cuda_rng_tracker().reset()


def gpt(recipe: str | None, post_process: bool = True, qk_layernorm: bool = False, **options: Any) -> GPTModel:
    if recipe is not None:
        options |= {"fp8": "e4m3" if recipe == "mxfp8" else "hybrid", "fp8_recipe": recipe}
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=2 * HIDDEN,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, qk_layernorm=qk_layernorm, **options,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope" if "apply_rope_fusion" in options else "learned_absolute",
        post_process=post_process,
    )


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens and labels, positions, mask with True where attention may not look)."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return data, torch.arange(SEQUENCE).expand(BATCH, SEQUENCE), mask


def train(model: GPTModel, steps: int) -> list[float]:
    """Losses of steps with two microbatches each."""
    data, positions, mask = tokens()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        model.set_is_first_microbatch()
        total = 0.0
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            loss = model(data[half, :-1], positions[half], mask, labels=data[half, 1:]).mean() / 2
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses


def test_its_layers_are_te_dispatchs() -> None:
    assert extension.HAVE_TE
    for name, module in gpt(None).decoder.layers[0].named_modules():
        for theirs, ours in (
            (extension.TELayerNormColumnParallelLinear, te.LayerNormLinear),
            (extension.TERowParallelLinear, te.Linear),
            (extension.TEDotProductAttention, te.DotProductAttention),
        ):
            assert not isinstance(module, theirs) or isinstance(module, ours), name
    modules = gpt(None).modules()
    assert sum(isinstance(m, (te.Linear, te.LayerNormLinear, te.DotProductAttention)) for m in modules) == 5 * LAYERS


@pytest.fixture(scope="module")
def high_precision() -> dict[bool, list[float]]:
    """Losses without FP8: of GPT, and of the layer like Llama's."""
    return {llama: train(gpt(None, **(LLAMA if llama else {})), 10) for llama in (False, True)}


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_ten_steps_in_fp8_follow_those_in_high_precision(recipe: str, llama: bool, high_precision: Any) -> None:
    model = gpt(recipe, **(LLAMA if llama else {}))
    losses = train(model, 10)
    assert_falls(losses)
    assert losses != high_precision[llama]
    assert losses == pytest.approx(high_precision[llama], rel=0.01)
    assert bool(scales(model)) is (recipe == "delayed")
    assert all(bool((scale != 1).all()) for name, scale in scales(model).items() if name.endswith(".scale"))


def test_ten_steps_in_bf16() -> None:
    assert_falls(train(gpt(None, params_dtype=torch.bfloat16, bf16=True).bfloat16(), 10))


@pytest.mark.parametrize("recipe", RECIPES)  # without FP8 its own checkpoint runs, which needs CUDA
def test_full_recomputation_changes_no_bit(recipe: str | None) -> None:
    plain = gpt(recipe)
    again = gpt(recipe, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert train(plain, 3) == train(again, 3)
    assert_same(parameters(again), parameters(plain))
    assert_same(scales(again), scales(plain))


@pytest.mark.parametrize("recipe", [None, "delayed", "blockwise"])
def test_gradient_accumulation_fusion(recipe: str | None) -> None:
    # Without the head, which is Megatron's own layer and needs a CUDA extension of Apex for this option.
    data, positions, mask = tokens()

    def gradients(fused: bool) -> dict[str, torch.Tensor]:
        model = gpt(recipe, post_process=False, gradient_accumulation_fusion=fused)
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False
        model.set_is_first_microbatch()
        for _ in range(2):
            model(data[:, :-1], positions, mask).sin().sum().backward()
        found = {}
        for name, parameter in model.named_parameters():
            added = parameter.grad_added_to_main_grad
            assert added is (fused and "linear" in name and name.endswith(".weight")), name
            found[name] = parameter.main_grad if added else parameter.grad
        return found

    plain, fused = gradients(False), gradients(True)
    for name, expected in plain.items():
        # Three roundings of float32 apart: of each gradient and of the sum.
        assert (fused[name] - expected).abs().max() <= 4e-7 * expected.abs().max(), name


@pytest.mark.parametrize("recipe", [None, "delayed", "tensorwise"])
def test_a_distributed_checkpoint_restores_every_bit(recipe: str | None, tmp_path: Path) -> None:
    model = gpt(recipe)
    train(model, 3)
    dist_checkpointing.save(model.sharded_state_dict(), str(tmp_path))
    other = gpt(recipe)
    loaded = dist_checkpointing.load(other.sharded_state_dict(), str(tmp_path))
    other.load_state_dict(loaded)
    assert_same(parameters(other), parameters(model))
    assert train(other, 2) == train(model, 2)
    assert_same(scales(other), scales(model))


def test_packed_sequences_attend_within_themselves() -> None:
    model = gpt(None, **LLAMA)
    data, _, _ = tokens()
    lengths = (24, 40)
    row = data[:1, :SEQUENCE]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    bounds = torch.tensor([0, 24, 64], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, None, None, max(lengths), max(lengths))
    together = model(row, positions, None, packed_seq_params=packed)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    start = 0
    for length in lengths:
        alone = model(row[:, start : start + length], positions[:, start : start + length], mask[..., :length, :length])
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=1e-5, atol=1e-5)
        start += length


def test_norms_of_queries_and_keys() -> None:
    model = gpt("delayed", qk_layernorm=True)
    assert isinstance(model.decoder.layers[0].self_attention.q_layernorm, te.LayerNorm)
    assert_falls(train(model, 10))
