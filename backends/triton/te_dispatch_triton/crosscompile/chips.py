# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The chips that every kernel is compiled for, and the instructions that products of FP8 codes must come to on each.

Sources: PTX ISA, "Warpgroup level matrix instructions" and "TensorCore 5th Generation"; AMD's CDNA 3 and CDNA 4
instruction set manuals. The mnemonic ``v_mfma_f32_*_fp8_fp8`` means FNUZ on gfx942 and OCP on gfx950.
"""

from __future__ import annotations

import re

from te_dispatch.numerics.encodings import FP8_ENCODINGS
from te_dispatch_triton.targets import Target, target_for

#: Processors of a common product with the chip: persistent kernels want a number.
TARGETS: dict[str, Target] = {
    arch: target_for(vendor, arch, processors)
    for vendor, arch, processors in (
        ("nvidia", "sm_80", 108), ("nvidia", "sm_89", 142), ("nvidia", "sm_90", 132), ("nvidia", "sm_100", 148),
        ("amd", "gfx90a", 110), ("amd", "gfx942", 304), ("amd", "gfx950", 256), ("amd", "gfx1100", 96),
    )
}  # fmt: skip

#: Products of codes on FP8 units. AMD's mnemonics say fp8 for E4M3 and bf8 for E5M2.
_FP8: dict[str, str] = {
    "sm_89": r"mma .*\.e[45]m[32]\.e[45]m[32]\.",
    "sm_90": r"wgmma f32\.e[45]m[32]\.e[45]m[32]",
    "sm_100": r"tcgen05 (f8f6f4|mxf8f6f4)",
    "gfx942": r"v_mfma_f32_\w+_[fb][pf]8_[fb][pf]8",
    "gfx950": r"v_mfma_(scale_)?f32_\w+_(f8f6f4|[fb][pf]8_[fb][pf]8)",
}
#: Products of 16-bit operands, which codes are decoded to elsewhere.
_SIXTEEN: dict[str, str] = {
    "sm_80": r"mma f32\.(b?f16)\.\1\.", "sm_89": r"mma f32\.(b?f16)\.\1\.", "sm_90": r"(wgmma|mma) f32\.(b?f16)\.\2",
    "sm_100": r"tcgen05 f16", "gfx90a": r"v_mfma_f32_\w+f16", "gfx942": r"v_mfma_f32_\w+_b?f16",
    "gfx950": r"v_mfma_f32_\w+_b?f16", "gfx1100": r"v_wmma_f32_\w+_b?f16",
}  # fmt: skip


def shown(chip: str, instructions: tuple[str, ...], pattern: dict[str, str]) -> bool:
    """Whether one of the instructions is of a chip's pattern."""
    return chip in pattern and any(re.search(pattern[chip], one) for one in instructions)


def wrong_instructions(target: Target, codes: tuple[str, str], instructions: tuple[str, ...]) -> str | None:
    """Why a product of codes of two encodings is not what the chip's units should do, None if it is."""
    assert all(code in FP8_ENCODINGS for code in codes)
    chip, seen = target.arch, ", ".join(instructions) or "none"
    if set(codes) <= target.dots:
        if not shown(chip, instructions, _FP8):
            return f"{' x '.join(codes)}: expected FP8 matrix instructions ({_FP8[chip]}), got {seen}"
    elif shown(chip, instructions, _FP8):
        return f"{' x '.join(codes)}: the chip's FP8 units read other encodings, got {seen}"
    elif not shown(chip, instructions, _SIXTEEN):
        return f"{' x '.join(codes)}: expected 16-bit matrix instructions ({_SIXTEEN[chip]}), got {seen}"
    return None
