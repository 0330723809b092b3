# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""The values that arguments of modules may have, under Transformer Engine's names.

Numbers of its native module are here where something takes them: `DType`, `FP8FwdTensors` and `FP8BwdTensors`, defined
in `te_dispatch.pytorch.tensor.dtypes`.
"""

from __future__ import annotations

import torch

from te_dispatch.numerics.quantizers import BLOCK
from te_dispatch.pytorch.attention.lowering import BIAS_TYPES
from te_dispatch.pytorch.attention.masks import ATTENTION_TYPES, MASK_TYPES
from te_dispatch.pytorch.attention.memory_layouts import QKVLayouts
from te_dispatch.pytorch.distributed.arguments import PARALLEL_MODES, CPLoadBalancingStrategy

__all__ = [
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "CPLoadBalancingStrategy",
    "GemmParallelModes",
    "LayerTypes",
    "QKVLayouts",
    "dist_group_type",
]

#: ``attn_mask_type``; `DotProductAttention` takes other spellings of them, too.
AttnMaskTypes = MASK_TYPES

#: ``core_attention_bias_type``.
AttnBiasTypes = tuple(BIAS_TYPES)

#: ``attention_type``.
AttnTypes = ATTENTION_TYPES

#: ``layer_type``.
LayerTypes = ("encoder", "decoder")

#: ``parallel_mode``.
GemmParallelModes = PARALLEL_MODES

#: What ``tp_group`` must be an instance of.
if torch.distributed.is_available():
    dist_group_type = torch.distributed.ProcessGroup

#: How many elements share a scale in MXFP8 and in NVFP4.
MXFP8_BLOCK_SCALING_SIZE = BLOCK["mxfp8"]
NVFP4_BLOCK_SCALING_SIZE = BLOCK["nvfp4"]
