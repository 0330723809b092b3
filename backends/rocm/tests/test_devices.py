# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""AMD's devices of a machine: told apart, and what is said where there is none that works."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from te_dispatch_rocm import devices, doctor
from te_dispatch_rocm.devices import READY, Device, Survey

HIP, HIPBLASLT = "libamdhip64.so.7", "libhipblaslt.so.1"


@pytest.fixture
def ask(host_folder, monkeypatch):
    """ask(chips) is the survey of a machine with these devices."""
    for name in devices.VISIBILITY:
        monkeypatch.delenv(name, raising=False)

    def survey(chips: str, **environment: str) -> Survey:
        monkeypatch.setenv("HOST_HIP_DEVICES", chips)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return devices.ask(str(host_folder / HIP), str(host_folder / HIPBLASLT))

    return survey


def test_each_device_has_its_own_facts(ask):
    found = ask("gfx942,gfx950")
    assert found.problem is None
    assert [(one.arch, one.hipblaslt, one.version) for one in found.devices] == [
        ("gfx942", READY, "1.2.2"), ("gfx950", READY, "1.2.2"),
    ]  # fmt: skip
    assert all(one.memory > 0 and one.name for one in found.devices)
    states = [row[1:] for row in doctor.device_rows(found)]
    assert [state for state, _ in states] == ["ok", "ok"]
    assert "e4m3fnuz" in states[0][1] and "e4m3fn " in states[1][1]


def test_no_device_ends_no_process_and_says_why(ask, tmp_path):
    assert ask("").problem is not None
    assert "no /nowhere, so the driver amdgpu is not loaded" in devices.no_device({}, "/nowhere")
    assert devices.no_device({}, str(tmp_path)) == "HIP sees no AMD device"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"HIP_VISIBLE_DEVICES": "-1"}, "HIP_VISIBLE_DEVICES='-1' names none"),
        ({"ROCR_VISIBLE_DEVICES": ""}, "ROCR_VISIBLE_DEVICES='' names none"),
        ({"ROCR_VISIBLE_DEVICES": "7", "HIP_VISIBLE_DEVICES": "0"}, "='7' and HIP_VISIBLE_DEVICES='0' name none"),
    ],
)
def test_what_hides_devices_is_named(environment, said):
    assert said in devices.no_device(environment)


def test_devices_that_are_hidden(ask):
    assert "HIP_VISIBLE_DEVICES='-1'" in (ask("gfx942,gfx950", HIP_VISIBLE_DEVICES="-1").problem or "")
    (only,) = ask("gfx942,gfx950", HIP_VISIBLE_DEVICES="1").devices
    assert only.arch == "gfx950"


def test_a_library_that_is_too_old_names_both_versions(ask):
    (device,) = ask("gfx942", HOST_HIPBLASLT_VERSION="800").devices
    assert "hipBLASLt 0.8.0 is too old, needs 0.10" in device.hipblaslt
    assert doctor.served(device)[0] == "warning"


def test_an_unknown_chip_is_told_of_and_does_not_hide_the_others(ask):
    found = ask("gfx1030,gfx942")
    rows = doctor.device_rows(found)
    assert rows[0][1] == "warning" and "gfx1030: this backend serves gfx90a, gfx942" in rows[0][2]
    assert rows[1][1] == "ok"


def planted(folder: Path, source: str) -> str:
    """A library of C functions."""
    (folder / "planted.c").write_text(source)
    path = str(folder / "planted.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, str(folder / "planted.c")], check=True)
    return path


def test_a_handle_that_ends_the_process_costs_that_device_alone(host_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOST_HIP_DEVICES", "gfx942,gfx950,gfx942")
    broken = planted(
        tmp_path,
        """
        #include <stdio.h>
        #include <stdlib.h>
        extern int hipGetDevice(int *);
        static int made;
        int hipblasLtCreate(void **handle) {
          int device = 0;
          hipGetDevice(&device);
          if (device == 1) { fputs("no kernels\\n", stderr); exit(1); }
          *handle = &made;
          return 0;
        }
        int hipblasLtGetVersion(void *handle, int *version) { *version = 100000; return 0; }
        int hipblasLtDestroy(void *handle) { return 0; }
        """,
    )
    found = devices.ask(str(host_folder / HIP), broken)
    assert [one.hipblaslt for one in found.devices] == [
        READY, "hipblasLtCreate ended the process with exit code 1 (no kernels)", READY,
    ]  # fmt: skip
    assert [one.version for one in found.devices] == ["1.0.0", "", "1.0.0"]


def test_hip_s_own_errors_are_passed_on(tmp_path, host_folder):
    broken = planted(
        tmp_path,
        "int hipGetDeviceCount(int *count) { return 35; }\n"
        'const char *hipGetErrorString(int e) { return "insufficient driver"; }\n',
    )
    assert devices.ask(broken, str(host_folder / HIPBLASLT)).problem == "hipGetDeviceCount: insufficient driver (35)"


def test_a_runtime_that_dies_while_it_counts(tmp_path, host_folder):
    broken = planted(tmp_path, "#include <stdlib.h>\nint hipGetDeviceCount(int *count) { abort(); }\n")
    found = devices.ask(broken, str(host_folder / HIPBLASLT))
    assert found == Survey(problem="counting AMD's devices killed the process with signal 6")


def test_a_runtime_that_hangs(tmp_path, host_folder):
    broken = planted(tmp_path, "#include <unistd.h>\nint hipGetDeviceCount(int *count) { sleep(60); return 0; }\n")
    found = devices.ask(broken, str(host_folder / HIPBLASLT), time_limit=1.0)
    assert found == Survey(problem="counting AMD's devices did not answer within 1 s")


def test_doctor_answers_without_devices():
    assert doctor.device_rows(Survey(problem="none")) == [("devices", "missing", "none")]
    state, reason = doctor.served(Device("MI300X", "gfx942", 1, "hipblasLtCreate: status 4"))
    assert state == "warning" and reason == "MI300X, gfx942: hipblasLtCreate: status 4"
