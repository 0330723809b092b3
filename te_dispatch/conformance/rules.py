# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""How one result is judged: by its bits, within a bound, or as the codes of a value known within a bound.

A rule never holds a tolerance: a limit comes from a derivation in `te_dispatch.conformance.bounds`, element by
element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Union

import numpy as np
import torch

from te_dispatch.conformance.decoding import decode, nibbles

#: log2(error / limit) is counted in these bins: one below the first, one each, one above the last.
HISTOGRAM = tuple(range(-12, 5))
#: Rows and columns of a heat map, at most.
HEAT_MAP = 32
#: A heat map holds no larger ratio; infinity is told as this.
HEAT_MAP_LARGEST = 2.0**20


@dataclass(frozen=True)
class Bitwise:
    """Equal bits. Of floats that are computed, a NaN is met by any NaN: IEEE 754 leaves its sign and payload open.

    Attributes:
        only: bool, True where the contract says what the element is; None for everywhere.
        moved: the result holds its operand's bytes, so a NaN keeps its payload too.
    """

    only: torch.Tensor | None = None
    moved: bool = False


@dataclass(frozen=True)
class Instead:
    """Another value that some elements may have: what the contract allows where an intermediate sum overflows.

    Attributes:
        where: bool, like the result or broadcastable to it.
        value: float64; an Inf or a NaN is met by itself.
        limit: float64, on the error of what has this value.
    """

    where: torch.Tensor
    value: torch.Tensor
    limit: torch.Tensor


@dataclass(frozen=True)
class Within:
    """|actual - expected| <= limit; NaN where, and only where, NaN is expected; an Inf is met by the same Inf.
    An Inf is right too where expected + limit (-Inf: expected - limit) is one in the result's dtype.

    Attributes:
        limit: float64, like the result or broadcastable to it. It holds everything, the rounding to the result's
            dtype and the oracle's own rounding too. An infinite limit leaves the element's value open, not its
            presence.
        only: as in `Bitwise`.
        instead: other values that some elements may have.
    """

    limit: torch.Tensor
    only: torch.Tensor | None = None
    instead: tuple[Instead, ...] = ()


@dataclass(frozen=True)
class Codes:
    """FP8 or FP4 codes of a value that is only known to lie in an interval: encode(low) <= code <= encode(high).

    Encoding is monotonic, so any value of the interval has a code between those of its ends.

    Attributes:
        encoding: of the codes.
        low, high: codes of the ends, uint8, one per element, also where the result packs two a byte; a NaN code in
            both asks for NaN.
        only: as in `Bitwise`.
    """

    encoding: str
    low: torch.Tensor
    high: torch.Tensor
    only: torch.Tensor | None = None


@dataclass(frozen=True)
class Open:
    """The contract leaves these elements open. Says why; the reason is reported."""

    reason: str


@dataclass(frozen=True)
class Sampled:
    """Some elements of a result that is too large to be judged whole. What is expected is those elements, in order.

    Attributes:
        places: int64 (n,), indices into the flattened result.
        rule: how they are judged.
    """

    places: torch.Tensor
    rule: Union[Bitwise, Within, Codes]


Rule = Union[Bitwise, Within, Codes, Open, Sampled]


@dataclass
class Finding:
    """What judging one result found.

    Attributes:
        path: of the result.
        passed: whether every element is as it must be.
        rule: ``bitwise``, ``within``, ``codes`` or ``open``.
        ratio: the largest error over its limit; 0 or infinity for a bitwise rule.
        bad, total: elements that are not as they must be, elements judged.
        index: of the worst element; actual, expected, limit: there, as text.
        histogram: elements by log2(error / limit), see `HISTOGRAM`; empty where there is no bound.
        heat_map: the worst ratio per tile of the result as a matrix, at most 32x32; only where something is bad.
        message: in one sentence.
        shape: of the result; () where it was not judged element by element.
    """

    path: str
    passed: bool
    rule: str
    ratio: float = 0.0
    bad: int = 0
    total: int = 0
    index: tuple[int, ...] = ()
    actual: str = ""
    expected: str = ""
    limit: str = ""
    histogram: list[int] = field(default_factory=list)
    heat_map: list[list[float]] = field(default_factory=list)
    message: str = ""
    shape: tuple[int, ...] = ()


def judge(path: str, rule: Rule, actual: torch.Tensor, expected: torch.Tensor) -> Finding:
    """Compare one result with what is expected of it. Both on the host, of one shape (but see `Sampled`)."""
    if isinstance(rule, Open):
        return Finding(path, True, "open", message=rule.reason)
    if isinstance(rule, Codes):
        return _codes(path, rule, actual)
    if isinstance(rule, Sampled):
        return judge(path, rule.rule, actual.flatten()[rule.places], expected)
    if actual.shape != expected.shape:
        # Compared all the same, they would be broadcast.
        message = f"{path} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        name = type(rule).__name__.lower()
        return Finding(path, False, name, math.inf, actual.numel(), actual.numel(), message=message)
    if isinstance(rule, Bitwise):
        return _bitwise(path, rule, actual, expected)
    return _within(path, rule, actual, expected)


def _bitwise(path: str, rule: Bitwise, actual: torch.Tensor, expected: torch.Tensor) -> Finding:
    if actual.dtype != expected.dtype:
        message = f"{path}: {actual.dtype}, expected {expected.dtype}"
        return Finding(path, False, "bitwise", math.inf, actual.numel(), actual.numel(), message=message)
    same = _bits(actual) == _bits(expected)
    if actual.dtype.is_floating_point and not rule.moved:
        same |= actual.isnan() & expected.isnan()
    ratio = torch.where(same, 0.0, math.inf).double()
    return _finding(path, "bitwise", ratio, rule.only, actual, expected, None)


def _within(path: str, rule: Within, actual: torch.Tensor, expected: torch.Tensor) -> Finding:
    got, want = actual.double(), expected.double()
    limit = rule.limit.double().broadcast_to(got.shape)
    error = (got - want).abs()
    # 0 / 0 is no error; where something must be exact, any error is too large.
    ratio = torch.where(error == 0, 0.0, error / limit)
    same_special = (got == want) | (got.isnan() & want.isnan())
    special = ~got.isfinite() | ~want.isfinite()
    # A value may round to an Inf of whichever sign the bound reaches past the largest finite number with.
    overflow = _overflow(actual.dtype)
    open_ended = ((got == math.inf) & (want + limit >= overflow)) | ((got == -math.inf) & (want - limit <= -overflow))
    open_ended &= want.isfinite()
    ratio = torch.where(special, torch.where(same_special | open_ended, 0.0, math.inf), ratio)
    ratio = torch.where(limit == math.inf, 0.0, ratio)
    for other in rule.instead:
        near = ((got - other.value).abs() <= other.limit) | (got == other.value) | (got.isnan() & other.value.isnan())
        ratio = torch.where(other.where & near, 0.0, ratio)
    # A limit that is NaN is a mistake of whoever derived it: it must not pass for one that everything meets.
    ratio = torch.where(ratio.isnan(), math.inf, ratio)
    return _finding(path, "within", ratio, rule.only, actual, expected, limit)


def _codes(path: str, rule: Codes, actual: torch.Tensor) -> Finding:
    if actual.shape != rule.low.shape:
        actual = nibbles(actual)
    got, low, high = (decode(code, rule.encoding) for code in (actual, rule.low, rule.high))
    nan = low.isnan() & high.isnan()
    inside = torch.where(nan, got.isnan(), (got >= low) & (got <= high))
    # Steps beyond the interval's end, in units of the interval's larger end: enough to tell near from far.
    beyond = torch.maximum(low - got, got - high) / torch.maximum(low.abs(), high.abs()).clamp_min(2.0**-17)
    # Never so near that the sum rounds to 1, as it would beside an interval that reaches to Inf.
    ratio = torch.where(inside, 0.0, 1.0 + beyond.nan_to_num(math.inf).clamp_min(2.0**-10))
    return _finding(path, "codes", ratio, rule.only, actual, rule.low, None)


def _bits(x: torch.Tensor) -> torch.Tensor:
    sized = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sized[x.element_size()])


def _overflow(dtype: torch.dtype) -> float:
    """What is this large rounds to Inf: half a step beyond the largest finite number."""
    if not dtype.is_floating_point:
        return math.inf
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    return largest + largest * eps / (2 - eps) / 2


def _finding(
    path: str,
    rule: str,
    ratio: torch.Tensor,
    only: torch.Tensor | None,
    actual: torch.Tensor,
    expected: torch.Tensor,
    limit: torch.Tensor | None,
) -> Finding:
    if only is not None:
        ratio = torch.where(only.broadcast_to(ratio.shape), ratio, 0.0)
    total = ratio.numel() if only is None else int(only.broadcast_to(ratio.shape).sum())
    if ratio.numel() == 0:
        return Finding(path, True, rule)
    bad = int((ratio > 1).sum())
    position = int(ratio.flatten().argmax())
    index = tuple(int(i) for i in np.unravel_index(position, tuple(ratio.shape)))  # torch's own loads sympy: seconds
    found = Finding(path, bad == 0, rule, float(ratio.flatten()[position]), bad, total, index)
    found.shape = tuple(ratio.shape)
    found.actual, found.expected = _text(actual[index]), _text(expected[index])
    if limit is not None:
        found.limit = _text(limit[index])
        found.histogram = _histogram(ratio)
    if bad:
        found.heat_map = _heat_map(ratio)
        # A zero-dimensional result is matched as a whole.
        where = f"[{', '.join(map(str, index))}]" if index else ""
        found.message = f"{path}{where} is {found.actual}, expected {found.expected}"
        found.message += f" within {found.limit}" if found.limit else ""
        found.message += f" ({bad} of {total} elements are wrong)"
    return found


def _text(x: torch.Tensor) -> str:
    value = x.item()
    return f"0x{value:02x}" if x.dtype == torch.uint8 else f"{value:.9g}" if isinstance(value, float) else str(value)


def _histogram(ratio: torch.Tensor) -> list[int]:
    exponents = ratio.flatten().clamp_min(2.0**-40).log2().clamp(HISTOGRAM[0] - 0.5, HISTOGRAM[-1] + 0.5)
    bins = torch.bucketize(exponents, torch.tensor(HISTOGRAM, dtype=torch.float64))
    return [int(n) for n in torch.bincount(bins, minlength=len(HISTOGRAM) + 1)]


def _heat_map(ratio: torch.Tensor) -> list[list[float]]:
    matrix = ratio.reshape(-1, ratio.shape[-1]) if ratio.dim() else ratio.reshape(1, 1)
    tile = [-(-size // HEAT_MAP) for size in matrix.shape]
    pooled = torch.nn.functional.max_pool2d(matrix.clamp_max(HEAT_MAP_LARGEST)[None, None], tuple(tile), ceil_mode=True)
    return [[round(float(value), 3) for value in row] for row in pooled[0, 0]]
