# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Activation checkpointing: `checkpoint`, and the phases that checkpoints of other programs announce (`phases`).

Start with `checkpoint`. What a forward leaves for its recomputation is kept by `te_dispatch.pytorch.fp8.regions`. May
import `te_dispatch.ops`, `te_dispatch.core`, and of `te_dispatch.pytorch` `compile`, `distributed` and `fp8`.
"""
