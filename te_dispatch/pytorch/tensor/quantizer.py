# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`Quantizer`: what all quantizers have under Transformer Engine's names."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch

from te_dispatch import ops
from te_dispatch.core.operator import OPERATORS
from te_dispatch.numerics import quantizers as records
from te_dispatch.pytorch.arguments import reject_unsupported, resolve_device
from te_dispatch.pytorch.randomness import draw_rng_state
from te_dispatch.pytorch.tensor.casting import rounded
from te_dispatch.pytorch.tensor.dtypes import device_encodings
from te_dispatch.pytorch.tensor.quantized_tensor import QuantizedTensor, as_tensor, quantized

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
        """Cast a tensor under the policy in force. The gradient of the tensor is that of the result, unchanged.

        Args:
            tensor: floating-point; with one scale per tensor of any shape, () too, else of two dimensions or more.
            out: what `update_quantized` takes as `dst`; autograd does not see that cast.
            dtype: the nominal dtype of the result; None for the tensor's. Not with `out`, which has one.

        Raises:
            ValueError: neither copy is asked for; see `update_quantized` for `out`.
        """
        if out is not None:
            reject_unsupported(f"{type(self).__name__}.quantize with out", {"dtype": dtype}, {"dtype": None})
            return self.update_quantized(tensor, out)
        usage, quantizer = self._usage("quantize"), self._on(tensor.device)
        if quantizer is None:
            return tensor if dtype is None else tensor.to(dtype)
        state = draw_rng_state(tensor.device) if self.stochastic else None
        return quantized(tensor, quantizer, usage, state, dtype)  # type: ignore[no-any-return]

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
