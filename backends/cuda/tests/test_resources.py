# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every kernel keeps within the registers, spills and shared memory that are recorded for it, on every chip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SAID = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN3ted4norm16_GLOBAL__N__0a1b6kernelIfLi8EEEvPfx' for 'sm_90a'
ptxas info    : Function properties for _ZN3ted4norm16_GLOBAL__N__0a1b6kernelIfLi8EEEvPfx
    24 bytes stack frame, 20 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 61 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 94.101 ms
ptxas info    : Compiling entry function '_Z5plainv' for 'sm_80'
ptxas info    : Function properties for _Z5plainv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers
"""


def test_no_kernel_exceeds_its_bound(resources: Any, build: Path) -> None:
    release, bounds = resources.recorded()
    compiler = resources.compiler_of(build)
    if compiler != release:
        pytest.skip(f"the bounds are of CUDA {release}, this build is of {compiler}")
    kernels = resources.kernels_of(build)
    assert kernels
    breaches = resources.breaches(kernels, bounds)
    assert not breaches, "\n".join([*breaches, "tools/resources.py shows and, where it is meant, records them"])


def test_the_record_names_no_kernel_that_is_gone(resources: Any, build: Path, native: Any) -> None:
    gone = set(resources.recorded()[1]) - set(resources.kernels_of(build))
    assert not gone, f"{sorted(gone)}: tools/resources.py --record"


#: Kernels whose registers are capped so that another block fits a multiprocessor: what that may cost on Hopper, which
#: the caps are chosen for, in bytes stored and loaded per thread. Nothing else spills there. Other chips keep to their
#: record.
SPILLING = {
    "ted::norm::backward_rows<": 512,
    "ted::norm::forward_": 128,
    "ted::tensor_cast::": 32,
    "ted::copy_kernel": 264,
}


def test_spills_are_the_exception_on_hopper(resources: Any) -> None:
    over = []
    for name, chips in resources.recorded()[1].items():
        limit = max((bytes_ for start, bytes_ in SPILLING.items() if name.startswith(start)), default=0)
        if chips["90a"].spills > limit:
            over.append(f"{name}: {chips['90a'].spills}, at most {limit}")
    assert not over, "\n".join(over)


def test_reading_what_the_assembler_says(resources: Any) -> None:
    found = resources.parse(SAID)
    usage = found["_ZN3ted4norm16_GLOBAL__N__0a1b6kernelIfLi8EEEvPfx", "90a"]
    assert usage == resources.Usage(61, 24, 48, 512)
    assert usage.bound() == resources.Usage(64, 24, 48, 512)
    assert found["_Z5plainv", "80"] == resources.Usage(8, 0, 0, 0)


def test_names_are_without_types_and_files(resources: Any) -> None:
    mangled = ["_ZN3ted4norm16_GLOBAL__N__0a1b6kernelIfLi8EEEvPfx", "_Z5plainv"]
    assert resources.names_of(mangled) == ["ted::norm::kernel<float, 8>", "plain"]


def test_a_breach_names_kernel_chip_figure_and_bound(resources: Any) -> None:
    bounds = {"k": {"90a": resources.Usage(64, 0, 0, 512)}}
    seen = {"k": {"90a": resources.Usage(66, 0, 8, 512), "80": resources.Usage(8, 0, 0, 0)}, "new": {}}
    assert resources.breaches(seen, bounds) == [
        "k on sm_90a: registers 66, bound 64",
        "k on sm_90a: spills 8, bound 0",
        "k on sm_80: no bound is recorded",
    ]


def test_a_record_reads_back(resources: Any, tmp_path: Path) -> None:
    kernels = {"b": {"100a": resources.Usage(33, 0, 0, 1), "90a": resources.Usage(32, 0, 0, 1)}}
    resources.record(kernels, "13.0", tmp_path / "r.json")
    compiler, bounds = resources.recorded(tmp_path / "r.json")
    assert compiler == "13.0"
    assert list(bounds["b"]) == ["90a", "100a"]
    assert bounds["b"]["100a"] == resources.Usage(40, 0, 0, 1)
    assert not resources.breaches(kernels, bounds)
