# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Other arithmetic for products and norms that their contracts allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch.ops.gemm import Epilogue
from te_dispatch.ops.results import NormForward
from te_dispatch_faulty.binding import Call
from te_dispatch_faulty.spoiling import Behaviour
from te_dispatch_torch.gemm import _finish, _matrices, _values


def product(multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Behaviour:
    """Products of fp32 matrices made in another way."""

    def behave(call: Call) -> Any:
        a, b, layout, out = call["a"], call["b"], call["layout"], call["out"]
        # Refuses what has to be refused. An output whose elements share memory must be seen as it is; no other may be
        # written here.
        shared = isinstance(out, torch.Tensor) and 0 in out.stride() and out.numel() > 1
        call.sound(out=out.clone() if isinstance(out, torch.Tensor) and not shared else out)
        left, right = _matrices(_values(a, layout, "a"), _values(b, layout, "b"), layout)
        return finished(call, multiply(left.float(), right.float()))

    return behave


def finished(call: Call, z: torch.Tensor) -> Any:
    """What a product's call gives that has come to `z` (m, n) before its epilogue."""
    a, b, layout, out = call["a"], call["b"], call["layout"], call["out"]
    shape = (z.shape[0], z.shape[1]) if layout == "TN" else (*a.shape[:-1], z.shape[1])
    dtype = call["out_dtype"] or (out.dtype if out is not None else a.dtype)
    names = ("alpha", "out", "accumulate", "bias", "epilogue", "aux", "aux_quantizer", "out_quantizer")
    return call.delivered(_finish(z, a, b, layout, Epilogue(shape, dtype, *(call[name] for name in names))))


def split_k(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    parts = [a @ b for a, b in zip(left.chunk(4, 1), right.chunk(4, 0))]
    return torch.stack(parts).sum(0)


def in_fp64(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (left.double() @ right.double()).float()


def turned(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (right.t().contiguous() @ left.t().contiguous()).t().contiguous()


def in_blocks(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Backwards through K, 32 at a time, one running sum."""
    total = left.new_zeros((left.shape[0], right.shape[1]))
    for start in reversed(range(0, left.shape[1], 32)):
        total = total + left[:, start : start + 32] @ right[start : start + 32]
    return total


def in_row_tiles(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """16 rows at a time, the last ones padded."""
    padded = torch.nn.functional.pad(left, (0, 0, 0, -left.shape[0] % 16))
    return torch.cat([rows @ right for rows in padded.split(16)] or [padded @ right])[: left.shape[0]]


def norm(call: Call, normalize: Callable[[torch.Tensor, float], Sequence[torch.Tensor | None]]) -> Any:
    """A norm by (x, eps) -> (normalized, mean, rstd), the latter with a last dimension of 1."""
    right = call.sound()
    if call["quantizer"] is not None or not call["x"].numel():
        return right
    x = call["x"] if right.residual_out is None else right.residual_out
    normal, mean, rstd = normalize(x, call["eps"])
    assert normal is not None and rstd is not None
    factor = call["gamma"].to(normal.dtype) + (1.0 if call["zero_centered_gamma"] else 0.0)
    y = normal * factor
    if call.get("beta") is not None:
        y = y + call["beta"].to(normal.dtype)
    found = NormForward(
        y.to(right.y.dtype), None, right.residual_out, None if mean is None else mean.squeeze(-1).float(),
        rstd.squeeze(-1).float(),
    )  # fmt: skip
    return call.delivered(found)


def layernorm_in_fp64(x: torch.Tensor, eps: float) -> Sequence[torch.Tensor | None]:
    wide = x.double()
    mean = wide.mean(-1, keepdim=True)
    rstd = ((wide - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide - mean) * rstd, mean, rstd


def layernorm_by_halves(x: torch.Tensor, eps: float) -> Sequence[torch.Tensor | None]:
    """Two passes in fp32, summed from the end in pieces of 64 columns."""
    x = x.float()

    def mean_of(values: torch.Tensor) -> torch.Tensor:
        pieces = [piece.sum(-1, keepdim=True) for piece in values.split(64, -1)]
        return torch.stack(pieces[::-1]).sum(0) / values.shape[-1]

    mean = mean_of(x)
    rstd = (mean_of((x - mean).square()) + eps).rsqrt()
    return (x - mean) * rstd, mean, rstd


def layernorm_by_welford(x: torch.Tensor, eps: float) -> Sequence[torch.Tensor | None]:
    """Means and sums of squares of pieces of 32 columns, put together as Chan, Golub and LeVeque do."""
    x = x.float()
    count, mean, squares = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    for piece in x.split(32, -1):
        n, own = piece.shape[-1], piece.mean(-1, keepdim=True)
        between = own - mean
        squares = squares + (piece - own).square().sum(-1, keepdim=True) + between.square() * (count * n / (count + n))
        mean, count = mean + between * (n / (count + n)), count + n
    rstd = (squares / count + eps).rsqrt()
    return (x - mean) * rstd, mean, rstd


def rms_in_fp64(x: torch.Tensor, eps: float) -> Sequence[torch.Tensor | None]:
    wide = x.double()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return wide * rstd, None, rstd


def rms_backwards(x: torch.Tensor, eps: float) -> Sequence[torch.Tensor | None]:
    rstd = (x.float().flip(-1).square().cumsum(-1)[..., -1:] / x.shape[-1] + eps).rsqrt()
    return x.float() * rstd, None, rstd


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**-126, torch.zeros_like(x), x)


def rms_flushing(x: torch.Tensor, eps: float) -> Sequence[torch.Tensor | None]:
    """Flushes numbers below fp32's normals wherever they come up."""
    x = flushed(x.float())
    rstd = (flushed(flushed(x.square()).mean(-1, keepdim=True)) + eps).rsqrt()
    return flushed(x * rstd), None, rstd
