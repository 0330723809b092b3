# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dispatch on a machine with AMD's devices, in processes of their own: what serves, what is left to others, and why."""

from __future__ import annotations

import json

import pytest

_STEP = """
import json, sys, torch, te_dispatch, te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling, Format
torch.manual_seed(0)
served = []
layer = te.Linear(64, 48, params_dtype=torch.bfloat16)
x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
with te_dispatch.observe(lambda operator, accepted, args, result: served.append(
    (operator.name, accepted.id, getattr(args[0], "encoding", None)))):
    with te.autocast(enabled=True, recipe=DelayedScaling(fp8_format=Format.HYBRID)):
        y = layer(x)
    y.float().pow(2).mean().backward()
exact = x.detach().double() @ layer.weight.detach().double().t() + layer.bias.detach().double()
error = float((y.detach().double() - exact).norm() / exact.norm())
print(json.dumps({"served": served, "error": error, "finite": bool(x.grad.isfinite().all())}))
"""


@pytest.mark.parametrize(
    ("chip", "encodings"),
    [
        ("gfx942", {"e4m3fnuz", "e5m2fnuz"}),
        pytest.param("gfx950", {"e4m3fn", "e5m2"}, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_in_fp8_runs_in_the_chip_s_encoding(run_python, chip, encodings):
    found = json.loads(run_python(_STEP, chip).splitlines()[-1])
    products = [(name, encoding) for operator, name, encoding in found["served"] if operator == "gemm"]
    assert len(products) == 3 and {name for name, _ in products} == {"rocm.hipblaslt_fp8_gemm"}
    assert {encoding for _, encoding in products} == encodings
    assert found["finite"] and found["error"] < 0.06


@pytest.mark.slow
def test_bf16_on_a_chip_without_fp8(run_python):
    code = _STEP.replace("enabled=True", "enabled=False")
    found = json.loads(run_python(code, "gfx90a").splitlines()[-1])
    products = [name for operator, name, _ in found["served"] if operator == "gemm"]
    # The library sums no operand of bf16 on this chip, so the bias gradient is a step of its own.
    assert products == ["rocm.hipblaslt_gemm", "rocm.hipblaslt_gemm", "composite.gemm_then_epilogue"]
    assert found["error"] < 0.01


_COMPOSED = """
import torch, te_dispatch
from te_dispatch import ops
torch.manual_seed(0)
a, b = torch.randn(32, 64).bfloat16(), torch.randn(48, 32).bfloat16().t()
out, served = torch.ones(64, 48), []
with te_dispatch.observe(lambda operator, accepted, args, result: served.append(accepted)):
    result = ops.gemm(a, b.contiguous(), layout="TN", out=out, accumulate=True, epilogue="bgrad_a")
(one,) = served
print(one.id, {step: decision.chosen.id for step, decision in one.pieces.items()})
torch.testing.assert_close(out.double(), a.double().t() @ b.double() + 1, rtol=1e-5, atol=1e-4)
torch.testing.assert_close(result.dbias.double(), a.double().sum(0), rtol=1e-5, atol=1e-4)
"""


@pytest.mark.slow
def test_what_the_library_does_not_fuse_is_composed_of_its_product(run_python):
    said = run_python(_COMPOSED, "gfx942")
    assert said.split(" ", 1)[0] == "composite.gemm_then_epilogue" and "'gemm': 'rocm.hipblaslt_gemm'" in said


_DECLINED = """
import os, torch, te_dispatch
from te_dispatch import ops
os.environ["HOST_HIPBLASLT_REFUSE"] = "all"
served = []
with te_dispatch.observe(lambda operator, accepted, args, result: served.append(accepted.id)):
    ops.gemm(torch.randn(16, 32), torch.randn(16, 32), layout="NT")
print(served)
"""


@pytest.mark.slow
def test_no_algorithm_passes_the_call_on(run_python):
    assert "torch.matmul" in run_python(_DECLINED)


def _explain(run_python, chip: str, *arguments: str) -> dict:
    words = ["te-dispatch", "explain", "gemm", *arguments, "-d", f"amd:{chip}", "--json"]
    code = f"import sys; from te_dispatch.cli import main; sys.argv = {words!r}; main()"
    return json.loads(run_python(code, "gfx942", TE_DISPATCH_ROCM_PATH="/nowhere", TE_DISPATCH_ROCM_MEMORY=""))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "mine", "other"), [("gfx942", "e4m3fnuz", "e4m3fn"), ("gfx950", "e4m3fn", "e4m3fnuz")]
)
def test_described_chips_are_explained_on_any_machine(run_python, chip, mine, other):
    scaled = ("a.scaling=tensor", "b.scaling=tensor")
    data = _explain(run_python, chip, f"a.dtype={mine}", f"b.dtype={mine}", *scaled)
    assert data["chosen"] == "rocm.hipblaslt_fp8_gemm"
    # PyTorch's own product of FP8 matrices is there, too.
    assert "torch.scaled_mm" in [one["id"] for one in data["accepted"]]
    data = _explain(run_python, chip, f"a.dtype={other}", f"b.dtype={other}", *scaled)
    reason = {one["id"]: one["reason"] for one in data["rejected"]}["rocm.hipblaslt_fp8_gemm"]
    assert f"a.dtype is {other}" in reason and mine in reason


@pytest.mark.slow
def test_an_epilogue_on_fp8_is_explained_as_composed(run_python):
    facts = ("a.dtype=e4m3fn", "b.dtype=e4m3fn", "a.scaling=tensor", "b.scaling=tensor", "epilogue=gelu")
    data = _explain(run_python, "gfx950", *facts)
    reason = {one["id"]: one["reason"] for one in data["rejected"]}["rocm.hipblaslt_fp8_gemm"]
    assert "epilogue is gelu, needs not given" in reason
    assert "composite.gemm_then_epilogue" in [one["id"] for one in data["accepted"]]


_DOCTOR = "from te_dispatch_rocm import doctor\nfor row in doctor.doctor(): print(*row, sep=' | ')\n"


def test_doctor_tells_devices_apart_and_names_the_libraries(run_python, host_folder):
    said = run_python(_DOCTOR, "gfx942,gfx950")
    assert f"hip | ok | 7.2.53211, TE_DISPATCH_ROCM_PATH: {host_folder}" in said
    assert (
        "gfx942: hipBLASLt 1.2.2, FP8 e4m3fnuz and e5m2fnuz" in said and "gfx950: hipBLASLt 1.2.2, FP8 e4m3fn" in said
    )


@pytest.mark.slow
def test_doctor_on_a_machine_without_rocm(run_python):
    said = run_python(_DOCTOR, TE_DISPATCH_ROCM_PATH="/nowhere")
    assert (
        "hip | missing | HIP's runtime is not here: no folder that TE_DISPATCH_ROCM_PATH names has libamdhip64" in said
    )


@pytest.mark.slow
def test_a_word_that_memory_does_not_know_is_an_error(run_python):
    code = "from te_dispatch_rocm import probe\ntry: probe.on_host()\nexcept ValueError as error: print(error)\n"
    assert run_python(code, TE_DISPATCH_ROCM_MEMORY="device").strip().endswith("expected host, or nothing")
