# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Which key every query sees, in every layout, against an element-by-element oracle; outputs and gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_dispatch.pytorch.attention.dot_product import DotProductAttention

from .attention_oracle import Rules, assert_within, sequence_attention

BATCH, HEADS, GROUPS, D = 2, 4, 2, 8
LENGTHS = {"square": ([5, 3], [5, 3]), "wide": ([3, 4], [7, 5]), "tall": ([6, 4], [4, 4])}


def rules_of(mask_type: str, window: tuple[int, int] | None, bottom_right: bool | None) -> Rules:
    causal = "causal" in mask_type
    if causal:
        bottom_right = mask_type.endswith("bottom_right")
    elif bottom_right is None:
        bottom_right = True
    return Rules(causal=causal, bottom_right=bottom_right, window=window or (-1, -1))


def dense(sequences: list[torch.Tensor], layout: str, length: int) -> torch.Tensor:
    """Sequences padded with arbitrary numbers, which no result may depend on."""
    out = torch.full((len(sequences), length, *sequences[0].shape[1:]), 3.0)
    for b, sequence in enumerate(sequences):
        out[b, : sequence.shape[0]] = sequence
    return (out.transpose(0, 1) if layout == "sbhd" else out).contiguous()


def make(lengths: list[int], heads: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn((n, heads, D), generator=generator) for n in lengths]


def expected(q, k, v, rules, dout, masked=None):  # type: ignore[no-untyped-def]
    """Outputs and gradients, one list per tensor."""
    results = []
    for b, parts in enumerate(zip(q, k, v)):
        leaves = [t.double().requires_grad_() for t in parts]
        out, _ = sequence_attention(*leaves, rules, masked=None if masked is None else masked[b])
        out.backward(dout[b].double())
        results.append((out.detach(), *(leaf.grad for leaf in leaves)))
    return [list(column) for column in zip(*results)]


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def check_dense(layout, mask_type, lengths, window, bottom_right, how):  # type: ignore[no-untyped-def]
    padding = mask_type.startswith("padding")
    lens_q, lens_kv = lengths if padding else ([lengths[0][0]] * 2, [lengths[1][0]] * 2)
    q, k, v = make(lens_q, HEADS, 1), make(lens_kv, GROUPS, 2), make(lens_kv, GROUPS, 3)
    dout = make(lens_q, HEADS, 4)
    want = expected(q, k, v, rules_of(mask_type, window, bottom_right), dout)

    s_q, s_kv = max(lens_q) + padding, max(lens_kv) + padding
    module = DotProductAttention(
        HEADS, D, GROUPS, qkv_format=layout, attn_mask_type=mask_type, window_size=window,
        bottom_right_diagonal=bottom_right, attention_type="cross",
    )  # fmt: skip
    leaves = [dense(t, layout, s).requires_grad_() for t, s in ((q, s_q), (k, s_kv), (v, s_kv))]
    arguments = {}
    if padding and how == "cu_seqlens":
        arguments = {"cu_seqlens_q": cu(lens_q), "cu_seqlens_kv": cu(lens_kv)}
    elif padding:
        arguments["attention_mask"] = tuple(
            (torch.arange(s) >= torch.tensor(lens)[:, None]).view(BATCH, 1, 1, s)
            for s, lens in ((s_q, lens_q), (s_kv, lens_kv))
        )
    out = module(*leaves, **arguments)
    out.backward(dense(dout, layout, s_q).flatten(-2))
    got = [out.detach().unflatten(-1, (HEADS, D)), *(leaf.grad for leaf in leaves)]
    for name, tensor, wanted, lens in zip(("out", "dq", "dk", "dv"), got, want, (lens_q, lens_q, lens_kv, lens_kv)):
        rows = tensor.transpose(0, 1) if layout == "sbhd" else tensor
        for b, n in enumerate(lens):
            assert_within(rows[b, :n], wanted[b], s_q + s_kv + D, name)
            assert not rows[b, n:].any(), f"{name}: padding must be 0"


MASKS = ["no_mask", "causal", "causal_bottom_right", "padding", "padding_causal", "padding_causal_bottom_right"]


@pytest.mark.parametrize("shape", list(LENGTHS))
@pytest.mark.parametrize("mask_type", MASKS)
def test_masks(mask_type: str, shape: str) -> None:
    check_dense("sbhd", mask_type, LENGTHS[shape], None, None, "mask")


@pytest.mark.parametrize("bottom_right", [None, False])
@pytest.mark.parametrize("window", [(1, 0), (2, 1), (0, 0), (-1, 1)])
@pytest.mark.parametrize("mask_type", MASKS)
def test_windows(mask_type: str, window: tuple[int, int], bottom_right: bool | None) -> None:
    check_dense("bshd", mask_type, LENGTHS["wide"], window, bottom_right, "cu_seqlens")


def test_a_query_that_sees_nothing_gives_zero() -> None:
    """Bottom right causal with more queries than keys: the first rows are empty."""
    check_dense("bshd", "causal_bottom_right", ([5, 5], [2, 2]), None, None, "mask")


@pytest.mark.parametrize(
    "spelling, canonical",
    [("padding,causal", "padding_causal"), ("causal,padding", "padding_causal"),
     ("padding,causal_bottom_right", "padding_causal_bottom_right")],
)  # fmt: skip
def test_comma_spellings(spelling: str, canonical: str) -> None:
    assert DotProductAttention(2, 8, attn_mask_type=spelling).attn_mask_type == canonical


@pytest.mark.parametrize("window", [None, (1, 2)])
@pytest.mark.parametrize("shape", [(1, 1, 4, 6), (BATCH, 1, 4, 6), (BATCH, HEADS, 4, 6), (1, 1, 1, 6)])
def test_arbitrary(shape: tuple[int, ...], window: tuple[int, int] | None) -> None:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(5)) < 0.4
    q, k, v = make([4, 4], HEADS, 1), make([6, 6], GROUPS, 2), make([6, 6], GROUPS, 3)
    dout = make([4, 4], HEADS, 4)
    masked = mask.expand(BATCH, HEADS, 4, 6)
    want = expected(q, k, v, rules_of("arbitrary", window, None), dout, masked)
    leaves = [torch.stack(t).requires_grad_() for t in (q, k, v)]
    module = DotProductAttention(HEADS, D, GROUPS, qkv_format="bshd", attn_mask_type="arbitrary", window_size=window)
    out = module(*leaves, attention_mask=mask)
    out.backward(torch.stack(dout).flatten(-2))
    for got, wanted in zip([out.detach().unflatten(-1, (HEADS, D)), *(leaf.grad for leaf in leaves)], want):
        assert_within(got, torch.stack(wanted), 18)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_thd(mask_type: str, gaps: bool) -> None:
    """Packed sequences, also with unused tokens between them, which get output and gradient 0."""
    lens_q, lens_kv = [3, 5], [4, 5]
    q, k, v = make(lens_q, HEADS, 1), make(lens_kv, GROUPS, 2), make(lens_kv, GROUPS, 3)
    dout = make(lens_q, HEADS, 4)
    want = expected(q, k, v, rules_of(mask_type, None, None), dout)
    room_q, room_kv = ([4, 7], [6, 6]) if gaps else (lens_q, lens_kv)

    def pack(sequences: list[torch.Tensor], room: list[int]) -> torch.Tensor:
        return torch.cat([torch.cat([s, s.new_ones(r - len(s), *s.shape[1:])]) for s, r in zip(sequences, room)])

    leaves = [pack(t, r).requires_grad_() for t, r in ((q, room_q), (k, room_kv), (v, room_kv))]
    padded = {"cu_seqlens_q_padded": cu(room_q), "cu_seqlens_kv_padded": cu(room_kv)} if gaps else {}
    module = DotProductAttention(HEADS, D, GROUPS, qkv_format="thd", attn_mask_type=mask_type, attention_type="cross")
    out = module(*leaves, cu_seqlens_q=cu(lens_q), cu_seqlens_kv=cu(lens_kv), max_seqlen_q=8, max_seqlen_kv=8, **padded)
    out.backward(pack(dout, room_q).flatten(-2))
    got = [out.detach().unflatten(-1, (HEADS, D)), *(leaf.grad for leaf in leaves)]
    rooms = (room_q, room_q, room_kv, room_kv)
    for tensor, wanted, room in zip(got, want, rooms):
        for part, sequence in zip(tensor.split(room), wanted):
            assert_within(part[: len(sequence)], sequence, 8 + 8 + D)
            assert not part[len(sequence) :].any()


def test_a_padding_mask_says_what_its_lengths_say() -> None:
    module = DotProductAttention(HEADS, D, qkv_format="bshd", attn_mask_type="padding_causal").eval()
    q, k, v = (torch.randn(2, 6, HEADS, D) for _ in range(3))
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool).view(2, 1, 1, 6)
    bounds = torch.tensor([0, 4, 10], dtype=torch.int32)
    assert torch.equal(module(q, k, v, attention_mask=mask), module(q, k, v, cu_seqlens_q=bounds))


def test_thd_equals_padded_bshd() -> None:
    lens = [2, 6, 3]
    bounds = cu(lens)
    q, k, v = (dense(make(lens, HEADS, seed), "bshd", 6) for seed in (1, 2, 3))
    valid = torch.arange(6) < torch.tensor(lens)[:, None]
    whole = DotProductAttention(HEADS, D, qkv_format="bshd", attn_mask_type="padding_causal")
    packed = DotProductAttention(HEADS, D, qkv_format="thd", attn_mask_type="padding_causal")
    a = whole(q, k, v, cu_seqlens_q=bounds)[valid]
    b = packed(q[valid], k[valid], v[valid], cu_seqlens_q=bounds)
    assert_within(a, b.double(), 6 + D)
