# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the probe and the doctor say of a machine, with and without a driver, a device, or the compiled module."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from te_dispatch_cuda import doctor, native, packages, probe

ALL = "80,89,90a,100a"
MODULE = SimpleNamespace(BUILT_ARCHS=ALL, RUNTIME_VERSION=13000, __file__="_native.so")


@pytest.mark.parametrize(
    ("chip", "archs", "expected"),
    [
        ("8.0", ALL, True),
        ("8.6", ALL, True),  # code of a chip serves the later ones of its generation
        ("8.7", ALL, True),
        ("8.9", ALL, True),
        ("8.6", "89,90a", False),  # never an earlier one
        ("9.0", ALL, True),
        ("9.0", "90", True),
        ("9.0", "80,89", False),  # nor another generation: there is no PTX in the build
        ("10.0", ALL, True),
        ("10.3", ALL, False),  # "a" ties code to its chip
        ("10.3", "100f", True),  # "f" serves the family
        ("10.0", "103f", False),
        ("10.3", "100", True),
        ("12.0", ALL, False),
        ("12.1", "120", True),
        ("7.5", ALL, False),
    ],
)
def test_which_chips_a_build_serves(chip: str, archs: str, expected: bool) -> None:
    major, minor = map(int, chip.split("."))
    assert probe.built_for(major, minor, archs) is expected
    assert (doctor.served(major, minor, archs)[0] == "ok") is expected


def test_a_chip_that_is_not_served_hears_what_to_build() -> None:
    assert doctor.served(10, 3, ALL) == (
        "warning",
        f"sm_103: this build holds code for {ALL} alone; TE_DISPATCH_CUDA_ARCHS=103 builds for it",
    )
    assert doctor.served(7, 5, ALL)[1] == "sm_75: this backend starts at sm_80"
    assert doctor.served(9, 0, "")[1] == "sm_90: there is no compiled module"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """driver(version) plants a libcuda that tells a version."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def plant(version: int, result: int = 0) -> None:
        source = tmp_path / "libcuda.c"
        source.write_text(f"int cuDriverGetVersion(int* version) {{ *version = {version}; return {result}; }}\n")
        library = tmp_path / f"libcuda-{version}-{result}.so"
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        monkeypatch.setattr(probe, "DRIVER", str(library))
        probe.driver_version.cache_clear()

    yield plant
    probe.driver_version.cache_clear()


def test_a_driver_too_old_names_both_versions(driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: MODULE)
    driver(12040)
    reason = probe.unavailable()
    assert reason is not None
    assert "the driver supports CUDA 12.4, this build needs CUDA 13.0" in reason
    assert probe.cuda(0) is None
    assert ("driver", "missing", reason) in doctor.doctor()


def test_a_driver_of_the_same_major_release_serves(
    driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: MODULE)
    driver(13000)
    assert probe.unavailable() is None
    driver(14010)
    assert probe.unavailable() is None


def test_a_driver_that_does_not_tell_is_none(driver: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: MODULE)
    driver(13000, result=3)
    assert "libcuda" in (probe.unavailable() or "")


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: MODULE)
    monkeypatch.setattr(probe, "driver_version", lambda: None)
    assert "no NVIDIA driver" in (probe.unavailable() or "")
    assert probe.cuda(0) is None


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise ImportError("te_dispatch_cuda's compiled module does not load (planted)")

    monkeypatch.setattr(native, "load", load)
    assert "planted" in (probe.unavailable() or "")
    assert probe.cuda(0) is None
    rows = doctor.doctor()
    assert rows[0][:2] == ("compiled module", "missing") and "planted" in rows[0][2]


def test_the_report_answers_here() -> None:
    rows = doctor.doctor()
    assert {state for _, state, _ in rows} <= {"ok", "missing", "warning"}
    assert all(subject and reason for subject, _, reason in rows)
    subjects = [subject for subject, _, _ in rows]
    assert subjects[:2] == ["compiled module", "driver"]
    assert {"cublaslt", "cudnn", *(name for name, _ in doctor.PACKAGES.values())} <= set(subjects)
    assert set(doctor.PACKAGES) == set(packages.DISTRIBUTIONS)


def test_the_drivers_release(tmp_path: Path) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\nGCC 12.2.0\n")
    assert doctor.driver_release(str(file)) == "580.159.03"
    file.write_text("something else\n")
    assert doctor.driver_release(str(file)) is None
    assert doctor.driver_release(str(tmp_path / "none")) is None
