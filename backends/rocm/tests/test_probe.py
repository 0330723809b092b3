# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Facts of each device, with PyTorch and HIP as they are on hosts with several kinds of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from te_dispatch.backend_kit.libraries import Library
from te_dispatch_rocm import devices, libraries, probe
from te_dispatch_rocm.devices import READY, Device, Survey

MI300, MI350 = (
    Device(name, arch, 1 << 37, READY, "1.2.2") for name, arch in (("MI300X", "gfx942"), ("MI350", "gfx950"))
)


@pytest.fixture
def host(native, monkeypatch):
    """host(survey, names) is a host whose HIP says `survey`, and whose PyTorch for ROCm sees devices of these names."""
    monkeypatch.delenv(probe.MEMORY, raising=False)
    monkeypatch.setattr(libraries, "hip", lambda: Library("/opt/rocm/lib/libamdhip64.so.7", "installation", (7, 2, 5)))

    def pretend(survey: Survey, *names: str) -> None:
        monkeypatch.setattr(devices, "found", lambda: survey)
        monkeypatch.setattr(torch.version, "hip", "7.2.5" if names else None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: max(len(names), 1))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=names[index], name="AMD")
        )

    return pretend


def test_two_chips_of_one_host_have_their_own_encodings(host):
    host(Survey((MI300, MI350)), "gfx942:sramecc+:xnack-", "gfx950:sramecc+:xnack-")
    first, second, none = (probe.cuda(index) for index in range(3))
    assert first is not None and second is not None and none is None
    assert (first.label(), first["encodings"]) == ("amd:gfx942", ("e4m3fnuz", "e5m2fnuz"))
    assert (second.label(), second["encodings"]) == ("amd:gfx950", ("e4m3fn", "e5m2"))
    assert first["version.hipblaslt"] == "1.2.2" and first["version.hip"] == "7.2.5" and first["hipblaslt"] == READY
    assert first["memory"] == 1 << 37 and not first.emulated


def test_a_host_with_both_vendors_is_told_apart_by_the_pytorch_that_runs(host):
    host(Survey((MI300,)))  # HIP sees AMD's device; PyTorch is built for NVIDIA's
    assert probe.cuda(0) is None


def test_pytorch_and_hip_that_see_different_devices(host):
    host(Survey((MI350,)), "gfx942:sramecc+:xnack-")
    facts = probe.cuda(0)
    assert facts is not None and facts.arch == "gfx942"
    assert facts["hipblaslt"] == "PyTorch's device 0 is a gfx942, HIP's a gfx950: two installations of ROCm are in use"
    host(Survey((MI300,)), "gfx942", "gfx942")
    assert probe.cuda(1) is None


def test_a_chip_without_a_table_keeps_its_name(host):
    host(Survey((Device("RX 6800", "gfx1030", 1, READY, "1.2.2"),)), "gfx1030")
    facts = probe.cuda(0)
    assert facts is not None and (facts.arch, facts.table) == ("gfx1030", None)


def test_what_hip_says_is_why_the_backend_is_unavailable(host):
    host(Survey(problem="HIP sees no AMD device"), "gfx942")
    assert probe.unavailable() == "HIP sees no AMD device" and probe.cuda(0) is None


def test_the_cpu_is_no_device_unless_it_is_said_to_be(host, monkeypatch):
    host(Survey((MI300,)))
    assert probe.cpu() is None
    monkeypatch.setenv(probe.MEMORY, "host")
    facts = probe.cpu()
    assert facts is not None and facts.label() == "amd:gfx942" and facts.type == "cpu" and facts.emulated
