# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a plan says is what a step does: the same calls, with the same facts, on the same implementations."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common import recipe as recipes
from te_dispatch.core.decision import Rejected
from te_dispatch.core.entries import describe
from te_dispatch.core.errors import Declined
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.policy import Policy
from te_dispatch.core.scopes import MANAGER
from tests.pytorch.planned_modules import BATCH, HEADS, HIDDEN, MODULES, RECIPES, SEQUENCE, observed, planned, step

pytestmark = pytest.mark.sampled(8)


@pytest.fixture(autouse=True)
def no_other_states() -> None:
    """Scales of all modules that are alive update in one call."""
    gc.collect()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_a_plan_says_what_a_step_does(name: str, recipe: str) -> None:
    example, used = MODULES[name], RECIPES[recipe]()
    module, inputs = example.make(), example.inputs()
    specs = [te.TensorSpec(shape, torch.bfloat16) for shape in example.shapes]
    plan = te.plan(module, *specs, recipe=used)
    calls = observed(lambda: step(module, inputs, used))
    assert planned(plan) == calls and calls
    assert planned(plan.forward) + planned(plan.backward) == calls and plan.backward
    assert te.plan(module, *inputs, recipe=used) == plan, "after a step, of real tensors"


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_a_forward_without_gradients(recipe: str) -> None:
    example, used = MODULES["TransformerLayer"], RECIPES[recipe]()
    module, inputs = example.make().eval(), example.inputs()
    plan = te.plan(module, *inputs, recipe=used, backward=False)

    def run() -> None:
        with torch.no_grad(), te.autocast(enabled=used is not None, recipe=used):
            module(*inputs)

    assert planned(plan) == observed(run) and not plan.backward


@pytest.mark.slow
@given(
    rows=st.sampled_from((32, 64, 96)),
    features=st.sampled_from((32, 64, 128)),
    bias=st.booleans(),
    grads=st.sampled_from(((True, True), (True, False), (False, True))),
    dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    recipe=st.sampled_from(("none", "delayed", "current", "mxfp8")),
)
@settings(max_examples=25, deadline=None)
def test_of_any_linear(
    rows: int, features: int, bias: bool, grads: tuple[bool, bool], dtype: torch.dtype, recipe: str
) -> None:
    gc.collect()
    module, used = te.Linear(features, 64, bias=bias, params_dtype=dtype), RECIPES[recipe]()
    wants, trains = grads
    module.weight.requires_grad_(trains)
    x = torch.randn(rows, features, dtype=dtype, device=module.weight.device, requires_grad=wants)
    plan = te.plan(module, te.TensorSpec((rows, features), dtype, wants), recipe=used)
    assert planned(plan) == observed(lambda: step(module, [x], used))


def test_the_policies_in_force_hold() -> None:
    example = MODULES["LayerNormLinear"]
    module, inputs = example.make(), example.inputs()
    with te_dispatch.using(gemm="reference"):
        plan = te.plan(module, *inputs)
    assert {call.choice for call in plan if call.operator == "gemm"} == {"reference.gemm"}
    assert all(call.choice.startswith("torch.") for call in plan if call.operator != "gemm")
    assert all(not call.choice.startswith("reference") for call in te.plan(module, *inputs))
    with te_dispatch.policy("verify"):
        assert {call.choice.split(".")[0] for call in te.plan(module, *inputs)} == {"reference"}


class _Own(torch.nn.Module):
    """A scope inside a forward, and outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = te.Linear(HIDDEN, HIDDEN), te.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, twice: bool = False) -> dict[str, Any]:
        with te_dispatch.using(gemm="reference"):
            y = self.first(x)
        y = self.second(y)
        return {"y": y, "z": [self.second(y)] if twice else []}


def test_a_scope_inside_the_forward_holds_for_its_backward() -> None:
    plan = te.plan(_Own(), te.TensorSpec((SEQUENCE, HIDDEN)), twice=True)
    assert [call.site for call in plan] == ["first", "second", "second", *["second"] * 4, *["first"] * 2]
    assert all((call.choice == "reference.gemm") == (call.site == "first") for call in plan)


def test_the_autocasts_in_force_hold() -> None:
    module = te.Linear(HIDDEN, HIDDEN)
    x = torch.randn(SEQUENCE, HIDDEN, device=module.weight.device)
    with te.autocast(recipe=recipes.DelayedScaling()):
        inside = te.plan(module, x)
        assert te.plan(module, x, recipe=recipes.MXFP8BlockScaling()).recipe == "MXFP8BlockScaling"
    assert inside == te.plan(module, x, recipe=recipes.DelayedScaling())
    assert [call.operator for call in inside].count("update_delayed_scales") == 2
    with te.autocast(enabled=False):
        assert te.plan(module, x).recipe is None
    with torch.autocast(x.device.type, torch.bfloat16):
        assert te.plan(module, x)[0].facts["a.dtype"] == "bf16"


def test_call_sites_are_qualified_names() -> None:
    plan = te.plan(MODULES["TransformerLayer"].make(), te.TensorSpec((SEQUENCE, BATCH, HIDDEN), torch.bfloat16))
    sites = {call.site for call in plan}
    assert sites == {
        "", "self_attention.layernorm_qkv", "self_attention.core_attention", "self_attention.proj", "layernorm_mlp",
    }  # fmt: skip
    assert {call.site for call in plan.backward} == sites


@pytest.mark.parametrize("own", [True, False], ids=["te.checkpoint", "torch.utils.checkpoint"])
def test_a_checkpoint_is_run_again_in_the_backward(own: bool) -> None:
    class Checkpointed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = te.Linear(HIDDEN, HIDDEN)

        def forward(self, x: torch.Tensor) -> Any:
            if own:
                return te.checkpoint(self.inner, x)
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    module, recipe = Checkpointed(), recipes.DelayedScaling()
    x = torch.randn(SEQUENCE, HIDDEN, device=module.inner.weight.device, requires_grad=True)
    plan = te.plan(module, x, recipe=recipe)
    assert planned(plan) == observed(lambda: step(module, [x], recipe))
    assert [call.operator for call in plan.backward[:3]] == ["quantize", "quantize", "gemm"]


def test_modules_that_torch_compile_has_wrapped() -> None:
    spec = te.TensorSpec((SEQUENCE, HIDDEN))
    expected = planned(te.plan(_Own(), spec))
    in_place = _Own()
    in_place.compile()
    for wrapped in (torch.compile(_Own()), torch.nn.Sequential(torch.compile(_Own())), in_place):
        assert planned(te.plan(wrapped, spec)) == expected


def test_modules_and_inputs_without_memory() -> None:
    makers: Any = (te.Linear, te.LayerNormLinear)
    for make in makers:
        expected = te.plan(make(HIDDEN, HIDDEN), torch.randn(SEQUENCE, HIDDEN), recipe=recipes.Float8CurrentScaling())
        x = torch.empty(SEQUENCE, HIDDEN, device="meta")
        assert te.plan(make(HIDDEN, HIDDEN, device="meta"), x, recipe=recipes.Float8CurrentScaling()) == expected
    with torch.inference_mode():
        inside = torch.randn(SEQUENCE, HIDDEN)
        assert planned(te.plan(te.Linear(HIDDEN, HIDDEN), inside)) == planned(te.plan(te.Linear(HIDDEN, HIDDEN), x))


def test_one_tensor_given_twice_is_one() -> None:
    x = torch.randn(SEQUENCE, BATCH, HEADS, HIDDEN // HEADS, requires_grad=True)
    module = te.DotProductAttention(HEADS, HIDDEN // HEADS)
    assert planned(te.plan(module, x, x, x)) == observed(lambda: step(module, [x, x, x], None))


def test_what_has_declined_a_call_before_is_not_planned_for_it() -> None:
    module = te.Linear(HIDDEN, HIDDEN)
    x = torch.randn(SEQUENCE, HIDDEN, device=module.weight.device)
    with te_dispatch.using(prefer={"gemm": ["torch.matmul", "reference"]}):
        step(module, [x], None)
        entries = MANAGER.capture().dispatcher(OPERATORS["gemm"]).entries.values()
        calls: list[Any] = []
        with te_dispatch.observe(lambda operator, accepted, args, result: calls.append(describe(args))):
            step(module, [x], None)
        for entry in entries:
            entry.remember(calls[0], "torch.matmul", Declined("for a test"))
        forward, backward = te.plan(module, x)
        for entry in entries:
            assert entry.memory.keys() == {calls[0]}
            entry.memory.clear()
        assert [call.choice for call in te.plan(module, x)] == ["torch.matmul", "torch.matmul"]
    assert (forward.choice, backward.choice) == ("reference.gemm", "torch.matmul")
    assert forward.decision.rejected[0] == Rejected("torch.matmul", "for a test", "decline")


def test_what_nothing_serves_is_in_the_plan() -> None:
    with te_dispatch.policy(Policy(name="none", allow=())):
        plan = te.plan(MODULES["TransformerLayer"].make(), te.TensorSpec((SEQUENCE, BATCH, HIDDEN), torch.bfloat16))
    assert plan.unserved == plan.calls and len(plan) > 10
    assert plan[0].chosen is None and "not among the allowed: nothing" in plan[0].decision.table()
