# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Calls of the quantize family: casts, amaxes, the update of delayed scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

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
from te_dispatch_triton import quantize, scales

_SHAPE, _ODD, _NO_FOURS = (8192, 4096), (1031, 1037), (8190, 4096)
Call = tuple[str, Callable[[], object]]


def calls() -> Iterator[Call]:
    """(name, a function that makes the call on CPU tensors)."""
    yield from _tensor_casts()
    yield from _block_casts()
    yield from _out_and_dbias()
    yield from _amaxes()
    yield from _updates()


def _x(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = _SHAPE) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _delayed(encoding: str = "e4m3fn", common: bool = False) -> DelayedQuantizer:
    return DelayedQuantizer(encoding, common, scale=torch.empty(1), amax=torch.empty(1))


def _cast(name: str, quantizer: Quantizer, usage: str, x: torch.Tensor) -> Call:
    return f"quantize {name} {usage}", lambda: quantize.quantize(x, quantizer, usage=usage)


def _tensor_casts() -> Iterator[Call]:
    for encoding in FP8_ENCODINGS:
        for usage in ("row", "both"):
            yield _cast(f"delayed {encoding}", _delayed(encoding), usage, _x())
        yield _cast(f"delayed {encoding} common", _delayed(encoding, True), "both", _x())
    for dtype in (torch.float16, torch.float32):
        yield _cast(f"delayed {dtype}", _delayed(), "column", _x(dtype))
    yield _cast("delayed odd", _delayed(), "both", _x(shape=_ODD))
    yield _cast("current", CurrentQuantizer(), "row", _x())
    yield _cast("current power of two", CurrentQuantizer("e5m2", power_of_two=True, epsilon=1e-6), "both", _x())


def _block_casts() -> Iterator[Call]:
    for usage in ("row", "column", "both"):
        yield _cast("block_1d", BlockQuantizer(), usage, _x())
        yield _cast("block_2d", BlockQuantizer(two_d=True), usage, _x())
        yield _cast("mxfp8", MXFP8Quantizer(), usage, _x())
        yield _cast("nvfp4", NVFP4Quantizer(), usage, _x())
    yield _cast("block_1d rows", BlockQuantizer(), "both", _x(shape=_NO_FOURS))
    yield _cast("block_2d rows", BlockQuantizer(two_d=True), "both", _x(shape=_NO_FOURS))
    yield _cast("nvfp4 16x16", NVFP4Quantizer(two_d=True), "both", _x())
    for encoding in ("e4m3fnuz", "e5m2"):
        yield _cast(f"block_1d {encoding}", BlockQuantizer(encoding, power_of_two=False), "both", _x(torch.float32))
        yield _cast(f"mxfp8 {encoding} common", MXFP8Quantizer(encoding, True), "both", _x(shape=_ODD))


def _out_and_dbias() -> Iterator[Call]:
    m, k = _SHAPE
    codes, flag = torch.uint8, torch.empty(1)
    out = Quantized(
        torch.empty(_SHAPE, dtype=codes), torch.empty((k, m), dtype=codes), torch.empty(1), torch.empty(1), "e4m3fn",
        "tensor", "canonical", _SHAPE, torch.bfloat16, torch.device("cpu"),
    )  # fmt: skip
    x = _x()
    for name, quantizer in (("delayed", _delayed()), ("current", CurrentQuantizer())):
        yield (
            f"quantize {name} out noop",
            lambda q=quantizer: quantize.quantize(x, q, usage="both", out=out, noop_flag=flag),
        )
    for name, quantizer in (("delayed", _delayed("e5m2")), ("block_1d", BlockQuantizer()), ("mxfp8", MXFP8Quantizer())):
        for bias_dtype in (torch.bfloat16, torch.float32):
            yield (
                f"quantize_dbias {name} {bias_dtype}",
                lambda q=quantizer, dtype=bias_dtype: quantize.quantize_dbias(x, q, usage="both", bias_dtype=dtype),
            )


def _amaxes() -> Iterator[Call]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = _x(dtype)
        yield f"compute_amax {dtype}", lambda x=x: quantize.compute_amax(x)
    strided = torch.empty((8192, 8192), dtype=torch.bfloat16)[:, :4096]
    yield _cast("current strided", CurrentQuantizer(), "row", strided)


def _updates() -> Iterator[Call]:
    for count in (1, 7):
        histories = [torch.empty((1024, 6)) for _ in range(count)]
        found = [torch.empty(6) for _ in range(count)]
        maxima = [[448.0] * 4 + [57344.0] * 2] * count
        for algorithm in ("max", "most_recent"):
            yield (
                f"update_delayed_scales {count} {algorithm}",
                lambda h=histories, s=found, m=maxima, a=algorithm: scales.update_delayed_scales(
                    h, s, m, algorithm=a, amaxes=s
                ),
            )
