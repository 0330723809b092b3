# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Names, values, structures and functions of HIP and hipBLASLt, as the binding and the host library declare them, are
AMD's: in AMD's headers, and in AMD's hip-python, which is of another release."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
BACKEND = HERE.parent.parent
BINDING = (BACKEND / "csrc" / "common" / "hip_api.h", BACKEND / "csrc" / "gemm" / "hipblaslt_api.h")
#: Members of structures that both know. AMD's name of the structure is the same.
MEMBERS = {
    "hipDeviceProp_tR0600": (
        "name totalGlobalMem sharedMemPerBlock warpSize major minor multiProcessorCount gcnArchName"
    ),
    "hipblasLtMatmulAlgo_t": "data max_workspace_bytes",
    "hipblasLtMatmulHeuristicResult_t": "algo workspaceSize state wavesCount reserved",
}


def enumerators(text: str) -> dict[str, int]:
    """Value by name of all enumerators in a header's text."""
    found = {}
    for body in re.findall(r"\benum\b[^{;]*\{([^}]*)\}", re.sub(r"//.*", "", text)):
        value = -1
        for item in filter(None, (part.strip() for part in body.split(","))):
            name, _, given = (part.strip() for part in item.partition("="))
            value = int(given) if given else value + 1
            found[name] = value
    return found


def declared() -> dict[str, int]:
    return enumerators((HERE / "declarations.h").read_text())


def pairs() -> dict[str, str]:
    """AMD's name by the binding's."""
    text = (HERE / "programs" / "check_binding.cpp").read_text()
    return dict(re.findall(r"^SAME\(\w+::(\w+), (\w+)\);", text, re.MULTILINE))


def bound() -> dict[str, int]:
    """What the binding declares, by its own names."""
    found: dict[str, int] = {}
    for path in BINDING:
        for name, value in enumerators(path.read_text()).items():
            assert found.setdefault(name, value) == value, name
    return found


@pytest.fixture
def compiles(builder, headers, tmp_path):
    """compiles(text, *flags) is what the compiler says of a source that may include AMD's headers; "" if it is good."""

    def go(text: str, *flags: str) -> str:
        source = tmp_path / "check.cpp"
        source.write_text(text)
        options = ["-std=c++17", "-fsyntax-only", *builder.header_flags(headers), f"-I{HERE}", *flags]
        command = [builder.compiler(), *options, str(source)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    return go


def test_the_host_library_is_built_against_amd_s_headers(builder, headers):
    assert (builder.build(headers=headers) / "libhipblaslt.so.1").is_file()


def test_a_function_that_differs_from_amd_s_is_an_error(compiles):
    right = '#include "amd.h"\nextern "C" hipError_t hipSetDevice(int) { return hipSuccess; }\n'
    assert compiles(right) == ""
    assert "hipSetDevice" in compiles(right.replace("hipSetDevice(int)", "hipSetDevice(long)"))


def test_the_host_library_s_declarations_are_amd_s(compiles):
    lines = ['#include "amd.h"', "#include <cstddef>", "namespace declared {", '#include "declarations.h"', "}"]
    for name in declared():
        lines.append(f'static_assert(static_cast<long>(declared::{name}) == static_cast<long>(::{name}), "{name}");')
    for structure, members in MEMBERS.items():
        lines.append(f'static_assert(sizeof(declared::{structure}) == sizeof(::{structure}), "{structure}");')
        for member in members.split():
            both = (f"offsetof({scope}::{structure}, {member})" for scope in ("declared", ""))
            lines.append(f'static_assert({" == ".join(both)}, "{structure}.{member}");')
    assert len(declared()) > 100
    assert compiles("\n".join(lines)) == ""
    changed = [line.replace("declared::HIP_R_16BF)", "declared::HIP_R_16BF) + 1") for line in lines]
    assert "HIP_R_16BF" in compiles("\n".join(changed))


def test_the_binding_s_declarations_are_amd_s(compiles):
    text = (HERE / "programs" / "check_binding.cpp").read_text()
    include = f"-I{BACKEND / 'csrc'}"
    assert compiles(text, include) == ""
    for right, wrong in (
        ("lt::kTransA, HIPBLASLT_MATMUL_DESC_TRANSA", "lt::kTransB, HIPBLASLT_MATMUL_DESC_TRANSA"),
        ("decltype(&::hipGetErrorName)", "decltype(&::hipSetDevice)"),
    ):
        assert right in text
        assert "static assertion failed" in compiles(text.replace(right, wrong), include)


def test_no_name_of_the_binding_is_left_out():
    assert set(pairs()) == set(bound())
    assert len(pairs()) > 30


def test_the_survey_reads_device_properties_where_amd_has_them(compiles):
    survey = (BACKEND / "te_dispatch_rocm" / "survey.py").read_text()
    size = int(re.search(r"^PROPERTIES_SIZE = (\d+)$", survey, re.MULTILINE)[1])
    offsets = re.search(r"^NAME, MEMORY, ARCH = (\d+), (\d+), (\d+)$", survey, re.MULTILINE).groups()
    lines = ['#include "amd.h"', "#include <cstddef>", f"static_assert(sizeof(hipDeviceProp_tR0600) == {size});"]
    for member, offset in zip(("name", "totalGlobalMem", "gcnArchName"), offsets):
        lines.append(f"static_assert(offsetof(hipDeviceProp_tR0600, {member}) == {offset});")
    assert compiles("\n".join(lines)) == ""


#: Prints the enumerators of hip-python's modules and the sizes of two structures, as JSON.
HIP_PYTHON = """
import enum, importlib, json
found = {}
for name in ("hip", "hipblas", "hipblaslt"):
    module = importlib.import_module("rocm.bindings." + name)
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, enum.Enum):
            found.update((name, int(value.value)) for name, value in one.__members__.items())
names = ("hipblasLtMatmulAlgo_t", "hipblasLtMatmulHeuristicResult_t")
sizes = {name: getattr(module, name)().c_sizeof() for name in names}
print(json.dumps([found, sizes]))
"""


@pytest.fixture(scope="session")
def hip_python():
    """Value by AMD's name, and size by structure, in hip-python."""
    if importlib.util.find_spec("rocm") is None or importlib.util.find_spec("rocm.bindings.hipblaslt") is None:
        pytest.skip('skipped: unavailable: no hip-python: pip install "hip-python[libraries]"')
    done = subprocess.run([sys.executable, "-c", HIP_PYTHON], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_values_are_hip_python_s(hip_python):
    values, _ = hip_python
    assert {name: values.get(name) for name in declared()} == declared()
    ours = bound()
    assert {name: values.get(amds) for name, amds in pairs().items()} == {name: ours[name] for name in pairs()}


def test_structures_are_of_hip_python_s_size(hip_python):
    _, sizes = hip_python
    assert sizes == {"hipblasLtMatmulAlgo_t": 24, "hipblasLtMatmulHeuristicResult_t": 56}
