# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""What a `QuantizedTensor` holds, under the names of Transformer Engine's tensor classes.

There each format has a class with tensors as attributes. Here one class stands for all formats. These properties show
its tensors under those names, for the formats that have them there; for others they raise AttributeError, so that
``hasattr`` answers as there. They cannot be assigned. What is written into the tensors themselves is in the quantized
tensor, because no property copies, but for the amaxes of NVFP4, which are computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_dispatch import ops
from te_dispatch.numerics.quantized import CANONICAL_SCALES, NVFP4_SCALINGS
from te_dispatch.numerics.quantizers import NVFP4FourOverSixQuantizer

if TYPE_CHECKING:
    from te_dispatch.numerics import quantizers as records
    from te_dispatch.pytorch.tensor.dtypes import DType
    from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor
    from te_dispatch.pytorch.tensor.quantizer import Quantizer

#: Scalings whose column-wise copy is the row-wise one with its bytes moved.
TRANSPOSABLE = ("tensor", "block_2d")


class QuantizedParts:
    """Mixin of `QuantizedTensor`."""

    shape: torch.Size
    _row_data: torch.Tensor | None
    _col_data: torch.Tensor | None
    _row_scale_inv: torch.Tensor | None
    _col_scale_inv: torch.Tensor | None
    _global_scale_inv: torch.Tensor | None
    _quantizer: records.Quantizer | None
    _encoding: str
    _scaling: str
    _scale_layout: str

    # -- FP8 with one scale per tensor ----------------------------------------------------------------------------

    @property
    def _data(self) -> torch.Tensor | None:
        """uint8, of the tensor's shape; None without a row-wise copy."""
        self._require("_data", "tensor")
        return self._row_data if self._row_data is None or self.shape else self._row_data.view(())

    @property
    def _transpose(self) -> torch.Tensor | None:
        """uint8, of the tensor's shape with the last dimension first; None without a column-wise copy."""
        self._require("_transpose", "tensor")
        return self._last_first(self._col_data)

    @property
    def _transpose_invalid(self) -> bool:
        """Whether there is no column-wise copy. One that is there is never out of date."""
        self._require("_transpose_invalid", "tensor")
        return self._col_data is None

    @property
    def _scale_inv(self) -> torch.Tensor | None:
        """float32 (1,)."""
        self._require("_scale_inv", "tensor")
        return self._row_scale_inv if self._row_scale_inv is not None else self._col_scale_inv

    # -- Formats with scales of blocks ----------------------------------------------------------------------------

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        """uint8, of the tensor's shape; NVFP4 packs two values of the last dimension in a byte."""
        self._require_blocks("_rowwise_data")
        return self._row_data

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        """uint8: MXFP8 of the tensor's shape, blocks of 128 with the last dimension first; NVFP4, too, two values of
        the dimension that is the last one then in a byte, or (K, M/2) where that dimension is odd."""
        self._require_blocks("_columnwise_data")
        return self._col_data if self._scaling == "mxfp8" else self._last_first(self._col_data)

    @property
    def _rowwise_scale_inv(self) -> torch.Tensor | None:
        """Scales by block, indexed as there but without padding: blocks of 128 float32, (ceil(K/128), M) or, in two
        dimensions, (ceil(M/128), ceil(K/128)); MXFP8 uint8 (M, K/32); NVFP4 uint8 (M, K/16).

        Raises:
            RuntimeError: they lie as one kernel reads them (`te_dispatch.ops.relayout_scales`).
        """
        return self._block_scales("_rowwise_scale_inv", self._row_scale_inv)

    @property
    def _columnwise_scale_inv(self) -> torch.Tensor | None:
        """As `_rowwise_scale_inv`: blocks of 128 (ceil(M/128), K) or (ceil(K/128), ceil(M/128)); MXFP8 (M/32, K); NVFP4
        (K, M/16)."""
        return self._block_scales("_columnwise_scale_inv", self._col_scale_inv)

    @property
    def _is_2D_scaled(self) -> bool:
        """Whether blocks of 128 are 128x128."""
        self._require("_is_2D_scaled", "block_1d", "block_2d")
        return self._scaling == "block_2d"

    @property
    def _fp8_dtype(self) -> DType:
        """E4M3 or E5M2; FNUZ encodings count as theirs."""
        self._require("_fp8_dtype", "tensor", "block_1d", "block_2d", "mxfp8")
        from te_dispatch.pytorch.tensor.dtypes import DType  # not before: that room imports QuantizedTensor

        return DType.kFloat8E4M3 if self._encoding.startswith("e4m3") else DType.kFloat8E5M2

    @property
    def _fp4_dtype(self) -> DType:
        self._require("_fp4_dtype", *NVFP4_SCALINGS)
        from te_dispatch.pytorch.tensor.dtypes import DType

        return DType.kFloat4E2M1

    # -- NVFP4 ----------------------------------------------------------------------------------------------------

    @property
    def _row_scaled_nvfp4(self) -> bool:
        """False: NVFP4 has one scale per tensor beside those of its blocks."""
        self._require("_row_scaled_nvfp4", *NVFP4_SCALINGS)
        return False

    @property
    def _nvfp4_use_4over6(self) -> bool:
        """Whether blocks may map their largest value to 4 in place of 6; False where no quantizer is known."""
        self._require("_nvfp4_use_4over6", *NVFP4_SCALINGS)
        return isinstance(self._quantizer, NVFP4FourOverSixQuantizer)

    @property
    def _nvfp4_e4m3_max(self) -> int:
        """What the scales of blocks that map to 6 reach up to: 448, or 256 if the quantizer says so."""
        self._require("_nvfp4_e4m3_max", *NVFP4_SCALINGS)
        quantizer = self._quantizer
        return quantizer.scale_max if isinstance(quantizer, NVFP4FourOverSixQuantizer) else 448

    @property
    def _amax_rowwise(self) -> torch.Tensor | None:
        """float32 (1,): the amax that the tensor's scale stands for, ``6 * _nvfp4_e4m3_max * scale``. It differs from
        the amax of the values by the scale's rounding, and is ``6 * _nvfp4_e4m3_max`` for a tensor of zeros. Computed
        by every call; None without a row-wise copy."""
        return self._amax_of("_amax_rowwise", self._row_data, 0)

    @property
    def _amax_columnwise(self) -> torch.Tensor | None:
        """As `_amax_rowwise`, of the column-wise copy, which is another matrix where it was rotated."""
        return self._amax_of("_amax_columnwise", self._col_data, -1)

    def _amax_of(self, name: str, data: torch.Tensor | None, place: int) -> torch.Tensor | None:
        self._require(name, *NVFP4_SCALINGS)
        if data is None or self._global_scale_inv is None:
            return None
        return self._global_scale_inv[place].reshape(1) * (6 * self._nvfp4_e4m3_max)

    def _last_first(self, data: torch.Tensor | None) -> torch.Tensor | None:
        """A column-wise copy, (K, M) or (K, M/2), with the dimensions that M stands for."""
        if data is None or len(self.shape) == 2:
            return data
        if len(self.shape) < 2:
            return data.view(self.shape)
        *leading, last, columns = self.shape
        packed = self._scaling in NVFP4_SCALINGS
        if packed and last % 2:
            return data
        return data.view(columns, *leading, last // 2 if packed else last)

    def _require(self, name: str, *scalings: str) -> None:
        if self._scaling not in scalings:
            raise AttributeError(f"a QuantizedTensor with {self._scaling} scaling has no attribute {name!r}")

    def _require_blocks(self, name: str) -> None:
        self._require(name, "block_1d", "block_2d", "mxfp8", *NVFP4_SCALINGS)

    def _block_scales(self, name: str, scales: torch.Tensor | None) -> torch.Tensor | None:
        self._require_blocks(name)
        if scales is not None and self._scale_layout != CANONICAL_SCALES:
            raise RuntimeError(
                f"{name}: the scales lie as {self._scale_layout!r}: take "
                f'te_dispatch.ops.relayout_scales(x.record, scale_layout="{CANONICAL_SCALES}")'
            )
        return scales.t() if scales is not None and self._scaling == "block_1d" else scales

    # -- methods --------------------------------------------------------------------------------------------------

    def _get_quantizer(self: Any) -> Quantizer:
        """What casts values that are written to this tensor, with the copies that it has; made anew by every call."""
        from te_dispatch.pytorch.tensor.aten import own_quantizer
        from te_dispatch.pytorch.tensor.quantizers import as_quantizer

        made = as_quantizer(own_quantizer(self))
        made.set_usage(**self.get_usages())
        return made

    def quantize_(self: Any, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> QuantizedTensor:
        """Cast a tensor of this one's shape into this one; autograd does not see it.

        Args:
            noop_flag: float32 (1,): nonzero leaves this as it is. None casts.

        Raises:
            ValueError: another shape, or this is a slice of another.
        """
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self  # type: ignore[no-any-return]

    def get_usages(self) -> dict[str, bool]:
        """``rowwise`` and ``columnwise``: which copies there are."""
        return {"rowwise": self._row_data is not None, "columnwise": self._col_data is not None}

    def update_usage(self: Any, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None) -> None:
        """Drop the copies that are not wanted, and make a column-wise one of the row-wise one where it can be had.

        Args:
            rowwise_usage, columnwise_usage: whether the copy is to be there; None leaves it as it is.

        Raises:
            RuntimeError: a copy that can only be cast from the values from before the cast, or no copy is left; nothing
                is changed.
        """
        there = self.get_usages()
        rows = there["rowwise"] if rowwise_usage is None else bool(rowwise_usage)
        columns = there["columnwise"] if columnwise_usage is None else bool(columnwise_usage)
        if not (rows or columns):
            raise RuntimeError(f"{self!r}.update_usage: no copy would be left; keep one of the two")
        if rows and not there["rowwise"]:
            raise RuntimeError(f"{self!r}.update_usage: a row-wise copy cannot be made of the column-wise one")
        if columns and not there["columnwise"]:
            if self._scaling not in TRANSPOSABLE:
                raise RuntimeError(
                    f"{self!r}.update_usage: with {self._scaling} scaling a column-wise copy cannot be made of the "
                    "row-wise one; cast with both"
                )
            made = ops.transpose_quantized(self.record)
            self._col_data, self._col_scale_inv = made.col_data, made.col_scale_inv
        if not rows:
            self._row_data = self._row_scale_inv = None
        if not columns:
            self._col_data = self._col_scale_inv = None

    def to_dtype(self: Any, dtype: torch.dtype) -> QuantizedTensor:
        """A tensor of the same data with another nominal dtype; autograd does not see it."""
        from te_dispatch.pytorch.tensor.quantized_tensor import as_tensor

        record = self.record
        record.dtype = dtype
        made = as_tensor(record, self._quantizer, self.shape)
        made._whole = self._whole
        return made
