# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Loading the plugin as Transformer Engine loads one, the proof of what is in use, and failures that are loud."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from te_dispatch.compat import nvte_plugin
from te_dispatch.compat.nvte_plugin import manifest, seam
from te_dispatch.compat.nvte_plugin.seam import Replacement
from te_dispatch.core import nvte_variables
from tests.compat.conftest import native

MODULE, NATIVE = "transformer_engine_torch", "transformer_engine_torch_nv"
PLUGIN = "te_dispatch.compat.nvte_plugin"


def load_as_transformer_engine(solib: Any, plugin: str = PLUGIN) -> None:
    """What `load_framework_extension` of release 2.20 does from the loaded native module on."""
    sys.modules[MODULE] = sys.modules[NATIVE] = solib
    try:
        importlib.import_module(plugin).load_plugins()
    except Exception as error:
        del sys.modules[NATIVE]
        sys.modules[MODULE] = solib
        warnings.warn(f"NVTE_PLUGIN={plugin} but plugin loading failed: {error}", RuntimeWarning, stacklevel=2)


@pytest.fixture
def solib(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A native module of an installed Transformer Engine, none of whose modules is imported yet."""
    before = {
        name: module for name, module in sys.modules.items() if name.partition("_torch")[0] == "transformer_engine"
    }
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "2.20.2" if name == "transformer_engine" else version(name)
    )
    yield native()
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    sys.modules.update(before)


def _imported(name: str, **attributes: Any) -> ModuleType:
    """A module of Transformer Engine."""
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(attributes)
    return module


def test_served_functions_take_the_place_of_native_ones_and_all_else_stays(solib: Any) -> None:
    load_as_transformer_engine(solib)
    tex = sys.modules[MODULE]
    assert isinstance(tex, Replacement) and sys.modules[NATIVE] is solib
    for name, entry in manifest.MANIFEST.items():
        assert (getattr(tex, name) is getattr(solib, name)) == isinstance(entry, manifest.PassedOn), name
    assert tex.DType is solib.DType and tex.__file__ == solib.__file__
    assert not hasattr(tex, "flash_attention") and not hasattr(tex, "get_attention_backend")
    x = torch.randn(4, 8)
    torch.testing.assert_close(tex.silu(x, None), torch.nn.functional.silu(x))
    assert tex.dropout_fwd(x, 0.1) == ("native", "dropout_fwd")
    ((name, arguments, keywords),) = solib.CALLS
    assert (name, keywords) == ("dropout_fwd", {}) and arguments[0] is x


def test_every_form_of_import_gives_them(solib: Any) -> None:
    load_as_transformer_engine(solib)
    namespace: dict[str, Any] = {}
    exec("from transformer_engine_torch import *", namespace)
    exec("from transformer_engine_torch import rmsnorm_fwd as one, FP8TensorMeta as other", namespace)
    tex = sys.modules[MODULE]
    assert {name for name in vars(solib) if not name.startswith("_")} <= set(namespace)
    assert namespace["gelu"] is namespace["gelu"] is tex.gelu is not solib.gelu
    assert namespace["one"] is tex.rmsnorm_fwd and namespace["other"] is solib.FP8TensorMeta


def test_the_loaded_module_can_be_looked_for(solib: Any) -> None:
    solib.__spec__ = importlib.util.spec_from_file_location(MODULE, solib.__file__)
    load_as_transformer_engine(solib)
    assert importlib.util.find_spec(MODULE) is solib.__spec__


def test_loading_again_does_nothing(solib: Any) -> None:
    load_as_transformer_engine(solib)
    tex = sys.modules[MODULE]
    nvte_plugin.load_plugins()
    assert sys.modules[MODULE] is tex


def test_calls_are_counted_and_the_first_that_is_passed_on_is_logged(
    solib: Any, caplog: pytest.LogCaptureFixture
) -> None:
    load_as_transformer_engine(solib)
    tex, x = sys.modules[MODULE], torch.ones(2, 4)

    class MXFP8Quantizer:
        pass

    with caplog.at_level(logging.INFO, "te_dispatch"):
        tex.relu(x, None)
        for _ in range(3):
            tex.gelu(x, MXFP8Quantizer())
        tex.gelu(x, None)
    assert nvte_plugin.calls() == {
        "gelu": {"served": 1, "passed_on": {"a MXFP8Quantizer": 3}},
        "relu": {"served": 1, "passed_on": {}},
    }
    said = [record.getMessage() for record in caplog.records]
    assert said == ["gelu goes to the native function of Transformer Engine: a MXFP8Quantizer"]


def test_an_error_of_the_native_function_is_its_own(solib: Any) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    solib.gelu = fail
    load_as_transformer_engine(solib)
    with pytest.raises(RuntimeError, match="CUDA error") as caught:
        sys.modules[MODULE].gelu(torch.ones(2), object())
    assert caught.value.__context__ is None


# -- proof -----------------------------------------------------------------------------------------------------------


def test_the_proof_lists_who_holds_what(solib: Any) -> None:
    load_as_transformer_engine(solib)
    tex = sys.modules[MODULE]
    _imported("transformer_engine.pytorch.module", tex=tex)
    _imported("transformer_engine.pytorch.ops", rmsnorm_fwd=tex.rmsnorm_fwd, _fused={"GELU": tex.dbias_dgelu})
    found = nvte_plugin.verify()
    assert found["modules"] == ["transformer_engine.pytorch.module"]
    assert set(found["functions"]) == set(manifest.SERVED)
    held = {name: modules for name, modules in found["functions"].items() if modules}
    assert held == {name: ["transformer_engine.pytorch.ops"] for name in ("rmsnorm_fwd", "dbias_dgelu")}


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (lambda solib: {"tex": solib}, "transformer_engine.late holds the native module as tex"),
        (lambda solib: {"norm": solib.rmsnorm_fwd}, "transformer_engine.late holds the native rmsnorm_fwd as norm"),
        (
            lambda solib: {"table": {"GELU": solib.gelu}},
            "transformer_engine.late holds the native gelu as table['GELU']",
        ),
    ],
    ids=["module", "function", "table"],
)
def test_what_still_is_native_is_found(solib: Any, held: Callable[[Any], dict[str, Any]], said: str) -> None:
    load_as_transformer_engine(solib)
    _imported("transformer_engine.pytorch", tex=sys.modules[MODULE])
    _imported("transformer_engine.late", **held(solib))
    with pytest.raises(RuntimeError) as caught:
        nvte_plugin.verify()
    assert said in str(caught.value)


def test_a_function_that_was_replaced_later_is_found(solib: Any) -> None:
    load_as_transformer_engine(solib)
    _imported("transformer_engine.pytorch", tex=sys.modules[MODULE])
    sys.modules[MODULE].swiglu = solib.swiglu
    with pytest.raises(RuntimeError, match=r"transformer_engine_torch\.swiglu is another function"):
        nvte_plugin.verify()


def test_no_proof_without_the_plugin(solib: Any) -> None:
    with pytest.raises(RuntimeError, match="not in use: transformer_engine_torch is not imported"):
        nvte_plugin.verify()
    with pytest.warns(RuntimeWarning, match="No module named 'te_dispatch.compat.nvte_plug'"):
        load_as_transformer_engine(solib, "te_dispatch.compat.nvte_plug")
    for ask in (nvte_plugin.verify, nvte_plugin.calls):
        with pytest.raises(RuntimeError, match=r"native_module\.py, not te_dispatch's"):
            ask()


def test_no_proof_before_transformer_engine_is_imported(solib: Any) -> None:
    load_as_transformer_engine(solib)
    with pytest.raises(RuntimeError, match="Transformer Engine is not imported"):
        nvte_plugin.verify()


# -- failures --------------------------------------------------------------------------------------------------------


def _refused(solib: Any, match: str) -> nvte_plugin.NvtePluginError:
    """The failure, which Transformer Engine does not catch; the native module is where it was."""
    with pytest.raises(nvte_plugin.NvtePluginError, match=match) as caught:
        load_as_transformer_engine(solib)
    assert not isinstance(caught.value, Exception)
    assert sys.modules[MODULE] is solib
    return caught.value


def test_a_failure_is_no_exception_that_transformer_engine_would_swallow(
    solib: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ImportError("no libcuda")

    monkeypatch.setattr(seam, "adapters", fail)
    error = _refused(solib, "no libcuda. Transformer Engine would go on with its own functions")
    assert isinstance(error.__cause__, ImportError)


def test_another_release_is_refused(solib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.21.0")
    _refused(solib, r"Transformer Engine is 2\.21\.0, and these functions are those of 2\.20")


def test_a_native_module_without_a_function_is_refused(solib: Any) -> None:
    del solib.dsilu, solib.nvshmem_finalize
    _refused(solib, r"the native module of Transformer Engine 2\.20\.2 lacks dsilu, nvshmem_finalize")


def test_a_load_that_comes_too_late_is_refused(solib: Any) -> None:
    _imported("transformer_engine.pytorch.module", tex=solib)
    _refused(solib, "already imported: transformer_engine.pytorch.module holds the native module as tex")


def test_a_machine_without_backends_is_refused(solib: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_dispatch.core.discovery.list_entry_points", lambda: ([], []))
    _refused(solib, "no backend is installed")


def test_a_host_without_the_native_module_is_told_what_to_do(solib: Any) -> None:
    with pytest.raises(nvte_plugin.NvtePluginError, match=r"te_dispatch\.as_transformer_engine\(\)"):
        nvte_plugin.load_plugins()
    assert MODULE not in sys.modules


# -- the manifest ----------------------------------------------------------------------------------------------------


def test_the_manifest_has_the_native_functions_and_no_other() -> None:
    assert set(manifest.MANIFEST) == set(native()._NAMES) and len(manifest.MANIFEST) == 161
    assert not manifest.OTHERS & set(manifest.MANIFEST)
    assert all(entry.reason for entry in manifest.MANIFEST.values() if isinstance(entry, manifest.PassedOn))


def test_what_is_served_names_operators_that_there_are() -> None:
    import te_dispatch.ops

    assert set(seam.adapters()) == set(manifest.SERVED)
    assert {entry.operator for entry in manifest.SERVED.values()} <= set(te_dispatch.ops.__all__)


def test_the_variable_is_not_called_one_without_effect() -> None:
    assert nvte_plugin.__name__ == PLUGIN == nvte_variables.PLUGIN
    assert nvte_variables.ignored({"NVTE_PLUGIN": PLUGIN}) == {}
    assert list(nvte_variables.ignored({"NVTE_PLUGIN": "other.plugin"})) == ["NVTE_PLUGIN"]


def test_the_page_lists_what_is_served() -> None:
    page = (Path(__file__).parents[2] / "docs" / "nvte_plugin.md").read_text()
    table = page.split("## What is served", 1)[1].split("What differs", 1)[0]
    assert f"{len(manifest.SERVED)} of {len(manifest.MANIFEST)} functions" in table
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(manifest.SERVED)
