# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Dropout, permutations of tokens and optimizer steps that the contracts refuse."""

from __future__ import annotations

import torch

from te_dispatch.conformance.families.refused.mistakes import given, item, lengthened, longer, refused, short
from te_dispatch.conformance.space import Arguments, register


def _probs_of_more(right: Arguments) -> torch.Tensor:
    tokens, top_k = right["row_map"].shape
    return torch.ones(tokens + 1, top_k)


def _row_behind(right: Arguments) -> torch.Tensor:
    """A map whose last choice is the row behind x's last."""
    rows: torch.Tensor = right["row_map"].clone()
    rows[-1, -1] = right["x"].shape[0]
    return rows


register(
    refused(
        "dropout_add_fwd",
        "plain",
        {
            "no_rng_state": given(dropout_p=0.1),
            "wide_residual": longer("residual"),
            "long_bias": longer("bias", bias="fp32"),
            "negative_share": given(dropout_p=-0.1, rng_state=torch.zeros(2, dtype=torch.int64)),
        },
    ),
    refused(
        "dropout_add_bwd",
        "plain",
        {
            "no_mask": given(mask=None),
            "wide_mask": longer("mask"),
            "mask_of_numbers": given(mask=lambda right: right["mask"].float()),
            "share_of_all": given(dropout_p=1.0),
        },
    ),
    refused(
        "moe_permute",
        "plain",
        {
            "tall_indices": longer("indices", 0),
            "indices_of_numbers": given(indices=lambda right: right["indices"].float()),
            "negative_capacity": given(capacity=-1),
        },
    ),
    refused(
        "moe_unpermute",
        "plain",
        {"tall_probs": given(probs=_probs_of_more), "int64_map": given(row_map=lambda right: right["row_map"].long())},
    ),
    refused("moe_unpermute", "plain", {"row_behind": given(row_map=_row_behind)}, "refused_contents", contents=True),
    refused(
        "moe_unpermute_bwd",
        "plain",
        {
            "tall_dy": longer("dy", 0),
            "wide_dy": longer("dy"),
            "int64_map": given(row_map=lambda right: right["row_map"].long()),
        },
    ),
    refused(
        "multi_tensor_adam",
        "plain",
        {
            "one_gradient_less": short("grads"),
            "moment_of_another_shape": item("exp_avgs", lengthened),
            "one_second_moment_less": short("exp_avg_sqs"),
            "long_gradient": item("grads", lengthened),
            "beta_of_one": given(beta1=1.0),
            "negative_beta": given(beta2=-0.5),
            "negative_eps": given(eps=-1.0),
            "step_of_zero": given(step=0),
        },
    ),
    refused(
        "multi_tensor_scale", "plain", {"one_output_less": short("outputs"), "long_output": item("outputs", lengthened)}
    ),
)
