# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The example of a vendor's plugin, installed as its users would, and environments that lack any one backend."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .workshop import SOURCES, Environment, build_wheel, create_environment, needs_a_compiler

pytestmark = pytest.mark.slow

EXERCISE = Path(__file__).with_name("exercise.py")
PORTABLE = ("reference", "torch")
#: What the x1 has no primitive for.
ELSEWHERE = {"attention_fwd", "attention_bwd", "update_delayed_scales"}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Environment:
    """te_dispatch, both portable backends and acme."""
    return create_environment(tmp_path_factory.mktemp("everything") / "venv", *wheels.values())


def _environment(folder: Path, wheels: dict[str, Path], *backends: str) -> Environment:
    names = ("te-dispatch", *(f"te-dispatch-{backend}" for backend in backends))
    return create_environment(folder / "venv", *(wheels[name] for name in names))


def _backends_of(ran: dict[str, list[str]], operator: str) -> set[str]:
    """Backends behind everything that ran for an operator, pieces of composites included."""
    found = set()
    for name in ran[operator]:
        pieces = name.partition("(")[2].rstrip(")")
        found |= {part.partition(".")[0] for part in (pieces.split(", ") if pieces else [name])}
    return found


def test_the_plugin_s_own_tests_pass(everything: Environment) -> None:
    tests = SOURCES["te-dispatch-acme"] / "tests"
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tests}", "-c", "/dev/null")
    done = everything.python("-m", "pytest", *options, str(tests))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@needs_a_compiler
def test_the_wheel_is_of_one_platform_and_any_python(wheels: dict[str, Path]) -> None:
    wheel = wheels["te-dispatch-acme"]
    assert wheel.name.startswith("te_dispatch_acme-0.1.0-py3-none-linux_")
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if "kernels" in name] == ["te_dispatch_acme/_kernels.abi3.so"]


def test_without_a_compiler_the_wheel_is_built_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = shutil.ignore_patterns("build", "*.egg-info", "*.so")
    source = shutil.copytree(SOURCES["te-dispatch-acme"], tmp_path / "source", ignore=ignored)
    monkeypatch.setenv("CC", str(tmp_path / "no_compiler"))
    names = zipfile.ZipFile(build_wheel(source, tmp_path)).namelist()
    assert "te_dispatch_acme/compiled_softmax.py" in names and not [name for name in names if "kernels" in name]


@contextmanager
def _kernels(environment: Environment, contents: bytes | None) -> Iterator[None]:
    """The compiled kernels replaced by other contents, or by nothing."""
    file = environment.site_packages / "te_dispatch_acme" / "_kernels.abi3.so"
    kept = file.rename(file.with_suffix(".kept"))
    try:
        if contents is not None:
            file.write_bytes(contents)
        yield
    finally:
        file.unlink(missing_ok=True)
        kept.rename(file)


@needs_a_compiler
def test_without_compiled_kernels_numpy_serves(everything: Environment) -> None:
    with _kernels(everything, None):
        calls, stderr = everything.run(EXERCISE, "primitives", ACME_DEVICE="1")
        report = everything.doctor(ACME_DEVICE="1")
        explained = everything.command("explain", "softmax_fwd", "x.dtype=fp32", "--json", ACME_DEVICE="1")
    assert calls["ran"]["softmax_fwd"] == ["acme.softmax_fwd"] and calls["finite"]
    assert "acme" not in stderr and report["problems"] == []
    reasons = {rejected["id"]: rejected["reason"] for rejected in json.loads(explained.stdout)["rejected"]}
    assert reasons["acme.compiled_softmax_fwd"] == "device.acme_kernels is not built, needs compiled"
    own = next(backend for backend in report["backends"] if backend["name"] == "acme")["doctor"]
    [row] = [row for row in own if row["subject"] == "kernels"]
    assert row["state"] == "missing" and "install gcc or clang" in row["reason"]


@needs_a_compiler
def test_kernels_that_cannot_be_loaded_are_told_of_and_numpy_serves(everything: Environment) -> None:
    with _kernels(everything, b"of another platform"):
        calls, stderr = everything.run(EXERCISE, "primitives", ACME_DEVICE="1")
        problems = everything.doctor(ACME_DEVICE="1")["problems"]
    assert calls["ran"]["softmax_fwd"] == ["acme.softmax_fwd"] and calls["finite"]
    assert stderr.count("_kernels.abi3.so: file too short") == 1
    [problem] = problems
    assert "acme.compiled_softmax_fwd" in problem and "_kernels.abi3.so: file too short" in problem


@needs_a_compiler
def test_the_compiled_kernel_serves_and_is_certified(everything: Environment, tmp_path: Path) -> None:
    calls, _ = everything.run(EXERCISE, "primitives", ACME_DEVICE="1")
    assert calls["ran"]["softmax_fwd"] == ["acme.compiled_softmax_fwd"]
    options = ("--backend", "acme", "--op", "softmax_fwd", "--level", "smoke", "--jobs", "1", "--out", str(tmp_path))
    done = everything.command("conformance", *options, ACME_DEVICE="1")
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "conformance.json").read_text())["outcomes"]
    states = [o["state"] for o in outcomes if o["unit"].startswith("acme.compiled_softmax_fwd/")]
    assert states.count("passed") > 10 and set(states) <= {"passed", "not_claimed"}


def test_doctor_shows_the_chip_and_what_the_plugin_says_of_itself(everything: Environment) -> None:
    with_chip, without = everything.doctor(ACME_DEVICE="1"), everything.doctor()
    assert with_chip["problems"] == without["problems"] == []
    assert [d["device"] for d in with_chip["devices"]] == ["acme:x1"]
    assert [d["device"] for d in without["devices"]] == ["cpu"]
    facts = with_chip["devices"][0]["facts"]
    assert (facts["encodings"], facts["version.acme_driver"]) == (["e4m3fn", "e5m2"], "1.0")
    for report, state in ((with_chip, "ok"), (without, "missing")):
        acme = next(b for b in report["backends"] if b["name"] == "acme")
        assert acme["native_to"] == ["acme"]
        assert acme["available"]
        assert (acme["doctor"][0]["subject"], acme["doctor"][0]["state"]) == ("x1", state)


def test_without_the_chip_the_plugin_stands_aside(everything: Environment) -> None:
    calls, _ = everything.run(EXERCISE)
    assert calls["device"] == "cpu"
    assert not any("acme" in _backends_of(calls["ran"], operator) for operator in calls["ran"])
    done = everything.command("explain", "gemm", "dtype=bf16", "layout=NT", "--json")
    reasons = {r["id"]: r["reason"] for r in json.loads(done.stdout)["rejected"]}
    assert reasons["acme.gemm"] == "device.vendor is cpu, needs acme"


def test_the_chip_is_explained_on_machines_that_lack_it(everything: Environment) -> None:
    facts = ("a.dtype=e4m3fn", "b.dtype=e4m3fn", "a.scaling=tensor", "b.scaling=tensor", "layout=NT", "n=64")
    done = everything.command("explain", "gemm", *facts, "--device", "acme:x1", "--json")
    decision = json.loads(done.stdout)
    assert (decision["device"], decision["chosen"]) == ("acme:x1", "acme.fp8_gemm")
    assert decision["accepted"][0]["distribution"] == "te-dispatch-acme"


@pytest.mark.parametrize("portable", PORTABLE)
def test_beside_any_one_portable_backend_a_layer_trains_on_the_chip(
    tmp_path: Path, wheels: dict[str, Path], portable: str
) -> None:
    environment = _environment(tmp_path, wheels, "acme", portable)
    named = {"TE_DISPATCH_PREFER": "*=reference"} if portable == "reference" else {}  # it serves none but those
    calls, _ = environment.run(EXERCISE, "layer", ACME_DEVICE="1", **named)
    assert calls["finite"]
    assert calls["device"] == "acme:x1"
    ran = calls["ran"]
    for operator in ran:
        assert _backends_of(ran, operator) == ({portable} if operator in ELSEWHERE else {"acme"}), operator
    assert set(ran) >= ELSEWHERE
    assert ran["gemm"] == ["acme.fp8_gemm"]
    assert ran["layernorm_fwd"] == ["composite.layernorm_then_quantize(acme.layernorm_fwd, acme.quantize)"]
    assert ran["quantize_dbias"] == ["composite.quantize_then_sum(acme.quantize)"]


def test_the_demo_shows_the_plugin_and_its_composites(everything: Environment, tmp_path: Path) -> None:
    sizes = ("--hidden", "64", "--layers", "1", "--heads", "4", "--seq", "32", "--batch", "2", "--steps", "3")
    done = everything.command("demo", *sizes, "--out", str(tmp_path), "--json", "--quiet", ACME_DEVICE="1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    shown = {row["implementation"]: row for row in _rows(document)}
    assert {"acme.gemm", "acme.fp8_gemm", "acme.quantize"} <= set(shown)
    assert shown["composite.layernorm_then_quantize"]["pieces"] == ["acme.layernorm_fwd", "acme.quantize"]
    assert shown["acme.fp8_gemm"]["distribution"] == "te-dispatch-acme 0.1.0"
    assert shown["acme.fp8_gemm"]["calls"] > 0


def _rows(document: Any) -> list[dict[str, Any]]:
    """Every row of the document's operator tables, wherever they stand."""
    if isinstance(document, dict):
        if {"operator", "implementation", "pieces"} <= set(document):
            return [document]
        return [row for value in document.values() for row in _rows(value)]
    if isinstance(document, list):
        return [row for value in document for row in _rows(value)]
    return []


@pytest.mark.parametrize("removed", PORTABLE)
def test_removing_a_backend_leaves_the_other_working(tmp_path: Path, wheels: dict[str, Path], removed: str) -> None:
    environment = _environment(tmp_path, wheels, *PORTABLE)
    environment.uninstall(f"te-dispatch-{removed}")
    [left] = set(PORTABLE) - {removed}
    calls, _ = environment.run(EXERCISE, TE_DISPATCH_PREFER=f"*={left}")
    assert calls["backends"] == [left]
    assert calls["finite"]
    assert {backend for operator in calls["ran"] for backend in _backends_of(calls["ran"], operator)} == {left}
    report = environment.doctor()
    assert report["problems"] == []
    assert [backend["name"] for backend in report["backends"]] == [left]


def test_without_any_backend_the_error_says_what_to_install(tmp_path: Path, wheels: dict[str, Path]) -> None:
    environment = _environment(tmp_path, wheels)
    program = "import torch\nfrom te_dispatch import ops\nops.compute_amax(torch.ones(4))"
    failed = environment.python("-c", program)
    assert failed.returncode == 1
    assert "NoImplementation: compute_amax on cpu" in failed.stderr
    assert "install one, e.g. te-dispatch-torch" in failed.stderr
    assert environment.doctor()["problems"] == ["no backend is installed: pip install te-dispatch-torch"]
