# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the spaces of the quantize family share: quantizers, shapes, and the rule.

The rule is equality of bits, everywhere: every byte of a cast, its scales and its amax is defined (`te_dispatch.ops.
quantize`), the bytes of NaN and the padding of scales included. Only where a result is a float that is computed is the
payload of a NaN open (`Bitwise`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_dispatch.conformance.inputs import ENDS, KINDS
from te_dispatch.conformance.maker import DTYPES, Maker
from te_dispatch.conformance.rules import Bitwise, Rule
from te_dispatch.conformance.space import Axis, Judged, Values
from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch.numerics.quantizers import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    MXFP8Quantizer,
    MXFP8TileQuantizer,
    NVFP4FourOverSixQuantizer,
    NVFP4HadamardQuantizer,
    NVFP4Quantizer,
    Quantizer,
)

#: Around the edges of blocks of 16, 32 and 128, primes, tall and wide (beyond 65535, to which launch grids are limited
#: in two of their dimensions), of 3 dimensions and one, without rows or columns.
SHAPES = (
    "33x65", "1x1", "15x17", "16x16", "17x15", "127x129", "128x128", "129x127", "1x1031", "1031x1", "3x5x40", "7",
    "65553x3", "2x65553", "0x16", "16x0", "2x0x5",
)  # fmt: skip
SMOKE_SHAPES = ("33x65", "129x127", "2x0x5")

#: Scaling -> kinds of quantizer that make it, see `quantizer_of`.
CASTS = (
    "delayed", "delayed_seen", "delayed_silent", "current", "block_1d", "block_2d", "mxfp8", "nvfp4", "nvfp4_2d",
    "block_1d_laid_out", "block_2d_laid_out", "current_floored", "block_1d_floored", "block_2d_floored",
)  # fmt: skip

#: About the amax of 128 ordinary numbers: some blocks lie above it, and others below.
_FLOOR = 2.5

#: Kinds that few backends make, and that have spaces of their own.
LATER_CASTS = ("nvfp4_rht", "mxfp8_2d", "nvfp4_4over6", "nvfp4_4over6_2d")

#: More columns than 8,192 and 16,384; many tiles each way and more elements than 2^18; several tiles and no rest; four
#: dimensions.
LARGE = ("3x8209", "2x16403", "1031x257", "257x1031", "256x512", "3x2x5x40")
#: More than 2^20 elements.
MANY = "1039x1031"
#: Maxima of many elements that end early show where the last ones are the largest. Kernels are compiled for each dtype.
LATE = tuple({"shape": MANY, "values": "late", "dtype": dtype} for dtype in ("fp32", "bf16"))

DTYPE = Axis("dtype", ("fp32", "bf16", "fp16"))
SHAPE = Axis("shape", SHAPES, SMOKE_SHAPES, once=(*LARGE, MANY))
ENCODING = Axis("encoding", FP8_ENCODINGS)
COMMON = Axis("common", ("no", "yes"))
USAGE = Axis("usage", ("both", "row", "column"))
VALUES = Axis(
    "values", tuple(kind for kind in KINDS if kind not in ENDS), ("normal", "nan", "ties", "saturation"), once=ENDS
)


def sizes(values: Values, axis: str = "shape") -> tuple[int, ...]:
    """``3x5x40`` as (3, 5, 40)."""
    return tuple(int(size) for size in values[axis].split("x"))


def counts(text: str) -> list[int]:
    """``7+26`` as [7, 26]; ``67:5`` as 67 numbers that run through 0 to 4; ``none`` as []."""
    if text == "none":
        return []
    count, colon, period = text.partition(":")
    return [i % int(period) for i in range(int(count))] if colon else [int(n) for n in text.split("+")]


def operand(values: Values, maker: Maker) -> torch.Tensor:
    """x of a case, by its axes ``shape``, ``dtype`` and ``values``."""
    return maker.tensor(*sizes(values), dtype=values["dtype"], values=values["values"])


def encodable(values: Values) -> bool:
    """NVFP4 has one encoding, which is not among those of the axis: it is made once, under the first of them."""
    return not values["cast"].startswith("nvfp4") or values["encoding"] == FP8_ENCODINGS[0]


def quantizer_of(
    cast: str,
    encoding: str,
    common: bool = False,
    *,
    scale: float = 0.75,
    amax: float | None = 0.0,
    power_of_two: bool | None = None,
    epsilon: float = 0.0,
) -> Quantizer:
    """A quantizer with state of its own.

    Args:
        cast: of `CASTS` or `LATER_CASTS`. ``delayed_seen`` is a delayed one that has seen a larger amax than most
            tensors have; ``delayed_silent`` one that records nothing. ``floored`` ones have an epsilon, and powers of
            two as scales where their kind has others by default, and the other way round.
        scale, amax: of a delayed one; amax None records nothing.
        power_of_two: None for the kind's default.
    """
    cast, floored, _ = cast.partition("_floored")
    if floored:
        epsilon, power_of_two = max(epsilon, _FLOOR), cast == "current"
    scaling = {} if power_of_two is None else {"power_of_two": power_of_two}
    if cast == "delayed_seen" and amax is not None:
        amax = 1e4
    if cast.startswith("delayed"):
        recorded = None if amax is None or cast == "delayed_silent" else torch.full((1,), amax)
        return DelayedQuantizer(encoding, common, scale=torch.full((1,), scale), amax=recorded)
    if cast == "current":
        return CurrentQuantizer(encoding, common, epsilon=epsilon, **scaling)
    if cast.startswith("block"):
        layout = cast.replace("block", "gemm").removesuffix("_laid_out") if cast.endswith("laid_out") else "canonical"
        two_d = cast.startswith("block_2d")
        return BlockQuantizer(encoding, common, two_d=two_d, epsilon=epsilon, scale_layout=layout, **scaling)
    if cast == "mxfp8":
        return MXFP8Quantizer(encoding, common)
    if cast in ("nvfp4", "nvfp4_2d"):
        return NVFP4Quantizer(common=common, two_d=cast == "nvfp4_2d")
    if cast == "nvfp4_rht":
        return NVFP4HadamardQuantizer(common=common)
    if cast == "mxfp8_2d":
        return MXFP8TileQuantizer(encoding, common)
    if cast in ("nvfp4_4over6", "nvfp4_4over6_2d"):
        return NVFP4FourOverSixQuantizer(common=common, two_d=cast.endswith("2d"))
    raise ValueError(f"cast: got {cast!r}, expected one of {', '.join((*CASTS, *LATER_CASTS))}")


def record_amax(x: torch.Tensor, quantizer: DelayedQuantizer) -> None:
    """What a cast of x does to its quantizer's state, for oracles that are not the reference."""
    if quantizer.amax is not None and x.numel():
        low, high = torch.aminmax(x.nan_to_num(0.0, torch.inf, -torch.inf))
        quantizer.amax.copy_(torch.maximum(quantizer.amax, torch.maximum(-low, high).float()))


def bits(judged: Judged) -> Mapping[str, Rule]:
    """Every result, and every argument that is written, by its bits."""
    return {path: Bitwise() for path in judged.actual}


def moved_bits(judged: Judged) -> Mapping[str, Rule]:
    """As `bits`, for operators that move bytes and compute nothing."""
    return {path: Bitwise(moved=True) for path in judged.actual}


def float_dtype(name: str) -> torch.dtype | None:
    """``none`` is None."""
    return None if name == "none" else DTYPES[name]
