# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Probes that end or hang the process that asks them: whoever asks says so, and does not end as if all were well."""

from __future__ import annotations

import sys

import pytest

from te_dispatch.core import probing
from te_dispatch.core.manifest import API_VERSION, Implementation, Manifest
from te_dispatch.core.trial import FatalPlugin, refuse_fatal, refuse_fatal_targets
from tests.cli.test_doctor import _plugin, _source
from tests.core.toy import installed

pytestmark = pytest.mark.sampled(8)

#: How a probe ends its process -> what is said of it.
_ENDINGS = {
    "os._exit(0)": "ended its process with exit code 0",
    "os._exit(3)": "ended its process with exit code 3",
    "__import__('ctypes').CDLL(None).exit(0)": "ended its process with exit code 0",
    "os.abort()": "killed its process with SIGABRT",
}
_KIT = (
    "import pytest, sys; sys.exit(pytest.main(['--pyargs', 'te_dispatch.conformance', '--te-backend', 'nimbus', "
    "'-p', 'no:cacheprovider']))"
)
_CERTIFY = """
import sys
from te_dispatch.conformance import certify
from te_dispatch.core.trial import FatalPlugin
try:
    certify("nimbus", op="gemm")
except FatalPlugin as error:
    sys.exit(str(error))
"""


def _nimbus(folder, ending, probe="probe"):
    """Install a backend one of whose probes does what `ending` says."""
    bodies = {"probe": "return None", "unavailable": "return None", "elsewhere": "return None", probe: ending}
    functions = "\n".join(f"def {name}(*_): {body}" for name, body in bodies.items())
    _plugin(
        folder,
        "nimbus",
        _source(
            functions,
            "name='nimbus', vendors=('nimbus',), unavailable='nimbus_backend:unavailable', "
            "devices={'cpu': 'nimbus_backend:probe', 'xpu': 'nimbus_backend:elsewhere'}, implementations=("
            "Implementation(op='gemm@1', name='gemm', target='nimbus_backend:gemm'),)",
        ),
    )


@pytest.mark.parametrize("ending", _ENDINGS)
def test_commands_name_the_probe_and_fail(tmp_path, run_process, ending):
    """They ended without a word, with the exit code that the probe chose."""
    _nimbus(tmp_path, ending)
    answer = run_process(tmp_path, "explain", "gemm", "dtype=bf16", path=tmp_path)
    assert answer.code == 2 and answer.out == ""
    assert f"backend 'nimbus' of te-dispatch-nimbus 9.9: its probe of cpu {_ENDINGS[ending]}" in answer.err


@pytest.mark.parametrize(
    "verb",
    [("ops",), ("conformance", "--backend", "nimbus", "--json"), ("tune", "--shape", "64x64x64")],
    ids=lambda verb: verb[0],
)
def test_every_command_that_asks_probes_does(tmp_path, run_process, verb):
    _nimbus(tmp_path, "os._exit(0)", "unavailable")
    answer = run_process(tmp_path, *verb, path=tmp_path)
    told = "backend 'nimbus' of te-dispatch-nimbus 9.9: its check of this machine ended its process with exit code 0"
    assert answer.code == 2 and told in answer.err
    if "--json" in verb:
        assert told in answer.json["error"]


def test_doctor_names_it_and_the_exit_code(tmp_path, run_process):
    _nimbus(tmp_path, "os._exit(0)")
    answer = run_process(tmp_path, "doctor", "--json", path=tmp_path)
    told = "backend 'nimbus' of te-dispatch-nimbus 9.9: its probe of cpu ended its process with exit code 0"
    assert answer.code == 1 and told in answer.json["problems"]


@pytest.mark.parametrize(("program", "code"), [(_KIT, 4), (_CERTIFY, 1)], ids=["pytest", "certify"])
def test_the_kit_in_a_vendor_s_own_process_does(tmp_path, run_process, program, code):
    _nimbus(tmp_path, "os._exit(0)")
    answer = run_process(tmp_path, path=tmp_path, program=program)
    assert answer.code == code
    assert "backend 'nimbus' of te-dispatch-nimbus 9.9: its probe of cpu ended its process with exit" in answer.err


@pytest.mark.parametrize("ending", ["os._exit(0)", "os.abort()"])
@pytest.mark.parametrize(
    "how",
    [("conformance", "--backend", "nimbus", "--op", "gemm"), _KIT, _CERTIFY],
    ids=["command", "pytest", "certify"],
)
def test_the_kit_names_a_kernel_s_module_that_ends_the_process(tmp_path, run_process, how, ending):
    """It ended without a word, with exit code 0 as if all were well."""
    _nimbus(tmp_path, "return None")
    (tmp_path / "nimbus_kernels.py").write_text(f"import os\n{ending}\n")
    source = tmp_path / "nimbus_backend.py"
    source.write_text(source.read_text().replace("target='nimbus_backend:gemm'", "target='nimbus_kernels:gemm'"))
    verb, program = (how, None) if isinstance(how, tuple) else ((), how)
    answer = run_process(tmp_path, *verb, path=tmp_path, **({} if program is None else {"program": program}))
    assert answer.code != 0
    assert f"backend 'nimbus': nimbus.gemm {_ENDINGS[ending]} while it was imported" in answer.err


def test_a_kernel_s_module_that_hangs_is_named_within_the_limit(tmp_path, monkeypatch):
    """The plan never came to an end."""
    _nimbus(tmp_path, "return None")
    (tmp_path / "nimbus_kernels.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    implementation = Implementation(op="gemm@1", name="gemm", target="nimbus_kernels:gemm")
    manifest = Manifest(name="nimbus", api_version=API_VERSION, implementations=(implementation,))
    snapshot = installed(manifest)
    with pytest.raises(FatalPlugin, match=r"backend 'nimbus': nimbus\.gemm did not answer within 1 s and was stopped"):
        refuse_fatal_targets(snapshot, ("nimbus",), 1.0)
    refuse_fatal_targets(snapshot, ("other",), 1.0)


def test_a_probe_that_hangs_is_named_within_the_limit(tmp_path, monkeypatch, te):
    """`explain` waited for it for ever, and said nothing."""
    _nimbus(tmp_path, "__import__('time').sleep(600)")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(probing, "TIME_LIMIT", 4.0)
    answer = te("explain", "gemm", "dtype=bf16")
    assert answer.code == 2
    assert "backend 'nimbus' of te-dispatch-nimbus 9.9: its probe of cpu did not answer within 4 s" in answer.err


def test_probes_of_devices_that_are_not_asked_about_are_left_alone(tmp_path, monkeypatch):
    _nimbus(tmp_path, "os._exit(0)", "elsewhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    refuse_fatal()
    with pytest.raises(FatalPlugin, match="its probe of xpu ended its process with exit code 0"):
        refuse_fatal("xpu:0")


def test_what_survived_is_not_tried_again(tmp_path, monkeypatch):
    _nimbus(tmp_path, "return None")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    refuse_fatal()
    monkeypatch.setattr(probing, "_one_child", lambda *_: pytest.fail("another process was started"))
    refuse_fatal()
