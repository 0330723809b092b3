# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`Quantized`: a quantized tensor as a plain record, the currency between operators.

A record and not a tensor subclass, because a subclass costs ten times as much to build.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Values of `Quantized.scaling`.
SCALINGS = ("tensor", "block_1d", "block_2d", "mxfp8", "nvfp4", "nvfp4_rht")

#: Those of 4-bit values, with a scale of the whole tensor besides those of blocks.
NVFP4_SCALINGS = ("nvfp4", "nvfp4_rht")

#: The layout of scales every implementation can produce and read: compact, row-major in logical block order.
CANONICAL_SCALES = "canonical"

#: PyTorch's class of tensors that imitate a device. A record of such is on no device, whichever class made it.
_FAKE = "FakeTensor"


class Quantized:
    """A quantized matrix and, optionally, its column-wise copy.

    With the logical tensor flattened to (M, K), where K is its last dimension:

    ==========  ===========================  ==================================  ==============================
    scaling     row_data / row_scale_inv     col_data / col_scale_inv            scale_inv dtype
    ==========  ===========================  ==================================  ==============================
    tensor      (..., K) / (1,)              (K, M), transposed / (1,)           float32
    block_1d    (..., K) / (M, ceil(K/128))  (K, M), transposed / (K, ceil(M/128))  float32
    block_2d    (..., K) / (ceil(M/128), ceil(K/128))  (K, M), transposed / (ceil(K/128), ceil(M/128))  float32
    mxfp8       (..., K) / (M, ceil(K/32))   (M, K), untransposed / (ceil(M/32), K)  uint8, E8M0 exponents
    nvfp4       (..., K/2) / (M, ceil(K/16))  (K, M/2), transposed / (K, ceil(M/16))  uint8, e4m3fn codes
    nvfp4_rht   as nvfp4                     as nvfp4, of rotated values         uint8, e4m3fn codes
    ==========  ===========================  ==================================  ==============================

    Data is uint8: the encoding is a tag here, not a dtype, because PyTorch's float8 dtypes round-trip NaN and -0
    differently between releases. FP4 packs two values a byte, the even column in the low nibble. A value reads
    ``decode(data) * scale_inv`` (for nvfp4 ``decode(data) * decode(scale_inv) * global_scale_inv``). Row- and
    column-wise copies of block scalings are quantized independently from the high-precision input, but for tiles.

    The column-wise copy of nvfp4_rht holds the matrix rotated along M (`te_dispatch.numerics.hadamard`): operators take
    it one copy at a time (`single_copy`), and it stands for the tensor only in a product with another rotated one.

    Attributes:
        row_data, col_data: uint8 tensors, each may be None.
        row_scale_inv, col_scale_inv: as the table says when `scale_layout` is ``canonical``; fresh for every cast,
            never an alias of a quantizer's state.
        encoding: how the bytes read (`te_dispatch.numerics.encodings`).
        scaling: one of `SCALINGS`.
        scale_layout: ``canonical``, or the name of a layout an implementation asked for (`relayout_scales`).
        shape: logical shape, a tuple of int.
        dtype: nominal dtype, the high-precision dtype the record stands for.
        device: where the data lies.
        global_scale_inv: nvfp4: float32 (1,), shared by the whole tensor. nvfp4_rht: float32 (2,), of the row-wise
            copy and of the column-wise one; 0 for a copy that was not made.
    """

    __slots__ = (
        "row_data",
        "col_data",
        "row_scale_inv",
        "col_scale_inv",
        "encoding",
        "scaling",
        "scale_layout",
        "shape",
        "dtype",
        "device",
        "global_scale_inv",
    )

    def __init__(
        self,
        row_data: torch.Tensor | None,
        col_data: torch.Tensor | None,
        row_scale_inv: torch.Tensor | None,
        col_scale_inv: torch.Tensor | None,
        encoding: str,
        scaling: str,
        scale_layout: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        global_scale_inv: torch.Tensor | None = None,
    ) -> None:
        self.row_data = row_data
        self.col_data = col_data
        self.row_scale_inv = row_scale_inv
        self.col_scale_inv = col_scale_inv
        self.encoding = encoding
        self.scaling = scaling
        self.scale_layout = scale_layout
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.global_scale_inv = global_scale_inv

    def __repr__(self) -> str:
        copies = [name for name in ("row", "column") if getattr(self, f"{name[:3]}_data") is not None]
        return (
            f"Quantized({'x'.join(map(str, self.shape))}, {self.encoding}, {self.scaling}, "
            f"{'+'.join(copies) or 'empty'}, {self.scale_layout} scales, {self.dtype}, {self.device})"
        )

    @property
    def is_cpu(self) -> bool:
        data = self.row_data if self.row_data is not None else self.col_data
        return data is not None and data.is_cpu and data.__class__.__name__ != _FAKE

    @property
    def is_cuda(self) -> bool:
        data = self.row_data if self.row_data is not None else self.col_data
        return data is not None and data.is_cuda and data.__class__.__name__ != _FAKE

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def rows(self) -> int:
        """M: the product of all dimensions but the last."""
        return row_count(self)


def row_count(x: torch.Tensor | Quantized) -> int:
    """The rows of a matrix whose leading dimensions flatten: the product of all dimensions but the last."""
    m = 1
    for size in x.shape[:-1]:
        m *= size
    return m


def row_parts(a: Operand, rows: Sequence[int]) -> Sequence[Operand]:
    """The rows of each group: x[0:rows[0]], and so on. A record's parts share its scale.

    Raises:
        ValueError: a record whose blocks' scales cannot be dealt out; the message names the argument, ``a``.
    """
    counts = list(rows)
    if not isinstance(a, Quantized):
        return a.split_with_sizes(counts)
    if a.scaling != "tensor":  # a block of its column-wise copy may span two groups
        raise ValueError(
            f"a: got one tensor with {a.scaling} scaling to split, expected tensor scaling, or one per group"
        )
    row: Sequence[torch.Tensor | None] = [None] * len(counts)
    column: Sequence[torch.Tensor | None] = row
    if a.row_data is not None:
        row = a.row_data.split_with_sizes(counts)
    if a.col_data is not None:
        column = a.col_data.split_with_sizes(counts, 1)
    return [
        Quantized(
            row[i], column[i], a.row_scale_inv, a.col_scale_inv, a.encoding, a.scaling, a.scale_layout,
            (count, a.shape[1]), a.dtype, a.device,
        )
        for i, count in enumerate(counts)
    ]  # fmt: skip


def single_copy(x: Quantized, side: str) -> Quantized:
    """The row-wise (``row``) or column-wise (``column``) copy of an nvfp4_rht record, as an nvfp4 record of its own.

    The row-wise one holds the tensor's values. The column-wise one holds rotated values: multiply it with another
    rotated one, along the rows of both. Its tensors share the memory of x's.

    Raises:
        ValueError: x has another scaling, or lacks the copy.
    """
    if x.scaling != "nvfp4_rht" or x.global_scale_inv is None:
        raise ValueError(f"x: got {x.scaling} scaling, expected nvfp4_rht")
    column = side == "column"
    data, scale = (x.col_data, x.col_scale_inv) if column else (x.row_data, x.row_scale_inv)
    if data is None:
        raise ValueError(f"x: has no {side}-wise copy, got {x!r}")
    whole = x.global_scale_inv[1:] if column else x.global_scale_inv[:1]
    tags = (x.encoding, "nvfp4", x.scale_layout, x.shape, x.dtype, x.device, whole)
    return Quantized(None, data, None, scale, *tags) if column else Quantized(data, None, scale, None, *tags)


class FakeQuantized(Quantized):
    """What a shape function returns: a `Quantized` of meta or fake tensors, which never reaches a backend."""

    __slots__ = ()


#: What a GEMM operand may be.
if TYPE_CHECKING:
    Operand = torch.Tensor | Quantized
