# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Megatron Core's GPT with its Transformer Engine layers, on one rank.

Its schedules, its random states and its own checkpoint need CUDA. The loop here does what its schedule does, which a
test compares on a GPU: it declares the first microbatch of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import te_dispatch.pytorch as te

from .states import DEVICE, assert_falls, assert_same, parameters, scales

LAYERS, HIDDEN, VOCABULARY, SEQUENCE, BATCH = 2, 64, 128, 64, 4
RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="this part of Megatron needs CUDA")
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
    torch.distributed.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def calls_of_cuda() -> Iterator[None]:
    """Two calls that its rotary embedding and its checkpoints make even where everything is on the CPU."""
    if DEVICE == "cuda":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        yield


def seed() -> None:
    torch.manual_seed(0)
    if DEVICE == "cuda":
        model_parallel_cuda_manual_seed(0)
    else:
        # Its tracker counts as in use once a recomputation has set its states, and CPUs cannot add any.
        get_cuda_rng_tracker().reset()


def gpt(
    recipe: str | None, post_process: bool = True, qk_layernorm: bool = False, dropout: float = 0.0, **options: Any
) -> GPTModel:
    if recipe is not None:
        options |= {"fp8": "e4m3" if recipe == "mxfp8" else "hybrid", "fp8_recipe": recipe}
    seed()
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=2 * HIDDEN,
        use_cpu_initialization=True, hidden_dropout=dropout, attention_dropout=dropout, qk_layernorm=qk_layernorm,
        **options,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope" if "apply_rope_fusion" in options else "learned_absolute",
        post_process=post_process,
    ).to(DEVICE)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(tokens and labels, positions, mask with True where attention may not look)."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    return data.to(DEVICE), torch.arange(SEQUENCE, device=DEVICE).expand(BATCH, SEQUENCE), mask.to(DEVICE)


HALVES = (slice(0, BATCH // 2), slice(BATCH // 2, BATCH))


def two_microbatches(model: GPTModel) -> float:
    """The loss of forward and backward passes over both halves of the batch."""
    data, positions, mask = tokens()
    model.set_is_first_microbatch()
    total = 0.0
    for half in HALVES:
        loss = model(data[half, :-1], positions[half], mask, labels=data[half, 1:]).mean() / 2
        loss.backward()
        total += loss.item()
    return total


def train(model: GPTModel, steps: int, passes: Callable[[GPTModel], float] = two_microbatches) -> list[float]:
    """The loss of each step."""
    seed()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(passes(model))
        optimizer.step()
    return losses


@needs_cuda
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_its_schedule_trains_as_the_loop_of_these_tests(recipe: str | None) -> None:
    data, positions, mask = tokens()

    def forward_step(halves: Iterator[slice], model: GPTModel) -> tuple[torch.Tensor, Callable[..., Any]]:
        half = next(halves)
        output = model(data[half, :-1], positions[half], mask, labels=data[half, 1:])
        return output, lambda found: (found.mean(), {"loss": found.mean().item() / 2})

    def its_schedule(model: GPTModel) -> float:
        reports = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(HALVES),
            model=model,
            num_microbatches=2,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH // 2,
        )
        return sum(report["loss"] for report in reports)

    by_loop, by_schedule = gpt(recipe), gpt(recipe)
    assert train(by_schedule, 5, its_schedule) == train(by_loop, 5)
    assert_same(parameters(by_schedule), parameters(by_loop))
    assert_same(scales(by_schedule), scales(by_loop))


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


@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.1, marks=needs_cuda)])
@pytest.mark.parametrize("recipe", [pytest.param(None, marks=needs_cuda), *RECIPES])  # without FP8: its own checkpoint
def test_full_recomputation_changes_no_bit(recipe: str | None, dropout: float) -> None:
    plain = gpt(recipe, dropout=dropout)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    again = gpt(recipe, dropout=dropout, **full)
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
        # Three roundings of float32 apart: of each gradient and of the sum. A GPU adds up the products of a row's
        # BATCH x SEQUENCE terms in an order of its own where it adds to what is there.
        roundings = 3 if DEVICE == "cpu" else BATCH * SEQUENCE
        assert (fused[name] - expected).abs().max() <= roundings * 2**-23 * expected.abs().max(), name


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
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    bounds = torch.tensor([0, 24, 64], dtype=torch.int32, device=DEVICE)
    packed = PackedSeqParams("thd", bounds, bounds, None, None, max(lengths), max(lengths))
    together = model(row, positions, None, packed_seq_params=packed)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=DEVICE).triu(1)
    start = 0
    for length in lengths:
        alone = model(row[:, start : start + length], positions[:, start : start + length], mask[..., :length, :length])
        torch.testing.assert_close(together[:, start : start + length], alone, rtol=1e-5, atol=1e-5)
        start += length


def test_norms_of_queries_and_keys() -> None:
    model = gpt("delayed", qk_layernorm=True)
    assert isinstance(model.decoder.layers[0].self_attention.q_layernorm, te.LayerNorm)
    assert_falls(train(model, 10))
