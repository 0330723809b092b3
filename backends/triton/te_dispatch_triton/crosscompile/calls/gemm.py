# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Products at the sizes of a transformer's layer: every way in which a kernel reads, scales and finishes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import DelayedQuantizer
from te_dispatch.ops.gemm import operand_format
from te_dispatch.ops.shapes import data_shapes, scale_shapes
from te_dispatch_triton.gemm import gemm, gemm_codes
from te_dispatch_triton.gemm_grouped import grouped_gemm, grouped_gemm_on_device

_M, _N, _K = 2048, 1024, 1024
_BF16, _F32 = torch.bfloat16, torch.float32
_SHAPES = {"NT": ((_M, _K), (_N, _K)), "NN": ((_M, _K), (_K, _N)), "TN": ((_K, _M), (_K, _N))}
_CPU = torch.device("cpu")

Call = tuple[str, Callable[[], object]]


def record(shape: tuple[int, int], encoding: str, scaling: str, layout: str, name: str) -> Quantized:
    """An uninitialized operand with the copy that a layout reads."""
    data, scales = data_shapes(shape, scaling), scale_shapes(shape, scaling)
    dtype = torch.uint8 if scaling in ("mxfp8", "nvfp4") else _F32
    row = operand_format(layout, name, scaling)[0] == "row"
    codes = torch.empty(data[0 if row else 1], dtype=torch.uint8)
    scale = torch.empty(scales[0 if row else 1], dtype=dtype)
    whole = torch.empty(1) if scaling == "nvfp4" else None
    copies = (codes, None, scale, None) if row else (None, codes, None, scale)
    return Quantized(*copies, encoding, scaling, CANONICAL_SCALES, shape, _BF16, _CPU, whole)


def calls() -> Iterator[Call]:
    yield from _plain()
    yield from _epilogues()
    yield from _codes()
    yield from _grouped()


def _plain() -> Iterator[Call]:
    for dtype in (_BF16, torch.float16, _F32):
        for layout, (a, b) in _SHAPES.items():
            yield (
                f"gemm {layout} {str(dtype)[6:]}",
                _call(gemm, torch.empty(a, dtype=dtype), torch.empty(b, dtype=dtype), layout=layout),
            )
    a, b = torch.empty(257, 129, dtype=_BF16), torch.empty(131, 129, dtype=_BF16)
    yield "gemm NT bfloat16, ragged", _call(gemm, a, b, layout="NT")
    a, b = torch.empty(_SHAPES["TN"][0], dtype=_BF16), torch.empty(_SHAPES["TN"][1], dtype=_BF16)
    out = torch.empty(_M, _N)
    yield (
        "gemm TN bfloat16, accumulate fp32, bgrad",
        _call(gemm, a, b, layout="TN", out=out, accumulate=True, epilogue="bgrad_a"),
    )


def _epilogues() -> Iterator[Call]:
    a, b = (torch.empty(shape, dtype=_BF16) for shape in _SHAPES["NT"])
    bias, aux = torch.empty(_N, dtype=_BF16), torch.empty(_M, _N, dtype=_BF16)
    for encoding in ("e4m3fn", "e4m3fnuz"):
        quantizer = DelayedQuantizer(encoding, scale=torch.empty(1), amax=torch.empty(1))
        yield (
            f"gemm gelu, out and aux {encoding}",
            _call(
                gemm, a, b, layout="NT", bias=bias, epilogue="gelu", out_quantizer=quantizer, aux_quantizer=quantizer
            ),
        )
    yield "gemm dgelu", _call(gemm, a, b, layout="NT", aux=aux, epilogue="dgelu")


def _codes() -> Iterator[Call]:
    pairs = [("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fnuz", "e4m3fnuz"), ("e5m2fnuz", "e4m3fnuz")]
    cases: list[tuple[Any, ...]] = []
    for pair in pairs:
        cases += [("NT", pair, "tensor", "tensor", False), ("TN", pair, "tensor", "tensor", True)]
    cases += [
        ("NT", pairs[0], "block_1d", "block_2d", None), ("TN", pairs[1], "block_1d", "block_1d", None),
        ("NT", pairs[2], "block_1d", "block_2d", None), ("NT", pairs[0], "mxfp8", "mxfp8", None),
        ("TN", pairs[0], "mxfp8", "mxfp8", None), ("NT", ("e2m1", "e2m1"), "nvfp4", "nvfp4", None),
    ]  # fmt: skip
    for layout, pair, a_scaling, b_scaling, split in cases:
        a, b = _SHAPES[layout]
        yield (
            f"gemm {layout} {pair[0]} x {pair[1]}, {a_scaling} x {b_scaling}{', split' if split else ''}",
            _call(
                gemm_codes, record(a, pair[0], a_scaling, layout, "a"), record(b, pair[1], b_scaling, layout, "b"),
                layout=layout, split_accumulator=split,
            ),
        )  # fmt: skip


def _grouped() -> Iterator[Call]:
    a = [torch.empty(_M, _K, dtype=_BF16) for _ in range(4)]
    b = [torch.empty(_N, _K, dtype=_BF16) for _ in range(4)]
    yield "grouped_gemm NT bfloat16", _call(grouped_gemm, a, b, layout="NT")
    a8 = [record((_M, _K), "e4m3fn", "tensor", "NT", "a") for _ in range(4)]
    b8 = [record((_N, _K), "e4m3fn", "tensor", "NT", "b") for _ in range(4)]
    yield "grouped_gemm NT e4m3fn", _call(grouped_gemm, a8, b8, layout="NT")
    rows = [torch.empty(_M // 4, _N, dtype=_BF16) for _ in range(4)]
    yield (
        "grouped_gemm TN bfloat16, splits on the device",
        _call(grouped_gemm_on_device, [a[0]], rows, torch.empty(4, dtype=torch.int64), layout="TN"),
    )


def _call(function: Callable[..., object], *arguments: object, **options: object) -> Callable[[], object]:
    return lambda: function(*arguments, **options)
