# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Rotary position embedding: kernels/rope.py. Contracts: `te_dispatch.ops.position`."""

from __future__ import annotations

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.ops.checks import rows as checks
from te_dispatch_triton.configs import choose
from te_dispatch_triton.kernels import rope as kernels
from te_dispatch_triton.launch import Config, Kernel
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, target_of

_rotate = Kernel(kernels.rotate)
#: Sequences whose ends are compared at a time.
_SEQUENCES = 64

#: (whether this is Triton's interpreter, then BT, BI, BH, BP of `kernels.rotate`), how to compile.
_Choice = tuple[tuple[bool, int, int, int, int], Config]


@replayed()
def rope_fwd(
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """x cos t + rotate(x) sin t on the first features, in fp32; the others pass."""
    checks.rope("x", x, freqs, layout, cu_seqlens, offsets)
    return _rotated(x, freqs, layout, interleaved, cu_seqlens, offsets, False)


@replayed()
def rope_bwd(
    dy: torch.Tensor,
    freqs: torch.Tensor,
    *,
    layout: str = "sbhd",
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """dy cos t - rotate(dy sin t) on the first features, in fp32; the others pass."""
    checks.rope("dy", dy, freqs, layout, cu_seqlens, offsets)
    return _rotated(dy, freqs, layout, interleaved, cu_seqlens, offsets, True)


def _rotated(
    x: torch.Tensor,
    freqs: torch.Tensor,
    layout: str,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    offsets: torch.Tensor | None,
    backward: bool,
) -> torch.Tensor:
    shape, device = tuple(x.shape), x.device
    y = empty("result", shape, x.dtype, device)
    if x.numel() == 0:
        return y
    if x.stride(-1) != 1:
        x = dense(x)
    if freqs.stride(-1) != 1:
        freqs = dense(freqs)
    # As (tokens, batch, heads): sizes, then strides.
    if layout == "sbhd":
        tokens, batch, heads, features = shape
        by_token, by_batch, by_head, _ = x.stride()
    elif layout == "bshd":
        batch, tokens, heads, features = shape
        by_batch, by_token, by_head, _ = x.stride()
    else:
        batch, by_batch = 1, 0
        tokens, heads, features = shape
        by_token, by_head, _ = x.stride()
    sequences = 0
    if cu_seqlens is not None:
        cu_seqlens = dense(cu_seqlens)
        sequences = cu_seqlens.shape[0] - 1
    own = offsets is not None and cu_seqlens is None  # positions of each batch entry
    items = heads if own else batch * heads
    available, _, _, rotated = freqs.shape
    tile, config = _choice(device, items, rotated // 2, features)
    programs = -(-tokens // tile[1]) * -(-items // tile[2]) * (batch if own else 1)
    args = (
        x, y, freqs, cu_seqlens, None if offsets is None else dense(offsets), tokens, batch, heads, features,
        rotated // 2, by_token, by_batch, by_head, freqs.stride(0), available, sequences,
    )  # fmt: skip
    constants = (layout == "bshd", interleaved, backward, *tile, _SEQUENCES)
    _rotate(device, (programs, 1, 1), args, constants, config)
    return y


@cached()
def _choice(device: torch.device, items: int, half: int, features: int) -> _Choice:
    target = target_of(device)
    made = choose("position", "rotate", target, fp_fusion=True, half=half)
    bh = 1 << max(half - 1, 0).bit_length()
    passing = features - 2 * half
    bp = min(1 << (passing - 1).bit_length(), bh) if passing else 0
    pairs = max(made.constants["PAIRS"] // bh, 1)
    bi = min(1 << (items - 1).bit_length(), pairs)
    bt = min(max(pairs // bi, 1), made.constants["TOKENS"])
    return (target is INTERPRETER, bt, bi, bh, bp), made.config
