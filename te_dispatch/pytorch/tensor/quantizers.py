# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Quantizers with the arguments of Transformer Engine 2.20's.

Each says how tensors are cast; `Quantizer.cast` gives the record of `te_dispatch.numerics.quantizers` that operators
take. An argument acts as it does there, or is refused by name at the constructor.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

from te_dispatch import ops
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics import quantizers as records
from te_dispatch.numerics.encodings import device_encoding
from te_dispatch.pytorch.arguments import reject_unsupported, resolve_device
from te_dispatch.pytorch.tensor.casting import rounded
from te_dispatch.pytorch.tensor.dtypes import DType, device_encodings, fp8_family
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor, as_tensor

_Self = TypeVar("_Self", bound="Quantizer")
#: (rowwise, columnwise) -> the usage that operators take.
_USAGES = {(True, True): "both", (True, False): "row", (False, True): "column"}


class Quantizer:
    """Base of all quantizers.

    Args:
        rowwise, columnwise: which copies `quantize` makes, at least one. A module that gets the quantizer from a
            factory makes the copies that its own products read, whatever these say, as in Transformer Engine.

    Attributes:
        rowwise_usage, columnwise_usage: these.
    """

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = bool(rowwise)
        self.columnwise_usage = bool(columnwise)

    @property
    def stochastic(self) -> bool:
        """Whether values are rounded stochastically."""
        return False

    def cast(self, encodings: tuple[str, ...], common: bool) -> records.Quantizer | None:
        """What operators take for this quantizer; None for no cast.

        Args:
            encodings: FP8 encodings of the device. common: `te_dispatch.numerics.quantizers` says.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: no operator casts as a quantizer of your own does; return one of "
            "te_dispatch.pytorch.tensor"
        )

    def quantize(
        self, tensor: torch.Tensor, *, out: Any = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor | torch.Tensor:
        """Cast a tensor under the policy in force; autograd does not see it.

        Args:
            tensor: floating-point; with one scale per tensor of any shape, () too, else of two dimensions or more.
            out: what `update_quantized` takes as `dst`.
            dtype: the nominal dtype of the result; None for the tensor's. Not with `out`, which has one.

        Raises:
            ValueError: neither copy is asked for; see `update_quantized` for `out`.
        """
        if out is not None:
            reject_unsupported(f"{type(self).__name__}.quantize with out", {"dtype": dtype}, {"dtype": None})
            return self.update_quantized(tensor, out)
        usage, x = self._usage("quantize"), tensor.detach()
        quantizer = self._on(x.device)
        if quantizer is None:
            return x if dtype is None else x.to(dtype)
        record = rounded(x if x.dim() else x.view(1), quantizer, usage, self.stochastic)
        if dtype is not None:
            record.dtype = dtype
        return as_tensor(record, quantizer, x.shape)

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor | torch.Tensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor | torch.Tensor:
        """Cast into a tensor that is there, all of its copies; autograd does not see it.

        Args:
            src: floating-point, of the shape of `dst`.
            dst: a `QuantizedTensor` of this quantizer's format; of `IdentityQuantizer`, an ordinary tensor.
            noop_flag: float32 (1,): nonzero leaves `dst` as it is. None casts.

        Returns:
            `dst`.

        Raises:
            ValueError: `dst` is of another kind, format or shape, or a slice of a `QuantizedTensor`.
        """
        name = f"{type(self).__name__}.update_quantized"
        x = src.detach()
        quantizer = self._on(x.device)
        if quantizer is None:
            if isinstance(dst, QuantizedTensor) or dst.shape != x.shape:
                got = f"a {type(dst).__name__} of shape {tuple(dst.shape)}"
                raise ValueError(f"{name}: dst: got {got}, expected an ordinary tensor of shape {tuple(x.shape)}")
            with torch.no_grad():
                dst.copy_(x if noop_flag is None else torch.where(noop_flag != 0, dst, x))
            return dst
        if not isinstance(dst, QuantizedTensor) or not dst._whole:
            got = "a slice" if isinstance(dst, QuantizedTensor) else f"a {type(dst).__name__}"
            raise ValueError(f"{name}: dst: got {got}, expected a QuantizedTensor that is no slice of another")
        if x.shape != dst.shape:
            raise ValueError(f"{name}: src: got shape {tuple(x.shape)}, expected that of dst, {tuple(dst.shape)}")
        record, x = dst.record, x if x.dim() else x.view(1)
        rows, columns = record.row_data is not None, record.col_data is not None
        rounded(x, quantizer, _USAGES[rows, columns], self.stochastic, record, noop_flag)
        return dst

    def make_empty(
        self,
        shape: Any,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor | torch.Tensor:
        """A tensor to cast into, with the copies that this quantizer makes; its contents are arbitrary.

        Args:
            shape: as `quantize` takes it. dtype: the nominal one. device: None for PyTorch's current accelerator,
                or the CPU where there is none.
            pin_memory: must be False.

        Raises:
            ValueError: neither copy is asked for. NotImplementedError: `pin_memory`.
        """
        reject_unsupported(f"{type(self).__name__}.make_empty", {"pin_memory": pin_memory}, {"pin_memory": False})
        usage = self._usage("make_empty")
        device = resolve_device(device)
        quantizer = self._on(device)
        if quantizer is None:
            return torch.empty(shape, dtype=dtype, device=device, requires_grad=requires_grad)
        like = torch.empty(1, dtype=dtype, device=device).expand(tuple(shape) or (1,))  # whose numbers nobody reads
        made = as_tensor(OPERATORS["quantize"].shape(like, quantizer, usage=usage), quantizer, shape)
        return made.requires_grad_(requires_grad)

    def _usage(self, method: str) -> str:
        if not (self.rowwise_usage or self.columnwise_usage):
            raise ValueError(f"{type(self).__name__}.{method}: rowwise and columnwise are both False, set one")
        return _USAGES[self.rowwise_usage, self.columnwise_usage]

    def _on(self, device: torch.device) -> records.Quantizer | None:
        """`cast`, for a device under the policy in force."""
        return self.cast(device_encodings(device), ops.policy_numerics().fp8_portability == "common")

    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor | torch.Tensor:
        return self.quantize(tensor)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Say which copies `quantize` makes; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = bool(rowwise)
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    def get_usages(self) -> dict[str, bool]:
        """``rowwise`` and ``columnwise``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self: _Self) -> _Self:
        """A shallow copy: tensors are shared."""
        return copy.copy(self)

    def __repr__(self) -> str:
        said = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({said})"


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
