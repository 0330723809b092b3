# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What recipes are made of: formats, how a product accumulates, how a tensor is cast. `te_dispatch.common.recipe`
exports them, as Transformer Engine does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, NamedTuple

from te_dispatch.common.recipe_arguments import CONVERSIONS, Conversion, convert_fields, lenient


def require_choice(owner: Any, name: str, choices: tuple[Any, ...]) -> None:
    value = getattr(owner, name)
    if value not in choices:
        raise ValueError(
            f"{type(owner).__name__}: {name} must be one of {', '.join(map(repr, choices))}, got {value!r}"
        )


class FormatLimits(NamedTuple):
    """Largest finite values of the encodings that a format uses."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which encodings the forward (activations, weights) and the backward (gradients) use.

    The limits are those of the OCP encodings; a device whose encodings differ scales to its own.

    E2M1: 4-bit. E4M3, E5M2: the same 8-bit format both ways. HYBRID: E4M3 forward, E5M2 backward.
    """

    E2M1 = FormatLimits(6.0, 6.0)
    E4M3 = FormatLimits(448.0, 448.0)
    E5M2 = FormatLimits(57344.0, 57344.0)
    HYBRID = FormatLimits(448.0, 57344.0)

    @property
    def fwd(self) -> str:
        """Encoding family of the forward: ``e4m3``, ``e5m2`` or ``e2m1``."""
        return "e4m3" if self is Format.HYBRID else self.name.lower()

    @property
    def bwd(self) -> str:
        """Encoding family of the backward."""
        return "e5m2" if self is Format.HYBRID else self.name.lower()


#: A member, or the value of one.
CONVERSIONS["Format"] = Conversion("a Format", Format)


@lenient
@dataclass(frozen=True)
class MMParams:
    """How one of a layer's three GEMMs runs.

    Attributes:
        use_split_accumulator: promote partial sums to full float32 (True), or allow the FP8 unit's fast, narrower
            accumulation (False).
    """

    use_split_accumulator: bool = True

    def __post_init__(self) -> None:
        convert_fields(self)


def _to_mm_params(value: Any) -> MMParams:
    if isinstance(value, dict):
        return MMParams(**value)
    if not isinstance(value, MMParams):
        raise TypeError
    return value


CONVERSIONS["MMParams"] = Conversion("an MMParams, or a dict with the arguments of one", _to_mm_params)


@lenient
@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is cast.

    Attributes:
        power_2_scale: round scales down to powers of two, so that scaling is exact.
        amax_epsilon: floor under the amax, against huge scales of tiny tensors.
        random_hadamard_transform: rotate blocks before the cast (NVFP4).
        stochastic_rounding: round up or down at random (NVFP4).
        fp4_2d_quantization: one scale per 16x16 values (NVFP4).
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False

    def __post_init__(self) -> None:
        convert_fields(self)
        if not 0.0 <= self.amax_epsilon < float("inf"):
            raise ValueError(f"QParams: amax_epsilon must be finite and not negative, got {self.amax_epsilon!r}")


_FLAGS = ("power_2_scale", "random_hadamard_transform", "stochastic_rounding", "fp4_2d_quantization")
#: Made once: torch.compile does not follow how a constructor looks its fields up.
_BY_FLAGS = {flags: QParams(**dict(zip(_FLAGS, flags))) for flags in product((False, True), repeat=len(_FLAGS))}


def by_flags(
    *,
    power_2_scale: bool = False,
    random_hadamard_transform: bool = False,
    stochastic_rounding: bool = False,
    fp4_2d_quantization: bool = False,
) -> QParams:
    """The `QParams` with these flags, also where torch.compile traces."""
    return _BY_FLAGS[power_2_scale, random_hadamard_transform, stochastic_rounding, fp4_2d_quantization]
