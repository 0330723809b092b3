# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Arguments of tensor and context parallelism on one rank: what remains of them, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from te_dispatch.pytorch.distributed.collectives import prepare_te_modules_for_fsdp
from te_dispatch.pytorch.distributed.rng_tracker import DEFAULT_STATE, RngStatesTracker

HIDDEN, FFN, HEADS = 64, 128, 4

BUILDERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(HIDDEN, FFN, device="cpu", **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(HIDDEN, FFN, device="cpu", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(HIDDEN, FFN, device="cpu", **kw),
    "DotProductAttention": lambda **kw: te.DotProductAttention(HEADS, HIDDEN // HEADS, **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(HIDDEN, HEADS, device="cpu", **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(HIDDEN, FFN, HEADS, device="cpu", **kw),
}
CONTEXT = ("DotProductAttention", "MultiheadAttention", "TransformerLayer")


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def pair() -> Any:
    """What says of itself that it has two ranks."""
    return torch.distributed.ProcessGroup(torch.distributed.HashStore(), 0, 2)


def tracker(*seeds: tuple[str, int]) -> Callable[[], RngStatesTracker]:
    made = RngStatesTracker()
    for name, seed in seeds or ((DEFAULT_STATE, 7),):
        made.add(name, seed)
    return lambda: made


@pytest.mark.parametrize("name", BUILDERS)
def test_a_group_of_one_rank_is_kept_and_can_be_set_later(name: str, alone: Any) -> None:
    module = BUILDERS[name](tp_group=alone, tp_size=1, sequence_parallel=True)
    assert module.tp_group is alone and module.tp_size == 1 and module.sequence_parallel is False
    module.set_tensor_parallel_group(None)
    assert {part.tp_group for part in module.modules() if hasattr(part, "tp_group")} == {None}
    module.set_tensor_parallel_group(alone)
    assert {part.tp_group for part in module.modules() if hasattr(part, "tp_group")} == {alone}


def test_what_a_subclass_sets_before_the_constructor_does_not_count() -> None:
    class Row(te.Linear):
        """As GPT-NeoX writes its wrappers."""

        def __init__(self) -> None:
            self.sequence_parallel = True
            super().__init__(HIDDEN, FFN, sequence_parallel=True, parallel_mode="row", device="cpu")

    layer = Row()
    assert layer.sequence_parallel is False and marks(layer.bias) == GATHERED


@pytest.mark.parametrize("name", BUILDERS)
def test_other_objects_than_groups_are_refused(name: str, pair: Any) -> None:
    build = BUILDERS[name]
    with pytest.raises(TypeError, match=f"{name}: tp_group must be a torch.distributed.ProcessGroup or None, got str"):
        build(tp_group="tp")
    with pytest.raises(TypeError, match=f"{name}: get_rng_state_tracker must be a function"):
        build(get_rng_state_tracker=RngStatesTracker())
    module = build()
    with pytest.raises(ValueError, match="tp_group has 2 ranks, and the parameters were made for 1"):
        module.set_tensor_parallel_group(pair)
    assert {part.tp_group for part in module.modules() if hasattr(part, "tp_group")} == {None}


@pytest.mark.parametrize("name", ["LayerNormMLP", "MultiheadAttention", "TransformerLayer"])
def test_parts_whose_results_nobody_adds_up_are_refused(name: str, pair: Any) -> None:
    for given in ({"tp_size": 2}, {"tp_group": pair}):
        with pytest.raises(ValueError, match=f"{name}: tp_size=2 needs set_parallel_mode=True"):
            BUILDERS[name](**given)


@pytest.mark.parametrize("name", CONTEXT)
def test_context_parallelism_on_one_rank(name: str, alone: Any, pair: Any) -> None:
    module = BUILDERS[name]()
    module.set_context_parallel_group(alone, [0], None, "a2a")
    assert {part.cp_group for part in module.modules() if hasattr(part, "cp_group")} == {alone}
    module.set_context_parallel_group([alone, alone], [0], None, "a2a+p2p")
    module.set_context_parallel_group(
        alone, [0], None, load_balancing_strategy=te.CPLoadBalancingStrategy.NO_LOAD_BALANCE
    )
    with pytest.raises(TypeError, match="load_balancing_strategy must be a CPLoadBalancingStrategy, got str"):
        module.set_context_parallel_group(alone, [0], None, "p2p", "dual_chunk_swap")
    with pytest.raises(NotImplementedError, match="cp_group of 2 ranks"):
        module.set_context_parallel_group([alone, pair], [0], None, "a2a+p2p")
    with pytest.raises(ValueError, match="cp_comm_type must be one of"):
        module.set_context_parallel_group(alone, [0], None, "ring")


def test_attention_takes_its_context_group_at_construction(alone: Any, pair: Any) -> None:
    attention = te.DotProductAttention(HEADS, 16, cp_group=alone, cp_global_ranks=[0], cp_comm_type="all_gather")
    assert attention.cp_group is alone
    with pytest.raises(NotImplementedError, match="DotProductAttention: cp_group of 2 ranks"):
        te.DotProductAttention(HEADS, 16, cp_group=pair)


def marks(parameter: torch.Tensor) -> dict[str, Any]:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    return {name: getattr(parameter, name) for name in names if hasattr(parameter, name)}


def divided(dim: int) -> dict[str, Any]:
    return {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}


GATHERED = {"sequence_parallel": False}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("split", [None, ("query", "key")])
@pytest.mark.parametrize(
    ("mode", "of_weight", "of_bias"),
    [(None, divided(0), {}), ("column", divided(0), divided(0)), ("row", divided(1), GATHERED)],
)
def test_parameters_are_marked_by_mode(mode: Any, of_weight: Any, of_bias: Any, split: Any, device: str) -> None:
    for build in (te.Linear, te.LayerNormLinear):
        layer = build(HIDDEN, FFN, parallel_mode=mode, parameters_split=split, device=device)
        assert layer.parallel_mode == mode
        for name, parameter in layer.named_parameters():
            wanted = GATHERED if "layer_norm" in name else of_weight if name.endswith("weight") else of_bias
            assert marks(parameter) == wanted, name


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear: parallel_mode must be one of None, 'column', 'row', got 'diagonal'"):
        te.Linear(16, 16, parallel_mode="diagonal", device="cpu")


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_marks_its_parts(whole: bool) -> None:
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, set_parallel_mode=whole, output_layernorm=True, device="cpu")
    mode = ("column", "row") if whole else (None, None)
    assert (layer.self_attention.qkv.parallel_mode, layer.self_attention.proj.parallel_mode) == mode
    found = {name: marks(parameter) for name, parameter in layer.named_parameters()}
    assert found["layernorm_mlp.fc1_weight"] == found["layernorm_mlp.fc1_bias"] == divided(0)
    assert found["layernorm_mlp.fc2_weight"] == divided(1)
    assert found["layernorm_mlp.fc2_bias"] == (GATHERED if whole else {})
    assert found["self_attention.proj.weight"] == divided(1 if whole else 0)
    assert found["layernorm.weight"] == found["layernorm_mlp.layer_norm_weight"] == GATHERED


@pytest.mark.parametrize("norm", [te.LayerNorm, te.RMSNorm])
def test_norms_are_marked_as_told(norm: Any) -> None:
    assert all(marks(parameter) == {} for parameter in norm(16, device="cpu").parameters())
    for told in (True, False):
        module = norm(16, sequence_parallel=told, device="cpu")
        assert module.sequence_parallel is told
        assert all(marks(parameter) == {"sequence_parallel": told} for parameter in module.parameters())


@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention"])
def test_weights_are_initialized_from_the_trackers_state(name: str) -> None:
    def weights(**kwargs: Any) -> list[torch.Tensor]:
        module = BUILDERS[name](**kwargs)
        return [
            p.detach() for n, p in module.named_parameters() if "weight" in n and "norm" not in n.rpartition(".")[2]
        ]

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = weights(get_rng_state_tracker=tracker())
    assert torch.equal(torch.get_rng_state(), before)  # the process's own state is untouched
    torch.manual_seed(2)
    assert all(map(torch.equal, first, weights(get_rng_state_tracker=tracker())))
    assert not any(map(torch.equal, first, weights()))


def test_the_trackers_state_is_chosen_by_name() -> None:
    def weight(**kwargs: Any) -> torch.Tensor:
        states = tracker((DEFAULT_STATE, 7), ("expert", 8))
        return te.Linear(16, 16, get_rng_state_tracker=states, device="cpu", **kwargs).weight.detach()

    assert torch.equal(weight(), weight(rng_tracker_name=DEFAULT_STATE))
    assert not torch.equal(weight(), weight(rng_tracker_name="expert"))
    with pytest.raises(KeyError, match="no random state 'other' was added, only 'model-parallel-rng', 'expert'"):
        weight(rng_tracker_name="other")


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_attention_drops_from_the_trackers_state(sequence_parallel: bool) -> None:
    x = torch.randn(8, 2, HEADS, 16)
    results = []
    for seed in (1, 2):
        attention = te.DotProductAttention(
            HEADS, 16, attention_dropout=0.5, get_rng_state_tracker=tracker(), sequence_parallel=sequence_parallel
        )
        torch.manual_seed(seed)
        results.append((attention(x, x, x), attention(x, x, x)))
    first, second = results
    assert torch.equal(first[0], second[0]) is torch.equal(first[1], second[1]) is not sequence_parallel
    assert not torch.equal(*first)  # the state moves on


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_replays_the_tracker(use_reentrant: bool) -> None:
    x = torch.randn(8, 2, HIDDEN)

    def train(checkpointed: bool, passes: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        states = tracker()
        torch.manual_seed(3)
        layer = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.5, get_rng_state_tracker=states, device="cpu")
        inp = x.clone().requires_grad_()
        if checkpointed:
            y = te.checkpoint(
                layer, inp, use_reentrant=use_reentrant, get_rng_state_tracker=states,
                distribute_saved_activations=use_reentrant, tp_group=None,
            )  # fmt: skip
        else:
            y = layer(inp)
        with states().fork():
            torch.rand(3)  # drawn between forward and backward: neither replayed nor lost
        for i in range(passes):
            y.sum().backward(retain_graph=i + 1 < passes)
        return [y.detach(), inp.grad, *(p.grad for p in layer.parameters())], states().get_states()  # type: ignore[list-item]

    for passes in (1,) if use_reentrant else (1, 2):  # early stopping frees what a second pass would need if reentrant
        plain, recomputed = train(False, passes), train(True, passes)
        assert all(map(torch.equal, plain[0], recomputed[0]))
        assert torch.equal(plain[1][DEFAULT_STATE], recomputed[1][DEFAULT_STATE])


def test_a_checkpoint_over_several_ranks_is_refused(pair: Any) -> None:
    with pytest.raises(NotImplementedError, match="distribute_saved_activations: tp_group of 2 ranks"):
        te.checkpoint(torch.sin, torch.ones(2, requires_grad=True), distribute_saved_activations=True, tp_group=pair)


def test_the_trackers_own_rules() -> None:
    states = tracker(("a", 1), ("b", 2))()
    with pytest.raises(RuntimeError, match="seed 1 is in use already"):
        states.add("c", 1)
    with pytest.raises(RuntimeError, match="a state 'a' is there already"):
        states.add("a", 3)
    kept = states.get_states()
    with states.fork("a"):
        first = torch.rand(4)
    with states.fork("b"):
        other = torch.rand(4)
    states.set_states(kept)
    with states.fork("a"):
        assert torch.equal(torch.rand(4), first)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4), first) and not torch.equal(first, other)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), states.fork("a"):
        torch.rand(1)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    states.reset()
    assert states.get_states() == {}


@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), Float8BlockScaling(), MXFP8BlockScaling()])
@pytest.mark.parametrize("needs", [(True, True), (False, True), (True, False)])
def test_saving_the_original_input_changes_no_bit(recipe: Any, needs: tuple[bool, bool]) -> None:
    x = torch.randn(64, HIDDEN)

    def train(saves: bool) -> tuple[list[torch.Tensor | None], list[torch.Tensor]]:
        torch.manual_seed(0)
        layer, inp = te.Linear(HIDDEN, FFN, device="cpu"), x.clone().requires_grad_(needs[0])
        layer.weight.requires_grad_(needs[1])
        saved: list[torch.Tensor] = []
        layer.save_original_input = not saves
        for _ in range(3):
            with te.autocast(recipe=recipe):
                y = layer(inp)
            layer.zero_grad()
            inp.grad = None
            y.sin().sum().backward()
            layer.save_original_input = saves  # calls that were known before must be forgotten
        with (
            te.autocast(recipe=recipe),
            torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t),
        ):
            layer(inp)
        return [y.detach(), inp.grad, layer.weight.grad, layer.bias.grad], saved

    (kept, of_input), (quantized, of_copy) = train(True), train(False)
    assert all((a is None) is (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(kept, quantized))

    def floats(saved: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t for t in saved if t.dtype == torch.float32 and t.shape == x.shape]

    assert [torch.equal(t, x) for t in floats(of_input)] == [True] * needs[1]
    assert floats(of_copy) == []


def test_saving_the_original_input_does_not_go_with_delayed_scaling() -> None:
    layer = te.Linear(32, 32, save_original_input=True, device="cpu")
    assert layer(torch.randn(16, 32)).shape == (16, 32)
    with te.autocast(recipe=DelayedScaling()), pytest.raises(ValueError, match=r"save_original_input.*DelayedScaling"):
        layer(torch.randn(16, 32))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (lambda: te.Linear(16, 32, bias=False, device="cpu"), ["bias"]),
        (
            lambda: te.LayerNormLinear(16, 32, bias=False, parameters_split=("a", "b"), device="cpu"),
            ["a_bias", "b_bias"],
        ),
        (lambda: te.LayerNormMLP(16, 32, bias=False, device="cpu"), ["fc1_bias", "fc2_bias"]),
    ],
)
def test_a_module_without_bias_has_empty_ones(module: Callable[[], torch.nn.Module], names: list[str]) -> None:
    built = module()
    assert [getattr(built, name).numel() for name in names] == [0] * len(names)
    assert not any("_bias" in name and "norm" not in name for name in built.state_dict())


def wrapped(*modules: torch.nn.Module) -> Any:
    """Modules in a sequence, each wrapped by FSDP, and the sequence too."""
    kinds = ModuleWrapPolicy({type(module) for module in modules})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*NO_SHARD.*")
        return FullyShardedDataParallel(
            torch.nn.Sequential(*modules), device_id=torch.device("cpu"), auto_wrap_policy=kinds
        )


def test_fsdp_is_prepared_on_one_rank(alone: Any) -> None:
    linear, mlp = BUILDERS["Linear"](), te.LayerNormMLP(FFN, FFN, device="cpu")
    expected = torch.nn.Sequential(linear, mlp)(x := torch.randn(4, HIDDEN)).detach()
    model = wrapped(linear, mlp)
    prepare_te_modules_for_fsdp(model)
    out = model(x)
    out.sum().backward()
    assert torch.equal(out, expected) and all(parameter.grad is not None for parameter in model.parameters())


def test_fsdp_that_is_not_prepared(alone: Any, pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="must be wrapped by FullyShardedDataParallel, got Linear"):
        prepare_te_modules_for_fsdp(BUILDERS["Linear"]())
    model = wrapped(BUILDERS["Linear"]())
    monkeypatch.setattr(model.module[0], "process_group", pair)
    with pytest.raises(NotImplementedError, match=r"process group of 2 ranks is not supported yet.*leave the call out"):
        prepare_te_modules_for_fsdp(model)
    monkeypatch.undo()
    quantized = te.MXFP8Quantizer(te.DType.kFloat8E4M3).quantize(torch.randn(32, 32))
    layer = model.module[0].module
    monkeypatch.setattr(type(layer), "parameters", lambda self, recurse=True: iter([quantized]))
    with pytest.raises(RuntimeError, match="Linear has quantized parameters"):
        prepare_te_modules_for_fsdp(model)
