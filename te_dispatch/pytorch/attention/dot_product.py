# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""`DotProductAttention`: the module around the attention operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint

from te_dispatch import ops
from te_dispatch.core import scopes
from te_dispatch.core.watched import reload_changed
from te_dispatch.pytorch.arguments import reject_unsupported, resolve_device
from te_dispatch.pytorch.attention.bounds import Bounds, sequence_bounds
from te_dispatch.pytorch.attention.function import (
    AttentionCall,
    AttentionOptions,
    NoGradTensors,
    attention,
    infer_attention,
    run_attention,
)
from te_dispatch.pytorch.attention.inputs import Operands, as_given, check_operands, gather_operands, under_autocast
from te_dispatch.pytorch.attention.lowering import (
    AttentionMask,
    arbitrary_mask,
    of_every_query,
    operator_bias_type,
    spell_out,
)
from te_dispatch.pytorch.attention.masks import (
    UNBOUNDED,
    Masking,
    canonical_mask_type,
    canonical_window,
    starts_bottom_right,
)
from te_dispatch.pytorch.attention.signature import AttentionSignatures, Given
from te_dispatch.pytorch.attention.views import CoreAttentionViews
from te_dispatch.pytorch.autograd.scoped import autocast_off
from te_dispatch.pytorch.composable import composable
from te_dispatch.pytorch.distributed.arguments import ContextParallelModule, forked
from te_dispatch.pytorch.distributed.tensor_parallel import part_of
from te_dispatch.pytorch.fp8.saved_module import SavedModule
from te_dispatch.pytorch.randomness import draw_rng_state

_UNSUPPORTED_CALL: dict[str, Any] = {
    "inference_params": None,
    "fp8_output": False,
    "bf16_backward": False,
    "num_splits": 1,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
    "thd_attention_policies": None,
    "thd_attention_policy_dispatch": "auto",
}


@composable
class DotProductAttention(SavedModule, ContextParallelModule, CoreAttentionViews):
    """softmax(q k^T / sqrt(d)) v, with masks, windows, biases, dropout and grouped queries.

    The formulas, in full, are those of `te_dispatch.ops.attention`.

    Args:
        num_attention_heads: query heads h.
        kv_channels: head dimension d, or a pair (of query and key, of value).
        num_gqa_groups: heads of key and value, a divisor of h; None for h.
        attention_dropout: probability of dropping an attention weight, in training.
        qkv_format: ``sbhd``, ``bshd`` or ``thd`` (s sequence, b batch, t tokens of all sequences).
        attn_mask_type: one of `MASK_TYPES`.
        window_size: (left, right) keys that a query may look at around its own position, -1 for no bound.
        bottom_right_diagonal: whether windows and ALiBi count from the bottom right corner of the score matrix. None
            for True; masks with causal in their name decide for themselves.
        softcap: cap of the logits, 0 for none.
        layer_number, name: kept as attributes.
        attention_type: ``self`` or ``cross``.
        softmax_scale: None for 1 / sqrt(d).
        softmax_type: ``vanilla``, ``off-by-one`` (1 added to the denominator) or ``learnable`` (exp of the parameter
            `softmax_offset` (h,), which starts at 0). `softmax_offset` is None for the first, zeros that nothing reads
            for the second.
        return_max_logit: also return the largest logit of each head.
        get_rng_state_tracker: a function that gives an RNG tracker; dropout then draws from its default state, unless
            sequence_parallel.
        tp_group: the process group whose ranks divide the heads, or None; tp_size: its ranks. Each attends with its
            part of num_attention_heads and num_gqa_groups, without communication.
        cp_group: a process group of one rank, or None. cp_global_ranks, cp_stream, cp_comm_type: no effect on one rank.

    Raises:
        NotImplementedError: an argument that is not supported yet; it is named.
        ValueError: a value that does not fit; it is named.
    """

    #: Of releases 1.6 and 1.7.
    FORMER_ENTRY = "fused_attention._extra_state"

    softmax_offset: torch.Tensor | None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool | None = False,
        name: str | None = None,
    ) -> None:
        given = locals()
        super().__init__()
        self._keep_parallel(given)
        self._keep_context(given)
        self._drops_alike = bool(sequence_parallel)
        if num_attention_heads < 1:
            raise ValueError(f"num_attention_heads must be positive, got {num_attention_heads}")
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups
        heads = part_of("DotProductAttention", "num_attention_heads", num_attention_heads, self._parts)
        part_of("DotProductAttention", "num_gqa_groups", self.num_gqa_groups, self._parts)
        widths = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = widths
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softcap = softcap
        self.layer_number = layer_number
        self.attention_type = attention_type
        self.softmax_scale = softmax_scale
        self.return_max_logit = return_max_logit
        self.name = name
        self.softmax_offset = None
        if softmax_type != "vanilla":
            offset = torch.zeros(heads, dtype=torch.float32, device=resolve_device(None))
            # Not a buffer: DDP would broadcast it at every step.
            self.softmax_offset = torch.nn.Parameter(offset) if softmax_type == "learnable" else offset
        self.softmax_type = softmax_type

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, "
            f"kv_channels={self.hidden_size_per_attention_head_k}, qkv_format={self.qkv_format!r}, "
            f"attn_mask_type={self.attn_mask_type!r}"
        )

    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_kv: torch.Tensor | None = None,
        cu_seqlens_q_padded: torch.Tensor | None = None,
        cu_seqlens_kv_padded: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable[..., Any] | None = None,
        score_mod_bprop: Callable[..., Any] | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: torch.Tensor | None = None,
        kv_layer: torch.Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend.

        Args:
            query_layer, key_layer, value_layer: (s, b, h, d), (b, s, h, d) or (t, h, d), as the format says; key and
                value with their own s and number of heads. float32, bfloat16 or float16; under torch.autocast they
                are cast to its dtype.
            attention_mask: True = masked out. For padding masks bool (b, 1, 1, s), padding after the tokens; cross
                attention takes a pair (of queries, of keys). For ``arbitrary`` bool broadcastable to
                (b, h, s_q, s_kv). Other masks do not read it.
            cu_seqlens_q, cu_seqlens_kv: int32 (b + 1,), cumulative lengths, instead of a padding mask and always for
                thd; key's default to query's in self attention.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 (b + 1,), where thd sequences start in memory.
            max_seqlen_q, max_seqlen_kv: upper bounds for thd; without them they are read from the device.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal, softcap: override the constructor's.
            checkpoint_core_attention: keep nothing for the backward but the inputs, and attend again there.
            core_attention_bias_type: ``no_bias``, ``pre_scale_bias``, ``post_scale_bias`` or ``alibi``.
            core_attention_bias: (1 or b, 1 or h, s_q, s_kv); has a gradient.
            alibi_slopes: float32 (h,) or (b, h), None for the paper's.
            fast_zero_fill: no effect: outputs are always written in full.
            pad_between_seqs: thd: whether the padded bounds differ from the lengths'; None for whether they are given.
            qkv_layer: query, key and value in one tensor, (.., 3, h, d), or (.., h, 3, d) with
                qkv_interleave_dim=-2; kv_layer: key and value likewise, beside query_layer. The gradient is then one
                tensor too.
            inference_params, fp8_output, bf16_backward, num_splits, score_mod, score_mod_bprop, score_mod_tensors,
                score_mod_bprop_tensors, thd_attention_policies, thd_attention_policy_dispatch: not supported yet.

        Returns:
            (s, b, h * d), (b, s, h * d) or (t, h * d); with `return_max_logit` a pair with float32 (h,).
        """
        # Tested one by one, because a dictionary of ten entries for every call costs more than the tests.
        if (
            inference_params is not None or fp8_output or bf16_backward or num_splits != 1 or score_mod is not None
            or score_mod_bprop is not None or score_mod_tensors is not None or score_mod_bprop_tensors is not None
            or thd_attention_policies is not None or thd_attention_policy_dispatch != "auto"
        ):  # fmt: skip
            reject_unsupported("DotProductAttention.forward", locals(), _UNSUPPORTED_CALL)
        if not torch.compiler.is_dynamo_compiling():  # dynamo reads them again where its trace begins
            reload_changed(scopes.MANAGER)
        given: Given = (query_layer, key_layer, value_layer, qkv_layer, kv_layer)
        if not autocast_off():
            given = tuple([under_autocast(x) for x in given])
        arguments = (
            qkv_interleave_dim, qkv_format, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size,
            bottom_right_diagonal, softcap, core_attention_bias_type, pad_between_seqs,
        )  # fmt: skip
        signatures: AttentionSignatures | None = None
        if not (
            attention_mask is not None or cu_seqlens_q is not None or cu_seqlens_kv is not None
            or cu_seqlens_q_padded is not None or cu_seqlens_kv_padded is not None or core_attention_bias is not None
            or alibi_slopes is not None or checkpoint_core_attention or torch.compiler.is_compiling()
        ):  # fmt: skip
            signatures = self._signatures  # the ones that are forgotten if an attribute is set meanwhile
            found = signatures.find(given, arguments)
            if found is not None:
                call = found.made()
                if call.program is not None:
                    function = run_attention if found.trains else infer_attention
                    return function(*as_given(*given), None, None, call)  # type: ignore[no-any-return]
                return self._attend(*as_given(*given), call, None)
        lengths = cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded, cu_seqlens_kv_padded
        operands, call, bias = self._lowered(
            given, arguments, attention_mask, lengths, core_attention_bias, alibi_slopes
        )
        if signatures is not None and bias is None and not call.tensors:
            call = signatures.made(given, arguments, call)
        if checkpoint_core_attention and torch.is_grad_enabled():
            return _checkpointed(self._attend, operands.q, operands.k, operands.v, call, bias)
        return self._attend(operands.q, operands.k, operands.v, call, bias)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Of calls without masks, lengths and biases. They rest on attributes: setting any forgets all.
        self.__dict__["_signatures"] = AttentionSignatures()

    def captured_with(self) -> Any:
        return self._signatures

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_signatures": AttentionSignatures()}

    def _lowered(
        self,
        given: Given,
        arguments: tuple[Any, ...],
        attention_mask: AttentionMask | None,
        lengths: tuple[torch.Tensor | None, ...],
        bias: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> tuple[Operands, AttentionCall, torch.Tensor | None]:
        """A call in the operators' terms, checked: its operands, what has no gradient, and the bias.

        Args:
            given: query, key, value, all three packed, key and value packed.
            arguments: the call's other arguments but tensors, as `forward` collects them.
            lengths: cu_seqlens_q, cu_seqlens_kv, and both padded.
        """
        interleave, qkv_format, max_q, max_kv, mask_type, window, bottom_right, softcap, bias_type, padded = arguments
        operands = gather_operands(*given, interleave)
        layout = qkv_format or self.qkv_format
        heads, groups = self.num_attention_heads // self._parts, self.num_gqa_groups // self._parts
        check_operands(operands, layout, heads, groups, self._widths())
        masking = self._masking(layout, mask_type, window, bottom_right)
        bounds = Bounds(*lengths, max_q, max_kv)
        if padded is not None:
            bounds = bounds.padded_between(padded, layout)
        own = self.attention_type == "self"
        bounds = sequence_bounds(operands, layout, masking.mask_type, attention_mask, bounds, own)
        mask = arbitrary_mask(operands, layout, masking.mask_type, attention_mask)
        tensors = NoGradTensors(
            attn_mask=mask,
            cu_seqlens_q=bounds.cu_seqlens_q,
            cu_seqlens_kv=bounds.cu_seqlens_kv,
            cu_seqlens_q_padded=bounds.cu_seqlens_q_padded,
            cu_seqlens_kv_padded=bounds.cu_seqlens_kv_padded,
            alibi_slopes=alibi_slopes,
        )
        bias_type = operator_bias_type(bias_type, bias)
        if bias_type == "alibi" and alibi_slopes is None and self._parts > 1:
            raise ValueError(
                f"DotProductAttention: alibi needs the alibi_slopes of this rank's {heads} heads, which are a part of "
                f"all {self.num_attention_heads}"
            )
        bias = of_every_query(bias, operands, layout)
        options = self._options(operands, layout, masking, bounds, bias_type, softcap)
        options, tensors, bias = spell_out(options, tensors, operands, bias, masking.bottom_right)
        return operands, AttentionCall(options, tensors), bias

    def _widths(self) -> tuple[int, int]:
        return self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v

    def _masking(
        self,
        layout: str,
        attn_mask_type: str | None,
        window_size: tuple[int, int] | None,
        bottom_right_diagonal: bool | None,
    ) -> Masking:
        """A call's mask: what it gives, else what the constructor was given."""
        if attn_mask_type is None:
            mask_type = self.attn_mask_type
        else:
            mask_type = canonical_mask_type("attn_mask_type", attn_mask_type)
        if layout == "thd" and not mask_type.startswith("padding"):
            raise ValueError(f"attn_mask_type must be a padding type for qkv_format='thd', got {mask_type!r}")
        window = canonical_window(mask_type, self.window_size if window_size is None else window_size)
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        return Masking(mask_type, window, starts_bottom_right(mask_type, bottom_right_diagonal))

    def _options(
        self,
        operands: Operands,
        layout: str,
        masking: Masking,
        bounds: Bounds,
        bias_type: str,
        softcap: float | None,
    ) -> AttentionOptions:
        mask, window = masking.mask_type, masking.window
        shared = bounds.cu_seqlens_q is bounds.cu_seqlens_kv
        return AttentionOptions(
            layout=layout,
            joined=operands.joined,
            packing=operands.packing,
            mask="none" if mask == "no_mask" else mask,
            window=None if window == UNBOUNDED or (window == (-1, 0) and "causal" in mask) else window,
            max_seqlen_q=bounds.max_seqlen_q,
            max_seqlen_kv=bounds.max_seqlen_q if bounds.max_seqlen_kv is None and shared else bounds.max_seqlen_kv,
            bias_type=bias_type,
            softmax_scale=self.softmax_scale,
            softmax_type=self.softmax_type,
            softcap=self.softcap if softcap is None else softcap,
            dropout_p=self.attention_dropout if self.training else 0.0,
            deterministic=_deterministic(),
            with_max_logit=self.return_max_logit,
        )

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        call: AttentionCall,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # Drawn here, inside what a checkpoint runs again, so that the recomputation draws the same.
        if call.options.dropout_p:
            tensors = NoGradTensors(*call.tensors)._replace(rng_state=self._drawn(q.device))
            call = AttentionCall(call.options, tensors)
        # Past Module.__getattr__, which asks three dictionaries for a parameter that is None.
        offset = None if self.softmax_type != "learnable" else self.softmax_offset
        if offset is not None and offset.dtype != torch.float32:
            offset = offset.float()
        return attention(q, k, v, call, bias, offset)

    def _drawn(self, device: torch.device) -> torch.Tensor:
        if self._dropout_tracker is None:
            return draw_rng_state(device)
        with forked(self._dropout_tracker):
            return draw_rng_state(device)


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() or bool(ops.policy_numerics().deterministic)


def _checkpointed(attend: Callable[..., Any], *args: Any) -> Any:
    """`attend(*args)`, run again in the backward instead of keeping what it computes."""
    if torch.compiler.is_compiling():
        # A graph has its policy inside: nothing to restore, and an object that notes its runs does not trace.
        return torch.utils.checkpoint.checkpoint(attend, *args, use_reentrant=False)
    # Imported here: most models never checkpoint, and the checkpoint module knows all other modules.
    from te_dispatch.pytorch.recompute.checkpoint import checkpoint

    return checkpoint(attend, *args, use_reentrant=False)
