# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The entries of the attention family."""

from __future__ import annotations

from te_dispatch.core.manifest import Implementation
from te_dispatch.core.requirements import AnyOf, Compare, Condition, OneOf
from te_dispatch_triton.implementations.entry import FLOATS, ROWS, kernel

_TRAITS = frozenset({"fused", "flash"})
_FORMAT = "triton.flash_attention/1"
#: FP8 attention is not written yet. A mask tensor has no rows and columns of a packed tensor.
_SERVED: tuple[Condition, ...] = (
    OneOf("q.dtype", *FLOATS),
    *(OneOf(f"{x}.scaling", "none") for x in ("q", "k", "v")),
    OneOf("s_quantizer", None),
    AnyOf(OneOf("attn_mask", False), OneOf("layout", "sbhd", "bshd")),
    Compare("head_dim", "<=", 256),
    Compare("head_dim_v", "<=", 256),
)

IMPLEMENTATIONS: tuple[Implementation, ...] = (
    kernel(
        "attention_fwd", "attention.operators:attention_fwd", (*_SERVED, OneOf("out_quantizer", None)), ROWS,
        "flash_attention", _TRAITS, _FORMAT,
    ),
    kernel(
        "attention_bwd", "attention.operators:attention_bwd",
        (*_SERVED, OneOf("dp_quantizer", None), OneOf("dqkv_quantizer", None)), ROWS, "flash_attention_bwd", _TRAITS,
        _FORMAT,
    ),
)  # fmt: skip
