# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""``te-dispatch doctor``, above all with backends that misbehave."""

from __future__ import annotations

import platform
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import te_dispatch
from te_dispatch.cli import doctor
from te_dispatch.core.manifest import Manifest
from te_dispatch.core.probing import Answer, run_probes
from te_dispatch.core.shipped import shipped_policies
from te_dispatch.core.snapshot import InstalledBackend, Snapshot

pytestmark = pytest.mark.sampled(8)


def _plugin(folder: Path, name: str, source: str) -> None:
    """Write a distribution with one backend."""
    information = folder / f"te_dispatch_{name}-9.9.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: te-dispatch-{name}\nVersion: 9.9\n")
    (information / "entry_points.txt").write_text(f"[te_dispatch.backends]\n{name} = {name}_backend:MANIFEST\n")
    (folder / f"{name}_backend.py").write_text(source)


def _source(body: str, fields: str) -> str:
    head = "import os, signal\nfrom te_dispatch.core.manifest import Implementation, Manifest\n"
    return f"{head}{textwrap.dedent(body)}\nMANIFEST = Manifest(api_version=1, {fields})\n"


_DYING = _source(
    """
    def devices(index): os._exit(7)
    def unavailable(): os.kill(os.getpid(), signal.SIGSEGV)
    def doctor():
        print("noise on standard output")
        return [("driver", "ok", "it still answers")]
    """,
    "name='dying', implementations=(), vendors=('acme',), devices={'acme': 'dying_backend:devices'}, "
    "unavailable='dying_backend:unavailable', doctor='dying_backend:doctor'",
)
_HALF = _source(
    "def gemm(left, right): pass",
    "name='half', implementations=("
    "Implementation(op='gemm@1', name='absent', target='nowhere_at_all:gemm'), "
    "Implementation(op='gemm@99', name='newer', target='half_backend:gemm'), "
    "Implementation(op='gemm@1', name='other', target='half_backend:gemm'))",
)
_ACME = _source(
    """
    from te_dispatch.core.facts import UNKNOWN, DeviceFacts
    def unavailable(): return 'no acme kernel in this machine'
    def devices(index):
        extra = {"version.acme": UNKNOWN, "memory": 2**30}
        return DeviceFacts("acme", "acme", "x1", "Acme X1", index, None, extra) if index < 2 else None
    """,
    "name='acme', vendors=('acme',), devices={'acme': 'acme_backend:devices'}, "
    "implementations=(Implementation(op='gemm@1', name='gemm', target='only_on_acme:gemm'),), "
    "unavailable='acme_backend:unavailable'",
)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory, run_process):
    """Doctor's (JSON, tables) beside four plugins with troubles of their own, and a bad variable."""
    folder = tmp_path_factory.mktemp("plugins")
    _plugin(folder, "dying", _DYING)
    _plugin(folder, "broken", "raise RuntimeError('no such driver')\n")
    _plugin(folder, "half", _HALF)
    _plugin(folder, "acme", _ACME)
    environ = {"TE_DISPATCH_POLICY": "no_such_policy"}
    return tuple(run_process(folder, "doctor", *more, path=folder, **environ) for more in (["--json"], []))


def _backend(answer, name):
    return next(b for b in answer.json["backends"] if b["name"] == name)


def test_everything_is_told(te_process):
    environ = {"TE_DISPATCH_PREFER": "gemm=torch", "NVTE_FLASH_ATTN": "1", "NVTE_NVTX_ENABLED": "1"}
    answer = te_process("doctor", "--json", **environ)
    data = answer.json
    assert data["te_dispatch"] == te_dispatch.__version__
    assert data["python"] == platform.python_version()
    assert {b["name"] for b in data["backends"]} >= {"reference", "torch"}
    assert all(b["distribution"].startswith("te-dispatch") and b["version"] for b in data["backends"])
    assert data["environment"] == environ
    assert [what.partition("=")[0] for what in data["without_effect"]] == ["NVTE_NVTX_ENABLED"]
    assert [p["name"] for p in data["policies"]] == list(shipped_policies())
    cpu = next(d for d in data["devices"] if d["type"] == "cpu")
    assert cpu["facts"]["vendor"] == "cpu"
    assert answer.code == 0, data["problems"]


def test_tables_for_people(troubled):
    _, shown = troubled
    assert shown.code == 1
    for words in ("Devices", "Backends", "Policies", "te-dispatch-reference", "no such driver", "3 unusable"):
        assert words in shown.out


def test_probes_that_die_cost_only_themselves(troubled):
    answer, _ = troubled
    assert answer.code == 1
    assert _backend(answer, "reference")["available"]
    dying = _backend(answer, "dying")
    assert dying["native_to"] == ["acme"] and dying["version"] == "9.9"
    assert not dying["available"] and "SIGSEGV" in dying["reason"]
    assert dying["doctor"] == [{"subject": "driver", "state": "ok", "reason": "it still answers"}]
    told = {f["probe"]: f["reason"] for f in dying["probe_failures"]}
    assert "SIGSEGV" in told["unavailable"] and "exit code 7" in told["devices acme"]
    where = "backend 'dying' of te-dispatch-dying 9.9: "
    assert f"{where}its probe of acme {told['devices acme']}" in answer.json["problems"]
    assert f"{where}its check of this machine {told['unavailable']}" in answer.json["problems"]
    assert dying["reason"] == f"its check of this machine {told['unavailable']}"


def test_plugins_and_implementations_that_fail(troubled):
    answer, _ = troubled
    failure = next(f for f in answer.json["failures"] if f["name"] == "broken")
    assert failure["distribution"] == "te-dispatch-broken" and "no such driver" in failure["reason"]
    unusable = _backend(answer, "half")["unusable"]
    assert set(unusable) == {"half.absent", "half.newer", "half.other"}
    assert "nowhere_at_all" in unusable["half.absent"]
    assert "gemm@99" in unusable["half.newer"]
    assert "left" in unusable["half.other"]


def test_an_unavailable_backend_is_not_broken(troubled):
    answer, _ = troubled
    acme = _backend(answer, "acme")
    assert acme["reason"] == "no acme kernel in this machine" and not acme["available"]
    assert acme["unusable"] == {}
    assert not any("'acme'" in problem for problem in answer.json["problems"])


def test_every_device_is_told_with_what_is_unknown(troubled):
    answer, shown = troubled
    found = [d for d in answer.json["devices"] if d["type"] == "acme"]
    assert [(d["device"], d["index"]) for d in found] == [("acme:x1", 0), ("acme:x1", 1)]
    assert found[1]["facts"]["version.acme"] == found[1]["facts"]["encodings"] == "unknown"
    assert "version.acme = unknown" in shown.out and "memory = 1.0 GiB" in shown.out


def test_a_bad_variable_is_told(troubled):
    answer, _ = troubled
    assert any("TE_DISPATCH_POLICY" in problem for problem in answer.json["problems"])


def test_answers_before_and_after_a_death_are_kept(tmp_path, monkeypatch):
    (tmp_path / "probes_to_keep.py").write_text(
        "import os\ndef one(): return 'one'\ndef death(index): os._exit(3)\ndef rows(): return [('a', 'ok', 'b')]\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    probes = [
        ("doctor", "", "probes_to_keep:rows"),
        ("devices", "acme", "probes_to_keep:death"),
        ("unavailable", "", "probes_to_keep:one"),
    ]
    first, second, third = run_probes(probes)
    assert first == Answer("doctor", "", [["a", "ok", "b"]])
    assert second == Answer("devices", "acme", problem="ended its process with exit code 3")
    assert third == Answer("unavailable", "", "one")


def test_a_probe_that_hangs_is_stopped(tmp_path, monkeypatch):
    (tmp_path / "probes_that_hang.py").write_text("import time\ndef doctor(): time.sleep(600)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (answer,) = run_probes([("doctor", "", "probes_that_hang:doctor")], time_limit=2)
    assert answer.problem == "did not answer within 2 s and was stopped"


def test_what_this_pytorch_lacks_is_told(tmp_path, run_process):
    """Another start-up module takes away a private name that has a replacement, and one that has none."""
    (tmp_path / "sitecustomize.py").write_text("import torch\ndel torch.cuda._sleep\n")
    answer = run_process(tmp_path, "doctor", "--json", path=tmp_path)
    assert answer.json["torch_replaced"] == ["torch.cuda._sleep"] and answer.json["problems"] == []
    (tmp_path / "sitecustomize.py").write_text("import torch\ndel torch._scaled_mm\n")
    problems = run_process(tmp_path, "doctor", "--json", path=tmp_path).json["problems"]
    [problem] = [p for p in problems if p.startswith("PyTorch ")]
    assert "te_dispatch needs torch._scaled_mm, which PyTorch" in problem


def test_no_more_backends_are_asked_at_a_time_than_there_are_cpus(monkeypatch):
    """Beside each other, forty imports of PyTorch on two CPUs took so long that each was told to have hung."""
    lock, now, most = threading.Lock(), 0, 0

    def ask(*_):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return []

    names = [f"b{i}" for i in range(12)]
    snapshot = Snapshot({name: InstalledBackend(Manifest(name, 1, ()), "d", "1") for name in names})
    monkeypatch.setattr(doctor, "run_probes", ask)
    monkeypatch.setattr(doctor, "fatal_manifests", lambda limit: {})
    monkeypatch.setattr(doctor, "find", lambda operators, vetoes: snapshot)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert [one["name"] for one in doctor.examine()["backends"]] == names
    assert most == 3
