# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Kinds of values that operands are filled with. Each is where some class of kernel bug shows.

| kind | what it is | what it finds |
|---|---|---|
| normal | standard normal | the ordinary path |
| log_uniform | exponents uniform over the dtype's whole normal range | under- and overflow, wrong block maxima |
| spread | exponents uniform in 2^-12 .. 2^12 | the same, where a sum must stay finite |
| outlier | normal, with one value 2^12 times as large in every 32 | scales of the wrong block |
| one_sign | uniform in [0.5, 1) | lost carries: sums that grow without cancelling |
| denormal | subnormal numbers of the dtype and of FP8 | flush to zero |
| zeros | +0 and -0 | signs of zero, division by an amax of 0 |
| nan | normal, with a share of NaN, the largest elements beside them | NaN made finite, or lost with what is beside |
| inf | normal, with a share of Inf of both signs | Inf made finite |
| ties | exact midpoints between neighbouring FP8 codes | rounding away instead of to even, truncation |
| saturation | around the largest finite FP8 values | overflow to NaN or Inf |
| cancelling | x, -x in turn, with a remainder 2^-10 as large | sums whose terms are far larger than the result |
| tile_scales | normal, every tile, row, column and block times a power of two of its own | scales of the wrong block |
| opposite | x, -x in turn: sums are exactly 0 | what is divided by a sum, signs of a sum that is 0 |
| constant | each row one value | a variance of 0 that comes out negative |
| far_mean | normal around a mean of +-100 or +-1000, row by row | variance by the difference of two sums |
| large_squares | squares around 2^104 (fp16: 2^24) | products and sums in a narrower format than fp32 |
| square_overflow | squares beyond fp32 (fp16: as large_squares) | what a kernel makes of a sum that overflows |
| square_underflow | squares below fp32's subnormals (fp16: below its own) | lost deviations, divisions by 0 |
| huge | 2^-24 .. 2^-10 of the dtype's largest (fp16: 2^10 .. 2^15) | 0 times an overflow in a saturated function |
| beyond_half | 2^16 to 1.23 times that (fp16: around 1) | numbers that are converted to fp16 before arithmetic |
| sum_overflow | 1/8 to 1/4 of the dtype's largest, of one sign | sums of finite numbers that overflow |
| late | normal, but for 2^-14 as large before the last 16 rows, or elements of a vector | long sums that end early |
| last_columns | normal, but for 2^-10 as large outside the last 16 columns | maxima over rows that end early |
| special_rows | rows in turn: normal; one NaN; one Inf; one -Inf; all -Inf | special values that leave their row |
| half_infinite | one half of every row is -Inf, in turn | running maxima that start with nothing but -Inf |
| tiny | multiples of 2^-24 below 2^-14: fp16's subnormals, in any dtype | subnormals that are none of fp32's |
| minute | 1 to 16 times the dtype's smallest normal number | scales that overflow to Inf |
| subnormal | nothing but subnormal numbers of the dtype | an amax that is flushed to zero |
| nan_first | normal; the first element is NaN, the last one the largest | maxima that start with NaN, or end early |
| nan_last | normal; the last element is NaN, the first one the largest | the same the other way round |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from te_dispatch.conformance.decoding import table
from te_dispatch.numerics.encodings import FP8_ENCODINGS

Fill = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]

#: One value in so many is special in ``outlier``, ``nan`` and ``inf``: a block of the smallest block scaling.
_BLOCK = 32


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=generator, dtype=torch.int64).double() * 2 - 1


def _normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def _exponents(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    exponent = low + (high - low) * _uniform(shape, generator)
    return torch.exp2(exponent) * _signs(shape, generator)


def _log_uniform(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    info = torch.finfo(dtype)
    low, high = torch.tensor([info.tiny, info.max], dtype=torch.float64).log2().tolist()
    return _exponents(low, high - 0.01, shape, generator)


def _spread(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return _exponents(-12, 12, shape, generator)


def _sprinkled(x: torch.Tensor, special: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`special` at one place of every `_BLOCK` consecutive ones."""
    flat = x.flatten()
    starts = torch.arange(0, flat.numel(), _BLOCK)
    places = starts + torch.randint(0, _BLOCK, starts.shape, generator=generator)
    places = places.clamp_max(max(flat.numel() - 1, 0))
    flat[places] = special.flatten()[places]
    return flat.reshape(x.shape)


def _outlier(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    return _sprinkled(x, 2.0**12 * torch.randn(shape, generator=generator), generator)


def _one_sign(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return 0.5 + 0.5 * _uniform(shape, generator)


def _minute(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.finfo(dtype).tiny * _exponents(0, 4, shape, generator)


def _subnormal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.finfo(dtype).tiny * _uniform(shape, generator) * _signs(shape, generator)


def _sum_overflow(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.finfo(dtype).max * (0.125 + 0.125 * _uniform(shape, generator))


def _denormal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    info = torch.finfo(dtype)
    own = info.tiny * _uniform(shape, generator)
    fp8 = torch.exp2(-18 + 14 * _uniform(shape, generator))
    return torch.where(_uniform(shape, generator) < 0.5, own, fp8) * _signs(shape, generator)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return 0.0 * _signs(shape, generator)


def _nan(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    x = _sprinkled(x, torch.full(shape, torch.nan).copysign(_signs(shape, generator).float()), generator)
    flat = x.view(-1)
    places = flat.isnan().nonzero().view(-1)
    # The largest elements are beside NaN: the other one of a pair, or another of four or eight, which are what kernels
    # load and compare together. In one tensor always the same.
    beside = places ^ (1, 2, 1, 4)[flat.numel() % 4]
    beside = beside[beside < flat.numel()]
    flat[beside] = torch.where(flat[beside].isnan(), flat[beside], flat[beside].sign() * 8.0)
    return x


def _inf(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    return _sprinkled(x, (torch.inf * _signs(shape, generator)).float(), generator)


def _chosen(pool: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return pool[torch.randint(0, pool.numel(), shape, generator=generator)] * _signs(shape, generator)


def _finite(name: str) -> torch.Tensor:
    values = table(name)
    distinct: torch.Tensor = torch.unique(values[values.isfinite() & (values >= 0)])  # sorted, -0 and 0 as one
    return distinct


def _ties(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    midpoints = [(codes[1:] + codes[:-1]) / 2 for codes in map(_finite, FP8_ENCODINGS)]
    pool = torch.cat(midpoints)
    pool = pool[pool.to(dtype).double() == pool]  # of fp16, whose range is narrower than e5m2's midpoints
    return _chosen(pool, shape, generator)


def _saturation(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    pool = torch.cat([_finite(name)[-1] * torch.linspace(0.9, 1.2, 61, dtype=torch.float64) for name in FP8_ENCODINGS])
    return _chosen(pool.clamp_max(torch.finfo(dtype).max), shape, generator)


def _cancelling(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not shape or shape[-1] < 2:
        return torch.randn(shape, generator=generator)
    half = torch.randn((*shape[:-1], -(-shape[-1] // 2)), generator=generator)
    remainder = 2.0**-10 * torch.randn(half.shape, generator=generator)
    return torch.stack((half, remainder - half), -1).flatten(-2)[..., : shape[-1]]


def _tile_scales(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Neighbouring blocks of every block scaling, along rows and along columns, have largest magnitudes that differ by
    a factor of two at least, between 2^-10 and 2^10: whoever takes the scale of another block is far off."""
    columns = shape[-1] if shape else 1
    rows = math.prod(shape[:-1])
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    exponent = (4 * (r // 128) + 3 * (c // 128)) % 11 - 10
    for size, period in ((1, 3), (16, 2), (32, 3)):
        exponent = exponent + r // size % period + c // size % period
    return (torch.randn((rows, columns), generator=generator) * torch.exp2(exponent.float())).reshape(shape)


def _opposite(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if not shape or shape[-1] < 2:
        return torch.zeros(shape)
    half = torch.randn((*shape[:-1], shape[-1] // 2), generator=generator).to(dtype)
    paired = torch.stack((half, -half), -1).flatten(-2)
    return torch.nn.functional.pad(paired, (0, shape[-1] % 2))


def _constant(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randn((*shape[:-1], 1), generator=generator).expand(shape) if shape else torch.randn(())


#: Mean over deviation of the rows of ``far_mean``, in turn.
FAR = (100.0, -1000.0)


def _far_mean(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    return x + _in_turn(shape, len(FAR), lambda turn: torch.tensor(FAR)[turn])


def _in_turn(shape: tuple[int, ...], count: int, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A value for each row, of its number modulo `count`; broadcastable to `shape`."""
    rows = shape[:-1]
    number = torch.arange(math.prod(rows)).reshape(rows)
    return of(number % count)[..., None] if shape else of(number)


def _between(low: float, high: float, low16: float, high16: float) -> Fill:
    """Exponents uniform between two, others for fp16, and random signs."""

    def made(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        ends = (low16, high16) if dtype == torch.float16 else (low, high)
        return _exponents(*ends, shape, generator)

    return made


def _late(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if shape and x.numel():
        x.reshape(-1, shape[-1] if len(shape) > 1 else 1)[:-16] *= 2.0**-14
    return x


def _last_columns(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if shape:
        x[..., :-16] *= 2.0**-10
    return x


def _special_rows(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if not shape or not x.numel():
        return x
    matrix = x.reshape(-1, shape[-1])
    place = torch.randint(0, shape[-1], (matrix.shape[0],), generator=generator)
    turns = torch.arange(matrix.shape[0]) % 5
    for turn, special in enumerate((torch.nan, torch.inf, -torch.inf), 1):
        matrix[turns == turn, place[turns == turn]] = special
    matrix[turns == 4] = -torch.inf
    return matrix.reshape(shape)


def _half_infinite(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if not shape:
        return x
    first = torch.arange(shape[-1]) < shape[-1] // 2
    return torch.where(first ^ _in_turn(shape, 2, torch.Tensor.bool), -torch.inf, x)


def _tiny(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-1023, 1024, shape, generator=generator) * 2.0**-24


def _nan_at(place: int, largest: int) -> Fill:
    """NaN in one element and a magnitude beyond all others' in another."""

    def made(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        flat = x.view(-1)
        if flat.numel():
            flat[largest] = -16.0
            flat[place] = torch.nan
        return x

    return made


#: Name -> what makes values of a shape, exact in fp32 or to be rounded to the dtype.
KINDS: dict[str, Fill] = {
    "normal": _normal,
    "log_uniform": _log_uniform,
    "spread": _spread,
    "outlier": _outlier,
    "one_sign": _one_sign,
    "denormal": _denormal,
    "zeros": _zeros,
    "nan": _nan,
    "inf": _inf,
    "ties": _ties,
    "saturation": _saturation,
    "cancelling": _cancelling,
    "tile_scales": _tile_scales,
    "opposite": _opposite,
    "constant": _constant,
    "far_mean": _far_mean,
    "large_squares": _between(51.5, 52.5, 11.5, 12.5),
    "square_overflow": _between(66, 67, 11.5, 12.5),
    "square_underflow": _between(-84, -80, -14, -13),
    "huge": _between(104, 118, 10, 15),
    "beyond_half": _between(16, 16.3, 0, 0.3),
    "sum_overflow": _sum_overflow,
    "late": _late,
    "last_columns": _last_columns,
    "special_rows": _special_rows,
    "half_infinite": _half_infinite,
    "tiny": _tiny,
    "minute": _minute,
    "subnormal": _subnormal,
    "nan_first": _nan_at(0, -1),
    "nan_last": _nan_at(-1, 0),
}
#: Of an operand whose dtype reaches further than the result's.
BEYOND_HALF = "beyond_half"
#: Kinds with one special element at an end of the tensor.
ENDS = ("nan_first", "nan_last")
#: Kinds that hold NaN or Inf.
SPECIAL = ("nan", "inf", "special_rows", "half_infinite", *ENDS)


def fill(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A contiguous tensor of one kind of values.

    Raises:
        ValueError: an unknown kind; lists all.
    """
    if kind not in KINDS:
        raise ValueError(f"values: got {kind!r}, expected one of: {', '.join(KINDS)}")
    return KINDS[kind](shape, dtype, generator).to(dtype).contiguous()
