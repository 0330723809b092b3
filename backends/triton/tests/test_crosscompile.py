# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Every kernel compiles for every chip, within its bounds, to the chip's own matrix instructions; and the matrix that
says so sees what is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_dispatch_triton import probe

if probe.missing_triton() is None:
    import torch

    from te_dispatch_triton import targets
    from te_dispatch_triton.crosscompile import assembly, chips, run, table
    from te_dispatch_triton.crosscompile.calls import FAMILIES
    from te_dispatch_triton.crosscompile.matrix import compile_for
    from te_dispatch_triton.launch import Launch, recording

pytestmark = pytest.mark.compiles
CHIPS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx90a", "gfx942", "gfx950", "gfx1100")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_within_its_bounds_to_the_chips_instructions() -> None:
    """One form of every kernel, and of every pair of encodings, on every chip."""
    jobs, cache = len(os.sched_getaffinity(0)), os.environ.get(run.CACHE)
    rows = run.compiled(list(chips.TARGETS), list(FAMILIES), jobs, each_form=False, cache=cache)
    print(table.printed(rows, CHIPS))
    problems = [row.problem for row in rows if row.problem is not None]
    assert not problems, "\n".join(problems)
    assert {(row.chip, row.family) for row in rows} == {(c, f) for c in CHIPS for f in FAMILIES}
    # The expectation on instructions is one that calls meet, on every chip.
    for chip in CHIPS:
        pattern = chips._FP8 if chip in chips._FP8 else chips._SIXTEEN
        seen = [row.facts.instructions for row in rows if row.chip == chip and row.facts is not None]
        assert any(chips.shown(chip, instructions, pattern) for instructions in seen), chip


def _script(code: str) -> Any:
    """JSON that a program prints; in a process of its own, where host code chooses anew."""
    environment = {name: value for name, value in os.environ.items() if name != probe.INTERPRET}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


_PRODUCT = """
import json, torch
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch.ops.shapes import empty_quantized
from te_dispatch_triton import targets
from te_dispatch_triton.crosscompile.assembly import facts_of
from te_dispatch_triton.crosscompile.chips import TARGETS
from te_dispatch_triton.crosscompile.matrix import compile_for
from te_dispatch_triton.gemm import gemm_codes
from te_dispatch_triton.launch import recording

target = TARGETS[{chip!r}]
targets.pretend(torch.device("cpu"), target)
launches = []
with recording(launches):
    quantizer, cpu = CurrentQuantizer({encoding!r}), torch.device("cpu")
    a, b = (empty_quantized((2048, 1024), quantizer, "row", torch.bfloat16, cpu) for _ in "ab")
    gemm_codes(a, b, layout="NT")
made = [compile_for(launch, target) for launch in launches]
print(json.dumps([[one.hash, str(one.metadata.target), facts_of(one).instructions, one.kernel.hex()] for one in made]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "encoding", "expected"),
    [
        ("gfx942", "e4m3fnuz", "fp8_fp8"),
        ("gfx950", "e4m3fn", "f8f6f4|fp8_fp8"),
        ("gfx942", "e4m3fn", "f16"),
        ("gfx950", "e4m3fnuz", "f16"),
        ("sm_90", "e4m3fn", "wgmma f32.e4m3.e4m3"),
        ("sm_90", "e4m3fnuz", "f16"),
    ],
)
def test_codes_are_multiplied_by_units_that_read_them(chip: str, encoding: str, expected: str) -> None:
    made = _script(_PRODUCT.format(chip=chip, encoding=encoding))
    seen = [instruction for _, _, instructions, _ in made for instruction in instructions]
    assert any(part in one for part in expected.split("|") for one in seen), seen


@pytest.mark.slow
def test_one_mnemonic_for_two_encodings_never_means_one_binary() -> None:
    """``v_mfma_f32_*_fp8_fp8`` reads FNUZ on gfx942 and OCP on gfx950."""
    first = _script(_PRODUCT.format(chip="gfx942", encoding="e4m3fnuz"))
    second = _script(_PRODUCT.format(chip="gfx950", encoding="e4m3fn"))
    other = _script(_PRODUCT.format(chip="gfx942", encoding="e4m3fn"))
    for field in (0, 3):  # cache keys, binaries
        found = [{one[field] for one in made} for made in (first, second, other)]
        assert not found[0] & found[1] and not found[0] & found[2] and not found[1] & found[2]
    assert {one[1] for one in first}.isdisjoint(one[1] for one in second)


_BESIDE = """
import json, torch
from te_dispatch_triton import targets
from te_dispatch_triton.attention import plans
from te_dispatch_triton.attention.operators import attention_fwd
from te_dispatch_triton.crosscompile.chips import TARGETS
from te_dispatch_triton.crosscompile.run import row_of
from te_dispatch_triton.launch import recording

q, k, v = (torch.empty(1024, 1, 2, {features}, dtype=torch.bfloat16) for _ in "qkv")
bias, hidden = torch.empty(1, 2, 1024, 1024), torch.empty(1, 1, 1024, 1024, dtype=torch.bool)
found = {{}}
for chip in {chips!r}:
    targets.pretend(torch.device("cpu"), TARGETS[chip])
    with recording(launches := []):
        attention_fwd(q, k, v, mask="arbitrary", attn_mask=hidden, bias=bias, bias_type="post_scale", inference=True)
    found[chip] = row_of(chip, "attention", "beside", launches[0], {{"forward": {{chip: 10**6}}}}).problem
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("features", [64, 128])
def test_a_bias_and_a_mask_fit_beside_the_scores(features: int) -> None:
    """They are loaded ahead as keys and values are, and take as much shared memory."""
    found = _script(_BESIDE.format(features=features, chips=("sm_80", "sm_89", "sm_90")))
    assert found == dict.fromkeys(("sm_80", "sm_89", "sm_90"))


def _launch(chip: str) -> Launch:
    from te_dispatch_triton import training

    noted: list[Launch] = []
    targets.pretend(torch.device("cpu"), chips.TARGETS[chip])
    try:
        with recording(noted):
            training.dropout_add_bwd(torch.empty(64, 64), torch.empty(64, 64, dtype=torch.uint8), dropout_p=0.5)
    finally:
        targets.pretend(torch.device("cpu"), None)
    return noted[0]


def test_a_failure_names_kernel_chip_and_configuration() -> None:
    launch = _launch("gfx942")
    row = run.row_of("gfx942", "training", "a call", launch._replace(constants=(False, 100)), {})
    assert row.facts is None
    for part in ("dropout_backward", "gfx942", "BLOCK=100", "num_warps="):
        assert part in str(row.problem)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("scaling", ["tensor", "block_2d"])
def test_codes_that_are_stored_twice_are_made_twice(scaling: str, rows: int) -> None:
    """NVIDIA's assembler 12.8 takes codes for two stores apart wrongly (`kernels.tile.apart`). One row is a case of its
    own: Triton compiles in an argument that is 1."""
    from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer
    from te_dispatch_triton.quantize import cast

    quantizer = CurrentQuantizer("e4m3fn") if scaling == "tensor" else BlockQuantizer("e4m3fn", two_d=True)
    made = {}
    targets.pretend(torch.device("cpu"), chips.TARGETS["sm_90"])
    try:
        for usage in ("column", "both"):
            with recording(launches := []):
                cast(torch.empty(rows, 96), quantizer, usage)
            ptx = compile_for(launches[-1], chips.TARGETS["sm_90"]).asm["ptx"]
            made[usage] = ptx.count("cvt.rn.satfinite.e4m3x2.f32")
    finally:
        targets.pretend(torch.device("cpu"), None)
    assert made["both"] == 2 * made["column"] > 0, made


def test_spills_and_shared_memory_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = _launch("sm_90")
    fine = assembly.Facts(32, 0, 1024, ())
    for facts, known, expected in (
        (fine, {}, None),
        (fine._replace(spills=8), {}, "spills 8, recorded bound 0"),
        (fine._replace(spills=8), {"dropout_backward": {"sm_90": 8}}, None),
        (fine._replace(spills=8), {"dropout_backward": {"sm_80": 8}}, "spills 8, recorded bound 0"),
        (fine._replace(shared=2**20), {}, "1048576 bytes of shared memory, the chip has 232448"),
    ):
        monkeypatch.setattr(run, "facts_of", lambda compiled, facts=facts: facts)
        problem = run.row_of("sm_90", "training", "a call", launch, known).problem
        assert problem is None if expected is None else problem is not None and expected in problem


@pytest.mark.parametrize(
    ("chip", "codes", "instructions", "fine"),
    [
        ("sm_90", ("e4m3fn", "e5m2"), ("wgmma f32.e4m3.e5m2",), True),
        ("sm_90", ("e4m3fn", "e4m3fn"), ("wgmma f32.bf16.bf16",), False),
        ("sm_90", ("e4m3fnuz", "e4m3fnuz"), ("wgmma f32.bf16.bf16",), True),
        ("sm_90", ("e4m3fnuz", "e4m3fnuz"), ("wgmma f32.e4m3.e4m3",), False),
        ("sm_90", ("e4m3fn", "e4m3fn"), (), False),
        ("sm_80", ("e4m3fn", "e4m3fn"), ("mma f32.f16.f16.f32",), True),
        ("sm_89", ("e4m3fn", "e4m3fn"), ("mma f32.e4m3.e4m3.f32",), True),
        ("sm_100", ("e4m3fn", "e4m3fn"), ("tcgen05 f8f6f4",), True),
        ("sm_100", ("e4m3fn", "e4m3fn"), ("mma f32.f16.f16.f32",), False),
        ("gfx942", ("e4m3fnuz", "e5m2fnuz"), ("v_mfma_f32_32x32x16_fp8_bf8",), True),
        ("gfx942", ("e4m3fn", "e4m3fn"), ("v_mfma_f32_32x32x16_fp8_fp8",), False),
        ("gfx942", ("e4m3fn", "e4m3fn"), ("v_mfma_f32_32x32x8_f16",), True),
        ("gfx950", ("e4m3fn", "e4m3fn"), ("v_mfma_f32_32x32x64_f8f6f4",), True),
        ("gfx950", ("e4m3fnuz", "e4m3fnuz"), ("v_mfma_f32_32x32x16_fp8_fp8",), False),
        ("gfx90a", ("e4m3fnuz", "e4m3fnuz"), ("v_mfma_f32_32x32x8f16",), True),
        ("gfx1100", ("e4m3fn", "e4m3fn"), ("v_wmma_f32_16x16x16_f16",), True),
        ("gfx1100", ("e4m3fn", "e4m3fn"), (), False),
    ],
)
def test_which_instructions_are_right(chip: str, codes: Any, instructions: tuple[str, ...], fine: bool) -> None:
    assert (chips.wrong_instructions(chips.TARGETS[chip], codes, instructions) is None) is fine


def test_what_assemblies_say() -> None:
    ptx = (
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%f1}\n"
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1 }\n"
        "tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r1 ]\n"
    )
    assert assembly.nvidia_instructions(ptx) == (
        "mma f32.bf16.bf16.f32", "tcgen05 f8f6f4", "wgmma f32.e4m3.e4m3"
    )  # fmt: skip
    amd = "\tv_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[0:1]\n .vgpr_count:     96\n .agpr_count: 4\n"
    amd += " .vgpr_spill_count: 3\n .sgpr_spill_count: 2\n"
    assert assembly.amd_instructions(amd) == ("v_mfma_f32_32x32x16_fp8_fp8",)
    assert assembly.amd_resources(amd) == (100, 3)
    facts = assembly.facts_of(compile_for(_launch("sm_90"), chips.TARGETS["sm_90"]))
    assert facts.registers > 8 and facts.spills == 0 and not facts.instructions


def test_bounds_are_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "BOUNDS", tmp_path / "bounds.json")
    row = run.Row("f", "k", "sm_90", "c", "B=1", assembly.Facts(32, 16, 0, ()), None)
    assert run.bounds() == {}
    run.record([row, row._replace(facts=row.facts._replace(spills=4)), row._replace(kernel="other", chip="gfx942")])
    assert run.bounds() == {"k": {"sm_90": 16}, "other": {"gfx942": 16}}
    run.record([row._replace(facts=row.facts._replace(spills=0))])
    assert run.bounds() == {"other": {"gfx942": 16}}


def test_the_table_shows_the_worst_form_of_each() -> None:
    row = run.Row("f", "k", "sm_90", "c", "B=1", assembly.Facts(32, 0, 2048, ("wgmma f32.e4m3.e4m3",)), None)
    worse = row._replace(facts=assembly.Facts(96, 8, 1024, ()))
    told = table.printed([row, worse, row._replace(chip="gfx942", facts=None, problem="no")], ["sm_90", "gfx942"])
    line = next(line for line in told.splitlines() if line.startswith("k "))
    assert line.split() == ["k", "2", "96/8/2", "wgmma:e4m3", "FAILED"]


def test_the_command_refuses_a_process_that_interprets() -> None:
    command = [sys.executable, "-m", "te_dispatch_triton.crosscompile", "--targets", "sm_90"]
    found = subprocess.run(
        command, env={**os.environ, probe.INTERPRET: "1"}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 2 and "unset it" in found.stderr
