# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``explain --module``: the plan of a module that is described on the command line."""

from __future__ import annotations

import pytest
import torch

import te_dispatch.pytorch as te_pytorch
from te_dispatch.cli.explain_module import modules
from te_dispatch.common import recipe as recipes
from tests.cli.test_doctor import _plugin, _source

pytestmark = pytest.mark.sampled(8)

LINEAR = ("explain", "--module", "Linear(64, 128)", "--input", "32x64")


def test_it_is_the_plan(te):
    answer = te(*LINEAR, "--dtype", "fp16", "--recipe", "DelayedScaling", "--device", "cpu:0", "--json")
    assert answer.code == 0, answer.err
    expected = _plan(torch.float16, recipes.DelayedScaling())
    assert answer.json == {"expression": "Linear(64, 128)", **expected}
    for_people = te(*LINEAR, "--recipe", "DelayedScaling(amax_history_len=4)", "--device", "cpu:0")
    assert for_people.out.startswith("Linear(64, 128): Linear on cpu, DelayedScaling(amax_history_len=4)")
    for word in ("forward", "backward", "quantize_dbias", "torch.emulated_gemm", "a.dtype=e4m3fn", "m=32, n=128"):
        assert word in for_people.out


def _plan(dtype: torch.dtype, recipe: recipes.Recipe) -> object:
    module = te_pytorch.Linear(64, 128, params_dtype=dtype, device="cpu")
    return te_pytorch.plan(module, te_pytorch.TensorSpec((32, 64), dtype), recipe=recipe, device="cpu:0").to_dict()


INPUTS = {
    "DotProductAttention(4, 16)": ("8x2x4x16",) * 3,
    "MultiheadAttention(64, 4)": ("8x2x64",),
    "TransformerLayer(64, 128, 4)": ("8x2x64",),
    "te.LayerNormMLP(64, 128, activation='swiglu')": ("8x64",),
    "te_dispatch.pytorch.RMSNorm(64)": ("8x64",),
    "LayerNorm(64)": ("8x64",),
    "LayerNormLinear(64, 64, params_dtype=None)": ("8x64:fp32",),
}


@pytest.mark.parametrize("module", INPUTS)
def test_every_module(te, module):
    given = [word for sizes in INPUTS[module] for word in ("--input", sizes)]
    for options in ((), ("--no-backward",), ("--device", "nvidia:sm_90"), ("--device", "gfx942")):
        answer = te("explain", "--module", module, *given, *options, "--json")
        assert answer.code == 0, answer.err
        phases = {call["phase"] for call in answer.json["calls"]}
        assert phases == ({"forward"} if "--no-backward" in options else {"forward", "backward"})
    assert module.partition("(")[0].rpartition(".")[2] in modules()


def test_policies_and_what_nothing_serves(te):
    answer = te(*LINEAR, "--policy", "verify", "--json")
    assert {call["chosen"].partition(".")[0] for call in answer.json["calls"]} == {"reference"}
    answer = te(*LINEAR, "--policy", "triton-only", "--device", "cpu:0")
    assert answer.code == 1 and "Nothing serves gemm of the module:" in answer.out and "rejected by" in answer.out


def test_a_backend_that_is_not_here(tmp_path, run_process):
    source = _source(
        """
        from te_dispatch.core.facts import Arch
        def unavailable(): return "libzeta.so is missing"
        """,
        "name='zeta', vendors=('zeta',), archs={'zeta': {'z2': Arch()}}, devices={}, "
        "unavailable='zeta_backend:unavailable', implementations=(Implementation(op='gemm@1', name='gemm', "
        "target='zeta_kernels:gemm'),)",
    )
    _plugin(tmp_path, "zeta", source)
    answer = run_process(tmp_path, *LINEAR, "--device", "zeta:z2", path=tmp_path)
    assert answer.code == 0 and "zeta.gemm" in answer.out, answer.err
    out = " ".join(answer.out.split())
    assert "the plan assumes: backend zeta works there, as it does not here (libzeta.so is missing)" in out
    assert "zeta.gemm cannot be imported here (ModuleNotFoundError: No module named 'zeta_kernels')" in out


_CALL = "write a call with literal arguments and nothing else"
REFUSED = (
    (("--module", "Linear(64"), f"--module: cannot read 'Linear(64': {_CALL} ('(' was never closed)"),
    (("--module", ""), f"--module: cannot read '': {_CALL}"),
    (("--module", "1 + 1"), f"--module: cannot read '1 + 1': {_CALL}"),
    (("--module", "Linear(64, open('x'))"), "\"open('x')\" is no literal"),
    (("--module", "Linear(64, x)"), "'x' is no literal"),
    (("--module", "Linear(*(64, 64))"), "is no literal"),
    (("--module", "Linear(**{'in_features': 64})"), _CALL),
    (("--module", "__import__('os').getcwd()"), _CALL),
    (("--module", "(lambda: 0)()"), _CALL),
    (("--module", "Linear(64, 64)\nLinear(64, 64)"), _CALL),
    (("--module", "Linaer(64, 64)"), "--module: unknown class 'Linaer'; did you mean 'Linear'?"),
    (("--module", "autocast()"), "--module: unknown class 'autocast'"),
    (("--module", "Linear(64)"), "--module Linear(64): Linear.__init__() missing 1 required positional argument"),
    (("--module", "Linear(64, -1)"), "--module Linear(64, -1): "),
    (("--module", "Linear(64, 64)"), "give --input for each tensor that Linear takes, e.g. --input 2048x1024"),
    (("--module", "Linear(64, 64)", "--input", "4y64"), "--input takes sizes with x between, such as 2048x1024"),
    (("--module", "Linear(64, 64)", "--input", "4x64:int31"), "--input: unknown dtype 'int31'; did you mean 'int32'?"),
    (("--module", "Linear(64, 64)", "--input", "4x65"), "4x65: Linear: inp must be (..., 64), got shape (4, 65)"),
    (("--module", "Linear(64, 64)", "--input", "4x64", "--dtype", "fp9"), "--dtype: unknown dtype 'fp9'"),
    (("--module", "Linear(64, 64)", "--input", "4x64", "--recipe", "Delayed"), "did you mean 'DelayedScaling'?"),
    (
        ("--module", "Linear(64, 64)", "--input", "4x64", "--recipe", "DelayedScaling(amax_history_len=0)"),
        "--recipe DelayedScaling(amax_history_len=0): ",
    ),
    (("--module", "Linear(64, 64)", "--input", "4x64", "--device", "nvidia:sm_1"), "unknown arch 'sm_1'"),
    (("--module", "Linear(64, 64)", "--input", "4x64", "--policy", "defualt"), "did you mean 'default'?"),
    (("gemm", "--module", "Linear(64, 64)"), "--module takes no OPERATOR and no facts, got 'gemm'"),
    (("gemm", "--input", "4x64"), "--input goes with --module"),
    (("gemm", "--recipe", "DelayedScaling"), "--recipe goes with --module"),
    ((), 'name an OPERATOR (te-dispatch ops lists them), or give --module "Linear(1024, 4096)"'),
)


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=[" ".join(a) or "nothing" for a, _ in REFUSED])
def test_mistakes_end_in_one_message(te, arguments, text):
    answer = te("explain", *arguments)
    assert answer.code == 2 and not answer.out
    assert answer.err.startswith("te-dispatch: ") and text in answer.err, answer.err
    assert answer.err.count("\n") - text.count("\n") <= 2
    assert text in te("explain", *arguments, "--json").json["error"]
