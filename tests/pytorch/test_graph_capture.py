# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`make_graphed_callables`: what surrounds CUDA graphs, with `CpuGraphs` in their place.

tests/gpu/test_graphed_callables.py has the same on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from te_dispatch.pytorch.fp8 import scale_update
from te_dispatch.pytorch.fp8.autocast import thread
from te_dispatch.pytorch.graphs import graphs
from tests.pytorch.capturing import MODULES, RECIPES, made, state_of
from tests.pytorch.graphs_on_cpu import CpuGraphs

DELAYED = DelayedScaling(amax_history_len=3)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "CudaGraphs", CpuGraphs)
    yield
    assert thread.recording is None and not scale_update._held


def sample(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (32, 1, 64))).requires_grad_()


def graphed(module: torch.nn.Module, recipe: Recipe | None, **kwargs: Any) -> Any:
    return te.make_graphed_callables(module, (sample(),), enabled=recipe is not None, recipe=recipe, **kwargs)


def trained(module: torch.nn.Module, recipe: Recipe | None, steps: int = 3) -> list[torch.Tensor]:
    """All that some steps of SGD give: results, gradients, parameters, states of delayed scaling."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    generator, found = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        x = torch.randn(32, 1, 64, generator=generator).requires_grad_()
        optimizer.zero_grad()
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = module(x)
        results = [out] if isinstance(out, torch.Tensor) else [part for part in out if part is not None]
        torch.autograd.backward(results, [torch.randn(part.shape, generator=generator) for part in results])
        optimizer.step()
        gradients = [parameter.grad for parameter in module.parameters()]
        found += [*results, x.grad, *gradients, *module.parameters(), *state_of(module)]
        found = [tensor.detach().clone() for tensor in found]
    return found


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    assert all(bool(tensor.isfinite().all()) for tensor in ours)
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# -- replays --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*((name, recipe) for name in MODULES for recipe in ("none", "delayed")), *(("Linear", r) for r in RECIPES)],
)
def test_training_is_that_of_eager(name: str, recipe: str) -> None:
    module = graphed(made(name), RECIPES[recipe])
    assert same(trained(module, RECIPES[recipe]), trained(made(name), RECIPES[recipe]))
    forward, backward = CpuGraphs.captured
    assert (forward.replays, backward.replays) == (3, 3)


def test_states_and_random_numbers_are_as_before_the_capture() -> None:
    module, x = made("TransformerLayer"), sample()
    module.hidden_dropout = 0.5
    trained(module, DELAYED, steps=2)
    before = [tensor.clone() for tensor in state_of(module)]
    gradients, random = [p.grad.clone() for p in module.parameters()], torch.get_rng_state()
    te.make_graphed_callables(module, (x,), enabled=True, recipe=DELAYED)
    assert same(state_of(module), before) and torch.equal(torch.get_rng_state(), random)
    assert same([p.grad for p in module.parameters()], gradients)
    assert not any(group.dirty for group in scale_update.trainer().groups)


def test_states_that_the_capture_makes_are_fresh() -> None:
    module = graphed(made("Linear"), DELAYED)
    histories, scales = state_of(module)[0::3], state_of(module)[1::3]
    assert len(scales) == 2 and all(not history.any() for history in histories)
    assert all(scale.eq(1).all() for scale in scales)


def test_a_state_that_is_bound_to_other_maxima_by_the_capture_keeps_its_amaxes() -> None:
    other = DelayedScaling(amax_history_len=4, margin=2)
    ours, theirs = made("Linear"), made("Linear")
    for module in (ours, theirs):
        trained(module, DELAYED, steps=2)
    assert same(trained(graphed(ours, other), other), trained(theirs, other))


def test_amaxes_that_wait_for_an_update_still_do_after_a_capture() -> None:
    module, other = made("Linear"), made("Linear")
    results = []
    for each in (module, other):
        with te.autocast(recipe=DELAYED):
            each(torch.ones(32, 64))
            if each is module:
                graphed(each, DELAYED)
        results.append([tensor.clone() for tensor in state_of(each)[:3]])
    assert same(*results)


def test_a_failed_capture_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made("Linear")
    trained(module, DELAYED, steps=2)
    before = [tensor.clone() for tensor in state_of(module)]
    monkeypatch.setattr(CpuGraphs, "capture", lambda self, function: [function(), 1 / 0])
    with pytest.raises(ZeroDivisionError):
        graphed(module, DELAYED)
    assert same(state_of(module), before) and "forward" not in vars(module)


def test_eager_calls_in_between_use_the_same_scales() -> None:
    ours, theirs = graphed(made("TransformerLayer"), DELAYED), made("TransformerLayer")
    found: list[list[torch.Tensor]] = [[], []]
    for mode in (True, False, True, True, False):
        for module, results in zip((ours, theirs), found):
            results += trained(module.train(mode), DELAYED, steps=1)
            with torch.no_grad(), te.autocast(recipe=DELAYED):
                results.append(module(torch.ones(32, 1, 64)))
    assert same(*found)
    assert CpuGraphs.captured[0].replays == 3


def test_a_graph_of_the_evaluation_mode() -> None:
    module = made("TransformerLayer").eval()
    with torch.no_grad():
        graphed(module, DELAYED)
        with te.autocast(recipe=DELAYED):
            out = module(torch.ones(32, 1, 64))
            assert len(CpuGraphs.captured) == 1 and CpuGraphs.captured[0].replays == 1
            expected = made("TransformerLayer").eval()(torch.ones(32, 1, 64))
    assert torch.equal(out, expected)
    with te.autocast(recipe=DELAYED):  # gradients were not captured
        module(torch.ones(32, 1, 64)).sum().backward()
    assert CpuGraphs.captured[0].replays == 1


def test_without_gradients_a_stateless_recipe_is_replayed() -> None:
    module, recipe = graphed(made("Linear"), Float8CurrentScaling()), Float8CurrentScaling()
    with torch.no_grad(), te.autocast(recipe=recipe):
        out = module(torch.ones(32, 1, 64))
        assert torch.equal(out, made("Linear")(torch.ones(32, 1, 64)))
    assert CpuGraphs.captured[0].replays == 1


def test_calibration() -> None:
    def run(module: torch.nn.Module) -> list[torch.Tensor]:
        with te.autocast(enabled=False, calibrating=True, recipe=DELAYED):
            out = module(torch.ones(32, 1, 64))
        return [out, *state_of(module)]

    ours = made("LayerNormMLP")
    te.make_graphed_callables(ours, (sample(),), calibrating=True, recipe=DELAYED)
    assert same(run(ours), run(made("LayerNormMLP"))) and not state_of(ours)[1].eq(1).all()


def test_another_thread_updates_what_it_replays() -> None:
    ours, theirs = graphed(made("Linear"), DELAYED), made("Linear")
    results: list[list[torch.Tensor]] = []

    def work() -> None:
        results.append(trained(ours, DELAYED))

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert same(results[0], trained(theirs, DELAYED))


def test_a_module_inside_is_scaled_by_its_own_recipe() -> None:
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = made("LayerNormMLP"), made("LayerNormMLP")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            with te.autocast(recipe=DelayedScaling(amax_history_len=2, margin=1)):
                return self.second(x)

    ours, theirs = Mixed(), Mixed()
    for module in (ours, theirs):
        trained(module, DELAYED, steps=2)  # so that calls are known in both autocasts
    assert same(trained(graphed(ours, DELAYED), DELAYED), trained(theirs, DELAYED))


def test_a_checkpoint_inside() -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = made("LayerNormMLP")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return te.checkpoint(self.part, x, use_reentrant=False)

    module = graphed(Checkpointed(), DELAYED)
    assert all(scales._frozen is None for scales in module.part.fp8_state.scales.live().values())
    assert same(trained(module, DELAYED), trained(made("LayerNormMLP"), DELAYED))


# -- microbatches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["none", "delayed", "block", "nvfp4"])
@pytest.mark.parametrize("name", ["Linear of three", "LayerNormMLP"])
def test_weights_are_quantized_in_first_microbatches_only(name: str, recipe: str) -> None:
    def run(module: torch.nn.Module) -> list[torch.Tensor]:
        optimizer, found = torch.optim.SGD(module.parameters(), lr=1e-3), []
        for step in range(3):
            for microbatch in range(3):
                x = torch.full((32, 1, 64), 1.0 + step).cumsum(-1).div(64).sub(microbatch).requires_grad_()
                with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                    out = module(x, is_first_microbatch=microbatch == 0)
                out.sum().backward()
                found += [x.detach().clone() for x in (out, x.grad, *state_of(module))]
            found += [parameter.grad.clone() for parameter in module.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        return found

    ours = graphed(made(name), RECIPES[recipe], cache_quantized_params=True)
    if recipe == "none":
        assert len(CpuGraphs.captured) == 2
    else:
        weights, *_ = CpuGraphs.captured
        assert len(CpuGraphs.captured) == 3 and weights.replays == 1
        assert [graph.apart for graph in CpuGraphs.captured] == [True, False, False]
    assert same(run(ours), run(made(name)))
    assert recipe == "none" or weights.replays == 1 + 3


def test_every_call_says_which_microbatch_it_is() -> None:
    cached, plain = graphed(made("Linear"), DELAYED, cache_quantized_params=True), graphed(made("Linear"), DELAYED)
    with te.autocast(recipe=DELAYED):
        with pytest.raises(TypeError, match="every call needs is_first_microbatch=True or False, got None"):
            cached(sample())
        with pytest.raises(ValueError, match="is_first_microbatch=False needs cache_quantized_params=True"):
            plain(sample(), is_first_microbatch=False)
        plain(sample(), is_first_microbatch=True)


# -- several callables ----------------------------------------------------------------------------------------------


def test_several_modules_are_captured_in_order() -> None:
    ours, theirs = ([made("LayerNormMLP") for _ in range(3)] for _ in range(2))
    for number, module in enumerate((*ours, *theirs)):
        torch.nn.init.constant_(module.fc2_bias, number % 3)
    found = te.make_graphed_callables(
        tuple(ours), tuple((sample(),) for _ in ours), enabled=(True, False, True), recipe=DELAYED
    )
    assert found == tuple(ours)

    def run(modules: list[torch.nn.Module]) -> list[torch.Tensor]:
        x = out = torch.linspace(-1, 1, 32 * 64).reshape(32, 1, 64).requires_grad_()
        results = []
        for number, module in enumerate(modules):
            with te.autocast(enabled=number != 1, recipe=DELAYED):
                out = module(out)
            results.append(out)
        out.sum().backward()
        gradients = [p.grad for module in modules for p in module.parameters()]
        return [*results, x.grad, *gradients, *(t for module in modules for t in state_of(module))]

    for _ in range(3):
        assert same([x.clone() for x in run(ours)], [x.clone() for x in run(theirs)])
    assert [graph.replays for graph in CpuGraphs.captured] == [3] * 6


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
def test_calls_of_a_pipeline(recipe: str) -> None:
    """Two chunks of two layers and one, two microbatches, interleaved."""
    order, names = [1, 2, 1, -2, 2, -1, -2, -1], ("LayerNormMLP", "Linear", "LayerNormMLP")
    shapes = ((64, 64), (64, 96), (64, 64))

    def models() -> list[torch.nn.Module]:
        return [made(name) for name in names]

    def run(modules: list[torch.nn.Module], calls: list[list[Callable[..., Any]]]) -> list[torch.Tensor]:
        """calls: by chunk and microbatch, the layers."""
        pending: dict[int, list[Any]] = {1: [], 2: []}
        done, found = {1: 0, 2: 0}, []
        for entry in order:
            chunk = abs(entry)
            if entry > 0:
                microbatch, done[chunk] = done[chunk], done[chunk] + 1
                x = out = torch.linspace(-1, 1 + microbatch, 32 * 64).reshape(32, 1, 64).requires_grad_()
                with te.autocast(enabled=recipe != "none", recipe=RECIPES[recipe]):
                    for layer in calls[chunk - 1][microbatch]:
                        out = layer(out)
                pending[chunk].append((x, out))
                found.append(out.detach().clone())
            else:
                x, out = pending[chunk].pop(0)
                out.sum().backward()
                found.append(x.grad)
        return [*found, *(p.grad for m in modules for p in m.parameters()), *(t for m in modules for t in state_of(m))]

    ours, theirs = models(), models()
    samples = [*(shapes[0], shapes[1]) * 2, *(shapes[2],) * 2]
    graph = te.make_graphed_callables(
        tuple(ours),
        tuple((sample(32, 1, shape[0]),) for shape in samples),
        enabled=recipe != "none",
        recipe=RECIPES[recipe],
        _order=order,
        _num_layers_per_chunk=[2, 1],
    )
    assert len(graph) == 6 and not any("forward" in vars(module) for module in ours)
    eager = [[theirs[:2]] * 2, [theirs[2:]] * 2]
    calls = [[graph[0:2], graph[2:4]], [graph[4:5], graph[5:6]]]
    for _ in range(3):
        for module in (*ours, *theirs):
            module.zero_grad()
        assert same(run(ours, calls), run(theirs, eager))
    assert all(captured.replays == 3 for captured in CpuGraphs.captured)


def test_a_function() -> None:
    layer = made("Linear")

    def work(x: torch.Tensor, weight: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        return {"out": (x @ weight.t()) * scale, "name": "work", "count": scale.round()}

    weight = layer.weight
    call = te.make_graphed_callables(work, (sample(8, 64), sample(96, 64)), sample_kwargs={"scale": torch.ones(1)})
    x, scale = sample(8, 64), torch.full((1,), 3.0)
    found = call(x, weight, scale=scale)
    assert found["name"] == "work" and found["count"].item() == 3.0 and not found["count"].requires_grad
    found["out"].sum().backward()
    assert torch.equal(found["out"], 3 * (x @ weight.t()))
    assert torch.allclose(x.grad, (3 * weight).sum(0).expand(8, 64), atol=1e-4) and weight.grad is not None


def test_a_sample_that_two_calls_share_is_copied() -> None:
    ours, shared = (made("Linear without bias"), made("Linear without bias")), sample()
    te.make_graphed_callables(ours, ((shared,), (shared,)))
    xs = [sample(), sample()]
    outs = [module(x) for module, x in zip(ours, xs)]
    for out in outs:
        out.sum().backward()
    for module, x in zip(ours, xs):
        expected = x.detach().reshape(32, 64).sum(0).expand(96, 64)
        assert torch.allclose(module.weight.grad, expected, atol=1e-4)


def test_gradients_of_parameters_are_copied_or_not() -> None:
    def first_gradient(clones: bool) -> torch.Tensor:
        module = graphed(made("Linear"), None, clone_param_grads_on_return=clones)
        module(torch.ones(32, 1, 64)).sum().backward()
        gradient = module.weight.grad
        before, module.weight.grad = gradient.clone(), None
        module(torch.zeros(32, 1, 64)).sum().backward()
        return torch.equal(gradient, before)

    assert first_gradient(True) and not first_gradient(False)


def test_gradients_of_leaves_accumulate() -> None:
    module, x = graphed(made("Linear"), None), sample()
    for _ in range(2):
        module(x).sum().backward()
    expected = made("Linear").weight.detach().sum(0)
    assert torch.allclose(x.grad, 2 * expected.expand(32, 1, 64), atol=1e-4)


def test_what_is_not_used() -> None:
    def work(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with pytest.raises(ValueError, match="argument 1 of work requires a gradient and got none"):
        te.make_graphed_callables(work, (sample(4), sample(4)))
    call = te.make_graphed_callables(work, (sample(4), sample(4)), allow_unused_input=True)
    x, y = sample(4), sample(4)
    call(x, y).sum().backward()
    assert x.grad.tolist() == [2.0] * 4 and y.grad is None


def test_hooks_around_the_warm_up() -> None:
    seen: list[str] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append("call")
        return 2 * x

    te.make_graphed_callables(
        work,
        (sample(4),),
        num_warmup_iters=2,
        pre_warmup_hook=lambda: seen.append("before"),
        post_warmup_hook=lambda: seen.append("after"),
    )
    assert seen == ["before", "call", "call", "after", "call"]


def test_its_own_forward_comes_back() -> None:
    module = graphed(made("Linear"), None)
    del module.forward
    module(sample())
    assert CpuGraphs.captured[0].replays == 0
    graphed(module, None)


def test_a_list_of_samples() -> None:
    module, x = made("Linear"), sample()
    expected = module(x)
    assert te.make_graphed_callables(module, [sample()]) is module
    assert torch.equal(module(x), expected)
