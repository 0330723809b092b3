# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations that never serve a call: nothing of them passes, and the run names them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import te_dispatch.ops  # noqa: F401  # before scopes
from te_dispatch.conformance.case import Unit
from te_dispatch.conformance.certification import certify
from te_dispatch.conformance.report import markdown
from te_dispatch.conformance.report.record import Report
from te_dispatch.conformance.settings import Settings
from te_dispatch.core import scopes

from ..plugins.workshop import write_wheel

pytestmark = pytest.mark.slow

_MANIFEST = """
from te_dispatch.core.requirements import OneOf
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest

def _one(op, name, *requires, **more):
    return Implementation(op=op, name=name, target=more.pop("target", f"idle_kernels:{name}"), requires=requires)

MANIFEST = Manifest(name="idle", api_version=API_VERSION, description="never serves", implementations=(
    _one("softmax_fwd@1", "declines"),
    _one("softmax_fwd@1", "elsewhere", OneOf("device.arch", "n9")),
    _one("softmax_bwd@1", "backward"),
    _one("sofmax_fwd@1", "misspelt"),
    _one("gemm@1", "absent", target="idle_absent:gemm"),
    _one("gemm@1", "lacks"),
    _one("gemm@1", "other_words"),
    _one("gemm@1", "older", OneOf("a.dtype", "fp32"), OneOf("b.dtype", "fp32")),
    _one("pad_rows@1", "pads"),
))
"""
_KERNELS = """
from te_dispatch.ops.checks import rows as checks
from te_dispatch.core.errors import Declined

def declines(x, mask=None, *, scale=1.0, causal=False, out_dtype=None):
    checks.softmax_fwd(x, mask, scale, out_dtype)
    raise Declined("not today")

elsewhere = declines

def backward(dy, y, *, scale=1.0, out_dtype=None):
    raise NotImplementedError

def other_words(left, right):
    return left @ right

def older(
    a, b, *, layout, out=None, accumulate=False, bias=None, epilogue=None, aux=None, aux_quantizer=None, out_dtype=None,
    out_quantizer=None, split_accumulator=None,
):
    from te_dispatch_torch.gemm import matmul

    return matmul(
        a, b, layout=layout, out=out, accumulate=accumulate, bias=bias, epilogue=epilogue, aux=aux,
        aux_quantizer=aux_quantizer, out_dtype=out_dtype, out_quantizer=out_quantizer,
    )

def pads(x, *args, **more):
    return x
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the backend, as installed."""
    folder = tmp_path_factory.mktemp("idle")
    modules = {"idle": _MANIFEST, "idle_kernels": _KERNELS}
    wheel = write_wheel(folder, "te-dispatch-idle", modules, {"idle": "idle:MANIFEST"})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def idle(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend in this process's registry."""
    monkeypatch.syspath_prepend(str(site))
    scopes.MANAGER.replace_snapshot()
    yield
    monkeypatch.undo()
    scopes.MANAGER.replace_snapshot()


def _certified(*operators: str, units: list[Unit] | None = None, level: str = "smoke") -> Report:
    settings = Settings(("idle",) if units is None else (), operators=operators, level=level, isolated=False)
    return certify(settings=settings, units=units)


@pytest.mark.usefixtures("idle")
def test_who_declines_every_call_passes_nothing_but_errors_and_is_named() -> None:
    report = _certified("softmax_fwd")
    own = [outcome for outcome in report.outcomes if outcome.parsed.implementation == "idle.declines"]
    assert {outcome.parsed.check for outcome in own if outcome.state == "passed"} == {"raises"}
    assert {outcome.parsed.check for outcome in own if outcome.cause == "declined"} >= {"values", "strided", "guarded"}
    strided = next(outcome for outcome in own if outcome.parsed.check == "strided")
    assert strided.message == "served no call: declined: not today"
    assert report.declining == {"idle.declines": "declined: not today"} and not report.ok
    assert any("idle.declines declines every call that it claims" in reason for reason in report.uncertified)


@pytest.mark.usefixtures("idle")
def test_requirements_that_never_hold_are_legal_and_told() -> None:
    report = _certified("softmax_fwd")
    assert report.unclaimed.keys() == {"idle.elsewhere"} and "n9" in report.unclaimed["idle.elsewhere"]
    assert "| idle.elsewhere | " in markdown.render(report)


@pytest.mark.usefixtures("idle")
def test_a_misspelt_operator_is_named_whatever_is_asked_for() -> None:
    report = _certified("pad_rows")
    assert "sofmax_fwd" in report.refused["idle.misspelt"] and not report.ok


@pytest.mark.usefixtures("idle")
def test_what_cannot_be_bound_is_refused_and_passes_nothing(tmp_path: Path) -> None:
    report = _certified("gemm")
    reasons = {"absent": "cannot be imported", "lacks": "has no attribute", "other_words": "parameter"}
    for name, words in reasons.items():
        assert words in report.refused[f"idle.{name}"]
        own = [outcome for outcome in report.outcomes if outcome.parsed.implementation == f"idle.{name}"]
        assert own and {outcome.state for outcome in own} == {"not_claimed"}
    assert not report.ok and not report.never_run
    assert Report.load(_saved(report, tmp_path)).refused == report.refused


def test_a_function_that_lacks_a_parameter_is_judged_by_the_calls_that_leave_it_alone(site: Path) -> None:
    """It was called without `alpha` where a case has one, before anything had imported it. In a process of its own,
    where nothing has."""
    script = f"""
import sys
sys.path.insert(0, {str(site)!r})
from te_dispatch.conformance import Settings, certify
report = certify(settings=Settings(
    ("idle",), operators=("gemm",), implementations=("idle.older",), checks=("values",), level="full", isolated=False,
))
print(report.counts["passed"], [one.message for one in report.failures()])
other = [one for one in report.outcomes if "alpha=1," not in one.unit and "alpha" in one.unit]
print({{one.state for one in other}}, {{one.message for one in other}})
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600)
    passed, other = answer.stdout.splitlines()[-2:]
    assert int(passed.split()[0]) > 50 and passed.endswith(" []"), answer.stderr
    assert other.startswith("{'not_claimed'}") and "alpha.default is False, needs True" in other


def _saved(report: Report, folder: Path) -> Path:
    path = folder / "report.json"
    report.save(path)
    return path


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("check", ["values", "spelled"])
def test_a_single_unit_of_what_cannot_be_bound_is_refused(check: str) -> None:
    case = (
        "gemm.plain[dtype=bf16,layout=NT,shape=31x37x41,lead=1,alpha=1,bias=none,out=new,out_dtype=same,values=normal]"
    )
    report = _certified(units=[Unit.parse(f"idle.absent/{check}/{case}")])
    assert report.refused.keys() == {"idle.absent"} and not report.ok and not report.counts["passed"]


def test_the_pytest_plugin_names_what_is_refused(site: Path, tmp_path: Path) -> None:
    options = ["--pyargs", "te_dispatch.conformance", "--te-backend", "idle", "--te-op", "gemm", "--te-in-process"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "--te-check", "spelled"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert answer.returncode == 1
    for name in ("absent", "lacks", "misspelt"):
        assert f"idle.{name} is refused: " in answer.stdout


def test_a_manifest_that_raises_is_told_with_its_reason(tmp_path: Path) -> None:
    modules = {"idle": "raise RuntimeError('boom in the manifest')"}
    wheel = write_wheel(tmp_path, "te-dispatch-idle", modules, {"idle": "idle:MANIFEST"})
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    path = [str(tmp_path / "site"), *sys.path]
    script = f"import sys; sys.path[:] = {path!r}; from te_dispatch.cli import main; main()"
    command = [sys.executable, "-c", script, "conformance", "--backend", "idle", "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    error = json.loads(answer.stdout)["error"]
    assert answer.returncode == 2 and "'idle' is installed, but refused" in error and "boom in the manifest" in error
