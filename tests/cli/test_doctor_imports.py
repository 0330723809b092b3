# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Plugins that harm whoever imports or asks them: doctor names each, and shows the rest of the installation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from te_dispatch.core.probing import run_probes
from tests.cli.test_doctor import _backend, _plugin, _source

pytestmark = pytest.mark.sampled(8)

#: Name of a plugin -> the source of its manifest's module, and what doctor says of it.
_FATAL = {
    "aborts": ("import os; os.abort()", "killed its process with SIGABRT while it was imported"),
    "leaves": ("import os; os._exit(0)", "ended its process with exit code 0 while it was imported"),
    "hangs": ("import time; time.sleep(600)", "did not answer within 3 s and was stopped while it was imported"),
    "interrupts": ("raise KeyboardInterrupt", "killed its process with SIGINT (last words: KeyboardInterrupt) while"),
    "skips": ("class Skipped(BaseException): pass\nraise Skipped('elsewhere')", "raised Skipped: elsewhere while"),
}
_TALKS = _source(
    """
    print("noise at import")
    os.write(1, b"noise below Python at import")
    def unavailable():
        print("noise of a check")
        os.write(1, b"noise below Python")
    def kernel(): pass
    """,
    "name='talks', implementations=(), unavailable='talks_backend:unavailable', doctor='talks_backend:rows'",
)
_ROWS = {
    "pairs": ("[('a',)]", "returned the row ('a',), not (subject, state, reason)"),
    "text": ("'abc'", "returned 'abc', not a list of (subject, state, reason)"),
    "mapping": ("{'driver': 'ok'}", "returned {'driver': 'ok'}, not a list"),
    "numbers": ("[('a', 'ok', 5)]", "returned the row ('a', 'ok', 5)"),
    "states": ("[('a', 'okay', '')]", "returned the state 'okay'; known: ok, missing, warning"),
}
_ZETA = _source(
    """
    from te_dispatch.core.facts import Arch, DeviceFacts
    from te_dispatch.core.requirements import Compare, OneOf
    def probe(index): return DeviceFacts("cpu", "zetta", "z2") if os.environ.get("ZETA") else None
    def tiles(index): return DeviceFacts("zeta", "zeta", "z22", extra={"tiles": 4}) if index < 1 else None
    def unavailable(): return False
    def gemm(): return {}["missing"]
    """,
    "name='zeta', vendors=('zeta',), archs={'zeta': {'z2': Arch()}}, "
    "devices={'cpu': 'zeta_backend:probe', 'zeta': 'zeta_backend:tiles'}, unavailable='zeta_backend:unavailable', "
    "implementations=(Implementation(op='gemm@1', name='gemm', target='zeta_backend:absent', "
    "requires=(Compare('device.tiles', '>=', 4), OneOf('device.lanes', 8), OneOf('device.version.zeta', '1'))),)",
)


@pytest.fixture(scope="module")
def harmed(tmp_path_factory, run_process):
    folder = tmp_path_factory.mktemp("plugins")
    for name, (source, _) in _FATAL.items():
        _plugin(folder, name, source)
    for name, (rows, _) in _ROWS.items():
        fields = f"name={name!r}, implementations=(), doctor='{name}_backend:rows'"
        _plugin(folder, name, _source(f"def rows(): return {rows}", fields))
    _plugin(folder, "talks", _TALKS)
    _plugin(folder, "zeta", _ZETA)
    # The directory for what a crash leaves behind is of no interest.
    return run_process(folder, "doctor", "--json", "--time-limit", "3", path=folder, ZETA="1")


@pytest.mark.parametrize("name", _FATAL)
def test_a_manifest_that_does_not_let_itself_be_imported_is_named(harmed, name):
    [failure] = [f for f in harmed.json["failures"] if f["name"] == name]
    assert _FATAL[name][1] in failure["reason"]
    assert any(f"backend {name!r} of te-dispatch-{name} 9.9: " in problem for problem in harmed.json["problems"])
    assert harmed.code == 1


@pytest.mark.parametrize("verb", [("explain", "gemm"), ("ops",), ("policy", "show"), ("conformance",)], ids=" ".join)
@pytest.mark.parametrize("name", ["aborts", "leaves"])
def test_other_commands_name_it_and_end(tmp_path, run_process, name, verb):
    """They ended without a word, and with the exit code that the manifest chose."""
    source, told = _FATAL[name]
    _plugin(tmp_path, name, source)
    answer = run_process(tmp_path, *verb, path=tmp_path)
    assert answer.code == 2 and answer.out == ""
    assert f"the manifest of backend {name!r} of te-dispatch-{name} 9.9 {told}" in answer.err
    assert not list(tmp_path.glob("te_dispatch_conformance*"))


def test_the_rest_of_the_installation_is_shown(harmed):
    names = {backend["name"] for backend in harmed.json["backends"]}
    assert names >= {"reference", "torch", "talks", "zeta", *_ROWS}
    assert _backend(harmed, "torch")["available"] and _backend(harmed, "torch")["unusable"] == {}


@pytest.mark.parametrize("name", _ROWS)
def test_a_report_of_another_form_is_named_and_left_out(harmed, name):
    shown = _backend(harmed, name)
    assert shown["doctor"] == [] and shown["available"]
    [failure] = shown["probe_failures"]
    assert failure["probe"] == "doctor" and _ROWS[name][1] in failure["reason"]


def test_what_a_probe_cannot_mean_is_told(harmed):
    shown = _backend(harmed, "zeta")
    told = {f["probe"]: f["reason"] for f in shown["probe_failures"]}
    assert "says vendor 'zetta', to which its manifest is not native; did you mean 'zeta'?" in told["devices cpu"]
    assert "says arch 'z22', which its manifest does not list; did you mean 'z2'?" in told["devices zeta"]
    assert "returned False" in told["unavailable"]
    assert shown["available"], "False is no reason"
    labels = {device["device"] for device in harmed.json["devices"]}
    assert {"cpu", "zeta:z22"} <= labels and "zetta:z2" not in labels


def test_a_device_fact_that_nobody_tells_is_told(harmed):
    assert _backend(harmed, "zeta")["unknown_facts"] == {"device.lanes": ["zeta.gemm"]}
    [problem] = [p for p in harmed.json["problems"] if "device.lanes" in p]
    assert "zeta.gemm: requires device.lanes, which no probe tells of any device here" in problem
    assert all(_backend(harmed, name)["unknown_facts"] == {} for name in ("reference", "torch", "triton"))


def test_what_its_own_probe_tells_is_known_where_another_backend_is_believed(tmp_path, run_process):
    body = """
    from te_dispatch.core.facts import DeviceFacts
    from te_dispatch.core.requirements import OneOf
    def native(index): return DeviceFacts("cpu", "chip", "c1")
    def portable(index): return DeviceFacts("cpu", "cpu", "cpu", extra={"fans": 2})
    """
    fields = "name='chip', vendors=('chip',), implementations=(), devices={'cpu': 'chip_backend:native'}"
    _plugin(tmp_path, "chip", _source(body, fields))
    gemm = "Implementation(op='gemm@1', name='gemm', target='fans_backend:absent', requires=(OneOf('device.fans', 2),))"
    fields = f"name='fans', implementations=({gemm},), devices={{'cpu': 'fans_backend:portable'}}"
    _plugin(tmp_path, "fans", _source(body, fields))
    answer = run_process(tmp_path, "doctor", "--json", path=tmp_path)
    assert [(d["device"], "fans" in d["facts"]) for d in answer.json["devices"]] == [("chip:c1", False)]
    assert _backend(answer, "fans")["unknown_facts"] == {}
    assert _backend(answer, "triton")["unknown_facts"] == {}


def test_a_saved_format_without_a_counterpart_is_told(tmp_path, run_process):
    def implementation(op, saved, more=""):
        return f"Implementation(op='{op}@1', name='{op}', target='alone_backend:kernel', saved_format={saved!r}{more})"

    rows = (
        implementation("attention_fwd", "alone.flash/1"),
        implementation("softmax_bwd", "alone.softmax/1"),
        implementation("layernorm_fwd", "alone.norm/1"),
        implementation("layernorm_bwd", "alone.norm/1"),
        implementation("rmsnorm_fwd", "alone.rms/1", ", inference=True"),
        implementation("rmsnorm_bwd", "canonical"),
        implementation("attention_fwd", "canonical").replace("name='attention_fwd'", "name='unsaid'"),
    )
    _plugin(tmp_path, "alone", _source("", f"name='alone', implementations=({', '.join(rows)})"))
    answer = run_process(tmp_path, "doctor", "--json", path=tmp_path)
    assert _backend(answer, "alone")["without_companion"] == {
        "alone.attention_fwd": "its saved format is 'alone.flash/1', and no implementation of attention_bwd reads it",
        "alone.softmax_bwd": "its saved format is 'alone.softmax/1', and no implementation of softmax_fwd leaves it",
        "alone.unsaid": "its saved format is 'canonical', and no implementation of attention_bwd reads it: set "
        "saved_format in both halves, or inference=True",
    }
    assert any("alone.attention_fwd: its saved format is" in problem for problem in answer.json["problems"])
    assert all(_backend(answer, name)["without_companion"] == {} for name in ("reference", "torch", "triton"))


@pytest.mark.parametrize("verb", [("doctor",), ("ops",), ("explain", "gemm", "dtype=bf16"), ("policy", "list")])
def test_what_plugins_print_is_not_in_the_document(tmp_path, run_process, verb):
    _plugin(tmp_path, "talks", _TALKS)
    answer = run_process(tmp_path, *verb, "--json", path=tmp_path)
    assert answer.json and "noise" not in answer.out


def test_tracebacks_are_shown_on_request(tmp_path, run_process):
    _plugin(tmp_path, "broken", "def inner(): return {}['x']\ninner()\n")
    _plugin(tmp_path, "zeta", _ZETA.replace("def unavailable(): return False", "def unavailable(): gemm()"))
    shown = run_process(tmp_path, "doctor", "--json", path=tmp_path)
    assert "tracebacks" not in shown.json
    assert "broken_backend.py:1" in shown.json["failures"][0]["reason"]
    answer = run_process(tmp_path, "doctor", "--json", "--traceback", path=tmp_path)
    told = {one["of"]: one["traceback"] for one in answer.json["tracebacks"]}
    assert "in inner" in told["backend 'broken' of te-dispatch-broken 9.9"]
    assert "KeyError: 'missing'" in told["backend 'zeta': unavailable"]


def test_the_import_of_torch_is_charged_to_nobody(tmp_path, monkeypatch):
    """A stand-in for PyTorch that takes longer than the limit."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(4)\n")
    (tmp_path / "probes_with_torch.py").write_text("import torch\ndef rows(): return [('a', 'ok', 'b')]\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    [answer] = run_probes([("doctor", "", "probes_with_torch:rows")], time_limit=2)
    assert (answer.value, answer.problem) == ([["a", "ok", "b"]], None)


def test_an_interrupt_ends_doctor(tmp_path):
    """The user's own, while a plugin hangs."""
    source = "import pathlib, time\npathlib.Path('started').touch()\ntime.sleep(600)\n"
    _plugin(tmp_path, "hangs", source)
    path = os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])
    child = subprocess.Popen(
        [sys.executable, "-m", "te_dispatch.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    program = textwrap.dedent("while not __import__('pathlib').Path('started').exists(): __import__('time').sleep(0.1)")
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=60, check=True)
    for _ in range(6):  # an interrupt that arrives while Python runs a finalizer is lost: whoever waits presses again
        os.killpg(child.pid, signal.SIGINT)
        try:
            _, stderr = child.communicate(timeout=10)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        os.killpg(child.pid, signal.SIGKILL)
        raise AssertionError("doctor went on after six interrupts")
    assert child.returncode == 130 and "interrupted" in stderr
