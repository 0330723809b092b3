# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attributes of Transformer Engine's attention modules and layers, answered from where they are kept here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from te_dispatch.ops.attention import LAYOUTS, SOFTMAX_TYPES
from te_dispatch.pytorch.arguments import require_choice
from te_dispatch.pytorch.assignment import Check, CheckedAttributes, fixed, for_parts, one_of, probability
from te_dispatch.pytorch.attention.masks import ATTENTION_TYPES, canonical_mask_type, canonical_window
from te_dispatch.pytorch.fp8.state_views import StateViews


def _groups(module: Any, value: Any) -> Any:
    heads = module.num_attention_heads
    groups = heads if value is None else value
    if groups < 1 or heads % groups:
        raise ValueError(f"num_gqa_groups must divide num_attention_heads={heads}, got {value}")
    return groups


def _window(module: Any, value: Any) -> Any:
    canonical_window(module.attn_mask_type, value)
    return value


def _softcap(module: Any, value: Any) -> Any:
    if value < 0.0:
        raise ValueError(f"softcap must not be negative, got {value}")
    return value


def _softmax_type(module: Any, value: Any) -> Any:
    require_choice("softmax_type", value, SOFTMAX_TYPES)
    became = value != module.__dict__.get("softmax_type")
    if value == "learnable" and became and "softmax_offset" not in module._parameters:
        raise AttributeError(
            f"{type(module).__name__}: softmax_type cannot become 'learnable', there is no parameter softmax_offset; "
            "construct a module with softmax_type='learnable'"
        )
    return value


class CoreAttentionViews(CheckedAttributes):
    """Of `DotProductAttention`."""

    _checks: ClassVar[Mapping[str, Check]] = {
        "num_attention_heads": fixed("num_attention_heads", "groups and offsets were made"),
        "num_gqa_groups": _groups,
        "qkv_format": one_of("qkv_format", LAYOUTS),
        "attention_type": one_of("attention_type", ATTENTION_TYPES),
        "attention_dropout": probability("attention_dropout"),
        "attn_mask_type": lambda module, value: canonical_mask_type("attn_mask_type", value),
        "window_size": _window,
        "softcap": _softcap,
        "softmax_type": _softmax_type,
        "return_max_logit": lambda module, value: bool(value),
    }

    num_gqa_groups: int
    tp_size: int
    get_rng_state_tracker: Any
    #: Whether ranks that divide the sequence drop by the same random numbers, as they may: they have other tokens.
    _drops_alike: bool

    @property
    def _dropout_tracker(self) -> Any:
        """The function that gives the tracker that dropout draws from; None without one."""
        return None if self._drops_alike else self.get_rng_state_tracker

    @property
    def num_gqa_groups_per_partition(self) -> int:
        """Heads of key and value on this rank."""
        return self.num_gqa_groups // self.tp_size

    @property
    def rng_states_tracker(self) -> Any:
        """The tracker that dropout draws from; None without one."""
        tracker = self._dropout_tracker
        return None if tracker is None else tracker()

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


def _layout(module: Any, value: Any) -> Any:
    require_choice("qkv_format", value, LAYOUTS)
    return for_parts("qkv_format", "core_attention")(module, value)


def _returned_norm(module: Any, value: Any) -> bool:
    """Without a norm there is none to return."""
    found = bool(value) and module.input_layernorm
    return bool(for_parts("return_layernorm_output", "layernorm_qkv", "layernorm_query")(module, found))


class AttentionViews(CheckedAttributes):
    """Of `MultiheadAttention`."""

    num_attention_heads: int
    num_gqa_groups: int
    tp_size: int
    kv_channels: int
    proj: torch.nn.Module

    _checks: ClassVar[Mapping[str, Check]] = {
        **{
            name: fixed(name, "projections were made")
            for name in (
                *("hidden_size", "num_attention_heads", "num_gqa_groups", "kv_channels"),
                *("attention_type", "input_layernorm", "fuse_qkv_params"),
            )
        },
        "qkv_format": _layout,
        "qkv_weight_interleaved": lambda module, value: bool(value) and module.fuse_qkv_params,
        "return_bias": for_parts("return_bias", "proj"),
        "return_layernorm_output": _returned_norm,
    }

    attn_mask_type = _of_core("attn_mask_type")
    window_size = _of_core("window_size")
    bottom_right_diagonal = _of_core("bottom_right_diagonal")
    softcap = _of_core("softcap")
    softmax_type = _of_core("softmax_type")

    @property
    def params_dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(self.proj.parameters()).dtype

    @params_dtype.setter
    def params_dtype(self, value: torch.dtype) -> None:
        if value != self.params_dtype:
            raise AttributeError(
                f"{type(self).__name__}: params_dtype cannot become {value}, the parameters are {self.params_dtype}; "
                "`to` changes their dtype"
            )

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
        """Query heads on this rank."""
        return self.num_attention_heads // self.tp_size

    @property
    def num_gqa_groups_per_partition(self) -> int:
        """Heads of key and value on this rank."""
        return self.num_gqa_groups // self.tp_size

    def fast_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)


def _of_part(part: str, name: str, without: str | None = None) -> property:
    """An attribute of a layer's attention, which later calls go by when it is assigned.

    Args:
        without: under which name a layer that lacks the part keeps the attribute, which has no effect there. None for a
            layer in which it is None and cannot be assigned.
    """

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name) if part in self._modules else self.__dict__.get(without)

    def write(self: Any, value: Any) -> None:
        if part in self._modules:
            setattr(getattr(self, part), name, value)
        elif without is None:
            raise AttributeError(f"{type(self).__name__}: only layer_type='decoder' has {part}.{name}")
        else:
            self.__dict__[without] = value

    alone = "; None without that part" if part == "inter_attention" and without is None else ""
    return property(read, write, doc=f"`{name}` of `{part}`{alone}. What is assigned holds for later calls.")


def _of_attentions(name: str) -> property:
    """An attribute that both attentions of a layer have, which later calls go by when it is assigned."""
    assigned = for_parts(name, "self_attention", "inter_attention")

    def read(self: Any) -> Any:
        return getattr(self.self_attention, name)

    def write(self: Any, value: Any) -> None:
        assigned(self, value)

    return property(read, write, doc=f"`{name}` of the attentions. What is assigned holds for later calls.")


class LayerViews(CheckedAttributes):
    """Of `TransformerLayer`."""

    self_attn_mask_type = _of_part("self_attention", "attn_mask_type")
    enc_dec_attn_mask_type = _of_part("inter_attention", "attn_mask_type", "_enc_dec_attn_mask_type")

    window_size = _of_part("self_attention", "window_size")
    bottom_right_diagonal = _of_part("self_attention", "bottom_right_diagonal")
    enc_dec_window_size = _of_part("inter_attention", "window_size")
    enc_dec_bottom_right_diagonal = _of_part("inter_attention", "bottom_right_diagonal")

    kv_channels = _of_part("self_attention", "kv_channels")

    softcap = _of_attentions("softcap")
    softmax_type = _of_attentions("softmax_type")

    def reset_fp8_meta_tensors(self) -> None:
        """Begin delayed scaling anew in all parts: scales of 1, empty histories."""
        for part in self.modules():
            if isinstance(part, StateViews):
                part.reset_fp8_meta_tensors()

    def fast_setattr(self, name: str, value: Any) -> None:
        """``setattr(self, name, value)``."""
        setattr(self, name, value)
