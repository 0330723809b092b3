# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts, and forms and lists of records, that the contracts refuse."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.conformance.families.refused.mistakes import given, item, lengthened, longer, refused, short
from te_dispatch.conformance.space import Arguments, register
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import BlockQuantizer, NVFP4FourOverSixQuantizer, NVFP4HadamardQuantizer


def _uneven(right: Arguments) -> list[int]:
    """Splits of one row more than there are."""
    return [*right["splits"][:-1], right["splits"][-1] + 1]


def _more(right: Arguments) -> list[Any]:
    return [*right["quantizers"], right["quantizers"][-1]]


_SHARD = {"beyond_the_matrix": given(start=10**9), "block_of_seven": given(block=7)}


#: Words and dtypes that the forms of records do not know; scalings and formats that they are not made for.
_LAYOUTS = {
    "layout_of_another_scaling": given({"scaling": "block_1d"}, scale_layout="swizzled_32x4x4"),
    "unknown_layout": given({"scaling": "block_1d"}, scale_layout="gemm_3d"),
}
_UPDATES = {
    "unknown_algorithm": given(algorithm="mean"),
    "scales_of_more": item("scales", lengthened),
    "one_maximum_less": item("max_values", lambda values: values[:-1]),
    "one_amax_less": short("amaxes"),
}


def _of_another_format(right: Arguments) -> str:
    return "e5m2fnuz" if right["x"].encoding.startswith("e4") else "e4m3fnuz"


def _mxfp8(right: Arguments) -> Quantized:
    """x, a record with one scale, said to be in blocks of 32."""
    x = right["x"]
    scale = torch.full((x.rows(), -(-x.shape[-1] // 32)), 127, dtype=torch.uint8)
    return Quantized(
        x.row_data, None, scale, None, x.encoding, "mxfp8", x.scale_layout, x.shape, x.dtype, x.device
    )  # fmt: skip


def _nvfp4(right: Arguments) -> Quantized:
    """A record of x's shape in blocks of 16."""
    x = right["x"]
    rows, columns = x.rows(), x.shape[-1]
    codes = torch.zeros((*x.shape[:-1], -(-columns // 2)), dtype=torch.uint8)
    scale = torch.full((rows, -(-columns // 16)), 0x38, dtype=torch.uint8)
    return Quantized(
        codes, None, scale, None, "e2m1", "nvfp4", CANONICAL_SCALES, x.shape, x.dtype, x.device, torch.ones(1)
    )  # fmt: skip


def _rotated_columns(right: Arguments) -> Quantized:
    """A record with nothing but a rotated copy, which does not hold the values."""
    codes = torch.zeros((32, 16), dtype=torch.uint8)
    scale = torch.full((32, 2), 0x38, dtype=torch.uint8)
    x = right["x"]
    return Quantized(
        None, codes, None, scale, "e2m1", "nvfp4_rht", CANONICAL_SCALES, (32, 32), x.dtype, x.device, torch.ones(2)
    )  # fmt: skip


def _block_1d(right: Arguments) -> Quantized:
    """x, a record with one scale, said to be in blocks of 128 columns."""
    x = right["x"]
    scale = torch.ones(x.rows(), -(-x.shape[-1] // 128))
    return Quantized(
        x.row_data, None, scale, None, x.encoding, "block_1d", x.scale_layout, x.shape, x.dtype, x.device
    )  # fmt: skip


register(
    refused(
        "quantize",
        "current",
        {
            "amax_of_two": given(amax=torch.ones(2)),
            "noop_flag_without_out": given(noop_flag=torch.zeros(1)),
            "usage": given(usage="rows"),
            "fp64": given(x=lambda right: right["x"].double()),
            "rng_state_of_one": given(rng_state=torch.zeros(1, dtype=torch.int64)),
            "rng_state_in_int32": given(rng_state=torch.zeros(2, dtype=torch.int32)),
            "draws_for_a_choice": given(
                quantizer=NVFP4FourOverSixQuantizer(), rng_state=torch.zeros(2, dtype=torch.int64)
            ),
            "rotated_rows_of_no_16": given({"shape": "33x65"}, quantizer=NVFP4HadamardQuantizer(), usage="column"),
            "amax_of_blocks": given(quantizer=BlockQuantizer(), amax=torch.ones(1)),
        },
    ),
    refused(
        "quantize",
        "delayed",
        {"given_amax": given(amax=torch.ones(1)), "noop_flag_without_out": given(noop_flag=torch.zeros(1))},
        "refused_delayed",
    ),
    refused("quantize_dbias", "plain", {"usage": given(usage="rows"), "int": given(bias_dtype=torch.int64)}),
    refused(
        "dequantize",
        "plain",
        {"result_of_integers": given(dtype=torch.int32), "rotated_columns_alone": given(x=_rotated_columns)},
    ),
    refused("split_quantize", "plain", {"too_many_rows": given(splits=_uneven), "no_quantizer": short("quantizers")}),
    refused("multi_tensor_quantize", "plain", {"more": given(quantizers=_more), "usage": given(usage="rows")}),
    refused(
        "compute_amax",
        "plain",
        {"out_of_two": given(out=torch.zeros(2)), "bf16_out": given(out=torch.zeros(1, dtype=torch.bfloat16))},
    ),
    refused("partial_amax", "plain", {**_SHARD, "amax_of_more_blocks": longer("amax")}),
    refused(
        "partial_cast",
        "plain",
        {
            **_SHARD,
            "scale_of_more_blocks": longer("scale"),
            "long_out": longer("out"),
            "fp4": given(encoding="e2m1"),
        },
    ),
    refused(
        "pad_rows",
        "plain",
        {
            "too_many_rows": given(splits=_uneven),
            "one_part_less": short("padded_splits"),
            "shorter": given(padded_splits=lambda right: [1 for _ in right["splits"]]),
        },
    ),
    refused(
        "unpad_rows",
        "plain",
        {
            "tall_x": longer("x", 0),
            "one_part_less": short("padded_splits"),
            "beyond": given(splits=lambda right: [n + 1 for n in right["padded_splits"]]),
        },
    ),
    refused(
        "transpose_quantized",
        "plain",
        {
            "blocks_of_rows": given(x=_mxfp8),
            "block_1d": given(x=_block_1d),
            "blocks_of_16": given(x=_nvfp4),
        },
    ),
    refused("relayout_scales", "plain", _LAYOUTS),
    refused(
        "convert_encoding",
        "plain",
        {
            "another_format": given(encoding=_of_another_format),
            "count_of_two": given(count=torch.zeros(2).long()),
            "its_own_encoding": given(encoding=lambda right: right["x"].encoding),
            "scales_of_8_bits": given(x=_mxfp8),
        },
    ),
    refused("update_delayed_scales", "plain", _UPDATES),
)
