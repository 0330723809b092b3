# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The spaces of every operator family, one module each, named as in `te_dispatch/ops/`. A new family is listed here.

Start with `softmax`. May import what `te_dispatch.conformance` may, and of the kit `space` and what makes, judges and
bounds; nothing that runs a case. `space` imports this package when the spaces are first asked for.
"""

from te_dispatch.conformance.families import (  # noqa: F401
    activation,
    attention,
    attention_bwd,
    attention_dropout,
    attention_grid,
    gemm,
    gemm_records,
    grouped,
    huge_rows,
    huge_training,
    moe,
    norm,
    position,
    quantize_bookkeeping,
    quantize_casts,
    quantize_drawn,
    quantize_forms,
    quantize_fp4,
    quantize_huge,
    quantize_many,
    quantize_patterns,
    quantize_tiles,
    refused,
    softmax,
    training,
)
