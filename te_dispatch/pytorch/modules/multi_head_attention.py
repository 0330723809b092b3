# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`MultiheadAttention`: projections around `DotProductAttention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_dispatch.pytorch.arguments import (
    PARALLEL_DEFAULTS,
    given,
    part_name,
    reject_in_call,
    reject_unsupported,
    require_choice,
    require_tensor,
    resolve_device,
)
from te_dispatch.pytorch.attention.dot_product import DotProductAttention
from te_dispatch.pytorch.attention.lowering import AttentionMask
from te_dispatch.pytorch.attention.rotary import apply_rotary_pos_emb
from te_dispatch.pytorch.attention.views import AttentionViews
from te_dispatch.pytorch.composable import composable
from te_dispatch.pytorch.constants import AttnTypes
from te_dispatch.pytorch.distributed.arguments import ContextParallelModule
from te_dispatch.pytorch.modules.gemm_module import update_passing
from te_dispatch.pytorch.modules.layernorm_linear import LayerNormLinear
from te_dispatch.pytorch.modules.linear import Linear
from te_dispatch.pytorch.modules.normalization import L2Normalization, make_norm

RotaryEmbedding = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

#: The name of a projection, which factories of a custom recipe are told, by its attribute: Transformer Engine's, but
#: for that of the queries without a norm in front, which has none there.
_ROLE_NAMES = {
    "layernorm_qkv": "layernorm_linear_qkv",
    "qkv": "linear_qkv",
    "layernorm_query": "layernorm_linear_q",
    "query_layer": "linear_q",
    "key_value": "linear_kv",
}

_QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")
#: Arguments that `DotProductAttention` takes too, under the same names.
_OF_CORE_ATTENTION = (
    *("num_gqa_groups", "attention_dropout", "qkv_format", "attn_mask_type", "window_size", "bottom_right_diagonal"),
    *("softcap", "layer_number", "attention_type", "softmax_type"),
    *("tp_group", "tp_size", "sequence_parallel", "get_rng_state_tracker"),
)


#: Arguments that all projections take too, under the same names.
_OF_PROJECTIONS = (
    *("bias", "params_dtype", "device", "tp_group", "tp_size", "sequence_parallel", "get_rng_state_tracker"),
    "fuse_wgrad_accumulation",
)


def _shared(given: Mapping[str, Any], parallel_mode: str) -> dict[str, Any]:
    """Constructor arguments that all projections have."""
    return {
        **{argument: given[argument] for argument in _OF_PROJECTIONS},
        "parallel_mode": parallel_mode if given["set_parallel_mode"] else None,
    }


@composable
class MultiheadAttention(ContextParallelModule, AttentionViews):
    """Multi-head attention (Vaswani et al., 2017) with its projections.

    Parts: `layernorm_qkv` or `qkv` (self attention), or `layernorm_query` or `query_layer` and `key_value` (cross
    attention); `q_norm` and `k_norm`; `core_attention`; `proj`.

    Args:
        hidden_size: features of the input and the output.
        num_attention_heads, num_gqa_groups: heads of the query, and of key and value (None for as many).
        kv_channels: head dimension, None for hidden_size / num_attention_heads.
        attention_dropout, attn_mask_type, window_size, bottom_right_diagonal, softcap, softmax_type, qkv_format,
            attention_type, layer_number: as in `DotProductAttention`.
        layernorm_epsilon, normalization, zero_centered_gamma: of the norm that `input_layernorm` puts first.
        init_method, output_layer_init_method: fill the weights of the first projections, and of the last; None for
            normal(0, 0.023).
        params_dtype: dtype of the parameters, None for PyTorch's default.
        return_bias: leave the last projection's bias out and return it.
        return_layernorm_output: return what the norm gave, too.
        fuse_qkv_params: one parameter for all first projections, else one for each of query, key and value.
        qkv_weight_interleaved: with fuse_qkv_params: whether rows go head group by head group (its queries, its key,
            its value), else all queries, all keys, all values. Without it rows are never interleaved.
        rotary_pos_interleaved: how the rotary embedding pairs features.
        bias: whether projections have one.
        qk_norm_type: ``L2Normalization``, ``RMSNorm``, ``LayerNorm`` or None: normalizes every head of query and key,
            with qk_norm_eps, after the rotary embedding unless qk_norm_before_rope.
        device: None for the current accelerator, or the CPU.
        name: kept as an attribute and passed on; seq_length, micro_batch_size: no effect.
        set_parallel_mode: divide heads among the ranks of tp_group: the first projections by outputs, the last by
            inputs. On one rank parameters are marked so.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker, fuse_wgrad_accumulation: as in `Linear` and
            `DotProductAttention`.
        ub_*: not supported yet.

    Raises:
        NotImplementedError: an argument that is not supported yet; ValueError: a value that does not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        softmax_type: str = "vanilla",
    ) -> None:
        given = locals()
        super().__init__()
        reject_unsupported("MultiheadAttention", given, PARALLEL_DEFAULTS)
        self._keep_parallel(given)
        self._require_parallel_mode()
        require_choice("attention_type", attention_type, AttnTypes)
        self.kv_channels = _head_width(hidden_size, num_attention_heads, kv_channels)
        core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, **{argument: given[argument] for argument in _OF_CORE_ATTENTION}
        )
        if softmax_type == "learnable":
            core_attention.to(resolve_device(device))  # its own constructor takes no device
        self.hidden_size = hidden_size
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = core_attention.num_gqa_groups
        self.qkv_format = qkv_format
        self.attention_type = attention_type
        self.layer_number = layer_number
        self.input_layernorm = input_layernorm
        self.return_bias = return_bias
        self.return_layernorm_output = return_layernorm_output
        self.fuse_qkv_params = fuse_qkv_params
        self.qkv_weight_interleaved = qkv_weight_interleaved
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        self.name = name
        # In Transformer Engine's order: optimizers and their checkpoints go by the order of parameters.
        self.q_norm, self.k_norm = self._build_qk_norms(qk_norm_type, qk_norm_eps, params_dtype, device)
        self._build_input_projections(given)
        self.core_attention = core_attention
        self.proj = self._build_output_projection(given)

    #: Of an attention with a norm in front: return the input last where possible, as `GemmModule.passes_input` says.
    passes_input = False

    def _build_input_projections(self, given: Mapping[str, Any]) -> None:
        """Those of queries, keys and values, under the names that checkpoints know them by, from the constructor's
        arguments."""
        norm = {
            "eps": given["layernorm_epsilon"],
            "normalization": given["normalization"],
            "zero_centered_gamma": given["zero_centered_gamma"],
            "return_layernorm_output": self.return_layernorm_output,
        }
        width, width_kv = self.num_attention_heads * self.kv_channels, self.num_gqa_groups * self.kv_channels
        splits = {"query": width, "key": width_kv, "value": width_kv}

        def build(name: str, parts: dict[str, int], normed: bool) -> torch.nn.Module:
            arguments = {
                "init_method": given["init_method"],
                # A single part has a name of its own behind a norm alone, as in Transformer Engine.
                "parameters_split": None if self.fuse_qkv_params or (len(parts) == 1 and not normed) else parts,
                "name": part_name(self.name, _ROLE_NAMES[name]),
                **_shared(given, "column"),
            }
            out = sum(parts.values())
            if normed:
                return LayerNormLinear(self.hidden_size, out, **arguments, **norm)
            return Linear(self.hidden_size, out, **arguments)

        if self.attention_type == "self":
            name = "layernorm_qkv" if self.input_layernorm else "qkv"
            self.add_module(name, build(name, splits, self.input_layernorm))
        else:
            name = "layernorm_query" if self.input_layernorm else "query_layer"
            self.add_module(name, build(name, {"query": splits.pop("query")}, self.input_layernorm))
            self.key_value = build("key_value", splits, False)

    def _build_output_projection(self, given: Mapping[str, Any]) -> Linear:
        return Linear(
            self.num_attention_heads * self.kv_channels,
            self.hidden_size,
            init_method=given["output_layer_init_method"],
            return_bias=self.return_bias,
            name=part_name(self.name, "proj"),
            **_shared(given, "row"),
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Take checkpoints, too, in which the query's projection behind a norm had no name of its own."""
        query = getattr(self, "layernorm_query", None)
        for name in ("weight", "bias"):
            before, now = (f"{prefix}layernorm_query.{part}{name}" for part in ("", "query_"))
            if hasattr(query, f"query_{name}") and before in state_dict:
                state_dict.setdefault(now, state_dict.pop(before))
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _build_qk_norms(
        self, kind: str | None, eps: float, params_dtype: torch.dtype | None, device: torch.device | str | None
    ) -> tuple[torch.nn.Module | None, torch.nn.Module | None]:
        if kind is None:
            return None, None
        require_choice("qk_norm_type", kind, _QK_NORMS)
        if kind == "L2Normalization":
            norm = L2Normalization(eps)
            return norm, norm
        # Ranks that divide the heads have the gradient of theirs: it is to be added up, as where they divide tokens.
        partial = True if self._parts > 1 else None
        q_norm, k_norm = (
            make_norm(kind, self.kv_channels, eps, params_dtype, device, sequence_parallel=partial) for _ in range(2)
        )
        return q_norm, k_norm

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMask | None = None,
        encoder_output: torch.Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: RotaryEmbedding | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
        softcap: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Attend.

        Args:
            hidden_states: (s, b, hidden), (b, s, hidden) or (t, hidden), as qkv_format says.
            encoder_output: what cross attention makes keys and values of, in the same format.
            is_first_microbatch: as in `Linear`.
            rotary_pos_emb: (s, 1, 1, r) angles, or a pair (for queries, for keys).
            The others: as in `DotProductAttention.forward`.

        Returns:
            Like hidden_states; with return_bias or return_layernorm_output a tuple (output[, bias][, norm's output]).
        """
        reject_in_call("MultiheadAttention", inference_params, thd_attention_policies, thd_attention_policy_dispatch)
        self._check_input(hidden_states)
        rotary = (
            rotary_pos_emb,
            cu_seqlens_q if cu_seqlens_q_padded is None or pad_between_seqs is False else cu_seqlens_q_padded,
            cu_seqlens_kv if cu_seqlens_kv_padded is None or pad_between_seqs is False else cu_seqlens_kv_padded,
        )
        if self.attention_type == "self":
            operands, beside = self._self_operands(hidden_states, is_first_microbatch, rotary)
        else:
            operands, beside = self._cross_operands(hidden_states, encoder_output, is_first_microbatch, rotary)
        context = self.core_attention(
            **operands,
            qkv_format=self.qkv_format,
            **given(
                attention_mask=attention_mask,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_q_padded=cu_seqlens_q_padded,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_kv=max_seqlen_kv,
                attn_mask_type=attn_mask_type,
                window_size=window_size,
                bottom_right_diagonal=bottom_right_diagonal,
                softcap=softcap,
                checkpoint_core_attention=checkpoint_core_attention or None,
                core_attention_bias_type=None if core_attention_bias_type == "no_bias" else core_attention_bias_type,
                core_attention_bias=core_attention_bias,
                alibi_slopes=alibi_slopes,
                pad_between_seqs=pad_between_seqs,
            ),
        )
        projected = self.proj(context, is_first_microbatch=is_first_microbatch)
        outputs = (*projected, *beside) if isinstance(projected, tuple) else (projected, *beside)
        return outputs if len(outputs) > 1 else outputs[0]

    def _check_input(self, hidden_states: torch.Tensor) -> None:
        require_tensor("hidden_states", hidden_states, floating=False)
        if hidden_states.dim() != len(self.qkv_format) - 1 or hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden_states must have {len(self.qkv_format) - 1} dimensions for qkv_format={self.qkv_format!r} and "
                f"end in hidden_size={self.hidden_size}, got shape {tuple(hidden_states.shape)}"
            )

    def _project(
        self, name: str, inp: torch.Tensor, is_first_microbatch: bool | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """A first projection and, where asked for, what its norm gave and its input."""
        projection = getattr(self, name)
        if self.passes_input:
            update_passing(projection)
        out = projection(inp, is_first_microbatch=is_first_microbatch)
        return (out[0], out[1:]) if isinstance(out, tuple) else (out, ())

    def _heads_here(self) -> tuple[int, int, int]:
        """This rank's query heads, its heads of key and value, and the head dimension."""
        return self.num_attention_heads // self._parts, self.num_gqa_groups // self._parts, self.kv_channels

    def _self_operands(
        self, hidden_states: torch.Tensor, is_first_microbatch: bool | None, rotary: tuple[Any, ...]
    ) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
        name = "layernorm_qkv" if self.input_layernorm else "qkv"
        mixed, beside = self._project(name, hidden_states, is_first_microbatch)
        heads, groups, d = self._heads_here()
        tokens = mixed.shape[:-1]
        if heads == groups and rotary[0] is None and self.q_norm is None:
            # One tensor for all three, so that their gradients are born as one.
            if self.qkv_weight_interleaved:
                return {"qkv_layer": mixed.view(*tokens, heads, 3, d), "qkv_interleave_dim": -2}, beside
            return {"qkv_layer": mixed.view(*tokens, 3, heads, d)}, beside
        if self.qkv_weight_interleaved:
            per_group = heads // groups
            parts = mixed.view(*tokens, groups, per_group + 2, d).split((per_group, 1, 1), dim=-2)
        else:
            parts = mixed.split((heads * d, groups * d, groups * d), dim=-1)
        q, k, v = (p.reshape(*tokens, n, d) for p, n in zip(parts, (heads, groups, groups), strict=True))
        q, k = self._position(q, k, *rotary)
        return {"query_layer": q, "key_layer": k, "value_layer": v}, beside

    def _cross_operands(
        self,
        hidden_states: torch.Tensor,
        encoder_output: torch.Tensor | None,
        is_first_microbatch: bool | None,
        rotary: tuple[Any, ...],
    ) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
        if encoder_output is None:
            raise ValueError("encoder_output must be a tensor for attention_type='cross', got None")
        name = "layernorm_query" if self.input_layernorm else "query_layer"
        projected, beside = self._project(name, hidden_states, is_first_microbatch)
        heads, groups, d = self._heads_here()
        q = projected.view(*projected.shape[:-1], heads, d)
        mixed = self.key_value(encoder_output, is_first_microbatch=is_first_microbatch)
        tokens, dim = mixed.shape[:-1], -2 if self.qkv_weight_interleaved else -3
        kv = mixed.view(*tokens, groups, 2, d) if dim == -2 else mixed.view(*tokens, 2, groups, d)
        if rotary[0] is None and self.q_norm is None:
            return {"query_layer": q, "kv_layer": kv, "qkv_interleave_dim": dim}, beside
        k, v = kv.unbind(dim)
        q, k = self._position(q, k, *rotary)
        return {"query_layer": q, "key_layer": k, "value_layer": v}, beside

    def _position(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        rotary_pos_emb: RotaryEmbedding | None,
        starts_q: torch.Tensor | None,
        starts_kv: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key with their positions rotated in, and normalized."""
        if self.q_norm is not None and self.k_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            if isinstance(rotary_pos_emb, torch.Tensor):
                rotary_pos_emb = (rotary_pos_emb, rotary_pos_emb)
            if starts_kv is None and self.attention_type == "self":
                starts_kv = starts_q
            layout, interleaved = self.qkv_format, self.rotary_pos_interleaved
            q = apply_rotary_pos_emb(q, rotary_pos_emb[0], layout, interleaved=interleaved, cu_seqlens=starts_q)
            k = apply_rotary_pos_emb(k, rotary_pos_emb[1], layout, interleaved=interleaved, cu_seqlens=starts_kv)
        if self.q_norm is not None and self.k_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k


def _head_width(hidden_size: int, heads: int, kv_channels: int | None) -> int:
    """`kv_channels`, or an even share of the hidden size."""
    if kv_channels is not None:
        return kv_channels
    if hidden_size % heads:
        raise ValueError(
            f"hidden_size must be a multiple of num_attention_heads={heads} where kv_channels is not given, "
            f"got {hidden_size}"
        )
    return hidden_size // heads
