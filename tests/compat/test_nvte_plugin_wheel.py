# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The plugin beside the Python of an installed Transformer Engine 2.20, whose native module a stand-in replaces.

Skipped where that, or a library that its Python imports, is not installed. No GPU is needed.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from te_dispatch.compat.nvte_plugin.manifest import MANIFEST, OTHERS, SERVED

MODULE = "transformer_engine_torch"
NATIVE = Path(__file__).parent / "native_module.py"


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The folder of the installed package."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("Transformer Engine is not installed")
    folder = Path(next(iter(spec.submodule_search_locations)))
    if not (folder / "pytorch" / "attention").is_dir():
        pytest.skip("Transformer Engine is not installed, something of its name is")
    return folder


def _native_names(file: Path) -> Iterator[str]:
    """The attributes of the native module that a file reads or imports."""
    tree = ast.parse(file.read_text())
    aliases = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {one.asname or one.name for one in node.names if one.name == MODULE}
        elif isinstance(node, ast.ImportFrom) and node.module == MODULE:
            yield from (one.name for one in node.names if one.name != "*")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield node.attr


def test_every_name_that_its_python_reads_is_in_the_manifest(wheel: Path) -> None:
    read = {name for file in (wheel / "pytorch").rglob("*.py") for name in _native_names(file)}
    read |= {name for file in (wheel / "debug").rglob("*.py") for name in _native_names(file)}
    assert len(read) > 150
    assert read - set(MANIFEST) - OTHERS == set()
    assert OTHERS - read == set()


#: Imports the package with its own load procedure, which finds the stand-in as the library.
_IMPORT = f"""
import os, pathlib, warnings
os.environ["NVTE_PROJECT_BUILDING"] = "1"  # does not load CUDA's libraries
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformer_engine  # without its PyTorch part, whose library is not there
import transformer_engine.common as common
common._get_shared_object_file = lambda library: pathlib.Path({str(NATIVE)!r})
"""


def _run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    for library in ("onnxscript", "einops", "pydantic"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"Transformer Engine's Python needs {library}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NVTE_", "TE_DISPATCH_"))}
    clean["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-c", _IMPORT + code], env={**clean, **environ}, capture_output=True, text=True, timeout=500
    )


PLUGIN = {"NVTE_PLUGIN": "te_dispatch.compat.nvte_plugin"}

#: What Transformer Engine's own Python computes on the CPU, where it does not ask for a GPU by name.
_USES = """
import torch
import torch.nn.functional as F
from torch.testing import assert_close
import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.dot_product_attention import softmax
from transformer_engine.pytorch.attention.rope import FusedRoPEFunc, RotaryPositionEmbedding
from transformer_engine.pytorch.module.fp8_padding import _Fp8Padding
from transformer_engine.pytorch.module._common import apply_normalization
from transformer_engine.pytorch.optimizers import MultiTensorApply, multi_tensor_adam, multi_tensor_l2norm
from te_dispatch.compat import nvte_plugin

nvte_plugin.verify()
te.utils._empty_tensor = torch.Tensor  # what a cleared tensor holds: there it is on the GPU
torch.manual_seed(0)

x = torch.randn(8, 64, requires_grad=True)
for op, formula in ((te.ops.GELU(), lambda x: F.gelu(x, approximate="tanh")), (te.ops.SiLU(), F.silu),
                    (te.ops.SwiGLU(), lambda x: F.silu(x[:, :32]) * x[:, 32:])):
    (ours,) = torch.autograd.grad(op(x).square().sum(), x)
    (expected,) = torch.autograd.grad(formula(x).square().sum(), x)
    assert_close(ours, expected)
for op, formula in ((te.ops.RMSNorm(64, device="cpu"), lambda x: F.rms_norm(x, (64,), eps=1e-5)),
                    (te.ops.LayerNorm(64, device="cpu"), lambda x: F.layer_norm(x, (64,), eps=1e-5))):
    (ours,) = torch.autograd.grad(op(x).pow(3).sum(), x)
    (expected,) = torch.autograd.grad(formula(x).pow(3).sum(), x)
    assert_close(ours, expected)
gamma = torch.ones(64)
y, _, _ = apply_normalization(x.detach(), None, gamma, None, 1e-5, None, torch.float32, "RMSNorm", 0, False)
assert_close(y, F.rms_norm(x.detach(), (64,), gamma, 1e-5))

logits = torch.randn(2, 4, 32, 32, dtype=torch.bfloat16, requires_grad=True)
fused = softmax.FusedScaleMaskSoftmax(None)
mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
(ours,) = torch.autograd.grad(fused(logits, mask, "arbitrary", 0.5).square().sum(), logits)
(expected,) = torch.autograd.grad(
    torch.softmax((logits.float() * 0.5).masked_fill(mask, -torch.inf), -1).square().sum(), logits)
assert_close(ours, expected, atol=1e-3, rtol=2e-2)

angles = torch.outer(torch.arange(6.0), torch.tensor([1.0, 0.01])).repeat(1, 2).view(6, 1, 1, 4)
t = torch.randn(6, 2, 3, 4, requires_grad=True)
turned = FusedRoPEFunc.apply(t, angles, None, "sbhd", False, None, 1, 0)
assert_close(turned, t * angles.cos() + torch.cat((-t[..., 2:], t[..., :2]), -1) * angles.sin())
(ours,) = torch.autograd.grad(turned.square().sum(), t)
assert_close(ours, 2 * t.detach())

tokens = torch.randn(10, 64, requires_grad=True)
index = torch.stack([torch.randperm(4)[:2] for _ in range(10)]).int()
import transformer_engine_torch as tex  # its forward refuses tensors on the CPU
permuted, row_map, _ = tex.moe_permute_fwd(tokens, te.DType.kFloat32, index, 0, [], 20)
assert_close(permuted, tokens[index.flatten().argsort(stable=True) // 2])
back = torch.ops.te_moe.unpermute_index_map_fwd(permuted, row_map, torch.full((10, 2), 0.5), 10, 2)
assert_close(back, tokens)

padded = _Fp8Padding.apply(x, ([3, 5], [16, 16], True))
assert_close(padded[16:21], x[3:])
flag = torch.zeros(1, dtype=torch.int32)
p, g, m, v = torch.ones(5), torch.ones(5), torch.zeros(5), torch.zeros(5)
MultiTensorApply(1024)(multi_tensor_adam, flag, [[g], [p], [m], [v]], 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
assert_close(p, torch.full((5,), 0.9))
assert_close(MultiTensorApply(1024)(multi_tensor_l2norm, flag, [[g]], False)[0], torch.tensor([5.0]).sqrt())

codes = [torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2)]
a, b = (te.Float8TensorStorage(data=c.view(torch.uint8), fp8_scale_inv=torch.tensor([0.5]),
                               fp8_dtype=te.DType.kFloat8E4M3, fake_dtype=torch.float32) for c in codes)
assert_close(tex.dequantize(a, te.DType.kFloat32), codes[0].float() * 0.5)
out, *_ = tex.generic_gemm(a, True, b, False, None, None, te.DType.kFloat32, None, te.DType.kBFloat16, False, None,
                           False, torch.empty(4), 4, False, True, comm_overlap=None, comm_type=None,
                           extra_output=None, bulk_overlap=False, alpha=1.0, beta=0.0)
assert_close(out, codes[1].float() @ codes[0].float().t() * 0.25)

calls = nvte_plugin.calls()
assert not any(count["passed_on"] for count in calls.values()), calls
print("served", *sorted(calls))
"""


def test_its_own_python_runs_on_served_functions(wheel: Path) -> None:
    done = _run(_USES, **PLUGIN)
    assert done.returncode == 0, done.stderr
    served = done.stdout.split()
    assert served[0] == "served" and set(served[1:]) <= set(SERVED)
    assert {"dgelu", "dswiglu", "fused_rope_backward", "layernorm_bwd", "moe_unpermute_fwd", "rmsnorm_bwd"} < set(
        served
    )


def test_a_failure_ends_its_import(wheel: Path) -> None:
    code = """
import te_dispatch.compat.nvte_plugin.seam as seam
def fail(): raise ImportError("no such library")
seam.adapters = fail
try:
    import transformer_engine.pytorch
except Exception as error:
    print("went on", error)
"""
    done = _run(code, **PLUGIN)
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "NvtePluginError" in done.stderr.strip().splitlines()[-1] and "no such library" in done.stderr


@pytest.mark.parametrize("warnings", [{}, {"PYTHONWARNINGS": "error:NVTE_PLUGIN"}], ids=["default", "error"])
def test_a_misspelt_plugin_is_found(wheel: Path, warnings: dict[str, str]) -> None:
    """By the proof, or by Python where the warning is asked to be an error."""
    code = """
import transformer_engine.pytorch
print("imported")
from te_dispatch.compat import nvte_plugin
nvte_plugin.verify()
"""
    done = _run(code, NVTE_PLUGIN="te_dispatch.compat.nvte_plugn", **warnings)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    if warnings:
        assert not done.stdout and last.startswith("RuntimeWarning: NVTE_PLUGIN=te_dispatch.compat.nvte_plugn but")
    else:
        assert done.stdout == "imported\n" and "plugin loading failed" in done.stderr
        assert last.startswith("RuntimeError: the functions of te_dispatch are not in use")
