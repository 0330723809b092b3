# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts between high precision and FP8/FP4.

The cast is bitwise: q = encode(RN32(fp32(x) * scale)). Rounding is to nearest even, without flush to zero, saturating
to the largest finite value, +-Inf too; NaN becomes 7F (OCP) or 80 (FNUZ); -0 becomes +0 where the encoding has none.
Products are formed in fp32, never in bf16. scale_inv = RN32(1 / scale). amax ignores NaN and keeps Inf. With an
`rng_state`, `quantize` rounds stochastically.

The rest of the family is exported here too: other forms of quantized data (`quantize_forms`), and the bookkeeping of
scales (`quantize_scales`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.core.memory import ROWS
from te_dispatch.core.operator import Fact, operator
from te_dispatch.numerics.quantizers import KINDS
from te_dispatch.ops.quantize_forms import convert_encoding, relayout_scales, transpose_quantized
from te_dispatch.ops.quantize_scales import compute_amax, partial_amax, partial_cast, update_delayed_scales
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch.ops.shapes import USAGES, empty_quantized

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Quantized
    from te_dispatch.numerics.quantizers import Quantizer

__all__ = [
    "compute_amax",
    "convert_encoding",
    "dequantize",
    "multi_tensor_quantize",
    "pad_rows",
    "partial_amax",
    "partial_cast",
    "quantize",
    "quantize_dbias",
    "relayout_scales",
    "split_quantize",
    "transpose_quantized",
    "unpad_rows",
    "update_delayed_scales",
]


def _quantize_shape(x: Any, quantizer: Quantizer, *, usage: str, out: Any = None, **_: Any) -> Any:
    return out if out is not None else empty_quantized(tuple(x.shape), quantizer, usage, x.dtype, x.device)


@operator(
    family="quantize",
    version=1,
    shape=_quantize_shape,
    device="x.device",
    words={"usage": USAGES},
    sizes={"k": "x.shape[-1]"},
    mutates=("out", "quantizer.amax"),
    memory={"x": ROWS},
)
def quantize(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    usage: str,
    out: Quantized | None = None,
    noop_flag: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    rng_state: torch.Tensor | None = None,
) -> Quantized:
    """Cast a tensor, as its quantizer says.

    Args:
        x: (..., K), float32, bfloat16 or float16, contiguous in its last dimension. May be empty.
        quantizer: the cast; a `DelayedQuantizer` with `amax` set has max |x| accumulated into it, which
            is 0, positive or Inf before; a NaN there may stay, or count as 0.
        usage: ``row``, ``column`` or ``both``: which copies to make (`Quantized`).
        out: a `Quantized` of matching shapes to write into and return; a copy that `usage` does not name is left as it
            is.
        noop_flag: float32 (1,); where it is nonzero `out` is left as it is, and no amax is recorded (weight caching
            under CUDA graphs). Requires `out`.
        amax: float32 (1,): for a `CurrentQuantizer`, use this amax (already reduced across ranks, say) and do not
            compute it; for an `NVFP4Quantizer` or `NVFP4FourOverSixQuantizer` likewise the tensor's amax.
        rng_state: int64 (2,), (seed, offset): round stochastically, to one of the two codes that a scaled value lies
            between, away from zero with the probability of its position between them, to 2^-23. Values of the
            encoding, scales and amaxes are as without. Equal states give equal codes; elements and states draw
            independently, by a generator of the implementation's own, and so do copies, but those of a per-tensor
            cast, of 128x128 blocks and of an `MXFP8TileQuantizer`, which hold the same codes. None rounds to nearest
            even, which is all that an `NVFP4FourOverSixQuantizer` does.

    Returns:
        `Quantized` with scales in the quantizer's `scale_layout`, fresh memory unless `out` was given.

    Raises:
        ValueError: a usage that is none of the three, or a shape or dtype that is not served, such as rows that 16
            does not divide where an `NVFP4HadamardQuantizer` makes a column-wise copy, or an `amax` or `rng_state` that
            the quantizer has no use for; names the argument.
    """
    raise NotImplementedError


def _quantize_dbias_shape(
    x: Any, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    import torch

    dbias = torch.empty((x.shape[-1],), dtype=bias_dtype or x.dtype, device=x.device)
    return QuantizeDbias(empty_quantized(tuple(x.shape), quantizer, usage, x.dtype, x.device), dbias)


@operator(
    family="quantize",
    version=1,
    shape=_quantize_dbias_shape,
    device="x.device",
    words={"usage": USAGES},
    sizes={"k": "x.shape[-1]"},
    mutates=("quantizer.amax",),
    memory={"x": ROWS},
)
def quantize_dbias(
    x: torch.Tensor, quantizer: Quantizer, *, usage: str, bias_dtype: torch.dtype | None = None
) -> QuantizeDbias:
    """Cast a gradient and reduce it to the bias gradient in the same pass.

    Args:
        x: (..., K) float32, bfloat16 or float16.
        quantizer, usage: as in `quantize`.
        bias_dtype: dtype of dbias; None for x's.

    Returns:
        quantized: as `quantize`. dbias: (K,), the sum of x over all other dimensions, accumulated in fp32 and rounded
        once.
    """
    raise NotImplementedError


def _dequantize_shape(x: Any, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    import torch

    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


@operator(
    family="quantize",
    version=1,
    shape=_dequantize_shape,
    device="x.device",
    facts=(
        Fact(
            "x.usage",
            "('row' if x.row_data is not None else 'column')",
            doc="the copy there is, the row-wise one if both",
            words=("row", "column"),
        ),
    ),
)
def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High-precision values of a `Quantized`, of its logical shape: RN_dtype(RN32(decode(data) * scale_inv)).

    Reads the row-wise copy, or the column-wise one where that is all there is. nvfp4 multiplies
    decode(scale_inv) * global_scale_inv first, rounded to fp32.

    Args:
        dtype: float32, bfloat16 or float16; None for the nominal dtype.

    Raises:
        ValueError: nothing but a rotated column-wise copy (nvfp4_rht), which does not hold x's values.
    """
    raise NotImplementedError


def _split_quantize_shape(x: Any, splits: Any, quantizers: Any, *, usage: str) -> list[Quantized]:
    k = x.shape[-1]
    return [empty_quantized((m, k), q, usage, x.dtype, x.device) for m, q in zip(splits, quantizers)]


@operator(
    family="quantize",
    version=1,
    shape=_split_quantize_shape,
    device="x.device",
    words={"usage": USAGES},
    facts=(
        Fact("splits", "len(splits)", "size", "how many splits"),
        Fact("quantizers", "(quantizers[0].kind if quantizers else None)", doc="kind of the quantizers", words=KINDS),
        Fact("quantizers.encoding", "(quantizers[0].encoding if quantizers else None)", "dtype"),
    ),
    mutates=("quantizers.amax",),
)
def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Split the rows of x (M, K) and cast every part with its own quantizer, as for a grouped GEMM.

    Args:
        splits: rows of each part, host integers that add up to M; zeros are allowed.
        quantizers: one each, all of one kind and encoding, with amaxes of their own.
    """
    raise NotImplementedError


@operator(
    family="quantize",
    version=1,
    shape=lambda xs, quantizers, *, usage: [
        empty_quantized(tuple(x.shape), q, usage, x.dtype, x.device) for x, q in zip(xs, quantizers)
    ],
    device="xs[0].device",
    words={"usage": USAGES},
    facts=(
        Fact("xs", "len(xs)", "size", "how many tensors"),
        Fact("xs.dtype", "xs[0].dtype", "dtype"),
        Fact("quantizers", "quantizers[0].kind", doc="kind of the quantizers", words=KINDS),
        Fact("quantizers.encoding", "quantizers[0].encoding", "dtype"),
    ),
    mutates=("quantizers.amax",),
)
def multi_tensor_quantize(
    xs: Sequence[torch.Tensor], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Cast many tensors in as few launches as possible. Each result equals `quantize` of that tensor, bit for bit.

    Args:
        xs: at least one tensor; one device, one dtype.
        quantizers: one each, all of one kind and encoding, with amaxes of their own.
    """
    raise NotImplementedError


def _pad_shape(x: Any, splits: Any, padded_splits: Any) -> torch.Tensor:
    import torch

    return torch.empty((sum(padded_splits), x.shape[-1]), dtype=x.dtype, device=x.device)


@operator(
    family="quantize",
    version=1,
    shape=_pad_shape,
    device="x.device",
    facts=(Fact("splits", "len(splits)", "size"), Fact("padded_splits", "len(padded_splits)", "size")),
)
def pad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Append zero rows to every part of x so that FP8 GEMMs, which need multiples of 16, can run on it.

    Args:
        x: (sum(splits), K), any dtype, uint8 codes too.
        splits, padded_splits: rows of each part before and after; padded_splits[i] >= splits[i].

    Returns:
        (sum(padded_splits), K).
    """
    raise NotImplementedError


def _unpad_shape(x: Any, splits: Any, padded_splits: Any) -> torch.Tensor:
    import torch

    return torch.empty((sum(splits), x.shape[-1]), dtype=x.dtype, device=x.device)


@operator(
    family="quantize",
    version=1,
    shape=_unpad_shape,
    device="x.device",
    facts=(Fact("splits", "len(splits)", "size"), Fact("padded_splits", "len(padded_splits)", "size")),
)
def unpad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Undo `pad_rows`: (sum(padded_splits), K) -> (sum(splits), K)."""
    raise NotImplementedError
