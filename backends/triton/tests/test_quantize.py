# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts and the bookkeeping of scales, where the conformance kit's smoke calls do not reach."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from te_dispatch.conformance.blank import calls
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch.numerics.quantized import Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch_triton import blocks, configs, launch, maxima, quantize, scales, targets
from te_dispatch_triton.crosscompile.calls import FAMILIES
from te_dispatch_triton.crosscompile.chips import TARGETS
from te_dispatch_triton.crosscompile.gather import run

CPU = torch.device("cpu")
COPIES = ("row_data", "col_data", "row_scale_inv", "col_scale_inv", "global_scale_inv")


def delayed(encoding: str = "e4m3fn", common: bool = False, scale: float = 3.0) -> DelayedQuantizer:
    return DelayedQuantizer(encoding, common, scale=torch.full((1,), scale), amax=torch.zeros(1))


QUANTIZERS: dict[str, Any] = {
    "delayed": delayed,
    "current": CurrentQuantizer,
    "block_1d": BlockQuantizer,
    "block_2d": lambda *a: BlockQuantizer(*a, two_d=True),
    "mxfp8": MXFP8Quantizer,
    "nvfp4": lambda *a: NVFP4Quantizer(),
    "nvfp4_2d": lambda *a: NVFP4Quantizer(two_d=True),
}


def assert_same(a: Quantized, b: Quantized) -> None:
    for name in COPIES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "cast, encoding, common",
    [
        *itertools.product(("delayed", "block_1d"), FP8_ENCODINGS, (False, True)),
        *itertools.product(("current", "block_2d", "mxfp8"), ("e4m3fnuz", "e5m2"), (False, True)),
        ("nvfp4", "e2m1", False),
        ("nvfp4_2d", "e2m1", False),
    ],
)
def test_every_16_bit_value_has_the_portable_bytes(cast: str, encoding: str, common: bool) -> None:
    portable = pytest.importorskip("te_dispatch_torch.quantize")
    x = torch.arange(65536).to(torch.int16).view(torch.bfloat16).view(256, 256)
    quantizer: Quantizer = QUANTIZERS[cast](encoding, common)
    assert_same(quantize.quantize(x, quantizer, usage="both"), portable.quantize(x, quantizer, usage="both"))


@pytest.mark.interpreted
@pytest.mark.parametrize("power_of_two, epsilon", [(True, 0.0), (True, 0.3), (False, 0.3)])
def test_every_fp16_value_in_blocks_has_the_portable_bytes(power_of_two: bool, epsilon: float) -> None:
    """The last blocks are no whole ones; one row and one column hold nothing but NaN."""
    portable = pytest.importorskip("te_dispatch_torch.quantize")
    x = torch.arange(65536).to(torch.int16).view(torch.float16).view(256, 256)[:252, :250].contiguous()
    x[7], x[:, 5] = torch.nan, torch.nan
    quantizer = BlockQuantizer(power_of_two=power_of_two, epsilon=epsilon)
    assert_same(quantize.quantize(x, quantizer, usage="both"), portable.quantize(x, quantizer, usage="both"))


@pytest.mark.parametrize(
    "x, arch, kernel",
    [
        (torch.empty(8, 6, dtype=torch.bfloat16), "sm_90", "cast_words"),
        (torch.empty(8, 12, dtype=torch.float16)[:, :6], "sm_90", "cast_words"),
        (torch.empty(8, 6, dtype=torch.bfloat16), "sm_80", "cast_crossed"),
        (torch.empty(8, 6), "sm_90", "cast_crossed"),
        (torch.empty(6, 6, dtype=torch.bfloat16), "sm_90", "cast_crossed"),
        (torch.empty(8, 5, dtype=torch.bfloat16), "sm_90", "cast_crossed"),
        (torch.empty(8, 7, dtype=torch.bfloat16)[:, :6], "sm_90", "cast_crossed"),
        (torch.empty(8, 8, dtype=torch.bfloat16)[:, 1:7], "sm_90", "cast_crossed"),
    ],
)  # fmt: skip
def test_two_elements_are_a_word_where_all_rows_allow_it(x: torch.Tensor, arch: str, kernel: str) -> None:
    launches: list[launch.Launch] = []
    targets.pretend(CPU, targets.target_for("nvidia", arch))
    try:
        with launch.recording(launches):
            quantize.quantize(x, BlockQuantizer(), usage="both")
    finally:
        targets.pretend(CPU, None)
    assert [each.kernel.name for each in launches] == [kernel]


@pytest.mark.interpreted
def test_a_delayed_cast_accumulates_the_amax() -> None:
    quantizer = delayed()
    assert quantizer.amax is not None
    for value, expected in ((2.0, 2.0), (-5.0, 5.0), (1.0, 5.0), (float("nan"), 5.0)):
        quantize.quantize(torch.full((3, 7), value), quantizer, usage="row")
        assert quantizer.amax.item() == expected


@pytest.mark.interpreted
@pytest.mark.parametrize("cast", [*QUANTIZERS, "gemm_1d", "gemm_2d"])
def test_a_record_that_does_not_lie_dense_is_left_where_the_flag_says(cast: str) -> None:
    """Nor where scales lie as a library's products read them, padded."""
    portable = pytest.importorskip("te_dispatch_torch.quantize")
    x = torch.randn(130, 96)
    laid_out = lambda: BlockQuantizer(two_d=cast == "gemm_2d", scale_layout=cast)  # noqa: E731
    quantizer: Quantizer = QUANTIZERS.get(cast, laid_out)()
    new = portable.quantize(x, quantizer, usage="both")
    kept: dict[str, Any] = {}
    for name in COPIES:
        part = getattr(new, name)
        kept[name] = None if part is None else torch.full((*part.shape, 2), 7, dtype=part.dtype)[..., 0]
    out = Quantized(
        kept["row_data"], kept["col_data"], kept["row_scale_inv"], kept["col_scale_inv"], quantizer.encoding,
        quantizer.scaling, quantizer.scale_layout, (130, 96), x.dtype, CPU, kept["global_scale_inv"],
    )  # fmt: skip
    assert quantize.quantize(x, quantizer, usage="both", out=out, noop_flag=torch.ones(1)) is out
    assert all(part is None or (part == 7).all() for part in kept.values())
    for usage, left in (("row", "col"), ("column", "row")):
        before = {name: part.clone() for name, part in kept.items() if part is not None and name.startswith(left)}
        quantize.quantize(x, quantizer, usage=usage, out=out)
        assert all(torch.equal(kept[name], part) for name, part in before.items())
        for part in kept.values():
            if part is not None:
                part.fill_(7)
    quantize.quantize(x, quantizer, usage="both", out=out, noop_flag=torch.zeros(1))
    assert_same(out, new)


@pytest.mark.interpreted
@pytest.mark.parametrize("amax", [4.0, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("quantizer", [CurrentQuantizer(), CurrentQuantizer(epsilon=1.5), NVFP4Quantizer()])
def test_a_given_amax_is_taken(quantizer: Quantizer, amax: float) -> None:
    portable = pytest.importorskip("te_dispatch_torch.quantize")
    x, given = torch.randn(33, 40), torch.full((1,), amax)
    made = quantize.quantize(x, quantizer, usage="both", amax=given)
    assert_same(made, portable.quantize(x, quantizer, usage="both", amax=given))


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [1, 3, 8, 40])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_any_number_of_histories_is_updated(count: int, algorithm: str) -> None:
    portable = pytest.importorskip("te_dispatch_torch.state")

    def make() -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        generator = torch.Generator().manual_seed(5)
        histories = [torch.rand(70 + i, 1 + i % 5, generator=generator) for i in range(count)]
        for history in histories:
            history[0, 0] = 0.0  # no cast happened
        sizes = [history.shape[1] for history in histories]
        return histories, [torch.full((n,), 2.0) for n in sizes], [torch.full((n,), 3.0) for n in sizes]

    maxima_of: Sequence[Sequence[float]] = [[448.0, 448.0, 57344.0, 57344.0, 448.0][: 1 + i % 5] for i in range(count)]
    here, there = make(), make()
    scales.update_delayed_scales(here[0], here[1], maxima_of, algorithm=algorithm, margin=2, amaxes=here[2])
    portable.update_delayed_scales(there[0], there[1], maxima_of, algorithm=algorithm, margin=2, amaxes=there[2])
    for left, right in zip(here, there):
        for a, b in zip(left, right):
            assert torch.equal(a, b)


def test_a_history_that_no_entry_holds_is_declined() -> None:
    history = torch.empty((1 << 31, 1), device="meta")
    with pytest.raises(Declined, match=r"histories\[0\]"):
        scales._runs_of([[history], [torch.empty(1)], []], [[448.0]], 0)


@pytest.mark.parametrize(
    "value, margin, bits", [(448.0, 0, 0x43E00000), (448.0, 3, 0x42600000), (448.0, -200, 0x7F800000)]
)
def test_numerators_are_rounded_once(value: float, margin: int, bits: int) -> None:
    assert scales._numerator(value, margin) == bits


def test_every_kernel_has_its_sizes_for_every_chip() -> None:
    for kernel in configs.table("quantize"):
        for arch in ("sm_80", "sm_90", "gfx942", "gfx1100", "interpreter"):
            target = (
                targets.INTERPRETER
                if arch == "interpreter"
                else targets.target_for("nvidia" if arch.startswith("sm") else "amd", arch)
            )
            for tiles in (1, 1 << 20):  # what `sums` is chosen by
                for name, size in configs.choose("quantize", kernel, target, tiles=tiles).constants.items():
                    if name not in ("STAGES", "PROGRAMS"):
                        assert size & (size - 1) == 0, f"{kernel}: {name} {size} is not a power of two"


def test_one_launch_casts_both_copies_and_records_the_amax() -> None:
    launches: list[launch.Launch] = []
    with launch.recording(launches):
        quantize.quantize(torch.empty(256, 256), delayed(), usage="both")
        quantize.quantize(torch.empty(256, 256), BlockQuantizer(), usage="both")
        scales.update_delayed_scales([torch.empty(4, 3)] * 2, [torch.empty(3)] * 2, [[448.0] * 3] * 2)
    assert [x.kernel.name for x in launches] == ["cast_columns", "cast_crossed", "update_scales"]


def test_a_repeated_update_launches_what_a_call_does() -> None:
    """`te_dispatch.core.repeating`: of these very tensors, wherever they lie by then."""

    def noted(call: Any) -> list[Any]:
        launches: list[launch.Launch] = []
        with launch.recording(launches):
            call()
        return [(x.grid, x.args, x.constants) for x in launches]

    given = {
        "histories": [torch.empty(4, 3) for _ in range(2)], "scales": [torch.empty(3) for _ in range(2)],
        "max_values": [[448.0, 448.0, 57344.0]] * 2, "algorithm": "max", "margin": 1, "amaxes": None,
    }  # fmt: skip
    repeated = scales.plan_update
    again = repeated((), **given)
    before = noted(again)
    assert len(before) == 1 and before == noted(lambda: scales.update_delayed_scales(**given))
    given["scales"][0].data = torch.empty(3)
    assert noted(again) == noted(lambda: scales.update_delayed_scales(**given)) != before
    assert repeated(("scales",), **given) is None
    assert repeated((), **{**given, "scales": [torch.empty(6)[::2] for _ in range(2)]}) is None


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 5), (3, 16)])
@pytest.mark.parametrize("quantizer", [delayed(), CurrentQuantizer(), BlockQuantizer()], ids=lambda q: q.kind)
def test_partial_sums_have_room_for_what_programs_write(shape: tuple[int, ...], quantizer: Quantizer) -> None:
    """Of an empty tensor too, for which one program runs."""
    launches: list[launch.Launch] = []
    with launch.recording(launches):
        quantize.quantize_dbias(torch.empty(shape), quantizer, usage="both")
    (finish,) = [x for x in launches if x.kernel.name == "sum_columns"]
    partial = finish.args[0]
    assert partial.dtype == torch.float32 and partial.shape[0] >= 1 and partial.shape[1] == shape[-1]


def test_only_a_current_cast_reads_twice() -> None:
    launches: list[launch.Launch] = []
    x = torch.empty(1024, 1024)
    with launch.recording(launches):
        quantize.quantize(x, CurrentQuantizer(), usage="row")
        quantize.quantize(x, CurrentQuantizer(), usage="row", amax=torch.empty(1))
    assert [x.kernel.name for x in launches] == ["maxima_line", "cast_line", "cast_line"]


def test_calls_for_other_chips_launch_every_kernel() -> None:
    seen = set()
    for call in calls(FAMILIES["quantize"]):
        launches: list[launch.Launch] = []
        with launch.recording(launches):
            run(call, TARGETS["sm_90"])
        assert launches, call.name
        seen |= {x.kernel.name for x in launches}
    modules = (quantize, blocks, maxima, scales)
    kernels = {k.name for module in modules for k in vars(module).values() if isinstance(k, launch.Kernel)}
    assert kernels <= seen


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"usage": "rows"}, "usage"),
        ({"usage": "row", "noop_flag": torch.zeros(1)}, "noop_flag"),
        ({"usage": "row", "amax": torch.zeros(1)}, "amax"),
    ],
)
def test_mistakes_name_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize.quantize(torch.empty(4, 4), delayed(), **arguments)
