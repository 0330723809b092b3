# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Private names of Triton: used in one module, with an answer where they are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

knobs = pytest.importorskip("triton.knobs")

from te_dispatch_triton import assembler, triton_private  # noqa: E402

GRID = (2, 3, 1)
_PRIVATE = re.compile(
    r"triton\.(\w+\.)*_[a-z]|triton\.backends\.(nvidia|amd)\b|launch_(enter|exit)_hook|packed_metadata|__closure__"
    r"|cell_contents|launch_cooperative_grid|tensordesc_"
)


def test_no_other_module_uses_one() -> None:
    home = Path(triton_private.__file__)
    used = {
        path.name: found.group()
        for path in home.parent.rglob("*.py")
        if path != home and (found := _PRIVATE.search(path.read_text()))
    }
    assert not used, f"belongs in {home.name}: {used}"
    assert _PRIVATE.search(home.read_text())


class CudaLauncher:
    """Of the form of Triton's own, whose C function takes scratch memory too."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, False

    def __init__(self, launched: list[Any]) -> None:
        self.launched = launched

    def launch(self, *given: Any) -> None:
        self.launched.append(given)

    def __call__(self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any) -> None:
        self.launched.append("called")


def test_the_launcher_is_passed_by_where_it_has_nothing_to_do() -> None:
    launched: list[Any] = []
    compiled = SimpleNamespace(run=CudaLauncher(launched), function=77, packed_metadata=(4, 1, 0))
    run, given = triton_private.launcher_of(compiled)
    run(*GRID, 1234, *given, 4096)
    assert launched == [(*GRID, 1234, 77, False, False, None, None, (4, 1, 0), None, None, None, 4096)]
    compiled.run.global_scratch_size = 128
    run, given = triton_private.launcher_of(compiled)
    run(*GRID, 1234, *given, 4096)
    assert launched[1:] == ["called"]


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not triton_private.hooked()
    for name in ("launch_enter_hook", "launch_exit_hook"):
        for hook, called in ((SimpleNamespace(calls=[]), False), (SimpleNamespace(calls=[print]), True), (print, True)):
            with monkeypatch.context() as patch:
                patch.setattr(knobs.runtime, name, hook)
                assert triton_private.hooked() is called


def test_the_ptx_version_of_an_assembler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton does not tell, its own assembler is kept."""
    assert triton_private.ptx_version("12.8") == 87 and triton_private.ptx_version("12.9") == 88
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.compiler", None)
    assert triton_private.ptx_version("12.9") is None
    tools = {
        name: SimpleNamespace(version=v, path=name) for name, v in (("ptxas", "12.8"), ("ptxas_blackwell", "12.9"))
    }
    monkeypatch.setattr(assembler, "knobs", SimpleNamespace(nvidia=SimpleNamespace(**tools)))
    assert assembler.replacement.__wrapped__() is None


@pytest.mark.parametrize(("backend", "expected"), [("hip", True), ("cuda", False), (None, False)])
def test_kernels_know_that_they_are_compiled_for_amd(backend: str | None, expected: bool) -> None:
    options = SimpleNamespace() if backend is None else SimpleNamespace(backend_name=backend)
    semantic = SimpleNamespace(builder=SimpleNamespace(options=options))
    assert triton_private.for_amd(_semantic=semantic).value is expected
