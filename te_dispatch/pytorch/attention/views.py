# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attributes of Transformer Engine's attention modules and layers, answered from where they are kept here."""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.pytorch.fp8.state_views import StateViews


class CoreAttentionViews(torch.nn.Module):
    """Of `DotProductAttention`."""

    num_gqa_groups: int
    _dropout_tracker: Any

    @property
    def num_gqa_groups_per_partition(self) -> int:
        """Heads of key and value on this rank: all."""
        return self.num_gqa_groups

    @property
    def rng_states_tracker(self) -> Any:
        """The tracker that dropout draws from; None without one."""
        return None if self._dropout_tracker is None else self._dropout_tracker()

    def fast_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)


def _of_core(name: str) -> property:
    """An attribute of ``core_attention`` under the same name, which later calls go by when it is assigned."""

    def read(self: Any) -> Any:
        return getattr(self.core_attention, name)

    def write(self: Any, value: Any) -> None:
        setattr(self.core_attention, name, value)

    return property(read, write, doc=f"`{name}` of `core_attention`; what is assigned holds for later calls.")


class AttentionViews(torch.nn.Module):
    """Of `MultiheadAttention`, where one rank has all heads."""

    num_attention_heads: int
    num_gqa_groups: int
    kv_channels: int
    proj: torch.nn.Module

    window_size = _of_core("window_size")
    bottom_right_diagonal = _of_core("bottom_right_diagonal")
    softcap = _of_core("softcap")

    @property
    def softmax_type(self) -> str:
        """`softmax_type` of `core_attention`, which the constructor decides."""
        softmax_type: str = self.core_attention.softmax_type  # type: ignore[union-attr, assignment]
        return softmax_type

    @property
    def params_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.proj.parameters()).dtype

    @property
    def hidden_size_per_attention_head(self) -> int:
        """The head dimension."""
        return self.kv_channels

    @property
    def hidden_size_q(self) -> int:
        """Features of all query heads."""
        return self.kv_channels * self.num_attention_heads

    @property
    def hidden_size_kv(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.kv_channels * self.num_gqa_groups

    @property
    def num_attention_heads_per_partition(self) -> int:
        """Query heads on this rank: all."""
        return self.num_attention_heads

    @property
    def num_gqa_groups_per_partition(self) -> int:
        """Heads of key and value on this rank: all."""
        return self.num_gqa_groups

    def fast_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)


def _of_part(part: str, name: str) -> property:
    """An attribute of a layer's attention, which later calls go by when it is assigned."""

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name) if part in self._modules else None

    def write(self: Any, value: Any) -> None:
        if part not in self._modules:
            raise AttributeError(f"{type(self).__name__}: only layer_type='decoder' has {part}.{name}")
        setattr(getattr(self, part), name, value)

    without = "; None without that part" if part == "inter_attention" else ""
    return property(read, write, doc=f"`{name}` of `{part}`{without}. What is assigned holds for later calls.")


class LayerViews(torch.nn.Module):
    """Of `TransformerLayer`."""

    window_size = _of_part("self_attention", "window_size")
    bottom_right_diagonal = _of_part("self_attention", "bottom_right_diagonal")
    softcap = _of_part("self_attention", "softcap")
    enc_dec_window_size = _of_part("inter_attention", "window_size")
    enc_dec_bottom_right_diagonal = _of_part("inter_attention", "bottom_right_diagonal")

    @property
    def softmax_type(self) -> str:
        """`softmax_type` of the attentions, which the constructor decides."""
        softmax_type: str = self.self_attention.softmax_type  # type: ignore[union-attr, assignment]
        return softmax_type

    @property
    def kv_channels(self) -> int:
        """The head dimension."""
        kv_channels: int = self.self_attention.kv_channels  # type: ignore[union-attr, assignment]
        return kv_channels

    def reset_fp8_meta_tensors(self) -> None:
        """Begin delayed scaling anew in all parts: scales of 1, empty histories."""
        for part in self.modules():
            if isinstance(part, StateViews):
                part.reset_fp8_meta_tensors()

    def fast_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)
