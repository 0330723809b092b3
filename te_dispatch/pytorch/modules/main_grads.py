# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`fuse_wgrad_accumulation`: the product that makes a weight's gradient adds it to ``weight.main_grad``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from te_dispatch.ops.results import Gemm
from te_dispatch.pytorch.arguments import resolve_device

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: What autograd is given for weights whose hooks wait for a gradient, by shape, dtype and device.
_dummies: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}


class MainGrads:
    """Where the gradient of a weight goes, instead of being returned.

    Attributes of a weight that are read, as Transformer Engine does:

        main_grad: the buffer, of the weight's shape; of a weight of Megatron's FSDP `get_main_grad()`.
        overwrite_main_grad: True to overwrite the buffer instead of adding to it.
        grad_added_to_main_grad: where it is there, it is set to True, and autograd gets a tensor of zeros as the
            gradient, so that hooks run; without it, autograd gets none.

    Args:
        owner: the module's class, for messages.
        weights: the parameters that the rows of the product's weight are, by name.
        accumulate: whether to add to the buffers, or to overwrite them as in the first microbatch of a step.
    """

    __slots__ = ("accumulate", "owner", "weights")

    #: The product runs in the backward, so that it can make the bias's gradient, too.
    postpones = False

    def __init__(self, owner: str, weights: Mapping[str, torch.Tensor], accumulate: bool) -> None:
        self.owner = owner
        self.weights = weights
        self.accumulate = accumulate

    def take(self, product: Callable[..., Gemm]) -> Gemm:
        """Have `product` write the gradient.

        Args:
            product: `te_dispatch.ops.gemm` of its operands; it takes out, accumulate and out_dtype.

        Raises:
            RuntimeError, ValueError: a weight without a buffer, or with one that does not fit; it is named.
        """
        buffers = [self._buffer(name, weight) for name, weight in self.weights.items()]
        first, *others = buffers
        if not others and first.is_contiguous():
            return product(out=first, accumulate=self._adds(self.weights.values()))
        made = product(out_dtype=torch.float32)
        assert isinstance(made.out, torch.Tensor)
        parts = made.out.split_with_sizes([buffer.shape[0] for buffer in buffers])
        for weight, buffer, part in zip(self.weights.values(), buffers, parts):
            buffer.copy_(buffer.float() + part if self._adds((weight,)) else part)
        return made

    def returned(self) -> list[torch.Tensor | None]:
        """What the backward returns as the gradients of the weights."""
        return [self._noted(weight) for weight in self.weights.values()]

    def _adds(self, weights: Any) -> bool:
        return self.accumulate and not any(getattr(weight, "overwrite_main_grad", False) for weight in weights)

    def _buffer(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        where = f"{self.owner}: fuse_wgrad_accumulation=True needs {name}.main_grad"
        buffer = weight.get_main_grad() if hasattr(weight, "__fsdp_param__") else getattr(weight, "main_grad", None)
        if not isinstance(buffer, torch.Tensor):
            raise RuntimeError(f"{where}, a tensor that the gradient is added to")
        if buffer.shape != weight.shape or buffer.device != weight.device or buffer.dtype not in _DTYPES:
            raise ValueError(
                f"{where} of shape {tuple(weight.shape)} on {weight.device} in float32, bfloat16 or float16, got "
                f"{tuple(buffer.shape)} on {buffer.device} in {buffer.dtype}"
            )
        return buffer

    @staticmethod
    def _noted(weight: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return _dummy(weight.shape, weight.dtype, weight.device, getattr(weight, "zero_out_wgrad", False))


def _dummy(shape: torch.Size, dtype: torch.dtype, device: torch.device, zero: bool) -> torch.Tensor:
    key = shape, dtype, device
    found = _dummies.get(key)
    if found is None:
        found = torch.zeros(shape, dtype=dtype, device=device)
        if found.__class__ is torch.Tensor:  # a fake one is of use to the trace or the plan that made it only
            _dummies[key] = found
    elif zero:
        found.zero_()
    return found.detach()


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What autograd is given in place of a weight's gradient that went to ``main_grad``, on the current device.

    Args:
        shape: of the weight.
        zero: whether it must hold zeros. It is one tensor for each shape and dtype, which other users may have written.
    """
    return _dummy(torch.Size(shape), dtype, resolve_device(None), zero)
