# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding of one tensor, without context parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, plain, require

_LAYOUTS = {"NVTE_SBHD": "sbhd", "NVTE_BSHD": "bshd", "NVTE_THD": "thd"}


def _options(start_positions: Any, qkv_format: Any, interleaved: bool, cu_seqlens: Any, cp_size: int) -> dict[str, Any]:
    layout = _LAYOUTS.get(getattr(qkv_format, "name", ""))
    require(layout is not None, f"the layout {qkv_format!r}")
    require(cp_size == 1, "context parallelism")
    plain(*(tensor for tensor in (start_positions, cu_seqlens) if tensor is not None))
    return {
        "layout": layout,
        "interleaved": bool(interleaved),
        "cu_seqlens": cu_seqlens if layout == "thd" else None,
        "offsets": start_positions,
    }


def fused_rope_forward(
    input: Any,
    freqs: Any,
    start_positions: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    floats(input, freqs)
    return ops.rope_fwd(input, freqs, **_options(start_positions, qkv_format, interleaved, cu_seqlens, cp_size))


def fused_rope_backward(
    output_grads: Any,
    freqs: Any,
    start_positions: Any,
    qkv_format: Any,
    interleaved: bool,
    cu_seqlens: Any,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    floats(output_grads, freqs)
    return ops.rope_bwd(output_grads, freqs, **_options(start_positions, qkv_format, interleaved, cu_seqlens, cp_size))


ADAPTERS: dict[str, Callable[..., Any]] = {
    "fused_rope_forward": fused_rope_forward,
    "fused_rope_backward": fused_rope_backward,
}
