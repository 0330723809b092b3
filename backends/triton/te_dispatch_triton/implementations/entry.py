# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What the entries of this backend share.

Claims. `deterministic`: sums are taken in an order fixed by shapes and the configuration, which is data; never by
atomics. `batch_invariant`: element by element, or row by row in an order that no other row changes. `capturable` and
`no_host_sync`: a launch reads nothing back and takes its scalars by value; what is not compiled yet says so before a
capture is broken.
"""

from __future__ import annotations

from te_dispatch.core.manifest import CANONICAL, Implementation
from te_dispatch.core.requirements import All, AnyOf, Compare, Condition, NoneOf, OneOf

RANK = 300
ON_DEVICE = frozenset({"deterministic", "capturable", "no_host_sync"})
ROWS = ON_DEVICE | {"batch_invariant"}
FLOATS = ("fp32", "bf16", "fp16")
OCP, FNUZ = ("e4m3fn", "e5m2"), ("e4m3fnuz", "e5m2fnuz")
#: Kinds of casts, with a quantizer or a list of them, that no kernel here makes.
_NOT_CAST = ("mxfp8_2d", "nvfp4_rht", "nvfp4_4over6")
CASTS = (NoneOf("quantizer", *_NOT_CAST),)
CASTS_OF_LISTS = (NoneOf("quantizers", *_NOT_CAST),)
#: No kernel here reads records with a rotated copy.
UNROTATED_RECORD = (NoneOf("x.scaling", "nvfp4_rht"),)
#: The chips that the kernels are written for, and whether the installed Triton serves the one at hand.
SERVED: tuple[Condition, ...] = (
    AnyOf(
        All(OneOf("device.vendor", "nvidia"), Compare("device.arch", ">=", "sm_80")),
        OneOf("device.vendor", "amd"),
        # Triton's interpreter. The vendor and not the type: another vendor's device of type cpu is none of ours.
        OneOf("device.vendor", "cpu"),
    ),
    OneOf("device.triton.ready", True),
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
    plan: str | None = "",
) -> Implementation:
    """An entry whose target and plan are each ``module:attribute`` within this backend. The plan is by default that of
    a replayed operator (`te_dispatch_triton.replay`); None where the target is none."""
    if plan == "":
        plan = f"{target}.plans.repeat"
    own = [part and f"te_dispatch_triton.{part}" for part in (target, plan)]
    return Implementation(
        f"{op}@1", name or op, own[0], (*SERVED, *requires), rank, claims, traits, saved_format, plan=own[1]
    )
