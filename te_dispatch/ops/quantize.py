# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Casts between high precision and FP8/FP4, and the bookkeeping of their scales.

The cast is bitwise: q = encode(RN32(fp32(x) * scale)). Rounding is to nearest even, without flush to zero, saturating
to the largest finite value, +-Inf too; NaN becomes 7F (OCP) or 80 (FNUZ); -0 becomes +0 where the encoding has none.
Products are formed in fp32, never in bf16. scale_inv = RN32(1 / scale). amax ignores NaN and keeps Inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from te_dispatch.core.operator import Fact, operator
from te_dispatch.ops.results import QuantizeDbias
from te_dispatch.ops.shapes import empty_quantized

if TYPE_CHECKING:
    import torch

    from te_dispatch.numerics.quantized import Quantized
    from te_dispatch.numerics.quantizers import Quantizer


def _quantize_shape(x: Any, quantizer: Quantizer, *, usage: str, out: Any = None, **_: Any) -> Any:
    return out if out is not None else empty_quantized(tuple(x.shape), quantizer, usage, x.dtype, x.device)


@operator(
    family="quantize",
    version=1,
    shape=_quantize_shape,
    device="x.device",
    tensors=("x", "noop_flag", "amax", "rng_state"),
    quantizers=("quantizer",),
    options=("usage",),
    sizes={"k": "x.shape[-1]"},
    facts=(Fact("out", "(out is not None)"),),
    mutates=("out", "quantizer.amax"),
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
        quantizer: the cast; a `DelayedQuantizer` with `amax` set has max |x| accumulated into it.
        usage: ``row``, ``column`` or ``both``: which copies to make (`Quantized`).
        out: a `Quantized` of matching shapes to write into and return.
        noop_flag: float32 (1,); where it is nonzero `out` is left as it is (weight caching under CUDA graphs).
            Requires `out`.
        amax: float32 (1,): for a `CurrentQuantizer`, use this amax (already reduced across ranks, say) and do not
            compute it; for an `NVFP4Quantizer` likewise the tensor's amax.
        rng_state: int64 (2,), reserved for stochastic rounding; None rounds to nearest even.

    Returns:
        `Quantized` with canonical scales, fresh memory unless `out` was given.

    Raises:
        ValueError: a usage that is none of the three, or a shape or dtype that is not served; names the argument.
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
    tensors=("x",),
    quantizers=("quantizer",),
    options=("usage",),
    dtypes=("bias_dtype",),
    sizes={"k": "x.shape[-1]"},
    mutates=("quantizer.amax",),
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
    operands=("x",),
    dtypes=("dtype",),
    facts=(Fact("x.usage", "('row' if x.row_data is not None else 'column')"),),
)
def dequantize(x: Quantized, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """High-precision values of a `Quantized`, of its logical shape: RN_dtype(RN32(decode(data) * scale_inv)).

    Reads the row-wise copy, or the column-wise one where that is all there is. nvfp4 multiplies
    decode(scale_inv) * global_scale_inv first, rounded to fp32.

    Args:
        dtype: float32, bfloat16 or float16; None for the nominal dtype.
    """
    raise NotImplementedError


def _transpose_shape(x: Any) -> Quantized:
    import torch

    from te_dispatch.numerics.quantized import FakeQuantized
    from te_dispatch.ops.shapes import data_shapes, scale_shapes

    data = torch.empty(data_shapes(x.shape, x.scaling)[1], dtype=torch.uint8, device=x.device)
    scale = x.row_scale_inv
    if x.scaling == "block_2d":
        scale = torch.empty(scale_shapes(x.shape, x.scaling)[1], dtype=scale.dtype, device=x.device)
    return FakeQuantized(
        x.row_data, data, x.row_scale_inv, scale, x.encoding, x.scaling, x.scale_layout, x.shape, x.dtype, x.device
    )


@operator(family="quantize", version=1, shape=_transpose_shape, device="x.device", operands=("x",))
def transpose_quantized(x: Quantized) -> Quantized:
    """Add the column-wise copy to a row-wise one by moving bytes: exact for ``tensor`` and ``block_2d`` scaling.

    Args:
        x: with row_data, canonical scales.

    Returns:
        A record that shares x's row-wise tensors and has col_data (K, M).

    Raises:
        ValueError: for ``block_1d``, ``mxfp8`` and ``nvfp4``, whose column-wise copy has other scales and must come
            from the high-precision input.
    """
    raise NotImplementedError


def _relayout_shape(x: Any, *, scale_layout: str) -> Quantized:
    raise NotImplementedError(f"the shape of scale layout {scale_layout!r} is known to its implementation only")


@operator(
    family="quantize",
    version=1,
    shape=_relayout_shape,
    device="x.device",
    operands=("x",),
    options=("scale_layout",),
    facts=(Fact("x.scale_layout", "x.scale_layout"),),
)
def relayout_scales(x: Quantized, *, scale_layout: str) -> Quantized:
    """The same values with scales in another layout.

    Args:
        x: any scale layout.
        scale_layout: ``canonical`` or one of

            ``gemm_1d``: block_1d scales transposed and padded for block-scaled GEMM libraries: row-wise
            (ceil(K/128), roundup(M, 4)), column-wise (ceil(M/128), roundup(K, 4)); padding is zero.
            ``gemm_2d``: block_2d scales, rows padded: row-wise (ceil(M/128), roundup(ceil(K/128), 4)), column-wise
            (ceil(K/128), roundup(ceil(M/128), 4)); padding is zero.
            ``swizzled_32x4x4``: mxfp8 and nvfp4 scales as cuBLASLt tiles them: 128x4 tiles of scales, each stored as
            32x4x4 (scale (r, c) of a tile at ((r % 32) * 4 + r // 32) * 4 + c), tiles row-major, padding zero.

    Returns:
        A record that shares x's data.
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
    tensors=("x",),
    options=("usage",),
    facts=(
        Fact("splits", "len(splits)", "size", "how many splits"),
        Fact("quantizers", "(quantizers[0].kind if quantizers else None)", doc="kind of the quantizers"),
        Fact("quantizers.encoding", "(quantizers[0].encoding if quantizers else None)", "dtype"),
    ),
)
def split_quantize(
    x: torch.Tensor, splits: Sequence[int], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Split the rows of x (M, K) and cast every part with its own quantizer, as for a grouped GEMM.

    Args:
        splits: rows of each part, host integers that add up to M; zeros are allowed.
        quantizers: one each, all of one kind and encoding.
    """
    raise NotImplementedError


@operator(
    family="quantize",
    version=1,
    shape=lambda xs, quantizers, *, usage: [
        empty_quantized(tuple(x.shape), q, usage, x.dtype, x.device) for x, q in zip(xs, quantizers)
    ],
    device="xs[0].device",
    options=("usage",),
    facts=(
        Fact("xs", "len(xs)", "size", "how many tensors"),
        Fact("xs.dtype", "xs[0].dtype", "dtype"),
        Fact("quantizers", "quantizers[0].kind", doc="kind of the quantizers"),
        Fact("quantizers.encoding", "quantizers[0].encoding", "dtype"),
    ),
)
def multi_tensor_quantize(
    xs: Sequence[torch.Tensor], quantizers: Sequence[Quantizer], *, usage: str
) -> list[Quantized]:
    """Cast many tensors in as few launches as possible. Each result equals `quantize` of that tensor, bit for bit.

    Args:
        xs: at least one tensor; one device, one dtype.
        quantizers: one each, all of one kind and encoding.
    """
    raise NotImplementedError


def _scalar_shape(x: Any, **_: Any) -> torch.Tensor:
    import torch

    return torch.empty((1,), dtype=torch.float32, device=x.device)


@operator(
    family="quantize",
    version=1,
    shape=lambda x, *, out=None: out if out is not None else _scalar_shape(x),
    device="x.device",
    tensors=("x", "out"),
    mutates=("out",),
)
def compute_amax(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """max |x| as float32 (1,): NaN ignored, Inf kept, 0 for an empty tensor.

    Args:
        x: any shape, float32, bfloat16 or float16.
        out: float32 (1,) to overwrite and return.
    """
    raise NotImplementedError


def _partial_amax_shape(x: Any, amax: torch.Tensor, **_: Any) -> torch.Tensor:
    return amax


@operator(
    family="quantize",
    version=1,
    shape=_partial_amax_shape,
    device="x.device",
    tensors=("x", "amax"),
    options=("block",),
    sizes={"height": "height", "width": "width", "start": "start"},
    mutates=("amax",),
)
def partial_amax(
    x: torch.Tensor, amax: torch.Tensor, *, height: int, width: int, start: int, block: int
) -> torch.Tensor:
    """Max-accumulate the block amaxes of a shard of a flattened matrix, as sharded optimizers need.

    Args:
        x: (N,), elements ``start .. start + N`` of the row-major (height, width) matrix.
        amax: float32 (ceil(height/block), ceil(width/block)), updated in place; blocks the shard misses keep theirs.
        block: 128 for block_2d; the whole matrix when 0 (then amax is (1, 1)).

    Returns:
        amax.
    """
    raise NotImplementedError


def _partial_cast_shape(x: Any, out: torch.Tensor, scale: Any, **_: Any) -> torch.Tensor:
    return out


@operator(
    family="quantize",
    version=1,
    shape=_partial_cast_shape,
    device="x.device",
    tensors=("x", "out"),
    options=("block",),
    dtypes=("encoding",),
    sizes={"height": "height", "width": "width", "start": "start"},
    mutates=("out",),
)
def partial_cast(
    x: torch.Tensor,
    out: torch.Tensor,
    scale: torch.Tensor,
    *,
    height: int,
    width: int,
    start: int,
    block: int,
    encoding: str,
) -> torch.Tensor:
    """Cast a shard of a flattened matrix with the blocks' scales.

    Args:
        x: (N,), elements ``start .. start + N`` of the row-major (height, width) matrix.
        out: uint8 (N,), overwritten.
        scale: float32 (ceil(height/block), ceil(width/block)), or (1, 1) when block is 0.
        encoding: target encoding.

    Returns:
        out.
    """
    raise NotImplementedError


def _update_shape(*_: Any, **__: Any) -> None:
    return None


@operator(
    family="quantize",
    version=1,
    shape=_update_shape,
    device="histories[0].device",
    options=("algorithm", "margin"),
    facts=(
        Fact("histories", "len(histories)", "size", "how many histories"),
        Fact("scales", "len(scales)", "size"),
        Fact("max_values", "len(max_values)", "size"),
        Fact("amaxes", "(amaxes is not None)"),
    ),
    mutates=("histories", "scales", "amaxes"),
)
def update_delayed_scales(
    histories: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    max_values: Sequence[Sequence[float]],
    *,
    algorithm: str = "max",
    margin: int = 0,
    amaxes: Sequence[torch.Tensor] | None = None,
) -> None:
    """End-of-step update of delayed scaling, all histories in as few launches as possible, in place.

    For each tensor (column) of each history: amax = max over the history, NaN ignored (``max``), or row 0
    (``most_recent``); scale = RN32(RN32(max_value * 2^-margin) / amax). An amax of 0, Inf or NaN keeps the old scale;
    an infinite scale becomes the largest float32. Then the history rolls by one (row i takes row i+1, the last takes
    row 0) and row 0 is cleared. A column whose row 0 equals 0 saw no cast: it neither rolls nor rescales.

    Args:
        histories: float32 (length, n_i), at least one; row 0 is what the casts of this step accumulated.
        scales: float32 (n_i,).
        max_values: n_i numbers each: where each tensor's cast saturates.
        algorithm: ``max`` or ``most_recent``.
        margin: power of two the scale backs off by.
        amaxes: float32 (n_i,): receive the amax behind every scale that changes. What crosses between encodings is
            the amax: a scale made for another maximum cannot be rebuilt from its inverse by bits.
    """
    raise NotImplementedError


def _convert_shape(x: Any, *, encoding: str, **_: Any) -> Quantized:
    import torch

    from te_dispatch.numerics.quantized import FakeQuantized

    def like(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else torch.empty_like(t)

    row_scale = like(x.row_scale_inv)
    col_scale = row_scale if x.col_scale_inv is x.row_scale_inv else like(x.col_scale_inv)
    return FakeQuantized(
        like(x.row_data), like(x.col_data), row_scale, col_scale, encoding, x.scaling, x.scale_layout, x.shape,
        x.dtype, x.device,
    )  # fmt: skip


@operator(
    family="quantize",
    version=1,
    shape=_convert_shape,
    device="x.device",
    operands=("x",),
    tensors=("count",),
    options=("overflow",),
    dtypes=("encoding",),
    mutates=("count",),
)
def convert_encoding(
    x: Quantized, *, encoding: str, overflow: str = "saturate", count: torch.Tensor | None = None
) -> Quantized:
    """Re-tag and, where codes differ, rewrite FP8 data between the OCP and FNUZ forms of one format.

    The same byte reads half as much in FNUZ, so scale_inv doubles (OCP to FNUZ) or halves. OCP to FNUZ is exact for
    finite codes; -0 becomes +0; NaN (and e5m2's Inf) becomes 80. FNUZ to OCP is exact below the common maximum; the
    codes beyond it (e4m3fnuz 7F and FF, +-240) have no OCP counterpart: ``saturate`` gives the largest finite value
    and adds to `count`, ``error`` raises.

    Args:
        x: ``tensor`` or block scaling with fp32 scales.
        encoding: the other form of x's format.
        overflow: ``saturate`` or ``error``.
        count: int64 (1,), incremented by the number of saturated values (row-wise copy if there is one).

    Raises:
        ValueError: formats differ (e4m3 to e5m2), or ``error`` met a code that does not convert.
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
    tensors=("x",),
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
    tensors=("x",),
    facts=(Fact("splits", "len(splits)", "size"), Fact("padded_splits", "len(padded_splits)", "size")),
)
def unpad_rows(x: torch.Tensor, splits: Sequence[int], padded_splits: Sequence[int]) -> torch.Tensor:
    """Undo `pad_rows`: (sum(padded_splits), K) -> (sum(splits), K)."""
    raise NotImplementedError
