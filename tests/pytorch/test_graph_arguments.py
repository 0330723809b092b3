# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`make_graphed_callables`: what it refuses, and in which words; orders of pipelines."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Float8CurrentScaling
from te_dispatch.pytorch.graphs import graphs
from te_dispatch.pytorch.graphs.schedule import Step, one_after_the_other, pipeline
from tests.pytorch.graphs_on_cpu import CpuGraphs

DELAYED = DelayedScaling(amax_history_len=3)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaGraphs", CpuGraphs)
    CpuGraphs.captured = []


def linear(**kwargs: Any) -> te.Linear:
    return te.Linear(32, 32, device="cpu", **kwargs)


def sample() -> torch.Tensor:
    return torch.randn(16, 32).requires_grad_()


def with_hook(register: str, inner: bool = False) -> torch.nn.Module:
    module = linear()
    getattr(module, register)(lambda *args: None)
    return torch.nn.Sequential(module) if inner else module


def with_parameter_hook() -> torch.nn.Module:
    module = linear()
    module.weight.register_hook(lambda gradient: None)
    return module


def with_buffer() -> torch.nn.Module:
    module = torch.nn.Linear(32, 32)
    module.register_buffer("shift", torch.zeros(1, requires_grad=True))
    return module


def hooked_sample() -> torch.Tensor:
    x = sample()
    x.register_hook(lambda gradient: None)
    return x


def inference_sample() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(16, 32)


class Quantized(torch.nn.Module):
    """Returns a quantized tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.part = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x, fp8_output=True)


MODULE = linear()
X = (sample(),)


# -- before anything is captured ------------------------------------------------------------------------------------


def test_cpu_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="a sample of Linear is on cpu, and graphs read memory of cuda devices only"):
        te.make_graphed_callables(linear(), X)
    with pytest.raises(ValueError, match="a parameter of Linear is on cpu"):
        te.make_graphed_callables(linear(), ())


@pytest.mark.parametrize(
    ("modules", "samples", "kwargs", "error", "words"),
    [
        (lambda: [linear()], X, {}, TypeError, "must be a module, a function or a tuple of these"),
        (lambda: (), (), {}, TypeError, "must be a module, a function or a tuple of these"),
        (lambda: (MODULE, MODULE), (X, X), {}, ValueError, "one of them twice.*need _order"),
        (lambda: 3, X, {}, TypeError, "must be a module, a function or a tuple of these, got 3"),
        (linear, sample(), {}, TypeError, "sample_args must be a tuple of tensors, got"),
        (linear, X, {"sample_kwargs": ({},)}, TypeError, "sample_kwargs must be a dict of tensors, got"),
        (lambda: (linear(),), X, {}, TypeError, "sample_args must be a tuple of tensors for each call"),
        (lambda: (linear(),), (X, X), {}, ValueError, "sample_args must have 1 entries, one for each call, got 2"),
        (linear, (3,), {}, TypeError, "sample argument 0 of Linear must be a tensor, got 3; leave it out"),
        (linear, X, {"sample_kwargs": {"fp8_grad": True}}, TypeError, "sample fp8_grad of Linear must be a tensor"),
        (linear, (sample() * 2,), {}, ValueError, r"computed with gradients.*sample.detach\(\)"),
        (linear, (hooked_sample(),), {}, ValueError, "sample argument 0 of Linear has gradient hooks"),
        (linear, (inference_sample(),), {}, ValueError, r"inference mode.*pass sample.clone\(\)"),
        (lambda: lambda: 3, (), {}, ValueError, "neither a sample nor a parameter says on which device"),
        (lambda: with_hook("register_forward_hook"), X, {}, RuntimeError, "Linear has hooks.*remove them"),
        (lambda: with_hook("register_forward_pre_hook", True), X, {}, RuntimeError, "Sequential.0 has hooks"),
        (lambda: with_hook("register_full_backward_hook"), X, {}, RuntimeError, "Linear has hooks"),
        (lambda: with_hook("register_full_backward_pre_hook"), X, {}, RuntimeError, "Linear has hooks"),
        (with_parameter_hook, X, {}, ValueError, "Linear.weight has gradient hooks"),
        (with_buffer, X, {}, ValueError, "the buffer shift of Linear requires a gradient; make it a parameter"),
        (lambda: linear(fuse_wgrad_accumulation=True), X, {}, NotImplementedError, "fuse_wgrad_accumulation=True"),
        (lambda: linear(delay_wgrad_compute=True), X, {}, NotImplementedError, "Linear has delay_wgrad_compute=True"),
        (linear, X, {"_reuse_graph_input_output_buffers": True}, NotImplementedError, "_reuse_graph_input_output_buff"),
        (linear, X, {"capture_time_hooks": [None]}, NotImplementedError, r"capture_time_hooks=\[None\]"),
        (linear, X, {"num_warmup_iters": 0}, ValueError, "num_warmup_iters must be an int of at least 1"),
        (linear, X, {"pre_warmup_hook": 3}, TypeError, "pre_warmup_hook must be a function without arguments or None"),
        (linear, X, {"enabled": (True, False)}, ValueError, "enabled has 2 entries for 1 callables"),
        (linear, X, {"enabled": True, "recipe": "delayed"}, TypeError, "recipe must be a recipe"),
        (linear, X, {"_num_layers_per_chunk": [1]}, ValueError, "_num_layers_per_chunk needs _order"),
        (lambda: torch.sin, X, {"cache_quantized_params": True}, NotImplementedError, "for functions .sin., only for"),
        (lambda: lambda x: MODULE(x), X, {}, ValueError, "neither one of its arguments nor a parameter of the modu"),
    ],
)
def test_what_cannot_be_captured(
    on_cpu: None, modules: Any, samples: Any, kwargs: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        te.make_graphed_callables(modules(), samples, **kwargs)
    assert not CpuGraphs.captured


def test_surroundings(on_cpu: None) -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"inference mode.*use torch.no_grad"):
        te.make_graphed_callables(linear(), X)
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match=r"needs torch.autocast.*cache_enabled=False"):
        te.make_graphed_callables(linear(), X)


def test_a_graphed_module_is_not_captured_again(on_cpu: None) -> None:
    module = te.make_graphed_callables(linear(), (sample(),))
    with pytest.raises(RuntimeError, match=r"Linear is graphed already; `del module.forward` brings its own"):
        te.make_graphed_callables(module, (sample(),))
    te.make_graphed_callables(torch.nn.Sequential(module, linear()), (sample(),))  # as a part it runs in eager


def test_deprecated_names(on_cpu: None) -> None:
    old = {"fp8_enabled": True, "fp8_calibrating": False, "fp8_recipe": DELAYED, "fp8_weight_caching": True}
    with pytest.warns(DeprecationWarning) as seen:
        module = te.make_graphed_callables(linear(), (sample(),), **old)
    assert len(seen) == 1 and seen[0].filename == __file__
    assert "fp8_recipe is now recipe, fp8_weight_caching is now cache_quantized_params" in str(seen[0].message)
    with te.autocast(recipe=DELAYED):
        module(sample(), is_first_microbatch=True)
    with pytest.raises(ValueError, match="fp8_enabled is the deprecated name of enabled, and both were given"):
        te.make_graphed_callables(linear(), (sample(),), enabled=True, fp8_enabled=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        te.make_graphed_callables(linear(), (sample(),), enabled=True)


# -- calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((torch.randn(32, 32),), {}, ValueError, r"argument 0 must be torch.float32 of shape \(16, 32\).* \(32, 32\)"),
        ((sample().bfloat16(),), {}, ValueError, "argument 0 must be torch.float32 .*, got torch.bfloat16"),
        (([1.0],), {}, TypeError, "argument 0 must be a tensor as when it was captured"),
        ((), {}, TypeError, "captured with 1 positional arguments, got 0"),
        ((torch.randn(16, 32),), {"fp8_grad": True}, TypeError, "captured without fp8_grad, got True; pass it in"),
        ((torch.randn(16, 32),), {"other": None}, TypeError, "captured without other, got None"),
    ],
)
def test_other_arguments_than_captured(
    on_cpu: None, args: Any, kwargs: Any, error: type[Exception], words: str
) -> None:
    module = te.make_graphed_callables(linear(), (sample(),))
    with pytest.raises(error, match=words):
        module(*args, **kwargs)
    assert CpuGraphs.captured[0].replays == 0
    module(sample(), fp8_grad=False, is_first_microbatch=None)
    assert CpuGraphs.captured[0].replays == 1


def test_a_gradient_that_was_not_captured(on_cpu: None) -> None:
    module = te.make_graphed_callables(linear(), (torch.randn(16, 32),))
    with pytest.raises(ValueError, match="argument 0 requires a gradient, which was not captured"):
        module(sample())
    module(torch.randn(16, 32)).sum().backward()
    assert module.weight.grad is not None


def test_keyword_and_nested_arguments(on_cpu: None) -> None:
    def work(x: torch.Tensor, pair: Any, *, shift: torch.Tensor) -> torch.Tensor:
        return x * pair[0] + pair[1]["b"] + shift

    ones = torch.ones(4)
    call = te.make_graphed_callables(
        work, (sample(), ), sample_kwargs={"pair": (torch.ones(32), {"b": torch.ones(32)}), "shift": torch.ones(32)}
    )  # fmt: skip
    x, two, three, four = torch.ones(16, 32), torch.full((32,), 2.0), torch.full((32,), 3.0), torch.full((32,), 4.0)
    assert call(x, shift=four, pair=(two, {"b": three})).eq(9).all()
    with pytest.raises(TypeError, match="work was captured with shift, which is missing now"):
        call(x, pair=(two, {"b": three}))
    with pytest.raises(TypeError, match="captured with arguments like"):
        call(x, pair=(two, three), shift=four)
    with pytest.raises(ValueError, match=r"pair\[1\]\['b'\] must be torch.float32 of shape \(32,\).*\(4,\)"):
        call(x, pair=(two, {"b": ones}), shift=four)


def test_another_autocast(on_cpu: None) -> None:
    module = te.make_graphed_callables(linear(), (sample(),), enabled=True, recipe=DELAYED)
    words = r"Linear was captured for autocast\(enabled=True, .*DelayedScaling.*\), and is called in "
    with pytest.raises(RuntimeError, match=words + "no autocast that quantizes"):
        module(sample())
    with te.autocast(recipe=Float8CurrentScaling()), pytest.raises(RuntimeError, match=words + r".*CurrentScaling"):
        module(sample())
    with te.autocast(enabled=False, calibrating=True, recipe=DELAYED), pytest.raises(RuntimeError, match=words):
        module(sample())
    plain = te.make_graphed_callables(linear(), (sample(),))
    with te.autocast(recipe=DELAYED), pytest.raises(RuntimeError, match="captured for no autocast that quantizes, and"):
        plain(sample())
    with te.autocast(enabled=False):
        plain(sample())


def test_another_torch_autocast(on_cpu: None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        module = te.make_graphed_callables(linear(), (sample(),))
        assert module(sample()).dtype == torch.bfloat16
    with pytest.raises(
        RuntimeError, match=r"captured with torch.autocast for torch.bfloat16, and is called with anoth"
    ):
        module(sample())


def test_parameters_and_states_stay_where_they_are(on_cpu: None) -> None:
    module = te.make_graphed_callables(linear(), (sample(),), enabled=True, recipe=DELAYED)
    with te.autocast(recipe=DELAYED):
        module(sample())
    state = module.state_dict()
    with te.autocast(recipe=DELAYED):
        module.load_state_dict(state)
        module(sample())  # written in place
        with torch.no_grad():
            module.weight.data = module.weight.data.clone()
        with pytest.raises(RuntimeError, match=r"a parameter of shape \(32, 32\) has moved to other memory"):
            module(sample())
    module = te.make_graphed_callables(linear(), (sample(),), enabled=True, recipe=DELAYED)
    module.eval()
    with te.autocast(recipe=DelayedScaling(amax_history_len=7)):
        module(sample())
    module.train()
    with te.autocast(recipe=DELAYED), pytest.raises(RuntimeError, match="Linear: its state of delayed scaling was mov"):
        module(sample())


def test_a_backward_belongs_to_the_last_call(on_cpu: None) -> None:
    module = te.make_graphed_callables(linear(), (sample(),))
    first, _ = module(sample()), module(sample())
    with pytest.raises(RuntimeError, match=r"Linear was called again before the backward.*with make.*_order=\.\.\."):
        first.sum().backward()


def test_second_derivatives(on_cpu: None) -> None:
    module = te.make_graphed_callables(linear(), (sample(),))
    with pytest.raises(RuntimeError, match="create_graph"):
        module(sample()).sum().backward(create_graph=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_delayed_scaling_are_refused(on_cpu: None, reentrant: bool) -> None:
    module = te.make_graphed_callables(linear(), (sample(),), enabled=True, recipe=DELAYED)
    with te.autocast(recipe=DELAYED), pytest.raises(RuntimeError, match="checkpoint inside of what is captured"):
        checkpoint(module, sample(), use_reentrant=reentrant)
    stateless = te.make_graphed_callables(linear(), (sample(),), enabled=True, recipe=Float8CurrentScaling())
    with te.autocast(recipe=Float8CurrentScaling()):
        out = te.checkpoint(stateless, sample(), use_reentrant=reentrant)
        out.sum().backward()


# -- orders ---------------------------------------------------------------------------------------------------------


def test_one_after_the_other() -> None:
    found = one_after_the_other(2)
    assert found.owners == (0, 1) and not found.pipelined
    assert found.steps == (Step(0, True), Step(1, True), Step(1, False), Step(0, False))


def test_an_interleaved_pipeline() -> None:
    found = pipeline([1, 1, 2, 2, -2, -1, -2, -1], [2, 1], 3)
    assert found.owners == (0, 1, 0, 1, 2, 2) and found.pipelined
    assert found.forwards() == [0, 1, 2, 3, 4, 5]
    assert [step.call for step in found.steps if not step.forward] == [4, 1, 0, 5, 3, 2]
    assert pipeline([1, -1], None, 3).owners == (0, 1, 2)


@pytest.mark.parametrize(
    ("order", "layers", "callables", "error", "words"),
    [
        (3, None, 1, TypeError, "_order must be a list of chunk numbers, got 3"),
        ([], None, 1, TypeError, "_order must be a list of chunk numbers"),
        ([1, 0, -1], None, 1, TypeError, "integers other than 0, got 0"),
        ([1, "2"], None, 1, TypeError, "integers other than 0, got '2'"),
        ([1, -1, -1.5], None, 1, NotImplementedError, r"passes for weight gradients alone \(-1.5\) is not supported"),
        ([1, 1, -1], None, 1, ValueError, "chunk 1 has 2 forwards and 1 backwards"),
        ([1, 3, -3, -1], None, 3, ValueError, "chunk 2 has 0 forwards and 0 backwards, chunk 1 has 1 forwards"),
        ([1, -2, 2, -1], None, 2, ValueError, "a backward of chunk 2 before its forward"),
        ([1, 2, -2, -1], None, 3, ValueError, "3 callables cannot be divided among the 2 chunks.*pass _num_layers"),
        ([1, 2, -2, -1], [1], 2, ValueError, r"an entry for each of the 2 chunks.*got \[1\]"),
        ([1, 2, -2, -1], [1, 2], 2, ValueError, r"sum must be the number of callables, 2; got \[1, 2\]"),
    ],
)
def test_orders_that_are_none(order: Any, layers: Any, callables: int, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        pipeline(order, layers, callables)
