# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Transformer Engine's variables that do nothing here are warned of, once and by name."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from te_dispatch.core.environment import (
    ATTENTION_SWITCHES,
    DEBUG,
    DEBUG_LEVEL,
    FUSED_BACKEND,
    LIBRARY_SWITCHES,
    NONDETERMINISTIC,
    PACKAGE_SWITCHES,
    TRITON_SWITCHES,
)
from te_dispatch.core.layers import Sources
from te_dispatch.core.nvte_variables import ELSEWHERE, HONOURED, PLUGIN, ignored
from te_dispatch.core.policy.known import Known


def test_what_is_read_is_not_called_ignored() -> None:
    switches = {*ATTENTION_SWITCHES, *PACKAGE_SWITCHES, *LIBRARY_SWITCHES, *TRITON_SWITCHES}
    assert switches | {FUSED_BACKEND, NONDETERMINISTIC, DEBUG, DEBUG_LEVEL} <= HONOURED
    assert ignored(dict.fromkeys(HONOURED, "1")) == {}


def test_variables_of_transformer_engine_that_do_nothing_are_named() -> None:
    found = ignored({"NVTE_TORCH_COMPILE": "0", "NVTE_UnfusedDPA_Emulate_FP8": "1", "PATH": "x"})
    assert list(found) == ["NVTE_TORCH_COMPILE", "NVTE_UnfusedDPA_Emulate_FP8"]
    assert found["NVTE_TORCH_COMPILE"].startswith("NVTE_TORCH_COMPILE=0 has no effect: te_dispatch does not act on")


def test_what_serves_their_purpose_is_said() -> None:
    (what,) = ignored({"NVTE_APPLY_QK_LAYER_SCALING": "1"}).values()
    assert what == "NVTE_APPLY_QK_LAYER_SCALING=1 has no effect: logits are fp32 numbers here, so none overflows"


def test_what_chooses_a_kernel_on_amd_is_told_the_policy_that_does() -> None:
    (what,) = ignored({"NVTE_USE_HIPBLASLT": "1"}).values()
    assert what.endswith("has no effect: policies choose backends: TE_DISPATCH_PREFER=gemm=rocm")


def test_a_misspelt_name_gets_the_nearest() -> None:
    (what,) = ignored({"NVTE_FLASH_ATN": "0"}).values()
    assert what.startswith("NVTE_FLASH_ATN=0 has no effect: there is no variable of this name")
    assert "'NVTE_FLASH_ATTN'" in what


@pytest.mark.parametrize(
    "environ", [{"NVTE_FRAMEWORK": "pytorch"}, {"NVTE_CUDA_ARCHS": "90"}, {"NVTE_MADE_UP": " "}, {}]
)
def test_variables_of_builds_and_unset_ones_are_nobodys_concern(environ: dict[str, str]) -> None:
    assert ignored(environ) == {}


@pytest.mark.parametrize("name", ["NVTE_USE_FAST_MATH", "NVTE_CUDA_INCLUDE_DIR"])
def test_what_a_run_under_pytorch_reads_is_no_concern_of_builds_alone(name: str) -> None:
    (what,) = ignored({name: "1"}).values()
    assert what.startswith(f"{name}=1 has no effect: ") and "there is no variable" not in what


def test_what_transformer_engine_sets_itself_is_not_told_where_it_runs() -> None:
    environ = {"NVTE_CUDA_INCLUDE_DIR": "/usr/local/cuda/include", "NVTE_PLUGIN": PLUGIN}
    assert ignored(environ) == {}
    assert list(ignored({**environ, "NVTE_PLUGIN": "other"})) == ["NVTE_CUDA_INCLUDE_DIR", "NVTE_PLUGIN"]


def test_the_docs_list_those_of_which_nothing_is_said() -> None:
    assert not ELSEWHERE & HONOURED and ignored(dict.fromkeys(ELSEWHERE, "1")) == {}
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    table = page.partition("| variables | why nothing is said |")[2].partition("\n\n")[0]
    listed = [name for row in table.splitlines()[2:] for name in re.findall(r"`(NVTE_\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(ELSEWHERE)
    assert set(re.findall(r"`(NVTE_\w+)[=`]", page)) >= HONOURED


def test_each_is_warned_of_once(known: Known, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"NVTE_MADE_UP": "1"}
    sources = Sources(environ, lambda: known)
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        sources.read()
        sources.read()
        environ["NVTE_NVTX_ENABLED"] = "1"
        sources.again().read()
    assert [record.getMessage().partition("=")[0] for record in caplog.records] == ["NVTE_MADE_UP", "NVTE_NVTX_ENABLED"]
