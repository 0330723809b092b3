# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention beyond the sizes and values at which kernels change: each kernel here is right on all smaller calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_dispatch.conformance.checks import find as find_check
from te_dispatch.conformance.families.quantize import counts
from te_dispatch.conformance.space import find
from te_dispatch.conformance.subject import Subject
from te_dispatch.conformance.trial import Failure
from tests.conformance.trials import Mistake, case_of, trial_of

Given = Mapping[str, Any]
FORWARD, BACKWARD = "torch.unfused_attention", "torch.unfused_attention_bwd"


def _values(space: str, kernel: Mistake | None = None, operator: str = "attention_fwd", **values: str) -> None:
    implementation = FORWARD if operator == "attention_fwd" else BACKWARD
    find_check("values").run(trial_of(case_of(operator, space, **values), implementation, kernel))


def _first_keys(right: Subject, given: Given) -> Any:
    """512 keys, as many as one block has."""
    return right.call({**given, "k": given["k"][:512].contiguous(), "v": given["v"][:512].contiguous()})


def _first_heads(right: Subject, given: Given) -> Any:
    made = right.call(given)
    made.out[..., 16:, :] = 0
    return made


def _first_sequences(right: Subject, given: Given) -> Any:
    made = right.call(given)
    made.out[int(given["cu_seqlens_q"][:65][-1]) :] = 0
    return made


def _narrow_heads(right: Subject, given: Given) -> Any:
    """Products of q and k over 128 features."""
    return right.call({**given, "q": given["q"][..., :128].contiguous(), "k": given["k"][..., :128].contiguous(),
                       "softmax_scale": given.get("softmax_scale") or given["q"].shape[-1] ** -0.5})  # fmt: skip


@pytest.mark.parametrize(
    ("space", "axis", "value", "kernel", "small"),
    [
        ("plain", "shape", "1x9x520", _first_keys, "2x17x33"),
        ("plain", "heads", "17/17", _first_heads, "8/2"),
        ("plain", "dims", "192/128", _narrow_heads, "128/128"),
        ("ragged", "lengths", "67:5", _first_sequences, "3+33+1+9"),
    ],
)
def test_a_kernel_that_is_wrong_above_a_size(space: str, axis: str, value: str, kernel: Mistake, small: str) -> None:
    once = next(a.once for a in find("attention_fwd", space).axes if a.name == axis)
    assert value in once
    chosen = {axis: value, "mask": "none", **({"gaps": "none"} if space == "ragged" else {})}
    _values(space, **chosen)
    _values(space, kernel, **{**chosen, axis: small})
    with pytest.raises(Failure, match="out"):
        _values(space, kernel, **chosen)


@pytest.mark.parametrize("value", ["1x5x1032", "1x2x4104", "1x4104x2", "67x3x5"])
@pytest.mark.parametrize("operator", ["attention_fwd", "attention_bwd"])
def test_sound_kernels_at_large_sizes(operator: str, value: str) -> None:
    _values("plain", operator=operator, shape=value, dtype="bf16")


def _online(right: Subject, given: Given) -> Any:
    """Tiles of 128 keys with a running maximum that starts at -Inf, and no care for a first tile that is all -Inf."""
    made = right.call(given)
    q, k, v = (given[name].double().permute(1, 2, 0, 3) for name in "qkv")
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = q @ k.transpose(-1, -2) * given.get("softmax_scale", q.shape[-1] ** -0.5) + given["bias"]
    top = torch.full((*scores.shape[:-1], 1), -torch.inf, dtype=torch.float64)
    total, out = torch.zeros_like(top), torch.zeros(*scores.shape[:-1], v.shape[-1], dtype=torch.float64)
    for tile, values in zip(scores.split(128, -1), v.split(128, -2)):
        higher = torch.maximum(top, tile.amax(-1, keepdim=True))
        weight, kept = torch.exp(tile - higher), torch.exp(top - higher)
        total, out, top = total * kept + weight.sum(-1, keepdim=True), out * kept + weight @ values, higher
    made.out.copy_((out / total).permute(2, 0, 1, 3))
    return made


def test_a_first_tile_of_minus_inf() -> None:
    chosen = {"bias": "post_scale", "bias_shape": "bh", "mask": "none", "softcap": "0", "softmax": "vanilla"}
    large = {**chosen, "shape": "1x9x150", "layout": "sbhd", "dtype": "fp32"}
    _values("scored", bias_values="minus_inf", **large)
    _values("scored", _online, bias_values="normal", **large)
    with pytest.raises(Failure, match="out"):
        _values("scored", _online, bias_values="minus_inf", **large)


@pytest.mark.parametrize("bias", ["pre_scale", "post_scale"])
@pytest.mark.parametrize("mask", ["none", "causal_bottom_right", "padding_causal_bottom_right"])
def test_gradients_of_a_bias_of_minus_inf(bias: str, mask: str) -> None:
    _values("scored", operator="attention_bwd", bias=bias, mask=mask, bias_values="minus_inf", dbias="yes")


@pytest.mark.parametrize("operator", ["attention_fwd", "attention_bwd"])
def test_a_bias_of_minus_inf_below_a_cap_hides_nothing(operator: str) -> None:
    """The cap makes a logit of -softcap of it, also in a row that has no other."""
    _values(
        "scored", operator=operator, bias="pre_scale", bias_values="minus_inf", softcap="20.0", softmax="off-by-one",
        shape="1x9x150", mask="causal", layout="bshd", window="3:5",
    )  # fmt: skip


@pytest.mark.parametrize("hole", ["nan", "inf"])
def test_what_lies_where_no_sequence_is(hole: str) -> None:
    def weighs_all(right: Subject, given: Given) -> Any:
        """Weights of 0 times whatever is there."""
        made = right.call(given)
        made.out.add_((0 * given["v"]).sum().to(made.out.dtype))
        return made

    chosen = {"mask": "padding", "valid": "ragged", "hole": hole}
    _values("masked", **chosen)
    _values("masked", weighs_all, **{**chosen, "hole": "number"})
    with pytest.raises(Failure, match="out"):
        _values("masked", weighs_all, **chosen)


@pytest.mark.parametrize("same", ["qkv", "kv"])
@pytest.mark.parametrize("operator", ["attention_fwd", "attention_bwd"])
def test_one_tensor_as_several_operands(operator: str, same: str) -> None:
    _values("twice", operator=operator, same=same)


def test_a_kernel_that_scales_its_keys_in_place() -> None:
    """And back, which is seen; or a copy of them, which is right unless the values are the same memory."""

    def kernel(right: Subject, given: Given) -> Any:
        given["k"].mul_(2)
        made = right.call({**given, "softmax_scale": given["q"].shape[-1] ** -0.5 / 2})
        given["k"].div_(2)
        return made

    def same_memory(right: Subject, given: Given) -> Any:
        k = given["k"] * 1
        v = k if given["k"] is given["v"] else given["v"]
        k.mul_(2)
        return right.call({**given, "k": k, "v": v, "softmax_scale": given["q"].shape[-1] ** -0.5 / 2})

    with pytest.raises(Failure, match="inputs were written to, and then put back: k"):
        _values("plain", kernel)
    _values("plain", same_memory)
    with pytest.raises(Failure, match="out"):
        _values("twice", same_memory, same="kv")


def test_lengths_of_many_sequences() -> None:
    assert counts("5+3+0") == [5, 3, 0]
    assert counts("7:3") == [0, 1, 2, 0, 1, 2, 0]


def test_an_output_wider_than_the_operands_may_be_rounded_to_their_dtype_first() -> None:
    def narrow(right: Subject, given: Given) -> Any:
        made = right.call(given)
        made.out.copy_(made.out.bfloat16())
        return made

    def narrower(right: Subject, given: Given) -> Any:
        made = right.call(given)
        made.out.copy_((made.out * (1 + 2.0**-6)).bfloat16())
        return made

    chosen = {"dtype": "bf16", "out": "fp32", "shape": "67x3x5", "dims": "1/1"}
    _values("plain", narrow, **chosen)
    with pytest.raises(Failure, match="out"):
        _values("plain", narrower, **chosen)
