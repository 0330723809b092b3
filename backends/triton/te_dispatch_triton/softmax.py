# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Scaled and masked softmax: kernels/softmax.py. Contracts: `te_dispatch.ops.softmax`."""

from __future__ import annotations

import math

import torch

from te_dispatch.backend_kit.caches import cached
from te_dispatch.ops.checks import rows as checks
from te_dispatch_triton.configs import choose
from te_dispatch_triton.kernels import softmax as kernels
from te_dispatch_triton.launch import Config, Kernel, blocks
from te_dispatch_triton.memory import dense, empty
from te_dispatch_triton.replay import replayed
from te_dispatch_triton.targets import INTERPRETER, target_of

_forward, _backward = Kernel(kernels.forward), Kernel(kernels.backward)
_LOG2_E = math.log2(math.e)

#: (whether this is Triton's interpreter, whether a row is one piece, rows and columns of a program), how to compile.
_Choice = tuple[tuple[bool, bool, int, int], Config]


@cached()
def _choice(kernel: str, device: torch.device, columns: int) -> _Choice:
    target = target_of(device)
    made = choose("softmax", kernel, target, fp_fusion=True, columns=columns)
    longest, elements = made.constants["LONGEST"], made.constants["ELEMENTS"]
    bn = min(1 << max(columns - 1, 15).bit_length(), longest)
    return (target is INTERPRETER, columns <= bn, max(elements // bn, 1), bn), made.config


@replayed()
def softmax_fwd(
    x: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """softmax(scale * x) over the last dimension in fp32; masked entries and fully masked rows are 0."""
    checks.softmax_fwd(x, mask, scale, out_dtype)
    shape, device = x.shape, x.device
    x = dense(x)
    y = empty("result", tuple(shape), out_dtype or x.dtype, device)
    size = x.numel()
    if size == 0:
        return y
    columns, s_q = shape[-1], shape[-2]
    rows, heads = size // columns, 1
    strides: tuple[int, ...] = (0, 0, 0, 0)
    vectors = False
    if mask is not None:
        heads = shape[1] if len(shape) == 4 else rows // s_q
        mask, strides, vectors = _mask_strides(mask, shape)
    tile, config = _choice("forward", device, columns)
    scale = float(scale)
    args = (x, mask, y, rows, columns, abs(scale) * _LOG2_E, heads, s_q, *strides)
    _forward(device, (blocks(rows, tile[2]), 1, 1), args, (scale < 0.0, causal, vectors, *tile), config)
    return y


def _mask_strides(mask: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, tuple[int, ...], bool]:
    """The mask's stride along (batch, heads, s_q, s_kv) of x, where x has four dimensions; fewer count as heads. And
    whether its rows begin at multiples of 16 bytes after its first, however many there are."""
    if len(shape) > 4 and mask.ndim > 2:  # more leading dimensions than there are strides
        mask = dense(mask.expand(shape)).view(-1, *shape[-2:])
    # Dimensions of size 1 are broadcast, or of no length either way.
    strides = [0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride())]
    vectors = strides[-1:] == [1] and shape[-1] % 16 == 0 and all(stride % 16 == 0 for stride in mask.stride()[:-1])
    return mask, (*(0,) * (4 - len(strides)), *strides), vectors


@replayed()
def softmax_bwd(
    dy: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """scale * y * (dy - sum(dy * y)), in fp32."""
    checks.softmax_bwd(dy, y, scale, out_dtype)
    dy, y, device = dense(dy), dense(y), y.device
    dx = empty("result", tuple(y.shape), out_dtype or y.dtype, device)
    size = y.numel()
    if size == 0:
        return dx
    columns = y.shape[-1]
    rows = size // columns
    tile, config = _choice("backward", device, columns)
    _backward(device, (blocks(rows, tile[2]), 1, 1), (dy, y, dx, rows, columns, float(scale)), tile, config)
    return dx
