# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the operators that read records, or move and cast shards: every kernel and what changes its code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from te_dispatch.ops.shapes import data_shapes, laid_out_shapes
from te_dispatch_triton import quantize_forms as forms
from te_dispatch_triton import quantize_many as many

_M, _K = 2048, 4096
_LAYOUTS = {
    "block_1d": "gemm_1d", "block_2d": "gemm_2d", "mxfp8": "swizzled_32x4x4", "nvfp4": "swizzled_32x4x4",
}  # fmt: skip


def _record(
    scaling: str, encoding: str, usage: str, layout: str = CANONICAL_SCALES, m: int = _M, k: int = _K
) -> Quantized:
    datas, scales = data_shapes((m, k), scaling), laid_out_shapes((m, k), scaling, layout)
    dtype = torch.uint8 if scaling in ("mxfp8", "nvfp4") else torch.float32
    parts: list[torch.Tensor | None] = []
    for side, name in enumerate(("row", "column")):
        present = usage in (name, "both")
        parts += [torch.empty(datas[side], dtype=torch.uint8) if present else None]
        parts += [torch.empty(scales[side], dtype=dtype) if present else None]
    whole = torch.empty(1) if scaling == "nvfp4" else None
    return Quantized(
        parts[0], parts[2], parts[1], parts[3], encoding, scaling, layout, (m, k), torch.bfloat16,
        torch.device("cpu"), whole,
    )  # fmt: skip


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for encoding in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        yield f"dequantize {encoding}", functools.partial(forms.dequantize, _record("tensor", encoding, "row"))
    yield "dequantize e4m3fn column", functools.partial(forms.dequantize, _record("tensor", "e4m3fn", "column"))
    for scaling, layout in _LAYOUTS.items():
        encoding = "e2m1" if scaling == "nvfp4" else "e4m3fn"
        for usage in ("row", "column"):
            x = _record(scaling, encoding, usage)
            yield f"dequantize {scaling} {usage}", functools.partial(forms.dequantize, x, dtype=torch.float32)
        x = _record(scaling, encoding, "row", layout)
        yield f"dequantize {scaling} {layout}", functools.partial(forms.dequantize, x)
        x = _record(scaling, encoding, "both")
        yield f"relayout {scaling}", functools.partial(forms.relayout_scales, x, scale_layout=layout)
    for scaling in ("tensor", "block_2d"):
        x = _record(scaling, "e4m3fn", "row")
        yield f"transpose {scaling}", functools.partial(forms.transpose_quantized, x)
    x = _record("tensor", "e4m3fn", "row", k=_K + 1)
    yield "transpose odd", functools.partial(forms.transpose_quantized, x)
    for encoding, other in (("e4m3fn", "e4m3fnuz"), ("e5m2fnuz", "e5m2")):
        x = _record("block_1d", encoding, "both")
        count = torch.empty(1, dtype=torch.int64)
        yield f"convert {encoding}", functools.partial(forms.convert_encoding, x, encoding=other, count=count)
    yield from _moves()
    yield from _odd_shards()
    yield from _casts_of_many()


def _odd_shards() -> Iterator[tuple[str, Callable[[], object]]]:
    x, out, scale = torch.empty(1 << 18), torch.empty(1 << 18, dtype=torch.uint8), torch.empty(1, 33)
    shard = {"height": 100, "width": 4100, "start": 1001, "block": 128}
    yield "partial_cast odd", functools.partial(forms.partial_cast, x, out, scale, encoding="e4m3fn", **shard)


def _casts_of_many() -> Iterator[tuple[str, Callable[[], object]]]:
    x = torch.empty(_M, _K, dtype=torch.bfloat16)
    casts: dict[str, Quantizer] = {
        "delayed": DelayedQuantizer(scale=torch.empty(1), amax=torch.empty(1)),
        "current": CurrentQuantizer(),
        "delayed e5m2fnuz": DelayedQuantizer("e5m2fnuz", scale=torch.empty(1)),
        "block_1d": BlockQuantizer(),
        "block_2d": BlockQuantizer(two_d=True),
        "mxfp8": MXFP8Quantizer(),
        "nvfp4": NVFP4Quantizer(),
    }
    for name, quantizer in casts.items():
        for usage in ("row", "both") if name in ("delayed", "block_1d", "mxfp8") else ("both",):
            given = ([_M // 4] * 4, [quantizer] * 4)
            yield f"split_quantize {name} {usage}", functools.partial(many.split_quantize, x, *given, usage=usage)
    odd = [torch.empty(17, 129), torch.empty(300, 48), torch.empty(5, 7, 1037)]
    quantizers = [casts["current"]] * 3
    yield "multi_tensor_quantize", functools.partial(many.multi_tensor_quantize, odd, quantizers, usage="both")


def _moves() -> Iterator[tuple[str, Callable[[], object]]]:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        x = torch.empty(100, _K, dtype=dtype)
        yield f"pad_rows {dtype}", functools.partial(forms.pad_rows, x, [30, 0, 70], [32, 16, 80])
    for block in (0, 128):
        shard = {"height": 1024, "width": 1024, "start": 1000, "block": block}
        blocks = (8, 8) if block else (1, 1)
        x = torch.empty(1 << 18, dtype=torch.bfloat16)
        yield f"partial_amax {block}", functools.partial(forms.partial_amax, x, torch.empty(blocks), **shard)
        for encoding in ("e4m3fn", "e5m2fnuz"):
            out, scale = torch.empty(1 << 18, dtype=torch.uint8), torch.empty(blocks)
            yield (
                f"partial_cast {encoding} {block}",
                functools.partial(forms.partial_cast, x, out, scale, encoding=encoding, **shard),
            )
