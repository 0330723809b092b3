# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention that the contracts refuse."""

from __future__ import annotations

import torch

from te_dispatch.conformance.families.refused.mistakes import given, lengthened, longer, refused
from te_dispatch.conformance.space import Arguments, register


def _scores(right: Arguments, dtype: torch.dtype) -> torch.Tensor:
    """(1, 1, s_q, s_kv + 1), which no score matrix broadcasts to."""
    return torch.zeros(1, 1, right["q"].shape[0], right["k"].shape[0] + 1, dtype=dtype)


_ATTENTION = {
    "wide_mask": given(mask="arbitrary", attn_mask=lambda right: _scores(right, torch.bool)),
    "no_mask": given(mask="arbitrary"),
    "other_head_dim": longer("k"),
    "more_keys_than_values": longer("k", 0),
    "heads_that_no_group_divides": given({"heads": "4/2"}, q=lambda right: lengthened(right["q"], -2)),
    "another_batch": given(k=lambda right: lengthened(right["k"], 1), v=lambda right: lengthened(right["v"], 1)),
    "padding_without_lengths": given(mask="padding"),
    "lengths_of_too_few": given(mask="padding", cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
                                cu_seqlens_kv=torch.tensor([0, 1], dtype=torch.int32)),
    "wide_bias": given(bias_type="post_scale", bias=lambda right: _scores(right, torch.float32)),
    "no_bias": given(bias_type="post_scale"),
    "bias_without_a_type": given(bias=lambda right: _scores(right, torch.float32)[..., 1:].clone()),
    "slopes_of_more_heads": given(bias_type="alibi", alibi_slopes=lambda right: torch.ones(right["q"].shape[2] + 1)),
    "no_softmax_offset": given(softmax_type="learnable"),
    "dropout_without_rng_state": given(dropout_p=0.1),
    "dropout_of_all": given(dropout_p=1.0, rng_state=torch.zeros(2, dtype=torch.int64)),
    "window_of_minus_two": given(window=(-2, 0)),
    "packing_of_unequal_shapes": given({"shape": "2x17x33"}, packing="3hd"),
    "unknown_mask": given(mask="diagonal"),
    "unknown_softmax": given(softmax_type="hard"),
    "negative_cap": given(softcap=-1.0),
    "unknown_bias": given(bias_type="added"),
    "unknown_layout": given(layout="hbsd"),
    "slopes_without_alibi": given(alibi_slopes=lambda right: torch.ones(right["q"].shape[2])),
    "mask_of_numbers": given(mask="arbitrary", attn_mask=lambda right: _scores(right, torch.float32)[..., 1:].clone()),
    "offset_of_more_heads": given(
        softmax_type="learnable", softmax_offset=lambda right: torch.ones(right["q"].shape[2] + 1)
    ),
    "negative_dropout": given(dropout_p=-0.1, rng_state=torch.zeros(2, dtype=torch.int64)),
    "rng_state_of_one": given(dropout_p=0.1, rng_state=torch.zeros(1, dtype=torch.int64)),
}  # fmt: skip
_RAGGED = {
    "no_lengths": given(cu_seqlens_q=None),
    "keys_of_another_batch": longer("cu_seqlens_kv"),
    "int64_lengths": given(cu_seqlens_q=lambda right: right["cu_seqlens_q"].long()),
}
_ATTENTION_BWD = {
    "wide_dout": longer("dout"),
    "long_dout": longer("dout", 0),
    "dbias_without_bias": given(with_dbias=True),
}


register(
    refused("attention_fwd", "plain", _ATTENTION),
    refused("attention_fwd", "ragged", _RAGGED, "refused_ragged"),
    refused("attention_bwd", "plain", _ATTENTION_BWD),
)
