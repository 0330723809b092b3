# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``--device emulated:...``: a backend certified on a chip that it emulates, here a made-up one."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_dispatch.conformance import Report, Settings, UsageError, certify
from te_dispatch.conformance.report import markdown, page
from te_dispatch.core import scopes
from te_dispatch.core.emulation import emulated

pytest_plugins = "pytester"

#: A backend for zeta:z1, whose softmax runs nowhere but under its emulator, which needs Z1_EMULATOR.
ZETA = """
    import functools, os
    from contextlib import contextmanager
    from te_dispatch.core.emulation import Emulation, EmulatorMissing
    from te_dispatch.core.facts import Arch
    from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
    from te_dispatch.core.requirements import OneOf

    ON_Z1 = (OneOf("device.arch", "z1"), OneOf("device.encodings", "e4m3fnuz"), OneOf("device.zeta.ready", True))
    CLAIMS = frozenset({"deterministic"})
    BACKEND = Manifest("zeta", API_VERSION, (
        Implementation("softmax_fwd@1", "softmax_fwd", "te_dispatch_zeta:softmax_fwd", ON_Z1, claims=CLAIMS),
        Implementation("softmax_bwd@1", "softmax_bwd", "te_dispatch_zeta:softmax_bwd", ON_Z1, claims=CLAIMS),
    ), vendors=("zeta",), archs={"zeta": {"z1": Arch(("e4m3fnuz",)), "z2": Arch()}},
        emulators={"zeta:z1": "te_dispatch_zeta:emulator"})
    entered = []

    @contextmanager
    def emulator(arch):
        if "Z1_EMULATOR" not in os.environ:
            raise EmulatorMissing("the emulator is not installed: set Z1_EMULATOR")
        entered.append(arch)
        try:
            yield Emulation("z1sim 2", {"zeta.ready": True}, ("speed", "the weather"))
        finally:
            entered.pop()

    def __getattr__(name):
        from te_dispatch_torch import softmax
        sound = getattr(softmax, name)

        @functools.wraps(sound)
        def emulated(*args, **kwargs):
            assert entered == ["z1"]
            return sound(*args, **kwargs) * float(os.environ["Z1_EMULATOR"])

        return emulated
"""


@pytest.fixture(autouse=True)
def zeta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install `ZETA`, for this process and for those that units run in."""
    (tmp_path / "te_dispatch_zeta.py").write_text(textwrap.dedent(ZETA), encoding="utf-8")
    info = tmp_path / "te_dispatch_zeta-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: te-dispatch-zeta\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[te_dispatch.backends]\nzeta = te_dispatch_zeta:BACKEND\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("Z1_EMULATOR", "1.0")
    scopes.MANAGER.replace_snapshot()
    yield
    sys.modules.pop("te_dispatch_zeta", None)
    monkeypatch.undo()
    scopes.MANAGER.replace_snapshot()


def certified(checks: tuple[str, ...] = ("values",), isolated: bool = False, **others: object) -> Report:
    given = {"operators": ("softmax_fwd",), "device": "emulated:z1", **others}
    return certify(settings=Settings(checks=checks, isolated=isolated, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_units_run_under_the_emulator_and_see_the_chip(isolated: bool) -> None:
    """The backends are those that emulate the chip, unless they are named."""
    report = certified(isolated=isolated)
    assert {outcome.parsed.backend for outcome in report.outcomes} == {"zeta"}
    assert report.ok and report.counts["passed"] >= 6
    assert scopes.MANAGER.emulation is None
    assert scopes.MANAGER.device_facts(torch.device("cpu")).vendor == "cpu"


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_wrong_result_fails(monkeypatch: pytest.MonkeyPatch, isolated: bool) -> None:
    monkeypatch.setenv("Z1_EMULATOR", "1.03")
    report = certified(isolated=isolated)
    assert report.counts["failed"] >= 4
    assert "--device emulated:z1" in report.reproducer(report.failures()[0])


def test_the_report_says_that_the_chip_was_emulated_and_what_that_leaves_open(tmp_path: Path) -> None:
    report = certified()
    report.save(tmp_path / "conformance.json")
    loaded = Report.load(tmp_path / "conformance.json")
    machine = loaded.environment
    assert (machine["device"], machine["arch"]) == ("zeta:z1 (emulated)", "zeta:z1")
    assert (machine["emulated by"], machine["not proven"]) == ("z1sim 2", "speed; the weather")
    assert loaded.settings.device == "emulated:z1"
    assert "the device was emulated, which does not prove speed; the weather" in loaded.certificate
    for text in (page.render(loaded), markdown.render(loaded)):
        assert "zeta:z1 (emulated)" in text and "speed; the weather" in text


def test_what_shows_nothing_on_an_emulator_is_not_run_and_the_claim_not_judged() -> None:
    report = certified(("values", "repeatable", "threads"))
    assert {outcome.parsed.check for outcome in report.outcomes} == {"values"}
    [claim] = report.unjudged
    assert (claim.implementation, claim.claim) == ("zeta.softmax_fwd", "deterministic")
    assert "an emulator executes a launch in the same order every time" in str(claim)


def test_without_the_emulator_the_chip_s_kernels_are_not_claimed() -> None:
    report = certified(device="cpu", backends=("zeta",))
    assert not report.counts["claimed"] and "emulated by" not in report.environment


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"device": "emulated:z2"},
            "device: emulated:z2: no installed backend emulates zeta:z2; emulated devices: .*z1",
        ),
        ({"device": "emulated:y1"}, "device: emulated:y1: unknown vendor 'y1' .*; emulated devices: .*zeta:z1"),
        ({"device": "emulated:"}, "device: emulated:: unknown vendor ''"),
        ({"backends": ("torch",)}, "backend: torch does not emulate z1, and would run on the host; .*: zeta"),
        ({"against": "torch"}, "against: on an emulated device results are compared with reference alone"),
    ],
)
def test_what_cannot_be_judged_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        certified(**given)


def test_a_process_emulates_one_chip_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated(scopes.MANAGER, "z1"):
        assert certified().ok
        with pytest.raises(UsageError, match="this process is emulating zeta:z1"):
            certified(device="emulated:gfx942", backends=("triton",))


def test_what_the_emulator_needs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("Z1_EMULATOR")
    told = "device: emulated:z1: zeta:z1 cannot be emulated: the emulator is not installed: set Z1_EMULATOR"
    with pytest.raises(UsageError, match=told):
        certified()
    assert scopes.MANAGER.emulation is None


def test_pytest_runs_units_on_an_emulated_device(pytester: pytest.Pytester) -> None:
    options = ("--te-backend", "zeta", "--te-op", "softmax_fwd", "--te-check", "values", "--te-device", "emulated:z1")
    ran = pytester.runpytest_inprocess(
        "--pyargs", "te_dispatch.conformance", "-p", "no:cacheprovider", "--te-in-process", *options
    )
    assert ran.ret == 0
    ran.assert_outcomes(passed=6)
    assert scopes.MANAGER.emulation is None
