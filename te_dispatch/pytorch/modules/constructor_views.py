# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attributes of Transformer Engine's GEMM modules that follow from what the constructor was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.ops.activation import CLAMPED_SWIGLU, GATED, KINDS
from te_dispatch.pytorch.arguments import require_choice
from te_dispatch.pytorch.assignment import Only
from te_dispatch.pytorch.capture.signatures import CapturedCalls


class ConstructorViews(torch.nn.Module):
    """Of `Linear`, `LayerNormLinear` and `LayerNormMLP`.

    Attributes:
        ub_overlap_ag_fprop, ub_overlap_rs_fprop, ub_overlap_ag_dgrad, ub_overlap_rs_dgrad, ub_bulk_dgrad,
            ub_bulk_wgrad: whether communication overlaps with products, False. symmetric_ar_type: None.
    """

    use_bias: bool
    return_bias: bool
    _wgrad_hooks: list[Callable[[], Any]]

    ub_overlap_ag_fprop = Only(False)
    ub_overlap_rs_fprop = Only(False)
    ub_overlap_ag_dgrad = Only(False)
    ub_overlap_rs_dgrad = Only(False)
    ub_bulk_dgrad = Only(False)
    ub_bulk_wgrad = Only(False)
    symmetric_ar_type = Only(None)

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


def _activation_parameters(activation: str, given: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """(limit, alpha) of ``clamped_swiglu``; None for activations without parameters."""
    if given is not None and (activation != "clamped_swiglu" or set(given) - {"limit", "alpha"}):
        raise ValueError(
            "activation_params must be None, or a dict of limit and alpha for activation='clamped_swiglu', "
            f"got {dict(given)} for activation={activation!r}"
        )
    if activation != "clamped_swiglu":
        return None
    limit, alpha = CLAMPED_SWIGLU
    given = given or {}
    return float(given.get("limit", limit)), float(given.get("alpha", alpha))


class MlpViews(torch.nn.Module):
    """Of `LayerNormMLP`."""

    ffn_hidden_size: int
    tp_size: int
    captured_calls: CapturedCalls
    _activation: str
    _activation_params: tuple[float, float] | None

    ub_overlap_ag = Only(False)
    ub_overlap_rs = Only(False)

    @property
    def size_per_partition(self) -> int:
        """Features between the GEMMs on this rank."""
        return self.ffn_hidden_size // self.tp_size

    @property
    def activation(self) -> str:
        """What is assigned holds for later calls. A gated activation cannot become one that is not, nor the reverse."""
        return self._activation

    @activation.setter
    def activation(self, value: str) -> None:
        value = "srelu" if value == "squared_relu" else value
        require_choice("activation", value, KINDS)
        before = self.__dict__.get("_activation", value)
        if (value in GATED) != (before in GATED):
            taller = value if value in GATED else before
            raise AttributeError(
                f"{type(self).__name__}: activation={before!r} cannot become {value!r}, fc1_weight has twice as many "
                f"rows for {taller!r} as for the other; construct a module with activation={value!r}"
            )
        if value != before or "_activation_params" not in self.__dict__:
            self._activation_params = _activation_parameters(value, None)
        self._activation = value
        self.captured_calls.forget()

    @property
    def activation_params(self) -> dict[str, float] | None:
        """Limit and alpha of ``clamped_swiglu``; None for activations without parameters. What is assigned holds for
        later calls."""
        known = self._activation_params
        return None if known is None else {"limit": known[0], "alpha": known[1]}

    @activation_params.setter
    def activation_params(self, value: Mapping[str, Any] | None) -> None:
        self._activation_params = _activation_parameters(self._activation, value)
        self.captured_calls.forget()
