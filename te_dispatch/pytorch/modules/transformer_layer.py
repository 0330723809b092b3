# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`TransformerLayer`: attention and MLP with their norms, dropouts and residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from te_dispatch.ops.attention import LAYOUTS
from te_dispatch.pytorch.arguments import (
    PARALLEL_DEFAULTS,
    OneOf,
    given,
    part_name,
    reject_in_call,
    reject_unsupported,
    require_choice,
)
from te_dispatch.pytorch.assignment import Check, fixed, for_parts, probability
from te_dispatch.pytorch.attention.lowering import AttentionMask
from te_dispatch.pytorch.attention.views import LayerViews
from te_dispatch.pytorch.capture.composed import ComposedCalls, composed
from te_dispatch.pytorch.compile import constant
from te_dispatch.pytorch.composable import composable
from te_dispatch.pytorch.constants import LayerTypes
from te_dispatch.pytorch.distributed.arguments import ContextParallelModule
from te_dispatch.pytorch.modules.dropout_add import DropPath, dropout_add
from te_dispatch.pytorch.modules.gemm_module import GemmModule, update_passing
from te_dispatch.pytorch.modules.layernorm_mlp import LayerNormMLP
from te_dispatch.pytorch.modules.multi_head_attention import MultiheadAttention, RotaryEmbedding
from te_dispatch.pytorch.modules.normalization import make_norm

# The ub_* switches choose parts of an overlap that ub_tp_comm_overlap turns on: without it both values mean the same.
_UNSUPPORTED_INIT: dict[str, Any] = {
    **{name: OneOf(False, True) if name.startswith("ub_") else v for name, v in PARALLEL_DEFAULTS.items()},
    "ub_tp_comm_overlap": False,
}
#: Arguments that all parts take too, and those that attention does, under the same names.
_OF_ALL_PARTS = (
    *("normalization", "zero_centered_gamma", "init_method", "output_layer_init_method"),
    *("params_dtype", "bias", "device"),
    *("tp_group", "tp_size", "set_parallel_mode", "sequence_parallel", "get_rng_state_tracker"),
    "fuse_wgrad_accumulation",
)
_OF_ATTENTION = (
    *("num_gqa_groups", "layernorm_epsilon", "kv_channels", "attention_dropout", "layer_number", "softcap"),
    *("fuse_qkv_params", "qkv_weight_interleaved", "rotary_pos_interleaved", "softmax_type"),
    *("qk_norm_type", "qk_norm_eps", "qk_norm_before_rope"),
)


@constant
def _has_autocast(kind: str) -> bool:
    """Called while dynamo traces, which before PyTorch 2.12 cannot trace what is asked."""
    return torch.amp.is_autocast_available(kind)


def _check_parallel(parallel: bool, layer_type: str, post: bool, last: bool) -> None:
    if parallel and (layer_type == "decoder" or post or last):
        raise ValueError(
            "parallel_attention_mlp=True needs layer_type='encoder', apply_residual_connection_post_layernorm=False"
            f" and output_layernorm=False, got {layer_type!r}, {post} and {last}"
        )


def _assign_parallel(layer: Any, value: Any) -> Any:
    _check_parallel(value, layer.layer_type, layer.apply_residual_connection_post_layernorm, layer.output_layernorm)
    return value


def _assign_post(layer: Any, value: Any) -> Any:
    """The residual of a part is the norm's output, which it must return, or its input."""
    if "layernorm_mlp" in layer._modules:  # else the constructor makes the parts for this value
        _check_parallel(layer.parallel_attention_mlp, layer.layer_type, value, layer.output_layernorm)
        for_parts("return_layernorm_output", "self_attention", "inter_attention", "layernorm_mlp")(layer, value)
        layer._pass_residuals(not value)
    return value


def _assign_format(layer: Any, value: Any) -> Any:
    require_choice("attn_input_format", value, LAYOUTS)
    return for_parts("qkv_format", "self_attention", "inter_attention")(layer, value)


@composable
class TransformerLayer(ContextParallelModule, LayerViews):
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
        tp_group, tp_size, set_parallel_mode, sequence_parallel, get_rng_state_tracker, fuse_wgrad_accumulation: as in
            `MultiheadAttention` and `LayerNormMLP`.
        ub_tp_comm_overlap: not supported yet. The other ub_* only matter with it.

    Raises:
        NotImplementedError: an argument that is not supported yet; ValueError: a value that does not fit.
    """

    _checks: ClassVar[Mapping[str, Check]] = {
        "layer_type": fixed("layer_type", "parts were made"),
        "output_layernorm": fixed("output_layernorm", "parts were made"),
        "apply_residual_connection_post_layernorm": _assign_post,
        "parallel_attention_mlp": _assign_parallel,
        "attn_input_format": _assign_format,
        "hidden_dropout": probability("hidden_dropout"),
    }

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
        _check_arguments(given)
        self._keep_parallel(given)
        self._require_parallel_mode()
        self.composed_calls = ComposedCalls()
        self.layer_number = layer_number
        self.layer_type = layer_type
        self.seq_length = seq_length
        self.hidden_dropout = hidden_dropout
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.attn_input_format = attn_input_format
        self.name = name
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate else None
        self.self_attention = self._build_attention(given, cross=False)
        if layer_type == "decoder":
            self.inter_attention = self._build_attention(given, cross=True)
        else:
            self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.layernorm_mlp = self._build_mlp(given)
        self._pass_residuals(not apply_residual_connection_post_layernorm)
        self.layernorm = self._build_norm(given) if output_layernorm else None

    def _build_attention(self, given: Mapping[str, Any], cross: bool) -> MultiheadAttention:
        prefix = "enc_dec_" if cross else ""
        return MultiheadAttention(
            given["hidden_size"],
            given["num_attention_heads"],
            attn_mask_type=given["enc_dec_attn_mask_type" if cross else "self_attn_mask_type"],
            window_size=given[f"{prefix}window_size"],
            bottom_right_diagonal=given[f"{prefix}bottom_right_diagonal"],
            attention_type="cross" if cross else "self",
            input_layernorm=cross or not self.output_layernorm,
            qkv_format=self.attn_input_format,
            **self._part_arguments("inter_attention" if cross else "self_attention", given, _OF_ATTENTION),
        )

    def _pass_residuals(self, passes: bool) -> None:
        """Have parts with a norm return their input, so that its gradient is added in the norm's backward, or not."""
        self._passes_residuals = passes
        for part in self.modules():
            if isinstance(part, MultiheadAttention):
                part.passes_input = passes and part.input_layernorm
            elif isinstance(part, GemmModule) and not passes:
                part.passes_input = False

    def _build_mlp(self, given: Mapping[str, Any]) -> LayerNormMLP:
        return LayerNormMLP(
            given["hidden_size"],
            given["ffn_hidden_size"],
            eps=given["layernorm_epsilon"],
            **self._part_arguments("layernorm_mlp", given, ("activation", "activation_params")),
        )

    def _build_norm(self, given: Mapping[str, Any]) -> torch.nn.Module:
        names = (
            "normalization", "hidden_size", "layernorm_epsilon", "params_dtype", "device", "zero_centered_gamma",
        )  # fmt: skip
        return make_norm(*(given[name] for name in names), self.sequence_parallel)

    def _part_arguments(self, part: str, given: Mapping[str, Any], own: tuple[str, ...]) -> dict[str, Any]:
        """What a part and this layer call by the same name: that of all parts, and the part's `own`."""
        return {
            **{argument: given[argument] for argument in (*_OF_ALL_PARTS, *own)},
            "return_bias": False,
            "return_layernorm_output": self.apply_residual_connection_post_layernorm,
            "name": part_name(self.name, part),
        }

    @composed
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
            Like hidden_states; in the dtype of torch.autocast where that is on.
        """
        reject_in_call("TransformerLayer", inference_params, thd_attention_policies, thd_attention_policy_dispatch)
        shared = given(
            is_first_microbatch=is_first_microbatch,
            checkpoint_core_attention=checkpoint_core_attention or None,
            core_attention_bias_type=None if core_attention_bias_type == "no_bias" else core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            max_seqlen_q=max_seqlen_q,
            pad_between_seqs=pad_between_seqs,
            softcap=softcap,
        )
        hidden_states = _under_autocast(hidden_states)
        if self._passes_residuals:
            update_passing(self.layernorm_mlp)
        decoder = self.layer_type == "decoder"
        keys = _key_bounds(cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv)
        own_keys = _key_bounds(cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q) if decoder else keys
        masking = _masking(attention_mask, self_attn_mask_type, window_size, bottom_right_diagonal)
        attended = self.self_attention(hidden_states, rotary_pos_emb=rotary_pos_emb, **masking, **own_keys, **shared)
        if self.parallel_attention_mlp:
            attended, x = self._with_residual(attended, hidden_states)
            mlp, x = self._with_residual(self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch), x)
            return self._add(attended + mlp, x, cu_seqlens_q)
        x = self._add(attended, hidden_states, cu_seqlens_q)
        if decoder:
            masking = _masking(
                enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size, enc_dec_bottom_right_diagonal
            )
            attended = self.inter_attention(x, encoder_output=encoder_output, **masking, **keys, **shared)
            x = self._add(attended, x, cu_seqlens_q)
        x = self._add(self.layernorm_mlp(x, is_first_microbatch=is_first_microbatch), x, cu_seqlens_q)
        return x if self.layernorm is None else self.layernorm(x)

    def _with_residual(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual) of what a part returned for x: the residual it returned beside its output, else x."""
        return outputs if isinstance(outputs, tuple) else (outputs, x)  # type: ignore[return-value]

    def _add(
        self, outputs: torch.Tensor | tuple[torch.Tensor, ...], x: torch.Tensor, cu_seqlens: torch.Tensor | None
    ) -> torch.Tensor:
        """residual + D(output), of what a part returned for x."""
        out, residual = self._with_residual(outputs, x)
        dropout = self.hidden_dropout if self.training else 0.0
        if self.drop_path is None or not self.training:
            return dropout_add(out, residual, dropout)
        branch = self.drop_path(dropout_add(out, None, dropout), self.attn_input_format, cu_seqlens)
        return residual + branch


def _under_autocast(hidden_states: torch.Tensor) -> torch.Tensor:
    """In the dtype of torch.autocast where that is on: the whole layer is, its residual stream and its result too."""
    if isinstance(hidden_states, torch.Tensor):  # else the attention says what is wrong
        kind = hidden_states.device.type
        if _has_autocast(kind) and torch.is_autocast_enabled(kind):
            return hidden_states.to(torch.get_autocast_dtype(kind))
    return hidden_states


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what the constructor cannot do, or not together."""
    reject_unsupported("TransformerLayer", given, _UNSUPPORTED_INIT)
    require_choice("layer_type", given["layer_type"], LayerTypes)
    names = "layer_type", "apply_residual_connection_post_layernorm", "output_layernorm"
    _check_parallel(given["parallel_attention_mlp"], *(given[name] for name in names))


def _key_bounds(cu_seqlens: torch.Tensor | None, padded: torch.Tensor | None, max_seqlen: int | None) -> dict[str, Any]:
    """The bounds of the keys' sequences, as `MultiheadAttention.forward` names them."""
    return given(cu_seqlens_kv=cu_seqlens, cu_seqlens_kv_padded=padded, max_seqlen_kv=max_seqlen)


def _masking(
    mask: AttentionMask | None, mask_type: str | None, window: tuple[int, int] | None, bottom_right: bool | None
) -> dict[str, Any]:
    """Which keys a query may look at, as `MultiheadAttention.forward` names it."""
    return given(attention_mask=mask, attn_mask_type=mask_type, window_size=window, bottom_right_diagonal=bottom_right)
