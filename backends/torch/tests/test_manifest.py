# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest keeps the contract: light, complete, with real facts, targets and signatures."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.facts import Arch, DeviceFacts
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.requirements import DEVICE_PREFIX
from te_dispatch_torch import MANIFEST, probe
from te_dispatch_torch.archs import ARCHS

IMPLEMENTATIONS = MANIFEST.implementations


def _load(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, te_dispatch_torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_operator_has_an_implementation() -> None:
    assert {i.operator for i in IMPLEMENTATIONS} == set(OPERATORS)


def test_names_are_unique() -> None:
    names = [i.name for i in IMPLEMENTATIONS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: f"{i.operator}-{i.name}")
def test_signature_and_facts(implementation: Any) -> None:
    operator = OPERATORS[implementation.operator]
    assert implementation.operator_version == operator.version
    mine = inspect.signature(_load(implementation.target)).parameters.values()
    theirs = operator.signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]
    read = {fact for condition in implementation.requires for fact in condition.reads()}
    unknown = {f for f in read if not f.startswith(DEVICE_PREFIX)} - set(operator.facts)
    if not operator.backward:
        assert not unknown
    else:
        # A backward may also read what only its forward's facts hold.
        assert unknown <= set(OPERATORS[operator.companion].facts)


def test_pairs_share_their_saved_format() -> None:
    for name in (
        "sdpa_cpu", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_aotriton_flash", "sdpa_aotriton_efficient",
        "unfused_attention", "varlen_attention",
    ):  # fmt: skip
        halves = {i.operator: i.saved_format for i in IMPLEMENTATIONS if i.name in (name, f"{name}_bwd")}
        assert set(halves) == {"attention_fwd", "attention_bwd"} and len(set(halves.values())) == 1


def _device(vendor: str, arch: str) -> DeviceFacts:
    return DeviceFacts("cpu" if vendor == "cpu" else "cuda", vendor, arch, table=ARCHS[vendor].get(arch))


def _holds(implementation: Any, call: dict[str, Any], device: DeviceFacts) -> bool:
    verdicts = [condition.check(call, device).holds for condition in implementation.requires]
    assert None not in verdicts  # every fact is known here
    return all(verdicts)


FP8 = {"a.dtype": "e4m3fn", "b.dtype": "e4m3fn", "a.scaling": "tensor", "b.scaling": "tensor", "k": 64, "n": 64}


@pytest.mark.parametrize(
    ("device", "changes", "serves"),
    [
        (_device("nvidia", "sm_90"), {}, True),
        (_device("nvidia", "sm_90"), {"a.dtype": "e5m2"}, True),
        (_device("nvidia", "sm_90"), {"a.dtype": "e5m2", "b.dtype": "e5m2"}, False),
        (_device("nvidia", "sm_90"), {"a.dtype": "e4m3fnuz", "b.dtype": "e4m3fnuz"}, False),
        (_device("nvidia", "sm_90"), {"a.scaling": "block_1d"}, False),
        (_device("nvidia", "sm_90"), {"n": 24}, False),
        (_device("nvidia", "sm_80"), {}, False),
        (_device("amd", "gfx942"), {}, False),
        (_device("amd", "gfx942"), {"a.dtype": "e4m3fnuz", "b.dtype": "e5m2fnuz"}, True),
        (_device("amd", "gfx950"), {}, True),
        (_device("cpu", "cpu"), {}, False),
    ],
)
def test_who_gets_the_fp8_units(device: DeviceFacts, changes: dict[str, Any], serves: bool) -> None:
    (scaled,) = (i for i in IMPLEMENTATIONS if i.name == "scaled_mm")
    assert _holds(scaled, {**FP8, **changes}, device) == serves
    (emulated,) = (i for i in IMPLEMENTATIONS if i.name == "emulated_gemm")
    assert _holds(emulated, {**FP8, **changes}, device)
    assert emulated.rank > scaled.rank


def test_probe_of_the_host() -> None:
    facts = probe.cpu()
    assert facts is not None and (facts.type, facts.vendor, facts.arch) == ("cpu", "cpu", "cpu")
    assert facts["version.torch"] == str(torch.__version__) and facts["encodings"] == ()
    assert isinstance(facts["memory"], int) and facts["memory"] > 1 << 28
    assert probe.unavailable() is None and probe.doctor()[0][1] == "ok"


def test_absent_devices_are_none_and_create_no_context() -> None:
    count = torch.cuda.device_count()
    initialized = torch.cuda.is_initialized()
    assert probe.cuda(count) is None and probe.xpu(1 << 10) is None and probe.mps(1) is None
    assert torch.cuda.is_initialized() == initialized


def test_probe_reads_both_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, gcnArchName = "chip", 1 << 34, "gfx942:sramecc+:xnack-"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    nvidia = probe.cuda()
    assert nvidia is not None and nvidia.label() == "nvidia:sm_90" and nvidia["version.cuda"] == "13.0"
    assert nvidia["fp8_layouts"] == ("NT",) and nvidia["memory"] == 1 << 34
    monkeypatch.setattr(torch.version, "hip", "7.1")
    amd = probe.cuda()
    assert amd is not None and amd.label() == "amd:gfx942" and amd["version.hip"] == "7.1"
    assert amd["encodings"] == ("e4m3fnuz", "e5m2fnuz") and amd["warp_size"] == 64


def test_arch_tables_hold_together() -> None:
    for archs in ARCHS.values():
        for arch in archs.values():
            assert isinstance(arch, Arch)
            assert arch.fp8_matmul == bool(arch.encodings) == bool(arch.fp8_layouts)
            assert len({e.endswith("fnuz") for e in arch.encodings}) <= 1
