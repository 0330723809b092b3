# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``import transformer_engine`` as an import of this project. What changes a process is run in one of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from te_dispatch.compat.face import ABSENT, FACE
from te_dispatch.compat.instead import INSTEAD

pytestmark = pytest.mark.sampled(8)

REPOSITORY = Path(__file__).resolve().parents[2]


def python(code: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(command or ("-c", code))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def said(code: str, *command: str, **environment: str) -> str:
    done = python(code, *command, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", FACE)
def test_every_name_is_where_the_table_says(module):
    for name, home in FACE[module].items():
        where, _, attribute = home.partition(":")
        assert hasattr(importlib.import_module(where), attribute), f"{module}.{name}"


def test_every_module_and_name_imports():
    out = said("""
import importlib
import te_dispatch
te_dispatch.as_transformer_engine()
te_dispatch.as_transformer_engine()
from te_dispatch.compat.face import FACE
for module, names in FACE.items():
    found = importlib.import_module(module)
    assert set(names) <= set(dir(found)), module
    for name in names:
        getattr(found, name)
    assert sorted(found.__all__) == sorted(names)
print(len(FACE))
""")
    assert int(out) == len(FACE)


def test_names_are_this_projects_own_objects():
    out = said("""
import te_dispatch
te_dispatch.as_transformer_engine()
import transformer_engine as te
import te_dispatch.pytorch as own
import te_dispatch.common.recipe as recipe
assert te.pytorch.Linear is own.Linear and te.common.recipe.DelayedScaling is recipe.DelayedScaling
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
with te.pytorch.autocast(recipe=recipe.Float8CurrentScaling()):
    print(FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.get_fp8_recipe())
print(FP8GlobalStateManager.is_fp8_enabled())
""")
    first, second = out.splitlines()
    assert first.startswith("True Float8CurrentScaling(") and second == "False"


def test_a_factory_of_quantizers():
    """The names are written as in Transformer Engine's own factories; a product is what its own recipe gives."""
    out = said("""
import te_dispatch
te_dispatch.as_transformer_engine()
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import CustomRecipe, Float8BlockScaling
from transformer_engine.pytorch import DType, QuantizerRole
from transformer_engine.pytorch.constants import DType as same
from transformer_engine.pytorch.quantization import QuantizerRole as also
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer
assert same is DType and also is QuantizerRole and te.tensor.Quantizer is te.Quantizer

def factory(role):
    dim = 2 if role is not None and role.tensor_type == "weight" else 1
    return Float8BlockQuantizer(fp8_dtype=DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dim)

layer, x = te.Linear(64, 64, device="cpu"), torch.randn(32, 64)
outs = []
for recipe in (CustomRecipe(qfactory=factory), Float8BlockScaling()):
    with te.autocast(recipe=recipe):
        outs.append(layer(x))
print(torch.equal(*outs))
""")
    assert out.split() == ["True"]


def test_numbers_of_the_native_module():
    out = said("""
import te_dispatch
te_dispatch.as_transformer_engine()
import transformer_engine_torch as tex
import transformer_engine.pytorch as te
from transformer_engine.pytorch.constants import FP8FwdTensorIdx, TE_DType
from transformer_engine.pytorch.attention.dot_product_attention.utils import FusedAttnBackend
assert tex.DType is te.DType and tex.FP8FwdTensors is FP8FwdTensorIdx
assert tex.NVTE_Fused_Attn_Backend is FusedAttnBackend
import torch
print(te.MXFP8Quantizer(tex.DType.kFloat8E5M2)(torch.ones(32, 32))._fp8_dtype.name, TE_DType[torch.uint8].name)
""")
    assert out.split() == ["kFloat8E5M2", "kByte"]


def test_a_native_module_that_is_installed_is_not_shadowed(tmp_path):
    (tmp_path / "transformer_engine_torch.py").write_text("real = True\n")
    code = (
        "import te_dispatch; te_dispatch.as_transformer_engine(); import transformer_engine, transformer_engine_torch"
    )
    assert said(f"{code} as tex; print(tex.real)", PYTHONPATH=str(tmp_path)) == "True\n"


def test_the_native_module_of_an_installed_transformer_engine_is_not_replaced(tmp_path):
    from te_dispatch.compat.alias import IMPORT_PATH

    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "transformer_engine_torch.py").write_text((IMPORT_PATH / "transformer_engine_torch.py").read_text())
    for before in ("", "import transformer_engine; "):
        done = python(f"{before}import transformer_engine_torch", PYTHONPATH=str(tmp_path))
        last = done.stderr.strip().splitlines()[-1]
        assert done.returncode == 1 and last.startswith("ModuleNotFoundError") and str(package) in last


def test_tensor_classes_by_their_files():
    said("""
import te_dispatch
te_dispatch.as_transformer_engine()
import torch, transformer_engine.pytorch as te
from transformer_engine.pytorch.float8_tensor import Float8Tensor
from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor as same
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, prepare_for_saving, restore_from_saved
assert same is Float8Tensor is te.Float8Tensor
x = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu")(torch.ones(16, 16))
assert isinstance(x, Float8Tensor) and isinstance(x, Float8TensorStorage) and isinstance(x, QuantizedTensorStorage)
assert not isinstance(x, MXFP8Tensor) and not isinstance(torch.ones(1), QuantizedTensorStorage)
from transformer_engine.pytorch.distributed import FP8GlobalStateManager, autocast, fp8_autocast
assert autocast is te.autocast and fp8_autocast is te.fp8_autocast
""")


def test_the_version_is_read_from_the_package_and_from_its_metadata():
    out = said("""
import importlib.metadata, importlib.util
import te_dispatch
te_dispatch.as_transformer_engine()
assert importlib.util.find_spec("transformer_engine") and importlib.util.find_spec("transformer_engine.pytorch")
print(importlib.metadata.version("transformer_engine"), importlib.metadata.version("transformer-engine"))
print(importlib.metadata.packages_distributions()["transformer_engine"])
import transformer_engine
print(transformer_engine.__version__)
""")
    assert out.splitlines() == ["2.20.2 2.20.2", "['transformer-engine']", "2.20.2"]


@pytest.mark.parametrize(
    ("statement", "error", "word"),
    [
        ("from transformer_engine.pytorch import MadeUp", "ImportError", "MadeUp"),
        ("import transformer_engine.pytorch.made_up", "ModuleNotFoundError", "made_up"),
        ("import transformer_engine as te; te.pytorch.MadeUp", "AttributeError", "docs/transformer_engine.md"),
        ("import transformer_engine as te; te.pytorch.initialize_ub", "AttributeError", "leave the arguments ub_*"),
        ("import transformer_engine as te; te.pytorch.optimizers", "AttributeError", "torch.optim"),
        ("import transformer_engine as te; te.made_up", "AttributeError", "made_up"),
        ("import transformer_engine_torch as tex; tex.generic_gemm", "AttributeError", "generic_gemm"),
        ("from transformer_engine_torch import NVTE_QKV_Layout", "ImportError", "NVTE_QKV_Layout"),
        # Megatron's batch-invariant mode takes a module of this name to have the functions that it replaces.
        ("import transformer_engine.pytorch.cpp_extensions", "ModuleNotFoundError", "cpp_extensions"),
    ],
)
def test_what_is_not_there_raises_with_its_name(statement, error, word):
    done = python(f"import te_dispatch; te_dispatch.as_transformer_engine(); {statement}")
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith(error) and word in last


def test_names_that_have_something_in_their_place_are_not_here():
    listed = {name for names in FACE.values() for name in names} | {name for names in ABSENT.values() for name in names}
    modules = {module.rpartition(".")[2] for module in FACE}
    assert not INSTEAD.keys() & (listed | modules)


def test_what_frameworks_only_import_raises_where_it_is_used():
    said(f"""
import importlib, te_dispatch
te_dispatch.as_transformer_engine()
for module, names in { ({m: sorted(n) for m, n in ABSENT.items()})!r}.items():
    for name in names:
        base = getattr(importlib.import_module(module), name)
        class Derived(base):
            def __init__(self):
                super().__init__(1, bias=False)
        for use in (lambda: base(2, x=3), Derived):
            try:
                use()
            except NotImplementedError as error:
                assert f"{{module}}.{{name}} is not there yet" in str(error)
            else:
                raise AssertionError(name)
    assert not set(names) & set(importlib.import_module(module).__all__)
""")


def test_an_installed_transformer_engine_is_not_shadowed(tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    code = "import te_dispatch; te_dispatch.as_transformer_engine()"
    for before in ("", "import transformer_engine; "):
        done = python(before + code, PYTHONPATH=str(tmp_path))
        assert done.returncode == 1 and str(package) in done.stderr and "uninstall" in done.stderr.splitlines()[-1]
    # Beside it in one folder, as after installing both, the package is found.
    from te_dispatch.compat.alias import IMPORT_PATH

    (tmp_path / "transformer_engine.py").write_text((IMPORT_PATH / "transformer_engine.py").read_text())
    assert said("import transformer_engine; print(transformer_engine.real)", PYTHONPATH=str(tmp_path)) == "True\n"


def test_the_import_itself_loads_no_torch():
    code = "import te_dispatch, sys; te_dispatch.as_transformer_engine(); import transformer_engine.pytorch; "
    assert said(code + "print('torch' in sys.modules)") == "False\n"


SCRIPT = """
import subprocess, sys
from multiprocessing import get_context

def version(_):
    import transformer_engine
    return transformer_engine.__version__

if __name__ == "__main__":
    import beside
    import transformer_engine.pytorch as te
    print(sys.argv[1:], te.Linear.__module__)
    with get_context("spawn").Pool(1) as pool:
        print(pool.map(version, [0]))
    code = "import importlib.metadata as m; print(m.version('transformer-engine'))"
    sys.stdout.flush()
    subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_run_serves_a_script_and_the_processes_it_starts(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("")
    out = said("", "-m", "te_dispatch.cli", "run", str(tmp_path / "script.py"), "-h", "--json", "x")
    assert out.splitlines() == ["['-h', '--json', 'x'] te_dispatch.pytorch.modules.linear", "['2.20.2']", "2.20.2"]


@pytest.mark.parametrize("option", ["-I", "-E"])
def test_run_does_not_serve_processes_that_ignore_pythonpath(option, tmp_path):
    (tmp_path / "script.py").write_text(
        "import subprocess, sys\n"
        "code = 'import transformer_engine as te; print(hasattr(te, \"pytorch\"))'\n"
        f"sys.exit(subprocess.run([sys.executable, {option!r}, '-c', code]).returncode)\n"
    )
    done = python("", "-m", "te_dispatch.cli", "run", str(tmp_path / "script.py"))
    assert done.returncode and "No module named 'transformer_engine'" in done.stderr


def test_run_serves_a_module_and_leaves_errors_and_exit_codes_alone(tmp_path):
    (tmp_path / "program.py").write_text("import sys, transformer_engine\nsys.exit(int(sys.argv[1]))\n")
    command = ("-m", "te_dispatch.cli", "run", "-m", "program")
    assert python("", *command, "7", PYTHONPATH=str(tmp_path)).returncode == 7
    done = python("", *command, "seven", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "ValueError" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("arguments", [("nothing.py",), ("-m", "no_such.module"), ("-m", "no_such_module")])
def test_run_without_a_program_says_so(arguments):
    done = python("", "-m", "te_dispatch.cli", "run", *arguments)
    assert done.returncode == 2 and arguments[-1] in done.stderr and "Traceback" not in done.stderr


def install(place, **variables):
    """Install the distribution into a folder."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"),
            *("--no-compile", "--target", str(place), str(REPOSITORY / "compat" / "transformer_engine")),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **variables},
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the distribution is installed."""
    place = tmp_path_factory.mktemp("installed")
    done = install(place)
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("editable", [False, True])
def test_the_distribution_does_not_install_beside_transformer_engine(tmp_path, editable):
    real, place = tmp_path / "real", tmp_path / "place"
    metadata = real / "transformer_engine-2.20.2.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    (metadata / "RECORD").write_text("")
    if not editable:  # whose package lies elsewhere
        (real / "transformer_engine").mkdir()
        (real / "transformer_engine" / "__init__.py").write_text("")
    done = install(place, PYTHONPATH=str(real))
    assert done.returncode != 0 and not place.exists()
    assert f"Transformer Engine is installed at {real}" in done.stderr and "Uninstall" in done.stderr
    # Its own metadata, which says the same name, is no hindrance to installing it again.
    again = tmp_path / "again"
    for _ in range(2):
        done = install(again, PYTHONPATH=str(again))
        assert done.returncode == 0, done.stderr


VERSIONS = """
import importlib.metadata as metadata, transformer_engine.pytorch as te
print(te.Linear.__module__, __import__("transformer_engine").__version__, metadata.version("transformer-engine"))
"""


def test_the_distribution_serves_the_import_and_tells_the_version(installed):
    from te_dispatch.compat.face import VERSION

    assert said(VERSIONS, PYTHONPATH=str(installed)).split() == ["te_dispatch.pytorch.modules.linear", VERSION, VERSION]
    code = "import transformer_engine_torch as tex; print(int(tex.DType.kFloat8E4M3), tex.__file__)"
    assert said(code, PYTHONPATH=str(installed)).split() == ["7", str(installed / "transformer_engine_torch.py")]
    data = json.loads(said("", "-m", "te_dispatch.cli", "doctor", "--json", PYTHONPATH=str(installed)))
    assert data["transformer_engine"] == f"te_dispatch ({installed / 'transformer_engine.py'})"


def test_doctor_reports_the_distribution_beside_a_real_one(installed, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    done = python(
        "", "-m", "te_dispatch.cli", "doctor", "--json", PYTHONPATH=os.pathsep.join(map(str, (tmp_path, installed)))
    )
    assert done.returncode == 1
    assert [str(package) in problem for problem in json.loads(done.stdout)["problems"]] == [True]
