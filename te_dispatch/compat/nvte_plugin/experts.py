# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Mixtures of experts: permuting tokens by indices of experts, and padding the rows of each expert.

A native map of rows is int32 (top_k * tokens,): the row of choice c of token t is at c * tokens + t. The operators' is
(tokens, top_k), a transposed view of the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from te_dispatch import ops
from te_dispatch.compat.nvte_plugin.passing import floats, plain, require


def moe_permute_fwd(
    input: Any, dtype: Any, indices: Any, num_out_tokens: int, workspace: list[Any], max_expanded_token_num: int
) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """`workspace` is of the native sort: it is returned as it came."""
    floats(input)
    plain(indices)
    result = ops.moe_permute(input, indices, capacity=num_out_tokens if num_out_tokens > 0 else None)
    return result.permuted, result.row_map.t().reshape(-1), workspace


def _unpermute(input: Any, dtype: Any, row_id_map: Any, prob: Any, num_tokens: int, topK: int) -> torch.Tensor:
    floats(input)
    plain(row_id_map, prob)
    return ops.moe_unpermute(input, row_id_map.view(topK, num_tokens).t(), probs=prob if prob.numel() > 0 else None)


def moe_unpermute_bwd(
    input_bwd: Any, input_fwd: Any, dtype: Any, row_id_map: Any, prob: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    floats(input_bwd, input_fwd, prob)
    plain(row_id_map)
    require(prob.numel() > 0, "no probabilities")
    tokens, top_k = prob.shape
    result = ops.moe_unpermute_bwd(input_bwd, input_fwd, row_id_map.view(top_k, tokens).t(), probs=prob)
    return result.dinput, result.dprobs


def fused_multi_row_padding(
    input: Any, output: Any, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    plain(input, output)
    output.copy_(ops.pad_rows(input, list(input_row_list), list(padded_input_row_list)))


def fused_multi_row_unpadding(
    input: Any, output: Any, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    plain(input, output)
    output.copy_(ops.unpad_rows(input, list(unpadded_input_row_list), list(input_row_list)))


ADAPTERS: dict[str, Callable[..., Any]] = {
    "moe_permute_fwd": moe_permute_fwd,
    "moe_permute_bwd": _unpermute,
    "moe_unpermute_fwd": _unpermute,
    "moe_unpermute_bwd": moe_unpermute_bwd,
    "fused_multi_row_padding": fused_multi_row_padding,
    "fused_multi_row_unpadding": fused_multi_row_unpadding,
}
