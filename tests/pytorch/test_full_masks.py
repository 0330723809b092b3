# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Masks, biases, packed tokens and memory layouts that programs make by themselves, against definitions in Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch.pytorch as te
from te_dispatch.pytorch.attention.full_masks import get_alibi, get_full_mask, get_padding_mask, get_thd_padding_mask
from te_dispatch.pytorch.attention.masks import MASK_TYPES
from te_dispatch.pytorch.attention.memory_layouts import (
    QKVLayouts,
    get_qkv_layout,
    qkv_layout_needs_detection,
    transpose_to_bhsd_htd_pytorch,
)
from te_dispatch.pytorch.attention.packing import (
    ConvertBSHDtoTHD,
    ConvertTHDtoBSHD,
    PackTensors,
    UnpackTensor,
    get_cu_seqlens_and_indices,
    get_full_cu_seqlens,
    get_indices,
)

#: Lengths of queries and of keys, and the rooms that they have.
LENGTHS_Q, LENGTHS_KV, ROOM_Q, ROOM_KV = [2, 4, 1], [3, 2, 5], 4, 5


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


# -- masks --------------------------------------------------------------------------------------------------------


def test_lengths_become_padding_masks() -> None:
    q, kv = get_padding_mask(2, cu(LENGTHS_Q), cu(LENGTHS_KV), ROOM_Q, ROOM_KV, "cross")
    assert q.shape == (2, 1, 1, ROOM_Q) and q.dtype == torch.bool
    assert q.flatten(1).tolist() == [[False, False, True, True], [False] * 4]
    assert kv.flatten(1).tolist() == [[False, False, False, True, True], [False, False, True, True, True]]
    assert torch.equal(get_padding_mask(2, cu(LENGTHS_Q), max_seqlen_q=ROOM_Q), q)
    with pytest.raises(ValueError, match="cu_seqlens_kv and max_seqlen_kv must be given"):
        get_padding_mask(2, cu(LENGTHS_Q), max_seqlen_q=ROOM_Q, attention_type="cross")


def test_rows_between_packed_sequences_are_padding() -> None:
    starts = cu([3, 2, 4])
    assert get_thd_padding_mask(11, cu([2, 0, 3]), starts).tolist() == [
        *(False, False, True),
        *(True, True),
        *(False, False, False, True),
        *(True, True),
    ]


def allowed(mask_type: str, window: Any, bottom_right: bool, i: int, j: int, len_q: int, len_kv: int) -> bool:
    """Whether query i may look at key j."""
    if "padding" in mask_type and (i >= len_q or j >= len_kv):
        return False
    if "causal" in mask_type:
        bottom_right = mask_type.endswith("bottom_right")
    distance = j - i - (len_kv - len_q if bottom_right else 0)
    left, right = window or (-1, -1)
    if "causal" in mask_type:
        right = 0
    return (left < 0 or distance >= -left) and (right < 0 or distance <= right)


@pytest.mark.parametrize("window", [None, (-1, -1), (1, 1), (2, 0), (-1, 1)])
@pytest.mark.parametrize("bottom_right", [True, False])
@pytest.mark.parametrize("mask_type", MASK_TYPES)
def test_a_full_mask_is_what_its_words_say(mask_type: str, bottom_right: bool, window: Any) -> None:
    padded = "padding" in mask_type
    batch = 3 if padded else 1
    given: Any = None
    if padded:
        given = get_padding_mask(3, cu(LENGTHS_Q), cu(LENGTHS_KV), ROOM_Q, ROOM_KV, "cross")
    elif mask_type == "arbitrary":
        given = torch.rand(1, 1, ROOM_Q, ROOM_KV) < 0.3
    kind, mask, len_q, len_kv = get_full_mask(ROOM_Q, ROOM_KV, mask_type, given, window, "cross", bottom_right)
    expected = torch.empty(batch, 1, ROOM_Q, ROOM_KV, dtype=torch.bool)
    for b in range(batch):
        lengths = (LENGTHS_Q[b], LENGTHS_KV[b]) if padded else (ROOM_Q, ROOM_KV)
        for i in range(ROOM_Q):
            for j in range(ROOM_KV):
                expected[b, 0, i, j] = not allowed(mask_type, window, bottom_right, i, j, *lengths)
    if mask_type == "arbitrary":
        expected = expected | given
    assert torch.equal(mask.expand_as(expected), expected)
    assert kind == ("arbitrary" if window is not None and window != (-1, -1) else mask_type)
    if padded:
        assert (len_q.tolist(), len_kv.tolist()) == (LENGTHS_Q, LENGTHS_KV)
    else:
        assert len_q is None and len_kv is None


def test_a_full_mask_of_padding_needs_one() -> None:
    with pytest.raises(ValueError, match="attention_mask must be given for attn_mask_type='padding'"):
        get_full_mask(4, 4, "padding")
    with pytest.raises(ValueError, match="attn_mask_type must be one of"):
        get_full_mask(4, 4, "diagonal")


def test_attention_under_a_full_mask_is_that_under_its_words() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, room, 2, 16) for room in (ROOM_Q, ROOM_KV, ROOM_KV))
    kind, mask, _, _ = get_full_mask(ROOM_Q, ROOM_KV, "causal_bottom_right", None, (2, 0), "cross")
    options: dict[str, Any] = {"qkv_format": "bshd", "attention_type": "cross"}
    words = te.DotProductAttention(2, 16, attn_mask_type="causal_bottom_right", window_size=(2, 0), **options)
    spelled = te.DotProductAttention(2, 16, attn_mask_type=kind, **options)
    torch.testing.assert_close(spelled(q, k, v, attention_mask=mask), words(q, k, v))


@pytest.mark.parametrize("bottom_right", [True, False])
def test_alibi_is_its_formula(bottom_right: bool) -> None:
    cache: dict[str, Any] = {"_alibi_slopes_require_update": True, "_alibi_bias_require_update": True}
    lengths = torch.tensor(LENGTHS_Q), torch.tensor(LENGTHS_KV)
    slopes, bias = get_alibi(cache, 4, ROOM_Q, ROOM_KV, *lengths, None, torch.float64, bottom_right)
    assert slopes.tolist() == [2.0 ** (-8 * k / 4) for k in range(1, 5)] and bias.dtype == torch.float64
    for b, (len_q, len_kv) in enumerate(zip(LENGTHS_Q, LENGTHS_KV)):
        offset = len_kv - len_q if bottom_right else 0
        for h in range(4):
            for i in range(ROOM_Q):
                for j in range(ROOM_KV):
                    assert bias.expand(3, -1, -1, -1)[b, h, i, j] == -slopes[h] * abs(j - i - offset)
    # The cache holds what it has until it is told otherwise.
    assert get_alibi(cache, 4, 9, 9)[1] is bias
    cache["_alibi_bias_require_update"] = True
    assert get_alibi(cache, 4, 9, 9)[1].shape == (1, 4, 9, 9)


def test_alibi_of_given_slopes() -> None:
    given = torch.tensor([[0.5, 0.25], [1.0, 2.0]])
    slopes, bias = get_alibi({}, 2, 3, 3, alibi_slopes=given)
    assert slopes is given and bias.shape == (2, 2, 3, 3) and bias[1, 1, 0, 2] == -4.0
    with pytest.raises(ValueError, match="must both be given or both be None"):
        get_alibi({}, 2, 3, 3, actual_seqlens_q=torch.tensor([3]))
    with pytest.raises(ValueError, match=r"alibi_slopes must be \(heads,\) or \(batch, heads\)"):
        get_alibi({}, 2, 3, 3, alibi_slopes=given[None])


# -- packed tokens ------------------------------------------------------------------------------------------------


def test_indices_say_where_tokens_are() -> None:
    found = get_indices(ROOM_Q, cu(LENGTHS_Q))
    assert found.shape == (12, 1, 1) and found.dtype == torch.int64
    assert found.flatten().tolist() == [0, 1, 4, 5, 6, 7, 8, 12, 12, 12, 12, 12]
    cu_seqlens, indices = get_cu_seqlens_and_indices(get_padding_mask(3, cu(LENGTHS_Q), max_seqlen_q=ROOM_Q))
    assert torch.equal(indices, found) and torch.equal(cu_seqlens, cu(LENGTHS_Q))
    assert get_full_cu_seqlens(3, 5, "cpu").tolist() == [0, 5, 10, 15]
    assert get_full_cu_seqlens(3, 5, "cpu").dtype == torch.int32


def test_batches_are_packed_and_unpacked_with_gradients() -> None:
    torch.manual_seed(0)
    indices, tokens = get_indices(ROOM_Q, cu(LENGTHS_Q)), sum(LENGTHS_Q)
    x, y = (torch.randn(12, 2, 3, requires_grad=True) for _ in range(2))
    packed, other = PackTensors.apply(indices, x, y)
    places = indices.flatten()[:tokens]
    assert torch.equal(packed[:tokens], x[places]) and torch.equal(other[:tokens], y[places])
    assert not packed[tokens:].any()
    back = UnpackTensor.apply(indices, 12, packed)
    there = torch.zeros(12, 1, 1, dtype=torch.bool)
    there[places] = True
    assert torch.equal(back, torch.where(there, x, 0.0))
    grad = torch.randn_like(back)
    back.backward(grad)
    assert torch.equal(x.grad, torch.where(there, grad, 0.0)) and not y.grad.any()
    assert torch.equal(PackTensors.apply(indices, x), packed)
    with pytest.raises(ValueError, match="at least one tensor"):
        PackTensors.apply(indices)


def test_tokens_and_padded_batches_are_converted_with_gradients() -> None:
    torch.manual_seed(0)
    bounds, tokens = cu(LENGTHS_Q), sum(LENGTHS_Q)
    x = torch.randn(tokens + 2, 2, 3, dtype=torch.float64, requires_grad=True)
    padded = ConvertTHDtoBSHD.apply(x, bounds, ROOM_Q)
    assert padded.shape == (3, ROOM_Q, 2, 3)
    for b, (start, length) in enumerate(zip(bounds.tolist(), LENGTHS_Q)):
        assert torch.equal(padded[b, :length], x[start : start + length]) and not padded[b, length:].any()
    back = ConvertBSHDtoTHD.apply(padded, bounds, tokens + 2)
    assert torch.equal(back[:tokens], x[:tokens]) and not back[tokens:].any()
    assert torch.autograd.gradcheck(lambda t: ConvertTHDtoBSHD.apply(t, bounds, ROOM_Q), x)
    assert torch.autograd.gradcheck(
        lambda t: ConvertBSHDtoTHD.apply(t, bounds, tokens), padded.detach().requires_grad_()
    )


# -- memory layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dim", "form", "layout"),
    [
        ((4, 2, 3, 5, 8), 2, "sbhd", "sb3hd"),
        ((4, 2, 5, 3, 8), 3, "bshd", "bsh3d"),
        ((7, 3, 5, 8), 1, "thd", "t3hd"),
        ((7, 5, 3, 8), 2, "thd", "th3d"),
        ((3, 4, 2, 5, 8), 0, "bshd", "bshd_bshd_bshd"),
    ],
)
def test_the_parts_of_one_tensor_are_found(shape: tuple[int, ...], dim: int, form: str, layout: str) -> None:
    given = torch.randn(shape).unbind(dim)
    found, *tensors, q_form, kv_form = get_qkv_layout(*given, form)
    assert (found, q_form, kv_form) == (layout, form, form) and found in QKVLayouts
    assert all(a is b for a, b in zip(tensors, given)) or layout == "bshd_bshd_bshd"


def test_keys_and_values_of_one_tensor_are_found() -> None:
    q = torch.randn(4, 2, 6, 8)
    for dim, layout in ((2, "bshd_bs2hd"), (3, "bshd_bsh2d")):
        kv = torch.randn(4, 2, 2, 5, 8) if dim == 2 else torch.randn(4, 2, 5, 2, 8)
        assert get_qkv_layout(q, *kv.unbind(dim), "bshd")[0] == layout
    k, v = torch.randn(4, 2, 5, 2, 8).unbind(3)
    assert get_qkv_layout(q, v, k, "bshd")[0] == "bshd_bshd_bshd"  # not in their order
    assert qkv_layout_needs_detection(q, k) and not qkv_layout_needs_detection(q, None, q.transpose(0, 1))


def test_other_tensors_are_made_contiguous() -> None:
    q, k, v = (torch.randn(2, 4, 5, 8).transpose(0, 1) for _ in range(3))
    layout, *tensors, q_form, kv_form = get_qkv_layout(q, k, v, "sbhd_2bshd")
    assert (layout, q_form, kv_form) == ("sbhd_bshd_bshd", "sbhd", "bshd") and layout in QKVLayouts
    assert all(x.is_contiguous() and torch.equal(x, given) for x, given in zip(tensors, (q, k, v)))
    with pytest.raises(ValueError, match="k must have stride 1 in its last dimension"):
        get_qkv_layout(q, k.transpose(-1, -2), v, "sbhd")
    with pytest.raises(NotImplementedError, match="inference_params"):
        get_qkv_layout(q, k, v, "sbhd", object())
    with pytest.raises(ValueError, match="qkv_format must be one of"):
        get_qkv_layout(q, k, v, "hsbd")


def test_tokens_are_moved_last_but_one() -> None:
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(transpose_to_bhsd_htd_pytorch(x, "sbhd"), x.permute(1, 2, 0, 3))
    assert torch.equal(transpose_to_bhsd_htd_pytorch(x, "bshd"), x.permute(0, 2, 1, 3))
    assert torch.equal(transpose_to_bhsd_htd_pytorch(x[0], "thd"), x[0].permute(1, 0, 2))
    assert transpose_to_bhsd_htd_pytorch(x, "bhsd") is x
    assert transpose_to_bhsd_htd_pytorch(x, "sbhd").is_contiguous()


def test_all_layouts_are_listed_once() -> None:
    assert len(set(QKVLayouts)) == len(QKVLayouts) == 25
    assert {"paged_kv_thd_sbhd_sbhd", "thd_bshd_bshd", "bshd_bsh2d"} <= set(QKVLayouts)
