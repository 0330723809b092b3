# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Private names of PyTorch: used in one module, each with a replacement that returns the same."""

from __future__ import annotations

import ast
import io
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import te_dispatch
from te_dispatch import torch_private as private

ROOT = Path(te_dispatch.__file__).parent.parent
#: Names that PyTorch documents for those who extend it.
DOCUMENTED = ("utils._pytree", "utils._python_dispatch", "_dynamo", "_register_device_module")
#: Names that a release may lack, wherever it runs.
REPLACED = (
    "_C._autograd._top_saved_tensors_default_hooks",
    "_C._autograd._pop_saved_tensors_default_hooks",
    "_C._set_grad_enabled",
    "_C._is_multithreading_enabled",
    "_C._is_any_autocast_enabled",
    "_C._len_torch_dispatch_stack",
    "_C._len_torch_function_stack",
    "_C._disabled_torch_function_impl",
    "_C._get_fp32_precision_getter",
    "_C._are_functorch_transforms_active",
    "_C._functorch.unwrap_if_dead",
    "_C._dynamo.guards.TensorGuards",
    "cpu._is_amx_tile_supported",
    "cuda._sleep",
    "_foreach_copy_",
    "_utils._rebuild_tensor_v2",
    "_tensor_str.PRINT_OPTS",
    "utils.checkpoint._CheckpointFrame",
)


def _files() -> list[Path]:
    folders = [ROOT / "te_dispatch", *ROOT.glob("backends/*/te_dispatch_*"), ROOT / "compat", ROOT / "examples"]
    return [path for folder in folders for path in folder.rglob("*.py") if path != Path(private.__file__)]


def _private_names(source: str) -> list[str]:
    """Dotted private names of torch in a module's source."""
    tree = ast.parse(source)
    aliases = {"torch": "torch"}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname or "torch": a.name if a.asname else "torch" for a in node.names if _of_torch(a.name)}
            found += [a.name for a in node.names if _of_torch(a.name)]
        elif isinstance(node, ast.ImportFrom) and node.module and _of_torch(node.module) and not node.level:
            aliases |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            found += [f"{node.module}.{a.name}" for a in node.names]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found += _dotted(node, aliases)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            owner, name = node.args[:2]
            base = _dotted(owner, aliases)
            if base and isinstance(name, ast.Constant):
                found.append(f"{base[0]}.{name.value}")
    names = {name.removeprefix("torch.") for name in found}
    return sorted(n for n in names if _is_private(n) and not n.startswith(DOCUMENTED))


def _of_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def _dotted(node: ast.expr, aliases: dict[str, str]) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [".".join([aliases[node.id], *parts])] if isinstance(node, ast.Name) and node.id in aliases else []


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_no_other_module_uses_one():
    used = {str(path.relative_to(ROOT)): names for path in _files() if (names := _private_names(path.read_text()))}
    assert not used, f"belongs in te_dispatch/torch_private.py: {used}"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._current_graph_task_id()",
        "from torch._C import _current_graph_task_id",
        "import torch.utils.checkpoint as c\nc._checkpoint_hook",
        "import torch\ngetattr(torch._C, '_x', None)",
        "import torch\ngetattr(torch.cuda, '_sleep')",
        "from torch import nn\nnn.Module._call_impl",
    ],
)
def test_the_search_finds_them(source):
    assert _private_names(source)


def test_the_search_leaves_documented_names():
    assert not _private_names("import torch\nfrom torch.utils._pytree import tree_map\ntorch._dynamo.mark_static(1)")


def test_this_release_has_them_all():
    """Releases that lack one are served, more slowly; those that are tested here have all."""
    assert private.MISSING == []


def _without(*paths: str, then: str) -> subprocess.CompletedProcess[str]:
    """Run Python where `torch_private` finds some names absent; PyTorch itself keeps them."""
    program = f"""
import functools, torch, torch.utils.checkpoint
places = [name.rpartition(".") for name in {list(paths)!r}]
owners = [functools.reduce(getattr, owner.split("."), torch) if owner else torch for owner, _, _ in places]
gone = [(owner, name, vars(owner)[name]) for owner, (_, _, name) in zip(owners, places)]
for owner, name, _ in gone:
    delattr(owner, name)
from te_dispatch import torch_private as private
for owner, name, value in gone:
    setattr(owner, name, value)
{then}
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)


@pytest.mark.slow
def test_a_release_without_them_is_served():
    """A module trains with the same bits."""
    then = """
assert sorted(private.MISSING) == sorted(GONE), private.MISSING
import te_dispatch.pytorch as te
from te_dispatch.common.recipe import DelayedScaling
torch.manual_seed(0)
layer = te.Linear(32, 32, params_dtype=torch.bfloat16, device="cpu")
x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
for step in range(3):
    with te.autocast(recipe=DelayedScaling()):
        y = te.checkpoint(layer, x) if step == 2 else layer(x)
    y.float().square().sum().backward()
print(float(x.grad.float().abs().sum()), float(layer.weight.grad.float().abs().sum()))
"""
    done = _without(*REPLACED, then=f"GONE = {['torch.' + name for name in REPLACED]!r}\n{then}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == _without(then=f"GONE = []\n{then}").stdout


def test_doctor_shows_what_is_replaced():
    done = _without("cuda._sleep", then="print(private.examine())")
    assert "('torch.cuda._sleep', 'warning', 'PyTorch" in done.stdout
    assert private.examine() == []


def test_what_cannot_be_replaced_is_named():
    done = _without("_C._current_graph_task_id", then="")
    assert done.returncode == 1
    assert "ImportError: te_dispatch needs torch._C._current_graph_task_id, which PyTorch" in done.stderr


@pytest.mark.parametrize("kind", ["cpu", None])
def test_any_autocast(kind):
    assert not private.any_autocast() and not private._any_autocast()
    if kind is not None:
        with torch.autocast(kind, torch.bfloat16):
            assert private.any_autocast() and private._any_autocast()


def test_hooks_are_taken_away():
    torch.autograd.graph.saved_tensors_hooks(abs, abs).__enter__()
    assert private.saved_tensors_hooks(True) is not None
    private.pop_saved_tensors_hooks()
    assert private.saved_tensors_hooks(True) is None


def test_hooks_of_a_tensor():
    x = torch.zeros(2, requires_grad=True)
    assert private.hooks(x) == 0 and private.multithreading()
    x.register_hook(lambda gradient: None)
    x.register_post_accumulate_grad_hook(lambda x: None)
    assert private.hooks(x) == 2
    with torch.autograd.set_multithreading_enabled(False):
        assert not private.multithreading()


def test_disabled_torch_function():
    for implementation in (private.disabled_torch_function, classmethod(private._without_torch_function)):
        marked = type("Marked", (torch.Tensor,), {"__torch_function__": implementation})
        assert type(torch.ones(2).as_subclass(marked) + 1) is torch.Tensor


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_rebuild_tensor():
    x = torch.randn(4, 6)[1:, ::2].requires_grad_()
    arguments = (x.untyped_storage(), x.storage_offset(), x.size(), x.stride(), True, None)
    typed = torch.storage.TypedStorage(wrap_storage=arguments[0], dtype=x.dtype, _internal=True)
    for rebuild in (private.rebuild_tensor, private._rebuild_tensor):
        again = rebuild(typed, *arguments[1:])
        assert torch.equal(again, x) and again.requires_grad and again.stride() == x.stride()
    assert torch.equal(pickle.load(io.BytesIO(pickle.dumps(x))), x)


def test_foreach_copy():
    sources = [torch.randn(3), torch.randn(2, 2)]
    targets = [torch.empty(3), torch.empty(2, 2)]
    private._foreach_copy(targets, sources)
    assert all(map(torch.equal, targets, sources))


def test_fp32_precision():
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for allow in (True, False):
            torch.backends.cuda.matmul.allow_tf32 = allow
            native, replaced = private.fp32_precision("cuda", "matmul"), private._fp32_precision("cuda", "matmul")
            assert (native == "tf32") is (replaced == "tf32") is allow
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_amx_tiles():
    assert private.amx_tiles() == private._amx_tiles()


def test_modes_that_cannot_be_counted_are_taken_to_be_there():
    assert private._mode_entered() > 0 and private._unknown_hooks(True) is not None
