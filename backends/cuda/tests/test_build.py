# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The build: where nvcc is found, what the module links and exports, and that it imports without a driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BACKEND = Path(__file__).resolve().parent.parent
PARTS = ("nvvm/bin/cicc", "include/crt/host_runtime.h", "include/cuda_runtime.h", "lib/libcudart_static.a")


@pytest.fixture
def toolkit(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """cmake/toolkit.py on a machine that has neither a toolkit nor packages."""
    for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH", "TE_DISPATCH_CUDA_TOOLKIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    module = script("cmake/toolkit.py")
    which = shutil.which

    def elsewhere(name: str, path: str | None = None) -> str | None:
        return None if path == "/usr/local/cuda/bin" else which(name, path=path)

    monkeypatch.setattr(module.shutil, "which", elsewhere)
    monkeypatch.setattr(module, "_site_folders", lambda: iter([tmp_path / "site"]))
    return module


def program(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


def packages(site: Path, major: str, without: str = "") -> str:
    root = site / "nvidia" / major
    for part in PARTS:
        if part != without:
            (root / part).parent.mkdir(parents=True, exist_ok=True)
            (root / part).touch()
    return program(root / "bin" / "nvcc")


def test_nvcc_is_searched_in_order(toolkit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert toolkit.nvcc() is None
    expected = packages(tmp_path / "site", "cu13")
    assert toolkit.nvcc() == expected
    expected = program(tmp_path / "path" / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert toolkit.nvcc() == expected
    expected = program(tmp_path / "home" / "bin" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert toolkit.nvcc() == expected
    expected = program(tmp_path / "chosen" / "nvcc")
    monkeypatch.setenv("CUDACXX", expected)
    assert toolkit.nvcc() == expected


def test_one_variable_keeps_to_one_kind(toolkit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = packages(tmp_path / "site", "cu13")
    system = program(tmp_path / "path" / "nvcc")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    for value, expected in (("wheels", wheel), ("system", system), ("", system)):
        monkeypatch.setenv("TE_DISPATCH_CUDA_TOOLKIT", value)
        assert toolkit.nvcc() == expected
    monkeypatch.setenv("TE_DISPATCH_CUDA_TOOLKIT", "pip")
    with pytest.raises(SystemExit, match="TE_DISPATCH_CUDA_TOOLKIT: got 'pip', expected 'wheels', 'system' or nothing"):
        toolkit.nvcc()


@pytest.mark.parametrize("part", PARTS)
def test_packages_with_a_part_missing_are_passed_over(toolkit: Any, tmp_path: Path, part: str) -> None:
    packages(tmp_path / "site", "cu14", without=part)
    expected = packages(tmp_path / "site", "cu13")
    assert toolkit.nvcc() == expected


def test_without_any_it_says_what_to_install(
    toolkit: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["toolkit.py"])
    assert toolkit.main() == 1
    said = capsys.readouterr().err
    assert "needs nvcc, CUDA 12.8 or newer" in said and "nvidia-cuda-nvcc==13.0.*" in said


def test_the_build_asks_for_the_compiler_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scikit_build_core")
    monkeypatch.chdir(BACKEND)
    monkeypatch.syspath_prepend(str(BACKEND / "cmake"))
    import build_backend
    import toolkit

    for hook in (build_backend.get_requires_for_build_wheel, build_backend.get_requires_for_build_editable):
        monkeypatch.setattr(toolkit, "nvcc", lambda: None)
        assert set(toolkit.requirements()) <= set(hook({}))
        monkeypatch.setattr(toolkit, "nvcc", lambda: "/usr/bin/nvcc")
        assert not any(name.startswith("nvidia") for name in hook({}))


@pytest.mark.parametrize("archs", ["75", "sm_90", "90x", "90a 100a"])
def test_a_chip_that_is_none_is_refused(archs: str, tmp_path: Path) -> None:
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("no cmake")
    environment = {**os.environ, "TE_DISPATCH_CUDA_ARCHS": archs}
    command = [cmake, "-S", str(BACKEND), "-B", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"TE_DISPATCH_CUDA_ARCHS: got '{archs}', expected a list" in " ".join(done.stderr.split())


def test_the_present_chips_by_name(script: Any) -> None:
    present = script("tools/present_archs.py").present
    assert present("9.0\n9.0\n8.0\n12.0\n10.0\n") == ["80", "90a", "100a", "120"]
    assert present("") == []
    assert present("No devices were found\n") == []


def test_it_imports_without_a_driver_and_tells_what_it_is(native: Any) -> None:
    code = (
        "import sys; from te_dispatch_cuda.native import load; m = load(); "
        "print(m.BUILT_ARCHS, m.RUNTIME_VERSION, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "LD_LIBRARY_PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    archs, version, torch = done.stdout.split()
    assert all(arch.rstrip("af").isdigit() for arch in archs.split(","))
    assert int(version) >= 12080
    assert torch == "False"


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_it_links_no_cuda_and_no_torch_and_exports_nothing(native: Any) -> None:
    def readelf(*options: str) -> str:
        return subprocess.run(["readelf", *options, native.__file__], capture_output=True, text=True, check=True).stdout

    needed = {line.partition("[")[2].partition("]")[0] for line in readelf("-d").splitlines() if "(NEEDED)" in line}
    system = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "libdl.so.2"}
    assert needed <= system | {"librt.so.1", "libpthread.so.0", "ld-linux-aarch64.so.1"}
    rows = [line.split() for line in readelf("--dyn-syms", "-W").splitlines()]
    # C++'s own templates and type information may be shared; functions of ours or of the CUDA runtime may not.
    exported = {row[7] for row in rows if len(row) == 8 and row[4] == "GLOBAL" and row[6].isdigit()}
    assert exported == {"PyInit__native"}
