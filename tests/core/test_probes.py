# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What backends say of this machine: probes that are wrong, availability, and imports beside other threads."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from te_dispatch.core.devices import probe_backends, probe_device
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.manager import OpManager
from te_dispatch.core.manifest import Manifest
from tests.core.toy import answers, backend, installed, manager, target

pytestmark = pytest.mark.usefixtures("toy_operators")

HOST = DeviceFacts("cpu", "cpu", "cpu", "host", 0, Arch(), {"version.torch": "2.13"})
ARCHS = {"zeta": {"z2": Arch()}}


def portable() -> Manifest:
    return backend("torch", devices={"cpu": target(lambda index: HOST)})


def native(answer: Any, name: str = "zeta", **fields: Any) -> Manifest:
    def probe(index: int) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    fields.setdefault("vendors", ("zeta",))
    fields.setdefault("archs", ARCHS)
    return backend(name, devices={"cpu": target(probe)}, **fields)


def _cpu(**fields: Any) -> DeviceFacts:
    return DeviceFacts(**{"type": "cpu", "vendor": "zeta", "arch": "z2", **fields})


class _Skipped(BaseException):
    """As a test framework's way to leave."""


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (5, "returned 5, neither DeviceFacts nor None"),
        ({"vendor": "zeta"}, "returned {'vendor': 'zeta'}, neither DeviceFacts nor None"),
        (_cpu(type="zpu"), "says that the device's type is 'zpu'"),
        (_cpu(vendor="zetta"), "says vendor 'zetta', to which its manifest is not native; did you mean 'zeta'?"),
        (_cpu(vendor="nvidia", arch="sm_90"), "says vendor 'nvidia', to which its manifest is not native"),
        (_cpu(arch=5), "whose arch is 5, not a str"),
        (_cpu(name=None), "whose name is None, not a str"),
        (_cpu(index="0"), "whose index is '0', not an int"),
        (_cpu(table={"warp_size": 1}), "whose table is {'warp_size': 1}, not an Arch"),
        (_cpu(table=Arch(("e4m3",))), "encodings: unknown word 'e4m3'; did you mean 'e4m3fn'?"),
        (_cpu(extra=5), "whose extra is 5"),
        (_cpu(extra={5: 5}), "whose extra is {5: 5}"),
        (_cpu(extra={"version.acme": 2}), "whose version.acme is 2, not a str such as '1.0'"),
        (RuntimeError("no answer"), "raised RuntimeError: no answer"),
        (_Skipped("elsewhere"), "raised _Skipped: elsewhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_probe_that_is_wrong_costs_its_facts_and_names_its_backend(answer: Any, reason: str) -> None:
    facts, problems = probe_device(installed(portable(), native(answer)), "cpu", None)
    assert (facts.vendor, facts["version.torch"]) == ("cpu", "2.13")
    [problem] = problems
    assert problem.startswith("backend 'zeta': its probe of cpu ") and reason in problem


def test_a_call_goes_on_beside_a_probe_that_is_wrong() -> None:
    m = manager(*answers("mix", ["a"]), native({"vendor": "zeta"}))
    assert m.device_facts(SimpleNamespace(type="cpu", index=None)).vendor == "cpu"
    assert "neither DeviceFacts nor None" in m.probe_problems[0]


def test_a_portable_probe_cannot_make_the_host_another_vendor_s_device() -> None:
    claims = DeviceFacts("cpu", "nvidia", "sm_90", table=Arch())
    snapshot = installed(portable(), native(claims, "alpha", vendors=(), archs={}))
    facts, [problem] = probe_device(snapshot, "cpu", None)
    assert facts.vendor == "cpu"
    assert "backend 'alpha'" in problem and "says vendor 'nvidia', whose devices are not of this type" in problem


def test_the_host_stands_for_a_vendor_s_chip_where_the_vendor_s_own_probe_says_so() -> None:
    def amd(extra: dict[str, Any]) -> Manifest:
        claims = DeviceFacts("cpu", "amd", "gfx942", table=Arch(), extra=extra)
        return native(claims, "alpha", vendors=("amd",), archs={"amd": {"gfx942": Arch()}})

    emulated = amd({"emulated": True, "version.torch": "theirs"})
    facts, problems = probe_device(installed(portable(), emulated), "cpu", None)
    assert (facts.label(), facts.emulated, problems) == ("amd:gfx942", True, [])
    assert facts["version.torch"] == "theirs"
    # What else is known of the host holds: here that a kernel language does not run on it.
    other = native(DeviceFacts("cpu", "cpu", "cpu", extra={"triton.ready": False}), "beta", vendors=(), archs={})
    facts, _ = probe_device(installed(portable(), emulated, other), "cpu", None)
    assert facts["triton.ready"] is False
    for extra in ({}, {"emulated": "yes"}):
        facts, [problem] = probe_device(installed(portable(), amd(extra)), "cpu", None)
        assert facts.vendor == "cpu" and "whose devices are not of this type" in problem


def test_a_vendor_that_the_manifest_forgot_to_name_is_told() -> None:
    snapshot = installed(portable(), native(_cpu(), vendors=()))
    facts, [problem] = probe_device(snapshot, "cpu", None)
    assert facts.vendor == "cpu"
    assert "says vendor 'zeta', which is not in its manifest's vendors" in problem


def test_an_arch_that_the_manifest_does_not_list_is_told_and_kept() -> None:
    facts, [problem] = probe_device(installed(portable(), native(_cpu(arch="z22"))), "cpu", None)
    assert (facts.vendor, facts.arch) == ("zeta", "z22")
    assert "says arch 'z22', which its manifest does not list; did you mean 'z2'?" in problem


# -- availability -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "available", "told"),
    [
        (None, True, False),
        ("no driver", False, False),
        (False, True, True),
        (0, True, True),
        ("", True, True),
        (True, False, True),
        (["no driver"], False, True),
    ],
)
def test_only_a_text_is_a_reason_to_be_unavailable(answer: Any, available: bool, told: bool) -> None:
    snapshot, problems = probe_backends(installed(backend("zeta", unavailable=target(lambda: answer))))
    assert ("zeta" not in snapshot.unavailable) is available
    assert bool(problems) is told
    if told:
        assert f"backend 'zeta': its check of this machine returned {answer!r}" in problems[0]


def test_a_check_that_is_interrupted_is_asked_again() -> None:
    outcomes: list[Any] = [KeyboardInterrupt(), "no driver"]

    def unavailable() -> str:
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return str(outcome)

    m = OpManager(installed(backend("zeta", unavailable=target(unavailable))), environ={})
    with pytest.raises(KeyboardInterrupt):
        assert m.snapshot
    assert m.snapshot.unavailable == {"zeta": "no driver"}
    assert outcomes == [], "and then no more"


# -- imports beside other threads -------------------------------------------------------------------------------------

_RACE = """
    import faulthandler, sys, threading, time
    faulthandler.dump_traceback_later(60, exit=True)
    import torch
    import te_dispatch
    from te_dispatch import ops
    from te_dispatch.core.manifest import Implementation, Manifest
    from te_dispatch.core.scopes import MANAGER
    from te_dispatch.core.discovery import find
    from te_dispatch.core.operator import OPERATORS
    from te_dispatch.core.snapshot import InstalledBackend, Snapshot
    import types
    shared = types.ModuleType("shared")
    shared.inside, shared.go_on = threading.Event(), threading.Event()
    sys.modules["shared"] = shared
    kernel = Implementation("softmax_fwd@1", "k", "racy_kernels:softmax_fwd")
    manifest = Manifest("racy", 1, (kernel,), vendors=("cpu",))
    found = find(OPERATORS)
    MANAGER.replace_snapshot(
        Snapshot({**found.backends, "racy": InstalledBackend(manifest, "te-dispatch-racy", "1")})
    )
    x = torch.ones(2, 4)
"""
_KERNELS = """
    import threading, shared, torch
    from te_dispatch import ops
    shared.inside.set()
    shared.go_on.wait(20)
    {body}
    def softmax_fwd(x, mask=None, *, scale=1.0, causal=False, out_dtype=None):
        return torch.full_like(x, 7.0)
"""
_IMPORTER = """
    importer = threading.Thread(target=__import__, args=("racy_kernels",))
    importer.start()
    shared.inside.wait(20)
    caller = threading.Thread(target=lambda: results.append(ops.softmax_fwd(x)))
    results = []
    caller.start()
    time.sleep(0.5)  # the caller now waits for the import
    shared.go_on.set()
    importer.join()
    caller.join()
    print(results[0][0, 0].item())
"""
_WAITER = """
    shared.go_on.set()
    print(ops.softmax_fwd(x)[0, 0].item())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "program"),
    [
        ("ops.activation_fwd(torch.ones(2, 4), kind='gelu')", _IMPORTER),
        (
            "other = threading.Thread(target=ops.activation_fwd, args=(torch.ones(2, 4),), kwargs={'kind': 'gelu'})\n"
            "    other.start(); other.join()",
            _WAITER,
        ),
    ],
    ids=["calls an operator", "waits for a thread that does"],
)
def test_kernels_may_call_operators_while_they_are_imported(tmp_path: Path, body: str, program: str) -> None:
    (tmp_path / "racy_kernels.py").write_text(textwrap.dedent(_KERNELS.format(body=body)))
    source = textwrap.dedent(_RACE) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "7.0"


def test_the_log_names_each_probe_before_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else can name the one that ends the process."""
    seen: list[str] = []

    def ask(*_: int) -> None:
        seen.append(caplog.messages[-1])

    snapshot = installed(backend("zeta", unavailable=target(ask), devices={"cpu": target(ask)}))
    with caplog.at_level("DEBUG", "te_dispatch"):
        probe_backends(snapshot)
        probe_device(snapshot, "cpu", None)
    assert seen == ["asking backend 'zeta': its check of this machine", "asking backend 'zeta': its probe of cpu"]


def test_what_a_probe_raises_is_told_with_its_place() -> None:
    _, [problem] = probe_device(installed(portable(), native(OSError("no ioctl"))), "cpu", None)
    assert re.fullmatch(r"backend 'zeta': its probe of cpu raised OSError: no ioctl, at \S+\.py:\d+", problem)

    def unavailable() -> str:
        raise OSError("no lib")

    snapshot, [problem] = probe_backends(installed(backend("zeta", unavailable=target(unavailable))))
    assert re.fullmatch(r"backend 'zeta': its check of this machine raised OSError: no lib, at \S+\.py:\d+", problem)
    assert snapshot.unavailable == {"zeta": "its check of this machine raised OSError: no lib"}
