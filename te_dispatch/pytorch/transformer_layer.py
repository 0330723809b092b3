# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`TransformerLayer`: attention and MLP with their norms, dropouts and residuals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_dispatch.ops.attention import LAYOUTS
from te_dispatch.pytorch.arguments import (
    ATTENTION_CALL_DEFAULTS,
    PARALLEL_DEFAULTS,
    OneOf,
    part_name,
    reject_unsupported,
    require_choice,
    require_probability,
)
from te_dispatch.pytorch.attention_lowering import AttentionMask
from te_dispatch.pytorch.dropout_add import DropPath, bias_dropout_add
from te_dispatch.pytorch.layernorm_mlp import LayerNormMLP
from te_dispatch.pytorch.multi_head_attention import MultiheadAttention, RotaryEmbedding
from te_dispatch.pytorch.normalization import make_norm

# The ub_* switches choose parts of an overlap that ub_tp_comm_overlap turns on: without it both values mean the same.
_UNSUPPORTED_INIT: dict[str, Any] = {
    **{name: OneOf(False, True) if name.startswith("ub_") else v for name, v in PARALLEL_DEFAULTS.items()},
    "ub_tp_comm_overlap": False,
}


class TransformerLayer(torch.nn.Module):
    """An encoder or decoder layer (Vaswani et al., 2017).

    With A the self attention, C the cross attention (`layer_type="decoder"`), M the MLP, each after its own norm, and
    D dropout:

        x = x + D(A(x)); x = x + D(C(x, encoder)); y = x + D(M(x))

    `apply_residual_connection_post_layernorm`: the residual is the norm's output. `output_layernorm`: A has no norm
    and y gets one. `parallel_attention_mlp`: y = x + D(A(x) + M(x)).

    Parts: `self_attention`, `inter_attention`, `layernorm_mlp`, `layernorm`.

    Args:
        hidden_size, ffn_hidden_size: features of the layer, and between the MLP's projections.
        hidden_dropout: probability of D; drop_path_rate: of skipping A, C or M for a whole sequence.
        self_attn_mask_type, window_size, bottom_right_diagonal: of A; enc_dec_attn_mask_type, enc_dec_window_size,
            enc_dec_bottom_right_diagonal: of C.
        activation, activation_params: as in `LayerNormMLP`.
        attn_input_format: ``sbhd``, ``bshd`` or ``thd``: the order of hidden_states' dimensions.
        num_attention_heads, num_gqa_groups, attention_dropout, init_method, output_layer_init_method, kv_channels,
            softcap, fuse_qkv_params, rotary_pos_interleaved, qkv_weight_interleaved, qk_norm_type, qk_norm_eps,
            qk_norm_before_rope, softmax_type, layernorm_epsilon, normalization, zero_centered_gamma, params_dtype,
            bias, device, name, layer_number, seq_length, micro_batch_size: as in `MultiheadAttention`.
        tp_group, tp_size, set_parallel_mode, sequence_parallel, get_rng_state_tracker, fuse_wgrad_accumulation,
            ub_tp_comm_overlap: not supported yet. The other ub_* only matter with ub_tp_comm_overlap.

    Raises:
        NotImplementedError: an argument that is not supported yet; ValueError: a value that does not fit.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        fuse_wgrad_accumulation: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        sequence_parallel: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: dict[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: torch.device | str | None = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
    ) -> None:
        given = locals()
        super().__init__()
        reject_unsupported("TransformerLayer", given, _UNSUPPORTED_INIT)
        require_choice("layer_type", layer_type, ("encoder", "decoder"))
        require_choice("attn_input_format", attn_input_format, LAYOUTS)
        require_probability("hidden_dropout", hidden_dropout)
        post_layernorm_residual = apply_residual_connection_post_layernorm
        if parallel_attention_mlp and (layer_type == "decoder" or post_layernorm_residual or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp=True needs layer_type='encoder', apply_residual_connection_post_layernorm=False"
                f" and output_layernorm=False, got {layer_type!r}, {post_layernorm_residual} and {output_layernorm}"
            )
        self.layer_number = layer_number
        self.layer_type = layer_type
        self.hidden_dropout = hidden_dropout
        self.apply_residual_connection_post_layernorm = post_layernorm_residual
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.attn_input_format = attn_input_format
        self.self_attn_mask_type = self_attn_mask_type
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.name = name
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else None

        shared: dict[str, Any] = {
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype,
            "bias": bias,
            "device": device,
            "return_bias": not parallel_attention_mlp,
        }
        # What attention and a model of this shape agree on by name is handed through by name.
        attention = shared | {
            argument: given[argument]
            for argument in (
                "num_gqa_groups", "layernorm_epsilon", "kv_channels", "attention_dropout", "layer_number", "softcap",
                "fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps",
                "qk_norm_before_rope", "softmax_type",
            )
        }  # fmt: skip
        attention["qkv_format"] = attn_input_format
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            input_layernorm=not output_layernorm,
            return_layernorm_output=post_layernorm_residual,
            name=part_name(self.name, "self_attention"),
            **attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                attention_type="cross",
                input_layernorm=True,
                return_layernorm_output=post_layernorm_residual,
                name=part_name(self.name, "inter_attention"),
                **attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            eps=layernorm_epsilon,
            activation=activation,
            activation_params=activation_params,
            return_layernorm_output=post_layernorm_residual,
            name=part_name(self.name, "layernorm_mlp"),
            **shared,
        )
        self.layernorm = (
            make_norm(normalization, hidden_size, layernorm_epsilon, params_dtype, device, zero_centered_gamma)
            if output_layernorm
            else None
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: AttentionMask | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: torch.Tensor | None = None,
        enc_dec_attn_mask: AttentionMask | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> torch.Tensor:
        """Run the layer.

        Args:
            hidden_states: (s, b, hidden), (b, s, hidden) or (t, hidden), as attn_input_format says.
            attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal: of the self attention.
            encoder_output, enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size,
                enc_dec_bottom_right_diagonal: of the cross attention.
            rotary_pos_emb: of the self attention.
            cu_seqlens_q, max_seqlen_q, ..: of hidden_states; cu_seqlens_kv, max_seqlen_kv, ..: of encoder_output in a
                decoder.
            The others: as in `MultiheadAttention.forward`, of both attentions.

        Returns:
            Like hidden_states.
        """
        if (
            inference_params is not None
            or thd_attention_policies is not None
            or thd_attention_policy_dispatch != "auto"
        ):
            reject_unsupported("TransformerLayer.forward", locals(), ATTENTION_CALL_DEFAULTS)
        shared: dict[str, Any] = {
            "is_first_microbatch": is_first_microbatch,
            "checkpoint_core_attention": checkpoint_core_attention,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "max_seqlen_q": max_seqlen_q,
            "fast_zero_fill": fast_zero_fill,
            "pad_between_seqs": pad_between_seqs,
            "softcap": softcap,
        }
        keys: dict[str, Any] = {
            "cu_seqlens_kv": cu_seqlens_kv,
            "cu_seqlens_kv_padded": cu_seqlens_kv_padded,
            "max_seqlen_kv": max_seqlen_kv,
        }
        queries: dict[str, Any] = {
            "cu_seqlens_kv": cu_seqlens_q,
            "cu_seqlens_kv_padded": cu_seqlens_q_padded,
            "max_seqlen_kv": max_seqlen_q,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask=attention_mask,
            attn_mask_type=self_attn_mask_type,
            window_size=window_size,
            bottom_right_diagonal=bottom_right_diagonal,
            rotary_pos_emb=rotary_pos_emb,
            **(queries if self.layer_type == "decoder" else keys),
            **shared,
        )
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(hidden_states, is_first_microbatch=is_first_microbatch)
            return self._add((attended + mlp, None), hidden_states, cu_seqlens_q)
        x = self._add(attended, hidden_states, cu_seqlens_q)
        if self.layer_type == "decoder":
            attended = self.inter_attention(
                x,
                attention_mask=enc_dec_attn_mask,
                attn_mask_type=enc_dec_attn_mask_type,
                window_size=enc_dec_window_size,
                bottom_right_diagonal=enc_dec_bottom_right_diagonal,
                encoder_output=encoder_output,
                **keys,
                **shared,
            )
            x = self._add(attended, x, cu_seqlens_q)
        x = self._add(self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch), x, cu_seqlens_q)
        return x if self.layernorm is None else self.layernorm(x)

    def _add(
        self, outputs: tuple[torch.Tensor | None, ...], residual: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + D(output + bias); a third output is the residual to take instead."""
        out, bias = outputs[0], outputs[1]
        assert out is not None
        if len(outputs) > 2 and outputs[2] is not None:
            residual = outputs[2]
        if bias is not None and bias.numel() == 0:
            bias = None
        dropout = self.hidden_dropout if self.training else 0.0
        if self.drop_path is None or not self.training:
            return bias_dropout_add(out, bias, residual, dropout)
        branch = self.drop_path(bias_dropout_add(out, bias, None, dropout), self.attn_input_format, cu_seqlens)
        return residual + branch
