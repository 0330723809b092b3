# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""A broken plugin is told of by doctor, by one warning, and in decisions, and harms nobody else.

All broken plugins are installed together, so that each also has every chance of harming the others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .broken import OLDER, PROBES, REFUSED, UNUSABLE, Plugin
from .workshop import Environment, create_environment

pytestmark = pytest.mark.slow

EXERCISE = Path(__file__).with_name("exercise.py")
HEALTHY = ["reference", "torch"]


@dataclass(frozen=True)
class Seen:
    """What an environment shows: doctor's report and tables, a program's results and its standard error."""

    environment: Environment
    doctor: dict[str, Any]
    tables: str
    calls: dict[str, Any]
    stderr: str

    def backend(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(b for b in self.doctor["backends"] if b["name"] == name)
        return found


def _mangled(environment: Environment, name: str, entry_points: str) -> None:
    """A distribution whose entry points cannot be read."""
    folder = environment.site_packages / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(entry_points)


def _look(environment: Environment) -> Seen:
    calls, stderr = environment.run(EXERCISE)
    return Seen(environment, environment.doctor(), environment.command("doctor").stdout, calls, stderr)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Seen:
    folder = tmp_path_factory.mktemp("healthy")
    names = ("te-dispatch", "te-dispatch-reference", "te-dispatch-torch")
    return _look(create_environment(folder / "venv", *(wheels[name] for name in names)))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Seen:
    folder = tmp_path_factory.mktemp("broken")
    names = ("te-dispatch", "te-dispatch-reference", "te-dispatch-torch")
    plugins = [plugin.wheel(folder) for plugin in (*REFUSED, *UNUSABLE, *PROBES)]
    return _look(create_environment(folder / "venv", *(wheels[name] for name in names), *plugins))


def test_without_broken_plugins_nothing_is_said(healthy: Seen) -> None:
    assert healthy.calls["failures"] == []
    assert healthy.calls["finite"]
    assert healthy.doctor["problems"] == []
    assert "backend '" not in healthy.stderr


def test_results_beside_broken_plugins_are_the_same(healthy: Seen, broken: Seen) -> None:
    assert broken.calls["checksum"] == healthy.calls["checksum"]
    assert broken.calls["ran"] == healthy.calls["ran"]


REFUSALS = {
    "noimport": "cannot be imported: ModuleNotFoundError: No module named 'a_driver_that_is_not_here'",
    "asserts": "raised AssertionError: the driver is too old while it was imported",
    "exits": "raised SystemExit: no licence while it was imported",
    "future": "api_version is 99, this te_dispatch speaks 1 and 2",
    "twin": "the name 'twin' is declared by te-dispatch-twin-a 1.0 and te-dispatch-twin-b 1.0; uninstall one",
    "nomanifest": "its entry point is int, not a te_dispatch.core.manifest.Manifest",
    "nocondition": "requires holds 'sm_90 or newer', which is no condition",
    "misclaims": "unknown claim 'fastest'",
    "oneclaim": "claims holds several values, got 'deterministic' alone; write ('deterministic',)",
    "skips": "raised Skipped: elsewhere while it was imported",
    "listing": "devices is the list [1], not a dict",
    "numbered": "archs['cpu']['cpu'] is the int 5, not an Arch",
    "endless": "k: compares with a finite number, got inf",
    "boundless": "k: compares with an int, a float or a str, got None",
    "zeroth": "k: '% 0 == 0' divides by zero",
    "ruler": "set_policy is refused while the manifest of backend 'ruler' is imported",
}


def test_every_refused_plugin_is_covered() -> None:
    assert {plugin.name for plugin in REFUSED} == set(REFUSALS)


@pytest.mark.parametrize("plugin", REFUSED, ids=lambda p: p.distribution or p.name)
def test_a_refused_plugin_is_told_of(broken: Seen, plugin: Plugin) -> None:
    distribution = plugin.distribution or f"te-dispatch-{plugin.name}"
    [failure] = [f for f in broken.doctor["failures"] if f["distribution"] == distribution]
    assert (failure["name"], failure["version"]) == (plugin.name, "1.0")
    assert REFUSALS[plugin.name] in failure["reason"]
    line = f"backend {plugin.name!r} of {distribution} 1.0: "
    assert [p for p in broken.doctor["problems"] if p.startswith(line)] == [line + failure["reason"]]
    assert broken.stderr.count(line) == 1, "one warning, however many calls"
    assert line in broken.tables
    assert plugin.name not in broken.calls["backends"]


UNUSABLES = {
    "nextop.gemm": "written for gemm@99, this te_dispatch has gemm@1",
    "newop.warp_drive": "operator 'warp_drive' does not exist in this te_dispatch",
    "oddfact.gemm": "requires a fact that gemm does not have: a.colour",
    "oddword.gemm": "there is no device fact 'vender'; did you mean 'vendor'?",
    "longword.gemm": "unknown word 'float32'; it is called 'fp32' here",
    "oddsign.gemm": "unknown parameter 'beta'",
    "nokernel.gemm": "No module named 'a_kernel_library_that_is_not_here'",
    "quits.gemm": "cannot be imported: SystemExit: no licence",
}


@pytest.mark.parametrize(("candidate", "reason"), UNUSABLES.items(), ids=lambda text: text.partition(" ")[0])
def test_an_unusable_implementation_is_told_of(broken: Seen, candidate: str, reason: str) -> None:
    assert reason in broken.calls["unusable"][candidate]
    assert reason in broken.backend(candidate.partition(".")[0])["unusable"][candidate]
    assert any(candidate in problem and reason in problem for problem in broken.doctor["problems"])


def test_a_signature_that_does_not_fit_is_quoted_beside_the_one_expected(broken: Seen) -> None:
    reason = broken.calls["unusable"]["oddsign.gemm"]
    assert "alpha=1.0, beta=0.0, out=None" in reason
    assert "alpha=1.0, out=None" in reason
    assert broken.stderr.count("unknown parameter 'beta'") == 1


def test_errors_and_explanations_give_the_reason(broken: Seen) -> None:
    done = broken.environment.command("explain", "gemm", "dtype=fp32", "layout=NT", "--json")
    decision = json.loads(done.stdout)
    reasons = {rejected["id"]: rejected["reason"] for rejected in decision["rejected"]}
    for candidate in ("nextop.gemm", "oddfact.gemm"):
        assert UNUSABLES[candidate] in reasons[candidate]
    assert "libbad.so: wrong ELF class" in reasons["badcheck.gemm"]
    program = "import torch, te_dispatch\nwith te_dispatch.using(gemm='oddsign'):\n    "
    call = "te_dispatch.ops.gemm(torch.ones(2, 2), torch.ones(2, 2), layout='NT')"
    failed = broken.environment.python("-c", f"import te_dispatch.ops\n{program}{call}")
    assert failed.returncode == 1
    assert "NoImplementation: gemm on cpu" in failed.stderr
    assert "rejected by bind: " in failed.stderr


def test_a_probe_that_raises_costs_its_facts(broken: Seen) -> None:
    reason = "raised RuntimeError: the driver does not answer"
    assert broken.stderr.count(reason) == 1
    [failure] = broken.backend("badprobe")["probe_failures"]
    assert failure["probe"] == "devices cpu"
    assert re.fullmatch(rf"{reason}, at \S+badprobe\S*\.py:\d+", failure["reason"])
    assert f"backend 'badprobe': its probe of cpu {failure['reason']}" in broken.stderr
    assert broken.calls["device"] == "cpu"


def test_a_probe_that_returns_something_else_costs_its_facts(broken: Seen) -> None:
    reason = "returned {'vendor': 'cpu'}, neither DeviceFacts nor None"
    assert broken.stderr.count(f"backend 'dictprobe': its probe of cpu {reason}") == 1
    [failure] = broken.backend("dictprobe")["probe_failures"]
    assert failure == {"probe": "devices cpu", "reason": reason}


def test_an_availability_check_that_raises_makes_its_backend_unavailable(broken: Seen) -> None:
    reason = "raised OSError: libbad.so: wrong ELF class"
    assert reason in broken.calls["unavailable"]["badcheck"]
    assert broken.stderr.count(reason) == 1
    shown = broken.backend("badcheck")
    assert not shown["available"]
    assert reason in shown["reason"]


@pytest.mark.parametrize(
    ("name", "type_", "ending"),
    [
        ("killer", "xpu", "ended its process with exit code 7"),
        ("crasher", "mps", "killed its process with SIGSEGV"),
    ],
)
def test_doctor_survives_a_probe_that_ends_its_process(broken: Seen, name: str, type_: str, ending: str) -> None:
    shown = broken.backend(name)
    assert shown["probe_failures"] == [{"probe": f"devices {type_}", "reason": ending}]
    assert any(name in problem and ending in problem for problem in broken.doctor["problems"])


def test_what_a_dying_probe_s_backend_still_says_is_shown(broken: Seen) -> None:
    assert broken.backend("killer")["doctor"] == [{"subject": "driver", "state": "ok", "reason": "still answers"}]


def test_entry_points_that_cannot_be_read_are_told_of_if_they_are_ours(tmp_path: Path, wheels: dict[str, Path]) -> None:
    environment = create_environment(tmp_path / "venv", wheels["te-dispatch"], wheels["te-dispatch-torch"])
    # As an interrupted upgrade leaves them; pip itself would install neither.
    _mangled(environment, "unrelated", "[console_scripts]\nthis line has no value\n")
    _mangled(environment, "mangled", "[te_dispatch.backends]\nthis line has no value\n")
    # PyTorch's own search for device plugins does not survive such a distribution.
    no_search = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    calls, stderr = environment.run(EXERCISE, "primitives", **no_search)
    assert (calls["backends"], calls["finite"]) == (["torch"], True)
    assert stderr.count("mangled-1.0.dist-info") == 1
    report = environment.doctor(**no_search)
    [failure] = report["failures"]
    assert failure["distribution"].endswith("mangled-1.0.dist-info")
    assert failure["reason"].startswith("unreadable metadata: ")
    assert len(report["problems"]) == 1
    assert "unrelated" not in json.dumps(report) + stderr


def test_nothing_is_told_of_twice_or_invented(broken: Seen) -> None:
    failed = [(f["name"], f["distribution"]) for f in broken.doctor["failures"]]
    assert sorted(failed) == sorted((p.name, p.distribution or f"te-dispatch-{p.name}") for p in REFUSED)
    sound = {plugin.name for plugin in (*UNUSABLE, *PROBES)}
    assert {b["name"] for b in broken.doctor["backends"]} == {*HEALTHY, *sound}
    for name in HEALTHY:
        shown = broken.backend(name)
        assert (shown["available"], shown["unusable"], shown["probe_failures"]) == (True, {}, [])


def test_an_older_signature_serves_the_calls_it_can(tmp_path: Path, healthy: Seen, wheels: dict[str, Path]) -> None:
    names = ("te-dispatch", "te-dispatch-reference", "te-dispatch-torch")
    environment = create_environment(tmp_path / "venv", *(wheels[name] for name in names), OLDER.wheel(tmp_path))
    calls, stderr = environment.run(EXERCISE, "primitives")
    # The first call leaves out_dtype at its default, the second does not.
    assert calls["ran"]["softmax_fwd"] == ["older.softmax_fwd", "torch.softmax_fwd"]
    assert calls["lacking"] == {"older.softmax_fwd": ["out_dtype"]}
    assert calls["unusable"] == {}
    assert "older" not in stderr
    assert environment.doctor()["problems"] == []
