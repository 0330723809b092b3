# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""FP8 (and FP4) encodings: how bytes read as numbers.

Sources: e4m3fn, e5m2: OCP 8-bit Floating Point Specification (OFP8), revision 1.0. e4m3fnuz, e5m2fnuz: "8-bit
Numerical Formats for Deep Neural Networks" (Noune et al., 2022), as AMD's CDNA3 ISA defines them. e2m1, e8m0: OCP
Microscaling Formats (MX) Specification, revision 1.0.

An encoding is a property of a device and a tag on a tensor, never of the process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Encoding:
    """One 8-bit (or narrower) floating-point encoding.

    Attributes:
        name: ``e4m3fn``, ``e4m3fnuz``, ``e5m2``, ``e5m2fnuz`` or ``e2m1``.
        exponent_bits, mantissa_bits: field widths; one sign bit comes before them.
        bias: exponent bias.
        max: largest finite value.
        max_code: its code.
        min_subnormal: smallest positive value.
        nan_code: the code a NaN is written as; None where the encoding has no NaN (NaN then becomes the maximum).
        negative_zero: whether code 0x80 (0x8 for e2m1) is -0. FNUZ encodings spend it on NaN.
        infinity: whether it has infinities. The cast never produces them: it saturates.
        common_max: the largest value that both the OCP and the FNUZ form of this format share, used as the clamp
            and as the scale's numerator under ``fp8_portability: common``: half of the OCP maximum for a FNUZ
            encoding, so that equal inputs give equal codes on both.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    max_code: int
    min_subnormal: float
    nan_code: int | None
    negative_zero: bool
    infinity: bool
    common_max: float

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def fnuz(self) -> bool:
        return not self.negative_zero and self.bits == 8

    @property
    def family(self) -> str:
        """``e4m3``, ``e5m2`` or ``e2m1``: the format without the flavour."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}"


ENCODINGS: dict[str, Encoding] = {
    e.name: e
    for e in (
        Encoding("e4m3fn", 4, 3, 7, 448.0, 0x7E, 2.0**-9, 0x7F, True, False, 448.0),
        Encoding("e4m3fnuz", 4, 3, 8, 240.0, 0x7F, 2.0**-10, 0x80, False, False, 224.0),
        Encoding("e5m2", 5, 2, 15, 57344.0, 0x7B, 2.0**-16, 0x7F, True, True, 57344.0),
        Encoding("e5m2fnuz", 5, 2, 16, 57344.0, 0x7F, 2.0**-17, 0x80, False, False, 28672.0),
        Encoding("e2m1", 2, 1, 1, 6.0, 0x7, 0.5, None, True, False, 6.0),
    )
}

#: The four 8-bit encodings.
FP8_ENCODINGS: tuple[str, ...] = ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")


def encoding(name: str) -> Encoding:
    """Look an encoding up by name.

    Raises:
        ValueError: for a name that is none of them; the message lists them.
    """
    found = ENCODINGS.get(name)
    if found is None:
        raise ValueError(f"encoding: got {name!r}, expected one of {', '.join(ENCODINGS)}")
    return found


def device_encoding(family: str, encodings: tuple[str, ...]) -> str:
    """The encoding of a family (``e4m3`` or ``e5m2``) that a device reads, given the device's list.

    A device that lists none (no FP8 hardware) uses the OCP form, which every emulation provides.
    """
    for name in encodings:
        if ENCODINGS[name].family == family:
            return name
    return {"e4m3": "e4m3fn", "e5m2": "e5m2"}[family]
