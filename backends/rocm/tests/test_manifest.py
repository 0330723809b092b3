# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The manifest keeps the contract: light, with real facts, targets and signatures; what it says of described chips."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

import te_dispatch.ops  # noqa: F401  # declares the operators
from te_dispatch.core.bind import import_target
from te_dispatch.core.facts import UNKNOWN, DeviceFacts
from te_dispatch.core.operator import OPERATORS
from te_dispatch.core.requirements import DEVICE_PREFIX
from te_dispatch_rocm import MANIFEST
from te_dispatch_rocm.archs import ARCHS
from te_dispatch_rocm.implementations.aiter import AITER
from te_dispatch_rocm.implementations.gemm import AMD

IMPLEMENTATIONS = {one.name: one for one in MANIFEST.implementations}
GEMM = OPERATORS["gemm"].default_facts()


def test_importing_it_loads_neither_torch_nor_the_module() -> None:
    code = "import sys, te_dispatch_rocm; sys.exit(bool({'torch', 'te_dispatch_rocm._native'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_are_unique() -> None:
    assert len(IMPLEMENTATIONS) == len(MANIFEST.implementations)


@pytest.mark.parametrize("implementation", MANIFEST.implementations, ids=lambda one: one.name)
def test_signature_and_facts(implementation, modules) -> None:
    operator = OPERATORS[implementation.operator]
    assert implementation.operator_version == operator.version
    of_chips = AITER if implementation.name.startswith("aiter") else AMD
    assert implementation.requires[: len(of_chips)] == of_chips
    module, _, attribute = implementation.target.partition(":")
    mine = inspect.signature(getattr(importlib.import_module(module), attribute)).parameters.values()
    theirs = operator.signature.parameters.values()
    assert [(p.name, p.kind, p.default) for p in mine] == [(p.name, p.kind, p.default) for p in theirs]
    assert implementation.plan is None or callable(import_target(implementation.plan))
    read = {fact for condition in implementation.requires for fact in condition.reads()}
    assert not {fact for fact in read if not fact.startswith(DEVICE_PREFIX)} - set(operator.facts)


def device(arch: str, **extra) -> DeviceFacts:
    known = {"hipblaslt": "ready", "version.hipblaslt": "1.2.0", **{k.replace("__", "."): v for k, v in extra.items()}}
    return DeviceFacts("cuda", "amd", arch, arch, 0, ARCHS["amd"].get(arch), known)


def refusals(name: str, arch: str, **facts) -> list[str]:
    """Why an implementation does not serve a call on a chip."""
    call = {**GEMM, **{fact.replace("__", "."): value for fact, value in facts.items()}}
    verdicts = [condition.check(call, device(arch)) for condition in IMPLEMENTATIONS[name].requires]
    return [verdict.reason for verdict in verdicts if verdict.holds is False]


def codes(a: str, b: str, scaling: str = "tensor", **facts):
    return {"a__dtype": a, "b__dtype": b, "a__scaling": scaling, "b__scaling": scaling, **facts}


PLAIN = {"a__dtype": "bf16", "b__dtype": "bf16", "a__scaling": "none", "b__scaling": "none"}


@pytest.mark.parametrize("arch", ARCHS["amd"])
def test_plain_dtypes_are_multiplied_on_every_chip(arch: str) -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        assert refusals("hipblaslt_gemm", arch, **{**PLAIN, "a__dtype": dtype, "b__dtype": dtype}) == []


@pytest.mark.parametrize(
    ("arch", "served"),
    [
        ("gfx90a", ()), ("gfx1100", ()), ("gfx942", ("e4m3fnuz", "e5m2fnuz")), ("gfx950", ("e4m3fn", "e5m2")),
        ("gfx1200", ("e4m3fn", "e5m2")), ("gfx1201", ("e4m3fn", "e5m2")),
    ],
)  # fmt: skip
def test_fp8_is_multiplied_in_the_chip_s_own_encoding(arch: str, served: tuple[str, ...]) -> None:
    for encoding in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        first = "e4m3fnuz" if encoding.endswith("fnuz") else "e4m3fn"
        reasons = refusals("hipblaslt_fp8_gemm", arch, **codes(first, encoding))
        assert (reasons == []) == (encoding in served), reasons


def test_another_encoding_is_refused_with_both_named() -> None:
    (reason,) = refusals("hipblaslt_fp8_gemm", "gfx942", **codes("e4m3fn", "e4m3fn"))
    assert "a.dtype is e4m3fn" in reason and "device.encodings is ('e4m3fnuz', 'e5m2fnuz')" in reason


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"epilogue": "gelu", "accumulate": True}, "accumulate is True"),
        ({"epilogue": "dgelu", "bias": True}, "bias is True"),
        ({"epilogue": "bgrad_a", "out_dtype": "fp32"}, "out_dtype is fp32"),
        ({"epilogue": "bgrad_a", "out__dtype": "fp32"}, "out.dtype is fp32"),
        ({"epilogue": "gelu", "aux_quantizer": "delayed"}, "aux_quantizer is delayed"),
        ({"out_quantizer": "delayed"}, "out_quantizer is delayed"),
        ({"out_dtype": "fp16"}, "out_dtype is fp16"),
    ],
)
def test_what_the_library_does_not_fuse_is_left_to_others(facts, said: str) -> None:
    reasons = refusals("hipblaslt_gemm", "gfx942", **PLAIN, **facts)
    assert len(reasons) == 1 and said in reasons[0]


def test_what_the_library_fuses() -> None:
    for facts in (
        {"epilogue": "gelu", "bias": True}, {"epilogue": "dgelu", "aux": True, "aux__scaling": "none"},
        {"epilogue": "bgrad_a"}, {"epilogue": "bgrad_b"}, {"bias": True, "accumulate": True, "out": True},
    ):  # fmt: skip
        assert refusals("hipblaslt_gemm", "gfx942", **PLAIN, **facts) == []


@pytest.mark.parametrize(
    ("arch", "served"),
    [
        ("gfx90a", {("gelu", "fp16"), ("dgelu", "fp16"), ("bgrad_a", "fp16")}),
        ("gfx1100", {("gelu", "bf16"), ("gelu", "fp16")}),
        ("gfx1201", {("gelu", "fp16")}),
    ],
)
def test_chips_with_few_epilogues(arch: str, served: set[tuple[str, str]]) -> None:
    for epilogue in ("gelu", "dgelu", "bgrad_a"):
        for dtype in ("bf16", "fp16"):
            call = {**PLAIN, "a__dtype": dtype, "b__dtype": dtype, "epilogue": epilogue, "aux": epilogue == "dgelu"}
            assert (refusals("hipblaslt_gemm", arch, **call) == []) == ((epilogue, dtype) in served)


def test_fp8_with_an_epilogue_and_blocks_of_128_are_refused() -> None:
    (reason,) = refusals("hipblaslt_fp8_gemm", "gfx950", **codes("e4m3fn", "e4m3fn"), epilogue="gelu")
    assert "epilogue is gelu" in reason
    assert refusals("hipblaslt_fp8_gemm", "gfx950", **codes("e4m3fn", "e4m3fn", "block_1d"))


def test_block_scales_need_the_chip_and_a_release_that_has_them() -> None:
    call = codes("e4m3fn", "e4m3fn", "mxfp8", m=64, n=32, k=256)
    assert refusals("hipblaslt_mxfp8_gemm", "gfx950", **call) == []
    assert refusals("hipblaslt_mxfp8_gemm", "gfx1201", **call) == ["device.block_scaled_matmul is (), needs mxfp8"]
    requires = IMPLEMENTATIONS["hipblaslt_mxfp8_gemm"].requires
    assert refusals("hipblaslt_mxfp8_gemm", "gfx950", **{**call, "m": 48}) == ["m is 48, needs a multiple of 32"]
    facts = {name.replace("__", "."): value for name, value in call.items()}
    old = [one.check({**GEMM, **facts}, device("gfx950", version__hipblaslt="0.12.1")) for one in requires]
    assert [v.reason for v in old if v.holds is False] == ["device.version.hipblaslt is 0.12.1, needs >= 0.15"]


def test_a_device_whose_library_does_not_work_says_why() -> None:
    broken = device("gfx942", hipblaslt="hipblasLtCreate ended the process with exit code 1")
    verdicts = [condition.check({}, broken) for condition in AMD]
    assert [v.reason for v in verdicts if v.holds is False] == [
        "device.hipblaslt is hipblasLtCreate ended the process with exit code 1, needs ready"
    ]


def test_a_chip_that_no_table_lists_is_refused_by_name() -> None:
    facts = DeviceFacts("cuda", "amd", "gfx1030", "", 0, None, {"hipblaslt": "ready", "version.hipblaslt": UNKNOWN})
    assert "device.arch is gfx1030, needs gfx90a or gfx942" in AMD[1].check({}, facts).reason
