# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A machine that lacks something: a reason in the doctor's report and another backend, never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from te_dispatch_triton import doctor, probe

#: Makes a call under a policy that prefers this backend, and prints who served it, and the doctor's rows.
_CALL = """
import sys, torch
{fault}
import te_dispatch
from te_dispatch import ops
from te_dispatch_triton import doctor
served = []
watching = te_dispatch.observe(lambda operator, accepted, *_: served.append(accepted))
with te_dispatch.using(prefer={{"dropout_add_fwd": "triton"}}), watching:
    ops.dropout_add_fwd(torch.ones(2, 3))
print("served by", served)
for row in doctor.doctor():
    print("doctor:", *row)
"""


def _told(fault: str = "", **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != probe.INTERPRET}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CALL.format(fault=fault)],
        env={**inherited, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_where_everything_is_there_it_serves() -> None:
    if probe.missing_triton() is not None:
        pytest.skip(str(probe.missing_triton()))
    told = _told(TRITON_INTERPRET="1")
    assert "triton.dropout_add_fwd" in told.splitlines()[0]
    assert "doctor: Triton ok" in told and "doctor: interpreter ok" in told


_MISSING = "sys.modules['triton'] = None"
_OLD = """
import importlib.metadata as metadata
told = metadata.version
metadata.version = lambda name: "3.2.0" if name == "triton" else told(name)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "environment", "reason"),
    [
        (_MISSING, {"TRITON_INTERPRET": "1"}, "Triton missing Triton is not installed: pip install triton"),
        (_OLD, {"TRITON_INTERPRET": "1"}, "Triton missing Triton 3.2.0 is too old, needs 3.6: pip install -U triton"),
        ("", {"TRITON_CACHE_DIR": "/proc/none"}, "cache directory missing Triton cannot write its cache directory"),
    ],
    ids=["missing", "old", "cache"],
)
def test_what_is_missing_is_told_and_another_backend_serves(
    fault: str, environment: dict[str, str], reason: str
) -> None:
    if fault != _MISSING and probe.triton_version() is None:
        pytest.skip("no Triton")
    told = _told(fault, **environment)
    assert "torch.dropout_add_fwd" in told.splitlines()[0] and "triton." not in told.splitlines()[0]
    assert reason in told


def test_the_command_names_the_cache_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = str(tmp_path / "file" / "cache")
    run = subprocess.run(
        [sys.executable, "-m", "te_dispatch.cli", "doctor", "--json"],
        env={**os.environ, "TRITON_CACHE_DIR": blocked}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = run.stdout + run.stderr
    assert "Traceback" not in told
    if probe.missing_triton() is None and not probe.interpreting():
        assert "set TRITON_CACHE_DIR to one that it can" in told


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.4.0", True),
        ("3.5.1", True),
        ("3.6.0", False),
        ("3.6.0+git1234", False),
        ("3.10.1", False),
        ("2.9", True),
        ("4.0rc1", False),
    ],
)
def test_releases_are_compared_by_number(version: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(probe, "triton_version", lambda: version)
    assert (probe.missing_triton() is not None) is expected


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One device of PyTorch's, planted."""
    torch = pytest.importorskip("torch")
    monkeypatch.delenv(probe.INTERPRET, raising=False)
    monkeypatch.setattr(probe, "unavailable", lambda: None)
    monkeypatch.setattr(probe, "missing_triton", lambda: None)
    found = SimpleNamespace(name="Planted", total_memory=1 << 34, major=9, minor=0, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    return torch


@pytest.mark.parametrize(("hip", "vendor", "arch"), [(None, "nvidia", "sm_90"), ("7.1", "amd", "gfx942")])
def test_a_device_without_a_compiler_is_not_served(
    device: Any, monkeypatch: pytest.MonkeyPatch, hip: str | None, vendor: str, arch: str
) -> None:
    monkeypatch.setattr(device.version, "hip", hip)
    asked = []
    monkeypatch.setattr(probe, "compiles_for", lambda backend: asked.append(backend) or False)
    facts = probe.cuda(0)
    assert facts is not None and (facts.vendor, facts.arch) == (vendor, arch)
    assert facts.extra["triton.ready"] is False and asked == [vendor]
    rows = doctor.doctor()
    assert ("device 0", "missing", f"Planted, {arch}: this Triton has no compiler for {vendor} devices") in rows
    assert probe.cuda(1) is None


def test_a_device_with_one_is(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.version, "hip", None)
    monkeypatch.setattr(probe, "compiles_for", lambda backend: True)
    facts = probe.cuda(0)
    assert facts is not None and facts.extra["triton.ready"] is True
    assert ("device 0", "ok", "Planted, sm_90") in doctor.doctor()
    monkeypatch.setenv(probe.INTERPRET, "1")
    facts = probe.cuda(0)
    assert facts is not None and facts.extra["triton.ready"] is False


def test_without_torch_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.importlib.util, "find_spec", lambda name: None)
    assert doctor.doctor() == [("PyTorch", "missing", "not installed")]
    assert probe.unavailable() == "PyTorch is not installed"


def test_probing_leaves_the_cache_directory_as_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "cache"
    assert probe.unwritable(folder) is None
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("true", True), ("ON", True), ("0", False), ("", False)])
def test_whether_kernels_are_interpreted(text: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(probe.INTERPRET, text)
    assert probe.interpreting() is expected
