# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which classes are this package's modules."""

from __future__ import annotations

import torch

from te_dispatch.pytorch.attention.dot_product import DotProductAttention
from te_dispatch.pytorch.modules.gemm_module import GemmModule
from te_dispatch.pytorch.modules.multi_head_attention import MultiheadAttention
from te_dispatch.pytorch.modules.normalization import LayerNorm, RMSNorm
from te_dispatch.pytorch.modules.transformer_layer import TransformerLayer


def get_te_classes() -> tuple[type[torch.nn.Module], ...]:
    """The classes that every module of this package is an instance of, for ``isinstance``."""
    return LayerNorm, RMSNorm, GemmModule, DotProductAttention, MultiheadAttention, TransformerLayer
