# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Plans as values: their table, their data, what differs between two; plans for devices elsewhere; what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import te_dispatch
import te_dispatch.pytorch as te
from te_dispatch.common import recipe as recipes
from te_dispatch.core.devices import describe_device
from te_dispatch.core.errors import DispatchError
from te_dispatch.core.facts import Arch
from te_dispatch.core.module_plan import Difference
from te_dispatch.core.scopes import MANAGER
from tests.pytorch.planned_modules import HIDDEN, MODULES, SEQUENCE

pytestmark = pytest.mark.sampled(8)

SPEC = te.TensorSpec((SEQUENCE, HIDDEN))


def test_a_plan_is_a_sequence_of_calls_that_compares_and_prints() -> None:
    module = te.LayerNormLinear(HIDDEN, HIDDEN, device="cpu")
    plan = te.plan(module, SPEC, device="cpu:0")
    assert list(plan) == [plan[i] for i in range(len(plan))] == [*plan.forward, *plan.backward]
    assert plan == te.plan(module, SPEC, device="cpu:0") != te.plan(module, te.TensorSpec((64, HIDDEN)), device="cpu:0")
    lines = str(plan).splitlines()
    assert lines[0] == "LayerNormLinear on cpu, high precision" and len(lines) == 2 + len(plan)
    assert lines[1].split() == ["phase", "call", "site", "operator", "implementation", "facts"]
    assert lines[3].split()[:4] == ["forward", ".", "gemm", "torch.matmul"] and "layout=NT" in lines[3]
    assert str(plan[1]) == "forward . gemm -> torch.matmul"


def test_its_data_is_json() -> None:
    plan = te.plan(MODULES["LayerNormMLP"].make(), te.TensorSpec((SEQUENCE, HIDDEN), torch.bfloat16), device="sm_90")
    data = json.loads(plan.to_json(indent=1))
    assert data == plan.to_dict()
    assert data["module"] == "LayerNormMLP" and data["device"] == "nvidia:sm_90" and data["recipe"] is None
    for call, told in zip(plan, data["calls"], strict=True):
        assert told["phase"] == call.phase and told["site"] == call.site and told["operator"] == f"{call.operator}@1"
        assert call.chosen is not None and told["chosen"] == call.chosen.id
        assert {one["id"] for one in told["rejected"]} == {one.id for one in call.decision.rejected}


def test_what_differs() -> None:
    module = te.LayerNormLinear(HIDDEN, HIDDEN, device="cpu")
    plan = te.plan(module, SPEC)
    assert plan.differences(plan) == ()
    with te_dispatch.using(layernorm_fwd="reference"):
        other = te.plan(module, SPEC)
    first, second = plan.differences(other)
    assert (first.mine, first.other, first.facts) == (plan[0], other[0], ())
    assert str(first) == (
        "forward . layernorm_fwd: torch.layernorm_fwd here, reference.layernorm_fwd in the other plan"
    )
    assert second.mine is not None and second.mine.operator == "layernorm_bwd", "a companion"
    larger = plan.differences(te.plan(module, te.TensorSpec((2 * SEQUENCE, HIDDEN))))
    assert {name for one in larger for name in one.facts} == {"m", "k"}
    assert str(larger[0]).endswith("gemm: m is 32 here, 64 in the other plan")
    forward = te.plan(module, SPEC, backward=False)
    missing = [one for one in plan.differences(forward) if one.other is None]
    assert [one.mine for one in missing] == list(plan.backward)
    extra = [one for one in forward.differences(plan) if one.mine is None]
    assert [one.other for one in extra] == list(plan.backward) and str(extra[0]).endswith("only in the other plan")
    assert isinstance(extra[0], Difference)


def test_devices_elsewhere() -> None:
    module = te.Linear(HIDDEN, HIDDEN, device="cpu")
    plans = {
        device: te.plan(module, SPEC, recipe=recipes.DelayedScaling(), device=device)
        for device in ("cpu", "nvidia:sm_90", "sm_90", "amd:gfx942", "amd:gfx950")
    }
    assert plans["sm_90"] == plans["nvidia:sm_90"]
    encodings = {device: plan[0].facts["quantizer.encoding"] for device, plan in plans.items()}
    assert encodings["nvidia:sm_90"] == encodings["amd:gfx950"] == "e4m3fn" and encodings["amd:gfx942"] == "e4m3fnuz"
    for device, plan in plans.items():
        facts = describe_device(MANAGER.snapshot, device)
        assert plan.device == facts and all(call.device == facts for call in plan)
        assert plan == te.plan(module, SPEC, recipe=recipes.DelayedScaling(), device=facts)
    assert plans["cpu"].device.described and not te.plan(module, SPEC, device=torch.device("cpu")).device.described
    differing = {one.mine.operator for one in plans["amd:gfx942"].differences(plans["sm_90"]) if one.mine}
    assert {"quantize", "gemm"} <= differing


def test_the_facts_of_the_device_decide() -> None:
    """Not those of the device that the parameters are on."""
    module = te.Linear(HIDDEN, HIDDEN, device="cpu")
    chip = describe_device(MANAGER.snapshot, "nvidia:sm_90")
    bare = dataclasses.replace(chip, arch="sm_70", table=Arch())
    choices = {
        device.arch: [
            call.choice for call in te.plan(module, SPEC, recipe=recipes.Float8CurrentScaling(), device=device)
        ]
        for device in (chip, bare)
    }
    assert choices["sm_90"] != choices["sm_70"]


class _Reads(torch.nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = te.Linear(HIDDEN, HIDDEN), what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        if self.what == "branch" and y.sum() > 0:
            return y * 2
        if self.what == "item":
            return y * y.sum().item()
        if self.what == "shape":
            return y[y > 0]
        return y


@pytest.mark.parametrize("what", ["branch", "item", "shape"])
def test_what_depends_on_data_is_refused(what: str) -> None:
    assert te.plan(_Reads("nothing"), SPEC)
    with pytest.raises(te.PlanningError, match=r"^_Reads cannot be planned: its forward reads values of a tensor") as e:
        te.plan(_Reads(what), SPEC)
    assert "after forward layer gemm -> " in str(e.value) and "plan the parts of the module" in str(e.value)


def test_what_cannot_be_copied_is_refused() -> None:
    module = torch.nn.Sequential(te.Linear(HIDDEN, HIDDEN))
    module.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(
        te.PlanningError, match=r"^Sequential cannot be planned, because it cannot be copied: TypeError"
    ):
        te.plan(module, SPEC)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: te.plan(lambda x: x, SPEC), TypeError, "plan: module must be a torch.nn.Module, got function"),
        (lambda: te.plan(te.Linear(8, 8), SPEC), ValueError, "Linear: inp must be (..., 8), got shape (32, 128)"),
        (lambda: te.plan(te.Linear(8, 8), SPEC, device="nvidia:sm_1"), DispatchError, "unknown arch 'sm_1'"),
        (lambda: te.plan(te.Linear(8, 8), SPEC, device="cuda:77"), DispatchError, "device cuda:77: there is no such"),
        (lambda: te.plan(te.Linear(8, 8), SPEC, device=3), TypeError, "plan: device must be a str"),
        (lambda: te.plan(te.Linear(8, 8), SPEC, recipe="fp8"), TypeError, "recipe must be a recipe"),
        (lambda: te.TensorSpec((3, -1)), TypeError, "TensorSpec: shape must be a tuple of sizes, got (3, -1)"),
        (lambda: te.TensorSpec((3,), "bf16"), TypeError, "TensorSpec: dtype must be a torch.dtype, got 'bf16'"),
    ],
)
def test_what_is_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as e:
        call()
    assert text in str(e.value)


def test_specs_of_masks_and_lengths() -> None:
    attention = te.DotProductAttention(4, 32, qkv_format="thd", attn_mask_type="padding")
    operands = [te.TensorSpec((64, 4, 32), torch.bfloat16)] * 3
    lengths = te.TensorSpec((3,), torch.int32)
    given: dict[str, Any] = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 32, "max_seqlen_kv": 32}
    forward, backward = te.plan(attention, *operands, **given)
    assert forward.facts["layout"] == "thd" and backward.operator == "attention_bwd"


def test_the_documentation_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page.partition("## Planning a module")[2], re.DOTALL)[0]
    exec(compile(code, "docs/policies.md", "exec"), {})
    assert "LayerNormLinear on cpu, DelayedScaling" in capsys.readouterr().out
