# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attributes of Transformer Engine's GEMM modules that follow from what the constructor was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class _Only:
    """An attribute with one value: of an argument that supports no other. Another value cannot be assigned."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return self.value

    def __set__(self, module: Any, value: Any) -> None:
        if value != self.value:
            raise NotImplementedError(
                f"{type(module).__name__}: {self.name}={value!r} is not supported yet, only {self.name}={self.value!r}"
            )


class ConstructorViews(torch.nn.Module):
    """Of `Linear`, `LayerNormLinear` and `LayerNormMLP`.

    Attributes:
        ub_overlap_ag_fprop, ub_overlap_rs_fprop, ub_overlap_ag_dgrad, ub_overlap_rs_dgrad, ub_bulk_dgrad,
            ub_bulk_wgrad: whether communication overlaps with products, False. symmetric_ar_type: None.
    """

    use_bias: bool
    return_bias: bool
    _wgrad_hooks: list[Callable[[], Any]]

    ub_overlap_ag_fprop = _Only(False)
    ub_overlap_rs_fprop = _Only(False)
    ub_overlap_ag_dgrad = _Only(False)
    ub_overlap_rs_dgrad = _Only(False)
    ub_bulk_dgrad = _Only(False)
    ub_bulk_wgrad = _Only(False)
    symmetric_ar_type = _Only(None)

    @property
    def apply_bias(self) -> bool:
        """Whether the module adds the bias of its last GEMM, and does not return it."""
        return self.use_bias and not self.return_bias

    @property
    def wgrad_accumulation_and_reduce_hooks(self) -> list[Callable[[], Any]]:
        """What `register_wgrad_accumulation_and_reduce_hooks` was given."""
        return self._wgrad_hooks


class LinearViews(torch.nn.Module):
    """Of `Linear` and `LayerNormLinear`."""

    weight_names: list[str]

    @property
    def parameter_split_sizes(self) -> list[int]:
        """Rows of each parameter that the weight is divided into, as `weight_names` names them."""
        return [getattr(self, name).shape[0] for name in self.weight_names]


class MlpViews(torch.nn.Module):
    """Of `LayerNormMLP`."""

    ffn_hidden_size: int
    _activation_params: tuple[float, float] | None

    ub_overlap_ag = _Only(False)
    ub_overlap_rs = _Only(False)

    @property
    def size_per_partition(self) -> int:
        """Features between the GEMMs on this rank: all."""
        return self.ffn_hidden_size

    @property
    def activation_params(self) -> dict[str, float] | None:
        """Limit and alpha of ``clamped_swiglu``; None for activations without parameters."""
        known = self._activation_params
        return None if known is None else {"limit": known[0], "alpha": known[1]}
