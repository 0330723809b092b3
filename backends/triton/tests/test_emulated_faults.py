# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Faults planted in kernels for AMD's chips are caught by the conformance kit on an emulated device.

Each is planted in a copy of a kernel's source, or in the machine code that Triton made of it. Without the faults the
units pass (`make conformance-emulated`).
"""

from __future__ import annotations

import importlib.util
import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops
from te_dispatch.conformance import Settings, certify
from te_dispatch.conformance.outcome import Outcome
from te_dispatch.conformance.planning import plan
from te_dispatch.core import scopes
from te_dispatch.core.emulation import emulated
from te_dispatch.core.errors import NoImplementation
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch_torch import quantize as portable
from te_dispatch_triton import emulation

pytestmark = [pytest.mark.compiles, pytest.mark.slow]
ARCHS = ("gfx942", "gfx950")


@pytest.fixture(autouse=True)
def needs_the_emulator() -> None:
    reason = emulation.missing()
    if reason is not None:
        pytest.skip(reason)


def failures(arch: str, implementation: str, operator: str, word: str = "") -> list[Outcome]:
    """What the kit finds by its check of numbers, on a few cases that an implementation claims.

    Args:
        word: part of those cases' ids.
    """
    settings = Settings(
        backends=("triton",), operators=(operator,), checks=("values",), device=f"emulated:{arch}", isolated=False,
        implementations=(f"triton.{implementation}",),
    )  # fmt: skip
    with emulated(scopes.MANAGER, arch):
        planned = plan(scopes.MANAGER, settings)
    units = [unit for unit in planned.units if unit.id not in planned.decided and word in unit.id]
    assert units
    return certify(settings=Settings(device=settings.device, isolated=False), units=units[:4]).failures()


def with_source(kernels: ModuleType, tmp_path: Path, right: str, wrong: str) -> ModuleType:
    """A copy of a module of kernels that differs in one place."""
    source = inspect.getsource(kernels)
    assert source.count(right) == 1, (source.count(right), right)
    path = tmp_path / f"wrong_{kernels.__name__.rsplit('.', 1)[1]}.py"
    path.write_text(source.replace(right, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_machine_code(monkeypatch: pytest.MonkeyPatch, change: Callable[[str], str]) -> None:
    """Let the emulator execute what is assembled of changed text in place of Triton's."""
    from triton._C.libtriton import amd, llvm

    from te_dispatch_triton.crosscompile import emulated as module

    compile_for = module.compile_for

    def changed(given: Any, target: Any) -> Any:
        made = compile_for(given, target)
        llvm.init_targets()
        with tempfile.TemporaryDirectory() as folder:
            objects, linked = Path(folder) / "object", Path(folder) / "linked"
            text = change(made.asm["amdgcn"])
            objects.write_bytes(amd.assemble_amdgcn(text, "amdgcn-amd-amdhsa", target.arch, ""))
            amd.link_hsaco(str(objects), str(linked))
            return SimpleNamespace(asm={"hsaco": linked.read_bytes()}, metadata=made.metadata)

    monkeypatch.setattr(module, "compile_for", changed)


_IN_A_ROW = "(rows < R)[:, None] & (columns < C)[None, :]"


@pytest.mark.parametrize(
    ("arch", "before", "behind", "told"),
    [
        ("gfx942", "mask=", ",\n    )  # fmt: skip\n    if BEHIND", "past the end of result"),
        ("gfx950", "present = ", "\n    if CAUSAL:\n        present", "AccessError"),
    ],
    ids=["store", "load"],
)
def test_a_mask_that_is_one_column_too_wide(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arch: str, before: str, behind: str, told: str
) -> None:
    from te_dispatch_triton import softmax
    from te_dispatch_triton.launch import Kernel

    right = before + _IN_A_ROW + behind
    kernels = with_source(softmax.kernels, tmp_path, right, right.replace("columns < C", "columns <= C"))
    monkeypatch.setattr(softmax, "_forward", Kernel(kernels.forward))
    found = failures(arch, "softmax_fwd", "softmax_fwd", "129x33")
    assert any(told in outcome.message for outcome in found), [outcome.message for outcome in found]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_reduction_over_a_wrong_lane(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    with_machine_code(monkeypatch, lambda text: text.replace("row_shr:4", "row_shr:3"))
    found = failures(arch, "rmsnorm_fwd", "rmsnorm_fwd", "31x257")
    assert any("elements are wrong" in outcome.message for outcome in found), [outcome.message for outcome in found]


def test_units_that_are_told_another_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """FNUZ codes read as OCP ones have twice their value."""
    from te_dispatch_triton import gemm_product
    from te_dispatch_triton.launch import Kernel

    line = "return x.to(tl.pointer_type(tl.float8e4b8), bitcast=True)"
    kernels = with_source(gemm_product.kernels, tmp_path, line, line.replace("e4b8", "e4nv"))
    monkeypatch.setattr(gemm_product, "PRODUCT", Kernel(kernels.gemm))
    found = failures("gfx942", "fp8_gemm", "gemm", "e4m3fnuz+e4m3fnuz")
    assert any("elements are wrong" in outcome.message for outcome in found), [outcome.message for outcome in found]


@pytest.mark.parametrize(
    ("arch", "encoding", "units"), [("gfx942", "e4m3fn", "e4m3fnuz"), ("gfx950", "e4m3fnuz", "e4m3fn")]
)
def test_codes_that_the_units_do_not_read_are_refused(arch: str, encoding: str, units: str) -> None:
    one = DelayedQuantizer(encoding, scale=torch.ones(1), amax=torch.zeros(1))
    a, b = (portable.quantize(torch.ones(64, 64).bfloat16(), one, usage="row") for _ in range(2))
    with (
        emulated(scopes.MANAGER, arch),
        te_dispatch.using(gemm="triton.fp8_gemm"),
        pytest.raises(NoImplementation) as refused,
    ):
        ops.gemm(a, b, layout="NT")
    line = next(one for one in str(refused.value).splitlines() if one.strip().startswith("triton.fp8_gemm"))
    assert f"a.dtype is {encoding}, needs" in line and f"device.encodings is ('{units}'" in line, line
