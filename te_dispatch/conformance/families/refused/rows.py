# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Norms, activations, softmax and rotary embeddings that the contracts refuse."""

from __future__ import annotations

from collections.abc import Callable

import torch

from te_dispatch.conformance.families.refused.mistakes import given, lengthened, longer, refused
from te_dispatch.conformance.space import Arguments, register


def _tall(name: str) -> Callable[[Arguments], torch.Tensor]:
    return lambda right: lengthened(right[name], 0)


def _odd(right: Arguments) -> torch.Tensor:
    """x with an odd number of columns, which no gate splits."""
    x: torch.Tensor = right["x"]
    return x[:, : (x.shape[1] - 1) // 2 * 2 + 1].clone()


_NORM = {
    "long_gamma": longer("gamma"),
    "residual_of_another_shape": given(residual=_tall("x")),
    "result_of_integers": given(out_dtype=torch.int32),
    "negative_eps": given(eps=-1e-5),
    "gamma_of_two_dimensions": given(gamma=lambda right: right["gamma"][None]),
}
_NORM_BWD = {
    "tall_dy": longer("dy", 0),
    "long_gamma": longer("gamma"),
    "long_rstd": longer("rstd"),
    "rstd_in_bf16": given(rstd=lambda right: right["rstd"].bfloat16()),
    "tall_add": given(add=_tall("x")),
}


def _wide_mask(right: Arguments) -> torch.Tensor:
    x = right["x"]
    return torch.zeros(*x.shape[:-1], x.shape[-1] + 1, dtype=torch.bool)


#: One sequence more than there are.
_OFFSETS = given(offsets=lambda right: torch.zeros(right[_rotated(right)].shape[1] + 1, dtype=torch.int32))
_ROPE = {
    "unknown_layout": given(layout="hbsd"),
    "more_angles_than_features": given(freqs=lambda right: torch.cat([right["freqs"]] * 3, -1)),
    "angles_in_fp64": given(freqs=lambda right: right["freqs"].double()),
    "odd_angles": given(freqs=lambda right: right["freqs"][..., :-1].clone()),
    "fewer_angles_than_positions": given(freqs=lambda right: right["freqs"][: _positions(right) - 1].clone()),
    "offsets_of_more": _OFFSETS,
    "sequences_of_a_dense_layout": given(cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
}


def _rotated(right: Arguments) -> str:
    return "x" if "x" in right else "dy"


def _positions(right: Arguments) -> int:
    """How many a sequence of sbhd layout has."""
    return int(right[_rotated(right)].shape[0])


register(
    refused("layernorm_fwd", "plain", {**_NORM, "long_beta": longer("beta")}),
    refused("rmsnorm_fwd", "plain", _NORM),
    refused("layernorm_bwd", "plain", {**_NORM_BWD, "long_mean": longer("mean")}),
    refused("rmsnorm_bwd", "plain", _NORM_BWD),
    refused(
        "activation_fwd",
        "plain",
        {
            "odd": given(kind="swiglu", x=_odd),
            "params": given(params=(7.0, 1.7)),
            "kind": given(kind="tanh"),
            "result_of_integers": given(out_dtype=torch.int32),
        },
    ),
    refused(
        "activation_bwd",
        "plain",
        {
            "wide_dy": longer("dy"),
            "tall_dy": longer("dy", 0),
            "params": given(params=(7.0, 1.7)),
        },
    ),
    refused(
        "softmax_fwd",
        "plain",
        {
            "wide_mask": given(mask=_wide_mask),
            "mask_of_numbers": given(mask=lambda right: torch.zeros(right["x"].shape)),
            "result_of_integers": given(out_dtype=torch.int32),
        },
    ),
    refused("softmax_bwd", "plain", {"wide_dy": longer("dy"), "tall_dy": longer("dy", 0)}),
    refused("rope_fwd", "dense", _ROPE),
    refused("rope_bwd", "dense", _ROPE),
    refused("rope_fwd", "thd", {"no_sequences": given(cu_seqlens=None)}, "refused_thd"),
)
