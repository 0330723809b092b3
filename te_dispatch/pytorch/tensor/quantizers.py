# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantizers with the arguments of Transformer Engine 2.20's.

Each says how tensors are cast; `Quantizer.cast` gives the record of `te_dispatch.numerics.quantizers` that operators
take. An argument acts as it does there, or is refused by name at the constructor.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.numerics import quantizers as records
from te_dispatch.numerics.encodings import device_encoding
from te_dispatch.pytorch.arguments import reject_unsupported
from te_dispatch.pytorch.tensor.dtypes import DType, fp8_family
from te_dispatch.pytorch.tensor.quantizer import Quantizer


class Float8Quantizer(Quantizer):
    """FP8 with one scale per tensor, given and updated by whoever makes the quantizer.

    Casts read `scale` and raise `amax` to the largest magnitude that they saw. Nothing here changes the scale:
    `te_dispatch.common.recipe.DelayedScaling` keeps scales of its own up to date.

    Args:
        scale: float32, (1,) or (), what values are multiplied by before the cast. amax: likewise.
        fp8_dtype: `DType` or a dtype of PyTorch; the device decides between its OCP and FNUZ encodings.
        rowwise, columnwise: as in `Quantizer`.

    Raises:
        TypeError, ValueError: another scale, amax or fp8_dtype.
    """

    def __init__(
        self, scale: torch.Tensor, amax: torch.Tensor, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        for name, value in (("scale", scale), ("amax", amax)):
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"Float8Quantizer: {name} must be a tensor, got {value!r}")
            if value.shape not in ((1,), ()) or value.dtype != torch.float32:
                raise ValueError(
                    f"Float8Quantizer: {name} must be float32 of shape (1,) or (), got {value.dtype}, "
                    f"{tuple(value.shape)}"
                )
        self._family = fp8_family("Float8Quantizer", fp8_dtype)
        self.scale = scale
        self.amax = amax
        self.dtype = fp8_dtype

    def cast(self, encodings: tuple[str, ...], common: bool) -> records.Quantizer:
        encoding = device_encoding(self._family, encodings)
        scale, amax = (value if value.dim() else value.view(1) for value in (self.scale, self.amax))
        return records.DelayedQuantizer(encoding, common, scale, amax)


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 with one scale per tensor, from that tensor's largest magnitude.

    Args:
        fp8_dtype: as in `Float8Quantizer`. device: no effect, casts run where the tensor is.
        rowwise, columnwise: as in `Quantizer`.
        force_pow_2_scales: round scales down to powers of two. amax_epsilon: floor under the largest magnitude.
        amax_reduction_group: only matters with `with_amax_reduction`.
        use_existing_amax, with_amax_reduction, scale, amax: not supported yet.

    Raises:
        NotImplementedError: an argument not supported yet; names it. ValueError: another fp8_dtype.
    """

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        given = locals()
        reject_unsupported(
            "Float8CurrentScalingQuantizer",
            given,
            {"use_existing_amax": False, "with_amax_reduction": False, "scale": None, "amax": None},
        )
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._family = fp8_family("Float8CurrentScalingQuantizer", fp8_dtype)
        self.dtype = fp8_dtype
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = _epsilon("Float8CurrentScalingQuantizer", amax_epsilon)

    def cast(self, encodings: tuple[str, ...], common: bool) -> records.Quantizer:
        return records.CurrentQuantizer(
            device_encoding(self._family, encodings), common, self.force_pow_2_scales, self.amax_epsilon
        )


class MXFP8Quantizer(Quantizer):
    """FP8 with one power-of-two scale per 32 values of the contracted dimension.

    Args:
        fp8_dtype: as in `Float8Quantizer`. rowwise, columnwise: as in `Quantizer`.
        with_2d_quantization: one scale per 32x32 values, so that both copies hold the same codes.

    Raises:
        ValueError: another fp8_dtype.
    """

    def __init__(
        self, fp8_dtype: Any, *, rowwise: bool = True, columnwise: bool = True, with_2d_quantization: bool = False
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._family = fp8_family("MXFP8Quantizer", fp8_dtype)
        self.dtype = fp8_dtype
        self.with_2d_quantization = bool(with_2d_quantization)

    def cast(self, encodings: tuple[str, ...], common: bool) -> records.Quantizer:
        record = records.MXFP8TileQuantizer if self.with_2d_quantization else records.MXFP8Quantizer
        return record(device_encoding(self._family, encodings), common)


class Float8BlockQuantizer(Quantizer):
    """FP8 with one scale per 1x128 values (`block_scaling_dim` 1) or 128x128 (2).

    Args:
        fp8_dtype: as in `Float8Quantizer`. rowwise, columnwise: as in `Quantizer`.
        amax_epsilon, force_pow_2_scales: as in `Float8CurrentScalingQuantizer`.
        block_scaling_dim: 1 or 2. Two operands of one product cannot both have 2.

    Raises:
        ValueError: another fp8_dtype, amax_epsilon or block_scaling_dim.
    """

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"Float8BlockQuantizer: block_scaling_dim must be 1 or 2, got {block_scaling_dim!r}")
        self._family = fp8_family("Float8BlockQuantizer", fp8_dtype)
        self.dtype = fp8_dtype
        self.block_len = records.BLOCK["block_1d"]
        self.force_pow_2_scales = bool(force_pow_2_scales)
        self.amax_epsilon = _epsilon("Float8BlockQuantizer", amax_epsilon)
        self.block_scaling_dim = block_scaling_dim

    def cast(self, encodings: tuple[str, ...], common: bool) -> records.Quantizer:
        return records.BlockQuantizer(
            device_encoding(self._family, encodings),
            common,
            self.block_scaling_dim == 2,
            self.force_pow_2_scales,
            self.amax_epsilon,
        )


class NVFP4Quantizer(Quantizer):
    """E2M1 with an E4M3 scale per 16 values and one float32 scale per tensor.

    Args:
        fp4_dtype: `DType.kFloat4E2M1`. rowwise, columnwise: as in `Quantizer`.
        with_rht, with_post_rht_amax: rotate blocks of 16 in the column-wise copy by a random Hadamard matrix, and scale
            that copy by what it is then. Both or neither, because the rotated copy has no other scale here.
        with_2d_quantization: one scale per 16x16 values, without `with_rht`.
        stochastic_rounding: for gradients.
        nvfp4_use_4over6: blocks map their largest value to 4 where that leaves a smaller error than 6; without
            `with_rht` and `stochastic_rounding`.
        nvfp4_e4m3_max: what the scales of blocks that map to 6 reach up to, 256 or 448; 448 without `nvfp4_use_4over6`.
        nvfp4_4over6_err_mode: errors are compared by the sum of their magnitudes, ``MAE``, or squares, ``MSE``.
        amax_reduction_group: only matters with `with_amax_reduction`; with_random_sign_mask: with `with_rht`, where it
            must be True.
        with_amax_reduction, row_scaled_nvfp4: not supported yet.

    Raises:
        NotImplementedError: an argument, or a combination, not supported yet; names it.
        ValueError: another fp4_dtype, nvfp4_e4m3_max or nvfp4_4over6_err_mode.
    """

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        given = locals()
        only: dict[str, Any] = {"with_amax_reduction": False, "row_scaled_nvfp4": False, "with_post_rht_amax": with_rht}
        if with_rht:
            only |= {"with_2d_quantization": False, "nvfp4_use_4over6": False, "with_random_sign_mask": True}
        if nvfp4_use_4over6:
            only["stochastic_rounding"] = False
        else:
            only["nvfp4_e4m3_max"] = 448
        reject_unsupported("NVFP4Quantizer" + (" with with_rht=True" if with_rht else ""), given, only)
        if fp4_dtype != DType.kFloat4E2M1:
            raise ValueError(f"NVFP4Quantizer: fp4_dtype must be DType.kFloat4E2M1, got {fp4_dtype!r}")
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.dtype = DType.kFloat4E2M1
        self.with_rht = bool(with_rht)
        self.with_post_rht_amax = bool(with_post_rht_amax)
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.nvfp4_use_4over6 = bool(nvfp4_use_4over6)
        self.nvfp4_e4m3_max = nvfp4_e4m3_max
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode
        self.cast((), False)  # raises for values that no cast has

    @property
    def stochastic(self) -> bool:
        return self.stochastic_rounding

    def cast(self, encodings: tuple[str, ...], common: bool) -> records.Quantizer:
        if self.with_rht:
            return records.NVFP4HadamardQuantizer("e2m1", common)
        if self.nvfp4_use_4over6:
            how = (self.with_2d_quantization, self.nvfp4_e4m3_max, self.nvfp4_4over6_err_mode)
            return records.NVFP4FourOverSixQuantizer("e2m1", common, *how)
        return records.NVFP4Quantizer("e2m1", common, self.with_2d_quantization)


class IdentityQuantizer(Quantizer):
    """No cast: the tensor stays in high precision.

    Args:
        dtype: must be None, for the tensor's own. rowwise, columnwise: no effect.
    """

    def __init__(self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True) -> None:
        reject_unsupported("IdentityQuantizer", {"dtype": dtype}, {"dtype": None})
        super().__init__(rowwise=rowwise, columnwise=columnwise)

    def cast(self, encodings: tuple[str, ...], common: bool) -> None:
        return None


class HybridQuantizer(Quantizer):
    """Two casts of one tensor, row-wise and column-wise; not supported yet.

    Raises:
        NotImplementedError: always.
    """

    def __init__(
        self, *, rowwise_quantizer: Quantizer, columnwise_quantizer: Quantizer, columnwise_source: str = "original"
    ) -> None:
        raise NotImplementedError(
            "HybridQuantizer is not supported yet: both copies of a tensor come from one cast; use one of the other "
            "quantizers, and for a backward in high precision backward_override of CustomRecipe"
        )


def as_quantizer(record: records.Quantizer, stochastic: bool = False) -> Quantizer:
    """A quantizer that stands for an operator's; tensors are shared.

    Args:
        stochastic: whether the values are rounded stochastically.
    """
    both: dict[str, Any] = {"rowwise": True, "columnwise": True}
    if isinstance(record, records.NVFP4HadamardQuantizer):
        return NVFP4Quantizer(**both, with_rht=True, with_post_rht_amax=True, stochastic_rounding=stochastic)
    if isinstance(record, records.NVFP4Quantizer):
        return NVFP4Quantizer(**both, with_2d_quantization=record.two_d, stochastic_rounding=stochastic)
    if isinstance(record, records.NVFP4FourOverSixQuantizer):
        return NVFP4Quantizer(
            **both, with_2d_quantization=record.two_d, nvfp4_use_4over6=True, nvfp4_e4m3_max=record.scale_max,
            nvfp4_4over6_err_mode=record.error,
        )  # fmt: skip
    dtype = DType.kFloat8E4M3 if record.encoding.startswith("e4m3") else DType.kFloat8E5M2
    if isinstance(record, (records.MXFP8Quantizer, records.MXFP8TileQuantizer)):
        return MXFP8Quantizer(dtype, **both, with_2d_quantization=isinstance(record, records.MXFP8TileQuantizer))
    if isinstance(record, records.DelayedQuantizer):
        amax = torch.zeros_like(record.scale) if record.amax is None else record.amax
        return Float8Quantizer(record.scale, amax, dtype, **both)
    how: dict[str, Any] = {"force_pow_2_scales": record.power_of_two, "amax_epsilon": record.epsilon}
    if isinstance(record, records.BlockQuantizer):
        return Float8BlockQuantizer(dtype, **both, **how, block_scaling_dim=2 if record.two_d else 1)
    return Float8CurrentScalingQuantizer(dtype, None, **both, **how)


def _epsilon(owner: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{owner}: amax_epsilon must be a number that is not negative, got {value!r}")
    return float(value)
