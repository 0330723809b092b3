# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Matrix products where the kit does not ask: which variant of the kernel a call gets, what is declined, groups."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, CurrentQuantizer, DelayedQuantizer, NVFP4Quantizer
from te_dispatch.ops.shapes import data_shapes, scale_shapes

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def record(
    shape: tuple[int, int], encoding: str = "e4m3fn", scaling: str = "tensor", copies: str = "both"
) -> Quantized:
    """Codes of 1.0 where those are e4m3fn, with scales of 1."""
    data, scales = data_shapes(shape, scaling), scale_shapes(shape, scaling)
    micro = scaling in ("mxfp8", "nvfp4")

    def copy(i: int) -> tuple[Any, Any]:
        scale = torch.full(scales[i], 127 if micro else 1, dtype=torch.uint8 if micro else torch.float32)
        return torch.full(data[i], 0x38, dtype=torch.uint8), scale

    row = copy(0) if copies in ("row", "both") else (None, None)
    column = copy(1) if copies in ("column", "both") else (None, None)
    whole = torch.ones(1) if scaling == "nvfp4" else None
    return Quantized(row[0], column[0], row[1], column[1], encoding, scaling, "canonical", shape, BF16, CPU, whole)


@contextmanager
def standing_for(vendor: str, arch: str) -> Iterator[None]:
    """The CPU stands for a chip, and products are planned anew."""
    from te_dispatch_triton import targets

    targets.pretend(CPU, targets.target_for(vendor, arch, 132))
    try:
        yield
    finally:
        targets.pretend(CPU, None)


def constants_of(vendor: str, arch: str, call: Callable[[], object]) -> dict[str, Any]:
    """Constants by name of the one product that a call launches on a chip."""
    from te_dispatch_triton.launch import Launch, constant_names, recording

    launches: list[Launch] = []
    with standing_for(vendor, arch), recording(launches):
        call()
    (found,) = [x for x in launches if x.kernel.name in ("gemm", "grouped")]
    return dict(zip(constant_names(found.kernel), found.constants))


def codes_call(encodings: tuple[str, str] = ("e4m3fn", "e4m3fn"), scaling: str = "tensor", **options: Any) -> Any:
    from te_dispatch_triton.gemm import gemm_codes

    a, b = (record((256, 256), encoding, scaling, options.pop("copies", "both")) for encoding in encodings)
    return lambda: gemm_codes(a, b, **{"layout": "NT", **options})


@pytest.mark.compiles
@pytest.mark.parametrize(
    "vendor, arch, encodings, units",
    [
        ("nvidia", "sm_80", ("e4m3fn", "e4m3fn"), False),
        ("nvidia", "sm_90", ("e5m2", "e4m3fn"), True),
        ("nvidia", "sm_90", ("e4m3fnuz", "e4m3fnuz"), False),
        ("amd", "gfx942", ("e4m3fnuz", "e5m2fnuz"), True),
        ("amd", "gfx942", ("e4m3fn", "e4m3fn"), False),
        ("amd", "gfx950", ("e4m3fn", "e4m3fn"), True),
        ("amd", "gfx1100", ("e4m3fn", "e4m3fn"), False),
    ],
)
def test_units_multiply_the_encodings_that_they_know(vendor, arch, encodings, units):
    assert constants_of(vendor, arch, codes_call(encodings))["UNITS"] is units


@pytest.mark.compiles
@pytest.mark.parametrize("scaling, encoding", [("tensor", "e4m3fn"), ("block_1d", "e5m2"), ("mxfp8", "e4m3fn")])
def test_what_promises_exact_products_decodes_even_where_units_know_the_codes(scaling, encoding):
    from te_dispatch_triton.gemm import gemm_decoded

    a, b = record((256, 256), encoding, scaling), record((256, 256), encoding, scaling)
    found = constants_of("nvidia", "sm_100", lambda: gemm_decoded(a, b, layout="NT"))
    assert found["UNITS"] is False and not found["PROMOTED"]


@pytest.mark.compiles
@pytest.mark.parametrize("arch, units", [("sm_90", False), ("sm_100", True)])
@pytest.mark.parametrize("scaling, encoding", [("mxfp8", "e4m3fn"), ("nvfp4", "e2m1")])
def test_microscaled_codes_go_only_to_units_that_apply_their_scales(arch, units, scaling, encoding):
    found = constants_of("nvidia", arch, codes_call((encoding, encoding), scaling))
    assert found["UNITS"] is units and found["SCALING"] == {"mxfp8": "mx", "nvfp4": "nv"}[scaling]


def turns_choice(teams: int = 2) -> Any:
    """A configuration that takes the kernel of `kernels.gemm_turns`."""
    from te_dispatch_triton import configs

    tiles = {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "PROGRAMS": 1, "STORE": True}
    constants = {**tiles, "TEAMS": teams, "TURN": 4}
    return configs.as_choice({"constants": constants, "num_warps": 4, "num_stages": 4}, True)


def listing_of(launch: Any, folder: Path) -> str:
    """What a launch of the kernel in turns is assembled to."""
    from triton import knobs

    from te_dispatch_triton import targets
    from te_dispatch_triton.crosscompile.matrix import compile_for

    assert launch.kernel.name == "gemm_turns"
    binary = folder / "gemm_turns.cubin"
    binary.write_bytes(compile_for(launch, targets.target_for("nvidia", "sm_90", 132)).asm["cubin"])
    tool = knobs.nvidia.nvdisasm.path
    return subprocess.run([tool, "-c", binary], capture_output=True, text=True, check=True).stdout


@pytest.mark.compiles
@pytest.mark.parametrize(
    "scalings, dtype",
    [
        (("tensor", "tensor"), BF16),
        (("block_1d", "block_2d"), BF16),
        (("block_1d", "block_1d"), BF16),
        (("block_1d", "block_1d"), torch.float32),
    ],
)
def test_teams_of_warps_multiply_in_turns_and_keep_sums_in_registers(scalings, dtype, tmp_path):
    """ptxas makes every product wait for the one before where it does not see through the waits that are asked for, and
    has room for a team's sums only where roles are given registers of their own."""
    from te_dispatch_triton.gemm import gemm_codes
    from te_dispatch_triton.launch import Launch, constant_names, recording

    a, b = record((2048, 1024), scaling=scalings[0]), record((1024, 1024), scaling=scalings[1])
    found: list[Launch] = []
    with standing_for("nvidia", "sm_90"), recording(found):
        gemm_codes(a, b, layout="NT", split_accumulator=True, out_dtype=dtype)
    listing = listing_of(found[0], tmp_path)
    teams = dict(zip(constant_names(found[0].kernel), found[0].constants))["TEAMS"]
    assert listing.count("QGMMA.") == 4 * teams
    assert listing.count("WARPGROUP.DEPBAR") == teams
    assert listing.count("LDL") <= 60  # hundreds, where sums are spilled


@pytest.mark.compiles
@pytest.mark.parametrize("scaling", ["tensor", "block_1d"])
def test_only_outputs_that_go_through_descriptors_are_promoted_in_turns(scaling):
    from te_dispatch_triton import gemm_plans
    from te_dispatch_triton.gemm import gemm_codes
    from te_dispatch_triton.launch import Launch, constant_names, recording

    table = "fp8_split_described" if scaling == "tensor" else "fp8_blocks_described"

    def launch(teams: int = 3, columns: int = 256, **options: Any) -> Launch:
        a, b = record((256, 256), scaling=scaling), record((columns, 256), scaling=scaling)
        launches: list[Launch] = []
        with standing_for("nvidia", "sm_90"), recording(launches):
            gemm_plans.force(table, turns_choice(teams))
            try:
                gemm_codes(a, b, layout="NT", split_accumulator=True, **options)
            finally:
                gemm_plans.force(table, None)
        return launches[0]

    for teams in (2, 3):
        found = launch(teams, bias=torch.ones(256, dtype=BF16))
        assert found.kernel.name == "gemm_turns"
        constants = dict(zip(constant_names(found.kernel), found.constants))
        assert (constants["STAGES"], constants["TEAMS"]) == (4, teams)
        assert found.grid == (-(-256 // (64 * teams)) * 2, 1, 1)
        a, b, out = found.args[:3]
        assert (a.block_shape, b.block_shape, out.block_shape) == ((64, 128), (128, 128), (64, 128))
    assert launch(epilogue="bgrad_b").kernel.name == "gemm_turns"
    for rest in ({"epilogue": "gelu"}, {"out": torch.zeros(256, 256), "accumulate": True}, {"columns": 260}):
        # The last: rows of the output that are no multiple of 16 bytes apart.
        assert launch(**rest).kernel.name == "gemm"


@pytest.mark.compiles
@pytest.mark.parametrize("arch, promoted", [("sm_89", True), ("sm_90", True), ("sm_100", False)])
def test_split_accumulation_promotes_where_units_are_imprecise(arch, promoted):
    split = constants_of("nvidia", arch, codes_call(split_accumulator=True))
    assert bool(split["PROMOTE"] or split["PROMOTED"]) is promoted
    assert not split["PROMOTE"] or split["BLOCK_K"] <= 128
    fast = constants_of("nvidia", arch, codes_call())
    assert not fast["PROMOTE"] and not fast["PROMOTED"]


@pytest.mark.compiles
def test_descriptors_take_what_is_aligned():
    from te_dispatch_triton.gemm import gemm

    def described(arch: str, rows: torch.Tensor) -> bool:
        return bool(constants_of("nvidia", arch, lambda: gemm(rows, rows, layout="NT"))["DESCRIBED"])

    wide = torch.empty(256, 272, dtype=BF16)
    assert described("sm_90", wide) and not described("sm_80", wide)
    assert described("sm_90", wide[:, :264])  # rows with gaps
    assert not described("sm_90", torch.empty(256, 129, dtype=BF16))
    assert not described("sm_90", wide[:, 1:265])


@pytest.mark.compiles
@pytest.mark.parametrize(
    "call, reason",
    [
        (lambda: codes_call(scaling="block_1d", copies="column"), "a has no row-wise copy"),
        (lambda: codes_call(out_quantizer=CurrentQuantizer("e4m3fn")), "out_quantizer: the scale of a current cast"),
        (lambda: codes_call(out_quantizer=NVFP4Quantizer()), "out_quantizer: the scale of a nvfp4 cast"),
        (lambda: codes_call(("e2m1", "e2m1"), "nvfp4", epilogue="bgrad_b"), "epilogue: sums over an nvfp4 operand"),
    ],
)
def test_what_no_kernel_does_is_declined_before_a_launch(call, reason):
    from te_dispatch_triton.launch import Launch, recording

    launches: list[Launch] = []
    with standing_for("nvidia", "sm_90"), recording(launches), pytest.raises(Declined, match=reason):
        call()()
    assert not launches


@pytest.mark.compiles
def test_splits_on_the_device_need_results_of_known_shapes():
    from te_dispatch_triton.gemm_grouped import grouped_gemm_on_device

    a, b = [torch.empty(8, 16, dtype=BF16)], [torch.empty(4, 16, dtype=BF16)] * 2
    with pytest.raises(Declined, match="neither out nor layout TN tells them"):
        grouped_gemm_on_device(a, b, torch.tensor([3, 5]), layout="NT")
    with pytest.raises(ValueError, match=r"splits: got groups of \[3, 6\] rows, expected numbers that add up to 8"):
        grouped_gemm_on_device(
            a, b, torch.tensor([3, 5]), layout="NT", out=[torch.empty(3, 4, dtype=BF16), torch.empty(6, 4, dtype=BF16)]
        )


@pytest.mark.compiles
def test_groups_of_different_kinds_are_declined():
    from te_dispatch_triton.gemm_grouped import grouped_gemm

    a, b = [record((16, 32)), record((16, 32), "e5m2")], [record((16, 32))] * 2
    with standing_for("nvidia", "sm_90"), pytest.raises(Declined, match="groups of different first operands"):
        grouped_gemm(a, b, layout="NT")


@pytest.mark.interpreted
def test_a_sum_of_ones_is_exact_in_every_scaling():
    from te_dispatch_triton.gemm import gemm_codes

    for scaling in ("tensor", "block_1d", "block_2d", "mxfp8"):
        out = gemm_codes(record((33, 160), scaling=scaling), record((17, 160), scaling=scaling), layout="NT").out
        assert (out == 160).all(), scaling


@pytest.mark.interpreted
def test_the_other_copy_of_a_tensor_serves():
    from te_dispatch_triton.gemm import gemm_codes

    a, b = record((33, 48), copies="column"), record((17, 48), copies="row")
    assert (gemm_codes(a, b, layout="NT").out == 48).all()


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_scales_laid_out_for_another_library_are_read_all_the_same(layout):
    """Alone and in groups: the bits of the product of canonical scales."""
    from te_dispatch_triton.gemm import gemm_codes
    from te_dispatch_triton.gemm_grouped import grouped_gemm_decoded
    from te_dispatch_triton.quantize import quantize
    from te_dispatch_triton.quantize_forms import relayout_scales

    torch.manual_seed(0)
    shapes = {"NT": ((140, 270), (130, 270)), "NN": ((140, 270), (270, 130)), "TN": ((270, 140), (270, 130))}[layout]
    a, b = (
        quantize(torch.randn(shape, dtype=BF16) * 8, BlockQuantizer(two_d=two_d), usage="both")
        for shape, two_d in zip(shapes, (False, layout != "TN"))
    )
    turned = [relayout_scales(x, scale_layout=f"gemm_{x.scaling[-2:]}") for x in (a, b)]
    expected = gemm_codes(a, b, layout=layout).out
    for x, y in ((turned[0], b), (a, turned[1]), turned):
        assert torch.equal(gemm_codes(x, y, layout=layout).out, expected)
        (found,) = grouped_gemm_decoded([x], [y], layout=layout)
        assert torch.equal(found, expected)


@pytest.mark.interpreted
def test_many_groups_are_told_in_several_launches():
    """More values than one launch carries."""
    from te_dispatch_triton.gemm_grouped import grouped_gemm

    torch.manual_seed(0)
    a = [torch.randn(1 + i % 3, 8) for i in range(50)]
    b = [torch.randn(5, 8) for _ in range(50)]
    for found, x, y in zip(grouped_gemm(a, b, layout="NT"), a, b):
        torch.testing.assert_close(found, x @ y.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_programs_read_splits_and_keep_within_the_results():
    from te_dispatch_triton.gemm_grouped import grouped_gemm_on_device

    torch.manual_seed(0)
    a, b = torch.randn(12, 8), [torch.randn(5, 8) for _ in range(3)]
    out = [torch.full((n, 5), 7.0) for n in (4, 2, 6)]
    # The device's word counts: one row less of the first group moves the others up, and leaves its last row alone.
    grouped_gemm_on_device([a], b, torch.tensor([3, 2, 7]), layout="NT", out=out)
    torch.testing.assert_close(out[0][:3], a[:3] @ b[0].t(), rtol=1e-5, atol=1e-5)
    assert (out[0][3:] == 7.0).all()
    torch.testing.assert_close(out[1], a[3:5] @ b[1].t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[2], a[5:11] @ b[2].t(), rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_splits_that_are_every_other_element_of_a_tensor():
    from te_dispatch_triton.gemm_grouped import grouped_gemm_on_device

    torch.manual_seed(0)
    a, b = torch.randn(12, 8), [torch.randn(5, 8) for _ in range(3)]
    out = [torch.empty(n, 5) for n in (4, 2, 6)]
    for _ in range(2):
        grouped_gemm_on_device([a], b, torch.tensor([4, 9, 2, 9, 6, 9])[::2], layout="NT", out=out)
        for found, rows, weights in zip(out, a.split([4, 2, 6]), b):
            torch.testing.assert_close(found, rows @ weights.t(), rtol=1e-5, atol=1e-5)
            found.zero_()


@pytest.mark.interpreted
def test_rows_with_gaps_are_read_in_place():
    from te_dispatch_triton.gemm import gemm

    torch.manual_seed(0)
    wide = torch.randn(9, 40)
    a, b = wide[:, 3:20], torch.randn(5, 17)
    torch.testing.assert_close(gemm(a, b, layout="NT").out, a @ b.t(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gemm(a, a, layout="TN").out, a.t() @ a, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreted
def test_a_delayed_cast_clamps_as_its_portability_says():
    """A product of 1000 saturates: FNUZ's own limit is 240, the one that all vendors share 224."""
    from te_dispatch_triton.gemm import gemm

    a, b = torch.full((4, 10), 10.0), torch.full((3, 10), 10.0)
    for common, expected in ((False, 240.0), (True, 224.0)):
        amax = torch.zeros(1)
        quantizer = DelayedQuantizer("e4m3fnuz", common, scale=torch.ones(1), amax=amax)
        out = gemm(a, b, layout="NT", out_quantizer=quantizer).out
        assert amax.item() == 1000.0 and out.row_scale_inv.item() == 1.0
        assert (out.row_data == {240.0: 0x7F, 224.0: 0x7E}[expected]).all()
