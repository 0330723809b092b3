# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`make_graphed_callables` on a GPU: training by replays is training in eager, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)
from te_dispatch.pytorch.distributed.rng_tracker import DEFAULT_STATE, RngStatesTracker
from te_dispatch.pytorch.modules.gemm_module import GemmModule

DELAYED = DelayedScaling(amax_history_len=4)
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "delayed": DELAYED,
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
}
HIDDEN = 256
BF16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(HIDDEN, 2 * HIDDEN, **BF16),
    "Linear of three": lambda: te.Linear(HIDDEN, 3 * HIDDEN, parameters_split=("q", "k", "v"), **BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(HIDDEN, 2 * HIDDEN, **BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(HIDDEN, 4 * HIDDEN, **BF16),
    "TransformerLayer": lambda: layer(),
}


def layer(dropout: float = 0.0, **kwargs: Any) -> te.TransformerLayer:
    return te.TransformerLayer(
        HIDDEN, 4 * HIDDEN, 4, hidden_dropout=dropout, attention_dropout=dropout, **BF16, **kwargs
    )


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return MODULES[name]()


def sample(seed: int = 0, gradient: bool = True) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(64, 2, HIDDEN, device="cuda", generator=generator).bfloat16()
    return x.requires_grad_(gradient)


def needs(recipe: str) -> None:
    """Skip a recipe whose products have no matrix units here: emulated ones make no claim of being capturable."""
    capability = torch.cuda.get_device_capability()
    if (recipe == "mxfp8" and capability < (10, 0)) or (recipe == "block" and capability < (9, 0)):
        pytest.skip(f"{recipe} is emulated on sm_{capability[0]}{capability[1]}")


def graphed(module: torch.nn.Module, recipe: Recipe | None, **kwargs: Any) -> Any:
    return te.make_graphed_callables(module, (sample(),), enabled=recipe is not None, recipe=recipe, **kwargs)


def state_of(module: torch.nn.Module) -> list[torch.Tensor]:
    parts = [part for part in module.modules() if isinstance(part, GemmModule)]
    return [tensor for part in parts for scales in part.fp8_state.scales.live().values() for tensor in scales.values()]


def trained(
    module: torch.nn.Module, recipe: Recipe | None, steps: int = 5, accumulate: int = 1, **call: Any
) -> list[torch.Tensor]:
    """All that some steps of SGD give: results, gradients, parameters, states of delayed scaling."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=1e-4), []
    for step in range(steps):
        optimizer.zero_grad()
        for microbatch in range(accumulate):
            x = sample(10 * step + microbatch)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = module(x, **{name: value(microbatch) for name, value in call.items()})
            out.backward(torch.cos(torch.arange(out.numel(), device="cuda").reshape(out.shape)).to(out.dtype))
            found += [x.detach().clone() for x in (out, x.grad, *state_of(module))]
        found += [parameter.grad.clone() for parameter in module.parameters()]
        optimizer.step()
        found += [parameter.detach().clone() for parameter in module.parameters()]
    return found


def differing(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[int]:
    assert len(ours) == len(theirs) and all(bool(tensor.isfinite().all()) for tensor in theirs)
    return [number for number, pair in enumerate(zip(ours, theirs)) if not torch.equal(*pair)]


def compared(name: str, recipe: str) -> None:
    theirs, again = (trained(made(name), RECIPES[recipe]) for _ in range(2))
    if differing(again, theirs):
        pytest.skip(f"{name}, {recipe}: eager itself gives other bits in a second run")
    assert not differing(trained(graphed(made(name), RECIPES[recipe]), RECIPES[recipe]), theirs)


# -- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_training_is_that_of_eager(name: str, recipe: str) -> None:
    needs(recipe)
    with te_dispatch.policy("deterministic"):
        theirs = trained(made(name), RECIPES[recipe])
        assert not differing(trained(graphed(made(name), RECIPES[recipe]), RECIPES[recipe]), theirs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "TransformerLayer"])
def test_under_the_default_policy(name: str, recipe: str) -> None:
    needs(recipe)
    compared(name, recipe)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
@pytest.mark.parametrize("policy", ["triton-only", "portable"])
def test_under_other_policies(policy: str, recipe: str) -> None:
    with te_dispatch.policy(policy):
        compared("TransformerLayer", recipe)


def test_states_and_random_numbers_are_as_before_the_capture() -> None:
    module = made("TransformerLayer")
    trained(module, DELAYED, steps=2)
    before, random = [tensor.clone() for tensor in state_of(module)], torch.cuda.get_rng_state()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    x = sample()
    te.make_graphed_callables(module, (x,), enabled=True, recipe=DELAYED)
    assert not differing(state_of(module), before) and torch.equal(torch.cuda.get_rng_state(), random)
    assert not differing([parameter.grad for parameter in module.parameters()], gradients)


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_the_other_mode_runs_in_eager(recipe: str) -> None:
    found: list[list[torch.Tensor]] = []
    with te_dispatch.policy("deterministic"):
        for module in (graphed(made("TransformerLayer"), RECIPES[recipe]), made("TransformerLayer")):
            found.append([])
            for mode in (True, False, True, False, True):
                found[-1] += trained(module.train(mode), RECIPES[recipe], steps=1)
                with torch.no_grad(), te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]):
                    found[-1].append(module(sample(9)).clone())
    assert not differing(*found)


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_a_graph_for_inference(recipe: str) -> None:
    module, x = made("TransformerLayer").eval(), sample(gradient=False)
    with torch.no_grad(), te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]):
        expected = [module(sample(seed)) for seed in (1, 2)]
        te.make_graphed_callables(module, (x,), enabled=recipe != "bf16", recipe=RECIPES[recipe])
        assert not differing([module(sample(seed)).clone() for seed in (1, 2)], expected)


def test_torch_autocast() -> None:
    def run(module: torch.nn.Module) -> list[torch.Tensor]:
        found = []
        for seed in range(3):
            with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), te.autocast(recipe=DELAYED):
                out = module(sample(seed, False).float())
            module.zero_grad()
            out.sum().backward()
            found += [out.detach().clone(), *(p.grad for p in module.parameters()), *map(torch.clone, state_of(module))]
        return found

    def module() -> torch.nn.Module:
        torch.manual_seed(0)
        return te.LayerNormMLP(HIDDEN, 4 * HIDDEN, device="cuda")

    ours = module()
    with te_dispatch.policy("deterministic"):
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            te.make_graphed_callables(ours, (sample(gradient=False).float(),), enabled=True, recipe=DELAYED)
        assert not differing(run(ours), run(module()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside(reentrant: bool) -> None:
    """A recomputation uses the scales of its forward, which the replay copies anew."""

    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = made("LayerNormMLP")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return te.checkpoint(self.part, x, use_reentrant=reentrant, preserve_rng_state=False)

    with te_dispatch.policy("deterministic"):
        if reentrant:  # no gradients of anything but its arguments can be asked for
            with pytest.raises(RuntimeError, match="use_reentrant"):
                graphed(Checkpointed(), DELAYED)
            return
        assert not differing(trained(graphed(Checkpointed(), DELAYED), DELAYED), trained(made("LayerNormMLP"), DELAYED))


# -- microbatches and pipelines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear of three", "TransformerLayer"])
def test_weights_are_quantized_in_first_microbatches_only(name: str, recipe: str) -> None:
    needs(recipe)
    call = {"is_first_microbatch": lambda microbatch: microbatch == 0}
    with te_dispatch.policy("deterministic"):
        theirs = trained(made(name), RECIPES[recipe], 3, 3, **call)
        ours = graphed(made(name), RECIPES[recipe], cache_quantized_params=True)
        assert not differing(trained(ours, RECIPES[recipe], 3, 3, **call), theirs)


def test_gradients_accumulate_over_calls() -> None:
    with te_dispatch.policy("deterministic"):
        theirs = trained(made("TransformerLayer"), DELAYED, 3, 3)
        assert not differing(trained(graphed(made("TransformerLayer"), DELAYED), DELAYED, 3, 3), theirs)


def test_several_modules_in_a_row() -> None:
    def run(modules: list[torch.nn.Module]) -> list[torch.Tensor]:
        found = []
        for seed in range(4):
            x = out = sample(seed)
            with te.autocast(recipe=DELAYED):
                for module in modules:
                    module.zero_grad()
                    out = module(out)
            out.sum().backward()
            found += [t.detach().clone() for t in (out, x.grad)]
            found += [p.grad for module in modules for p in module.parameters()]
            found += [t.clone() for module in modules for t in state_of(module)]
        return found

    with te_dispatch.policy("deterministic"):
        ours, theirs = ([made("TransformerLayer"), made("LayerNormMLP")] for _ in range(2))
        te.make_graphed_callables(tuple(ours), ((sample(),), (sample(),)), enabled=True, recipe=DELAYED)
        assert not differing(run(ours), run(theirs))


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_calls_of_a_pipeline(recipe: str, caches: bool) -> None:
    """Two chunks of one layer, two microbatches, interleaved."""
    order = [1, 2, 1, -2, 2, -1, -2, -1]

    def run(modules: list[torch.nn.Module], calls: list[list[Callable[..., Any]]]) -> list[torch.Tensor]:
        pending: dict[int, list[Any]] = {1: [], 2: []}
        done, found = {1: 0, 2: 0}, []
        for entry in order:
            chunk = abs(entry)
            if entry < 0:
                x, out = pending[chunk].pop(0)
                out.sum().backward()
                found.append(x.grad.clone())
                continue
            microbatch, done[chunk] = done[chunk], done[chunk] + 1
            first = {"is_first_microbatch": microbatch == 0} if caches else {}
            x = sample(10 * chunk + microbatch)
            with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]):
                out = calls[chunk - 1][microbatch](x, **first)
            pending[chunk].append((x, out))
            found.append(out.detach().clone())
        found += [p.grad.clone() for module in modules for p in module.parameters()]
        return [*found, *(t.clone() for module in modules for t in state_of(module))]

    with te_dispatch.policy("deterministic"):
        ours, theirs = ([made("TransformerLayer"), made("LayerNormMLP")] for _ in range(2))
        calls = te.make_graphed_callables(
            tuple(ours),
            tuple((sample(seed),) for seed in range(4)),
            enabled=recipe != "bf16",
            recipe=RECIPES[recipe],
            cache_quantized_params=caches,
            _order=order,
        )
        for step in range(3):
            for module in (*ours, *theirs):
                module.zero_grad()
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.add_(2.0**-8 * step)
            expected = run(theirs, [[theirs[0]] * 2, [theirs[1]] * 2])
            assert not differing(run(ours, [list(calls[:2]), list(calls[2:])]), expected)


def test_a_pool_is_shared() -> None:
    pool = torch.cuda.graph_pool_handle()
    first, second = (graphed(made("LayerNormMLP"), DELAYED, pool=pool) for _ in range(2))
    for module in (first, second):
        assert not differing(trained(module, DELAYED, 2), trained(made("LayerNormMLP"), DELAYED, 2))


# -- random numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_replays_drop_other_elements(recipe: str) -> None:
    torch.manual_seed(0)
    module, x = graphed(layer(dropout=0.5), RECIPES[recipe]), sample(1)

    def call() -> torch.Tensor:
        with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe], _graph=True):  # without an update
            return module(x).detach().clone()

    torch.cuda.manual_seed(3)
    first, second = call(), call()
    assert not torch.equal(first, second)
    torch.cuda.manual_seed(3)
    assert torch.equal(call(), first) and torch.equal(call(), second)


def test_draws_are_those_of_eager() -> None:
    found = []
    with te_dispatch.policy("deterministic"):
        for capture in (True, False):
            torch.manual_seed(0)
            module = layer(dropout=0.25)
            if capture:
                graphed(module, None)
            torch.cuda.manual_seed(5)
            found.append(trained(module, None, steps=3))
    assert not differing(*found)


def test_a_trackers_state_advances_with_replays() -> None:
    states = RngStatesTracker()
    states.add(DEFAULT_STATE, 7)

    def tracker() -> RngStatesTracker:
        return states

    module = layer(get_rng_state_tracker=tracker)
    module.self_attention.core_attention.attention_dropout = 0.5
    before = states.get_states()
    graphed(module, None)
    assert torch.equal(states.get_states()[DEFAULT_STATE], before[DEFAULT_STATE])
    own, x = torch.cuda.get_rng_state(), sample(1)
    first, second = module(x).detach().clone(), module(x).detach().clone()
    assert not torch.equal(first, second) and torch.equal(torch.cuda.get_rng_state(), own)
    states.set_states(before)
    assert torch.equal(module(x), first) and torch.equal(module(x), second)
    states.set_states(before)
    del module.forward
    assert torch.equal(module(x), first)


# -- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current"])
def test_a_replayed_step_does_not_wait_for_the_device(recipe: str) -> None:
    module, x = graphed(made("TransformerLayer"), RECIPES[recipe]), sample(1)

    def step() -> None:
        with te.autocast(enabled=recipe != "bf16", recipe=RECIPES[recipe]):
            out = module(x)
        out.backward(x.detach())

    step()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def test_replays_leave_no_memory_behind() -> None:
    module = graphed(made("TransformerLayer"), DELAYED)
    trained(module, DELAYED, 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        with te.autocast(recipe=DELAYED):
            module(sample(1)).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("stream", [False, True])
def test_another_stream(stream: bool) -> None:
    with te_dispatch.policy("deterministic"):
        module, theirs = graphed(made("TransformerLayer"), DELAYED), trained(made("TransformerLayer"), DELAYED)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()) if stream else contextlib.nullcontext():
            ours = trained(module, DELAYED)
        torch.cuda.synchronize()
    assert not differing(ours, theirs)


def test_errors_come_before_a_replay() -> None:
    module = graphed(made("Linear"), DELAYED)
    with te.autocast(recipe=DELAYED):
        with pytest.raises(
            ValueError, match=r"argument 0 must be torch.bfloat16 of shape \(64, 2, 256\).*\(32, 2, 256\)"
        ):
            module(sample()[:32].detach())
        with pytest.raises(ValueError, match=r"got torch.float32 of shape \(64, 2, 256\)"):
            module(sample().detach().float())
        with pytest.raises(ValueError, match=r"on cuda:0 as when it was captured, got .* on cpu"):
            module(sample().detach().cpu())
        module(sample())
    with pytest.raises(RuntimeError, match="call it in an autocast like the one it was captured for"):
        module(sample())
    with pytest.raises(ValueError, match="a sample of Linear is on cpu"):
        te.make_graphed_callables(made("Linear"), (torch.randn(64, HIDDEN),))
    with pytest.raises(ValueError, match="a parameter of Linear is on cpu"):
        te.make_graphed_callables(made("Linear").cpu(), (sample(),))
