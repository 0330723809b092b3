# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the entries of this backend share.

Claims. `deterministic`: sums are taken in an order fixed by shapes and the chip; maxima do not depend on theirs.
`batch_invariant`: element by element, or row by row in an order that no other row changes. `capturable` and
`no_host_sync`: a launch reads nothing back, allocates nothing, and takes its scalars by value.
"""

from __future__ import annotations

from te_dispatch.core.manifest import CANONICAL, Implementation
from te_dispatch.core.requirements import Compare, Condition, NoneOf, OneOf

RANK = 100
ON_DEVICE = frozenset({"deterministic", "capturable", "no_host_sync"})
ROWS = ON_DEVICE | {"batch_invariant"}
FLOATS = ("fp32", "bf16", "fp16")
#: Kinds of casts, with a quantizer or a list of them, that no kernel here makes.
_NOT_CAST = ("mxfp8_2d", "nvfp4_rht", "nvfp4_4over6")
CASTS = (NoneOf("quantizer", *_NOT_CAST),)
CASTS_OF_LISTS = (NoneOf("quantizers", *_NOT_CAST),)
#: No kernel here reads records with a rotated copy.
UNROTATED_RECORD = (NoneOf("x.scaling", "nvfp4_rht"),)
#: The chips that the kernels are written for, and whether this build holds code for the one at hand.
NVIDIA: tuple[Condition, ...] = (
    OneOf("device.type", "cuda"),
    OneOf("device.vendor", "nvidia"),
    Compare("device.arch", ">=", "sm_80"),
    OneOf("device.cuda.built", True),
)


def kernel(
    op: str,
    target: str,
    requires: tuple[Condition, ...] = (),
    claims: frozenset[str] = ON_DEVICE,
    name: str | None = None,
    traits: frozenset[str] = frozenset(),
    saved_format: str = CANONICAL,
    rank: int = RANK,
    plan: str | None = None,
    operand_format: str | None = None,
) -> Implementation:
    """An entry whose target, plan and operand format are each ``module:attribute`` within this backend."""
    own = [part and f"te_dispatch_cuda.{part}" for part in (target, plan, operand_format)]
    return Implementation(
        f"{op}@1", name or op, own[0], (*NVIDIA, *requires), rank, claims, traits, saved_format, plan=own[1],
        operand_format=own[2],
    )  # fmt: skip
