# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention against the operator's formulas written with loops and differentiated by float64 autograd."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from te_dispatch.backend_kit.attention import spec_of
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantizers import CurrentQuantizer, DelayedQuantizer, MXFP8Quantizer
from te_dispatch.ops import alloc
from te_dispatch.ops.attention import MASKS
from te_dispatch_reference.attention import attention_bwd, attention_fwd
from te_dispatch_reference.philox import keep_scale, philox4x32, uniform
from te_dispatch_reference.quantize import dequantize, quantize
from te_dispatch_reference.scores import alibi_slopes_of
from te_dispatch_reference.sequences import hidden_mask

BATCH, HEADS, GROUPS, LONG_Q, LONG_KV, DIM, DIM_V = 2, 4, 2, 5, 7, 6, 4
LEN_Q, LEN_KV = (3, 5), (7, 4)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def hidden_by_hand(mask: str, window: tuple[int, int] | None, i: int, j: int, len_q: int, len_kv: int) -> bool:
    """The docstring's sentence, for one pair."""
    offset = len_kv - len_q if "bottom_right" in mask else 0
    if i >= len_q or j >= len_kv:
        return True
    if "causal" in mask and j > i + offset:
        return True
    if window is not None and window[0] != -1 and j < i + offset - window[0]:
        return True
    return window is not None and window[1] != -1 and "causal" not in mask and j > i + offset + window[1]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("window", [None, (-1, -1), (1, 0), (2, 1), (0, -1), (-1, 2)])
def test_masks_by_brute_force(mask: str, window: tuple[int, int] | None) -> None:
    x, lengths = randn(5, 1, 1, 8), int32(0, 5)
    others = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "attn_mask": torch.zeros(5, 5, dtype=torch.bool)}
    spec = spec_of(q=x, k=x, v=x, mask=mask, window=window, **others)
    for len_q, len_kv in itertools.product((0, 1, 3, 5), (0, 2, 5, 6)):
        found, offset = hidden_mask(spec, 5, 6, len_q, len_kv)
        expected = [[hidden_by_hand(mask, window, i, j, len_q, len_kv) for j in range(6)] for i in range(5)]
        np.testing.assert_array_equal(found, expected)
        assert offset == (len_kv - len_q if "bottom_right" in mask else 0)


def formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(b, s, h, d) float64 -> out (b, s, h, d_v), lse (b, h, s), z (b, h, s, s_kv): row by row."""
    mask, window, cap = o.get("mask", "causal"), o.get("window"), o.get("softcap", 0.0)
    padding = mask.startswith("padding")
    len_q = LEN_Q if padding else (LONG_Q,) * BATCH
    len_kv = LEN_KV if padding else (LONG_KV,) * BATCH
    scale = o.get("softmax_scale") or DIM**-0.5
    kind, bias = o.get("bias_type", "none"), o.get("bias")
    outs = torch.zeros(BATCH, LONG_Q, HEADS, DIM_V, dtype=torch.float64)
    lses = torch.full((BATCH, HEADS, LONG_Q), -math.inf, dtype=torch.float64)
    zs = torch.full((BATCH, HEADS, LONG_Q, LONG_KV), -math.inf, dtype=torch.float64)
    for b, h, i in itertools.product(range(BATCH), range(HEADS), range(LONG_Q)):
        visible = [
            j
            for j in range(LONG_KV)
            if not hidden_by_hand(mask, window, i, j, len_q[b], len_kv[b])
            and not ("attn_mask" in o and o["attn_mask"].expand(BATCH, HEADS, LONG_Q, LONG_KV)[b, h, i, j])
        ]
        if not visible:
            continue
        group = h // (HEADS // GROUPS)
        z = scale * (k[b, visible, group] @ q[b, i, h])
        if bias is not None:
            added = bias.expand(BATCH, HEADS, LONG_Q, LONG_KV)[b, h, i, visible]
        elif kind == "alibi":
            slopes = o.get("alibi_slopes", torch.from_numpy(alibi_slopes_of(HEADS))).double().expand(BATCH, HEADS)
            offset = len_kv[b] - len_q[b] if "bottom_right" in mask else 0
            added = slopes[b, h] * (torch.tensor(visible) - i - offset)
        if kind == "pre_scale":
            z = z + scale * added
        if cap:
            z = cap * torch.tanh(z / cap)
        if kind in ("post_scale", "alibi"):
            z = z + added
        terms = [z]
        if o.get("softmax_type") == "off-by-one":
            terms.append(torch.zeros(1, dtype=torch.float64))
        elif o.get("softmax_type") == "learnable":
            terms.append(o["softmax_offset"][h : h + 1])
        lse = torch.logsumexp(torch.cat(terms), 0)
        p = torch.exp(z - lse)
        if o.get("dropout_p"):
            seed, offset = o["rng_state"].tolist()
            index = np.array([((b * HEADS + h) * LONG_Q + i) * LONG_KV + j for j in visible])
            p = p * torch.from_numpy(keep_scale(o["dropout_p"], seed, offset, index))
        outs[b, i, h] = p @ v[b, visible, group]
        lses[b, h, i] = lse
        zs[b, h, i, visible] = z
    return outs, lses, zs


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Inputs are exact float32 values and arithmetic is float64: what is left is one float32 rounding."""
    torch.testing.assert_close(found.double(), exact.detach(), rtol=2.0**-24, atol=1e-12)


BIAS = randn(1, HEADS, LONG_Q, LONG_KV)
OPTIONS: dict[str, dict[str, Any]] = {
    **{mask: {"mask": mask} for mask in MASKS if mask != "arbitrary"},
    **{f"{mask}-window": {"mask": mask, "window": (2, 1)} for mask in MASKS if mask != "arbitrary"},
    "arbitrary": {"mask": "arbitrary", "attn_mask": randn(BATCH, 1, LONG_Q, LONG_KV) > 0.2},
    "scale": {"softmax_scale": 0.9},
    "pre_scale": {"bias_type": "pre_scale", "bias": BIAS},
    "post_scale": {"bias_type": "post_scale", "bias": randn(BATCH, 1, LONG_Q, LONG_KV), "mask": "padding"},
    "alibi": {"bias_type": "alibi", "mask": "none"},
    "alibi-bottom-right": {
        "bias_type": "alibi",
        "mask": "padding_causal_bottom_right",
        "alibi_slopes": randn(BATCH, HEADS),
    },
    "softcap": {"softcap": 1.5},
    "softcap-pre": {"softcap": 1.5, "bias_type": "pre_scale", "bias": BIAS},
    "softcap-post": {"softcap": 1.5, "bias_type": "post_scale", "bias": BIAS},
    "off-by-one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable", "softmax_offset": randn(HEADS), "mask": "padding_causal"},
    "dropout": {"dropout_p": 0.4, "rng_state": torch.tensor([123, 456])},
}


def arrange(x: torch.Tensor, layout: str, lengths: tuple[int, ...], gap: int = 0) -> torch.Tensor:
    """(b, s, ...) in a layout; thd keeps valid tokens only, with `gap` NaN tokens after every sequence."""
    if layout == "thd":
        hole = torch.full((gap, *x.shape[2:]), math.nan, dtype=x.dtype)
        return torch.cat([part for b, n in enumerate(lengths) for part in (x[b, :n], hole)])
    return x.transpose(0, 1).contiguous() if layout == "sbhd" else x


def restore(x: torch.Tensor, layout: str, lengths: tuple[int, ...], long: int, gap: int = 0) -> torch.Tensor:
    """Back to (b, s, ...), zeros where no token was."""
    if layout != "thd":
        return x.transpose(0, 1) if layout == "sbhd" else x
    out, start = torch.zeros(BATCH, long, *x.shape[1:], dtype=x.dtype), 0
    for b, n in enumerate(lengths):
        out[b, :n] = x[start : start + n]
        assert not x[start + n : start + n + gap].any(), "results between sequences must be 0"
        start += n + gap
    return out


def seqlens(layout: str, mask: str, gap: int = 0) -> dict[str, Any]:
    if layout != "thd" and not mask.startswith("padding"):
        return {}
    made: dict[str, Any] = {}
    for side, lengths, long in (("q", LEN_Q, LONG_Q), ("kv", LEN_KV, LONG_KV)):
        made[f"cu_seqlens_{side}"] = int32(0, *itertools.accumulate(lengths))
        if layout == "thd":
            made[f"max_seqlen_{side}"] = long
            if gap:
                made[f"cu_seqlens_{side}_padded"] = int32(0, *itertools.accumulate(n + gap for n in lengths))
    return made


# The dense twin of an arbitrary thd mask is another mask: test_arbitrary_thd has it.
CASES = [
    (name, layout)
    for name in OPTIONS
    for layout in ("sbhd", "bshd", "thd", "thd-gaps")
    if not (name == "arbitrary" and layout.startswith("thd"))
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_forward_and_gradients(name: str, layout: str) -> None:
    options = dict(OPTIONS[name])
    mask = options.get("mask", "causal")
    layout, gap = ("thd", 2) if layout == "thd-gaps" else (layout, 0)
    if layout == "thd" and not mask.startswith("padding"):
        # A thd batch is padded by nature; its dense twin carries the padding form of the mask.
        mask = options["mask"] = "padding" if mask == "none" else f"padding_{mask}"
    q, k, v = randn(BATCH, LONG_Q, HEADS, DIM), randn(BATCH, LONG_KV, GROUPS, DIM), randn(BATCH, LONG_KV, GROUPS, DIM_V)
    dout = randn(BATCH, LONG_Q, HEADS, DIM_V)
    exact = {n: options[n].double().requires_grad_() for n in ("bias", "softmax_offset") if n in options}
    qd, kd, vd = (x.double().requires_grad_() for x in (q, k, v))
    out, lse, z = formula(qd, kd, vd, {**options, **exact})
    padding = mask.startswith("padding")
    valid = (
        torch.arange(LONG_Q) < torch.tensor(LEN_Q)[:, None] if padding else torch.ones(BATCH, LONG_Q, dtype=torch.bool)
    )
    (out * dout.double() * valid[..., None, None]).sum().backward()

    given = {**options, "layout": layout, **seqlens(layout, mask, gap)}
    hosted = [arrange(x, layout, n, gap) for x, n in ((q, LEN_Q), (k, LEN_KV), (v, LEN_KV))]
    made = attention_fwd(*hosted, **given, with_max_logit=True)
    close(restore(made.out, layout, LEN_Q, LONG_Q, gap), out)
    close(made.max_logit, z.amax((0, 2, 3)))
    if layout == "thd":
        start = 0
        for b, n in enumerate(LEN_Q):
            close(made.lse[start : start + n], lse[b, :, :n].T)
            assert (made.lse[start + n : start + n + gap] == -math.inf).all()
            start += n + gap
    else:
        close(made.lse, lse)
    back = attention_bwd(
        arrange(dout, layout, LEN_Q, gap),
        *hosted,
        made.out,
        made.lse,
        made.saved,
        **given,
        with_dbias="bias" in options,
    )
    close(restore(back.dq, layout, LEN_Q, LONG_Q, gap), qd.grad)
    close(restore(back.dk, layout, LEN_KV, LONG_KV, gap), kd.grad)
    close(restore(back.dv, layout, LEN_KV, LONG_KV, gap), vd.grad)
    assert (back.dbias is None) == ("bias" not in options)
    assert (back.dsoftmax_offset is None) == ("softmax_offset" not in options)
    if "bias" in options:
        close(back.dbias, exact["bias"].grad)
    if "softmax_offset" in options:
        close(back.dsoftmax_offset, exact["softmax_offset"].grad)


def test_arbitrary_thd() -> None:
    hidden = randn(BATCH, HEADS, LONG_Q, LONG_KV) > 0
    q, k, v = randn(BATCH, LONG_Q, HEADS, DIM), randn(BATCH, LONG_KV, GROUPS, DIM), randn(BATCH, LONG_KV, GROUPS, DIM_V)
    out, _, _ = formula(q.double(), k.double(), v.double(), {"mask": "padding", "attn_mask": hidden})
    hosted = [arrange(x, "thd", n) for x, n in ((q, LEN_Q), (k, LEN_KV), (v, LEN_KV))]
    made = attention_fwd(*hosted, layout="thd", mask="arbitrary", attn_mask=hidden, **seqlens("thd", "arbitrary"))
    close(restore(made.out, "thd", LEN_Q, LONG_Q), out)


def test_fully_masked_rows_and_garbage_in_padding() -> None:
    q, k, v = randn(BATCH, 5, 2, 4), randn(BATCH, 5, 2, 4, seed=1), randn(BATCH, 5, 2, 4, seed=2)
    for x in (q, k, v):
        x[0, 3:] = math.nan
    given: dict[str, Any] = {"layout": "bshd", "mask": "padding", "softmax_type": "off-by-one"}
    given |= {"cu_seqlens_q": int32(0, 3, 8), "cu_seqlens_kv": int32(0, 3, 3)}  # sequence 1 has no keys
    made = attention_fwd(q, k, v, **given)
    assert not made.out[1].any() and (made.lse[1] == -math.inf).all()
    assert not made.out[0, 3:].any() and made.out[0, :3].isfinite().all()
    back = attention_bwd(torch.ones_like(q), q, k, v, made.out, made.lse, made.saved, **given)
    assert not back.dq[1].any() and not back.dk[1].any() and not back.dv[1].any()
    assert all(t.isfinite().all() for t in back[:3])


def test_pages_hold_the_same_keys() -> None:
    q, k, v = randn(BATCH, 1, HEADS, DIM), randn(BATCH, 8, GROUPS, DIM), randn(BATCH, 8, GROUPS, DIM_V)
    table = torch.tensor([[4, 0], [2, 5]], dtype=torch.int32)
    pages_k, pages_v = torch.full((6, 4, GROUPS, DIM), math.nan), torch.full((6, 4, GROUPS, DIM_V), math.nan)
    for b in range(BATCH):
        for page in range(2):
            pages_k[table[b, page]] = k[b, 4 * page : 4 * page + 4]
            pages_v[table[b, page]] = v[b, 4 * page : 4 * page + 4]
    lengths = {"cu_seqlens_q": int32(0, 1, 2), "cu_seqlens_kv": int32(0, 6, 14)}
    for mask in ("padding", "padding_causal_bottom_right"):
        given: dict[str, Any] = {"layout": "bshd", "mask": mask, "inference": True, **lengths}
        paged = attention_fwd(q, pages_k, pages_v, page_table=table, **given)
        assert torch.equal(paged.out, attention_fwd(q, k, v, **given).out)
        assert paged.lse is None and paged.saved is None
    with pytest.raises(ValueError, match="page_table: given without inference"):
        attention_fwd(q, pages_k, pages_v, page_table=table, layout="bshd", mask="padding", **lengths)


@pytest.mark.parametrize("packing", ["3hd", "h3d", "2hd", "h2d"])
@pytest.mark.parametrize("quantized", [False, True])
def test_gradients_are_packed_as_the_operands(packing: str, quantized: bool) -> None:
    s, b, h, d = 5, 2, 3, 4
    count, axis = int(packing.strip("hd")), -3 if packing.startswith(("2", "3")) else -2
    packed = list(torch.stack([randn(s, b, h, d, seed=n) for n in range(count)], axis).unbind(axis))
    q, k, v = packed if count == 3 else [randn(s, b, h, d, seed=9), *packed]
    options: dict[str, Any] = {"dqkv_quantizer": CurrentQuantizer("e5m2")} if quantized else {}
    made = attention_fwd(q, k, v, packing=packing)
    back = attention_bwd(torch.ones(s, b, h, d), q, k, v, made.out, made.lse, made.saved, packing=packing, **options)
    alone = attention_bwd(torch.ones(s, b, h, d), q, k, v, made.out, made.lse, made.saved, **options)
    found, expected = list(back[:3]), list(alone[:3])
    if quantized:
        assert all(torch.equal(f.row_scale_inv, e.row_scale_inv) for f, e in zip(found, expected))
        found, expected = [f.row_data for f in found], [e.row_data for e in expected]
    assert all(torch.equal(f, e) for f, e in zip(found, expected))
    views = found[3 - count :]
    assert len({t.untyped_storage().data_ptr() for t in views}) == 1
    assert all(t.stride() == p.stride() for t, p in zip(views, packed))


def test_fp8_casts_apply_where_the_docstring_says() -> None:
    exact = CurrentQuantizer(power_of_two=True)  # so that dequantized float32 values are the values
    q, k, v, dout = (quantize(randn(4, 1, 2, 8, seed=n), exact, usage="row") for n in range(4))
    high = [dequantize(x) for x in (q, k, v, dout)]
    close(attention_fwd(q, k, v).out, attention_fwd(*high[:3]).out.double())
    s_amax, dp_amax = torch.zeros(1), torch.zeros(1)
    s = DelayedQuantizer(scale=torch.tensor([256.0]), amax=s_amax)
    dp = DelayedQuantizer("e5m2", scale=torch.tensor([1024.0]), amax=dp_amax)
    made = attention_fwd(q, k, v, s_quantizer=s, out_quantizer=CurrentQuantizer())
    qh, kh, vh, dh = (x.double()[:, 0].transpose(0, 1) for x in high)  # (h, s, d)
    z = (qh @ kh.mT * 8**-0.5).masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1), -math.inf)
    p = z.softmax(-1)
    assert s_amax.item() == 1.0  # the first row sees one key

    def cast(x: torch.Tensor, quantizer: DelayedQuantizer) -> torch.Tensor:
        free = DelayedQuantizer(quantizer.encoding, scale=quantizer.scale)
        return dequantize(quantize(x.float(), free, usage="row")).double()

    out = (cast(p, s) @ vh).transpose(0, 1)[:, None]
    expected = quantize(out.float(), CurrentQuantizer(), usage="row")
    assert torch.equal(made.out.row_data, expected.row_data) and made.out.shape == (4, 1, 2, 8)
    back = attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, s_quantizer=s, dp_quantizer=dp)
    dprob = dh @ vh.mT
    dz = p * (dprob - (p * dprob).sum(-1, keepdim=True))
    assert dp_amax.item() == dz.float().abs().max().item()
    close(back.dv, (cast(p, s).mT @ dh).transpose(0, 1)[:, None])
    close(back.dq, (8**-0.5 * cast(dz, dp) @ kh).transpose(0, 1)[:, None])
    close(back.dk, (8**-0.5 * cast(dz, dp).mT @ qh).transpose(0, 1)[:, None])
    with pytest.raises(Declined, match="s_quantizer has mxfp8 scaling"):
        attention_fwd(q, k, v, s_quantizer=MXFP8Quantizer())


def test_philox_known_answers() -> None:
    # Known-answer vectors of Random123 1.09 (kat_vectors) for philox4x32-10.
    def words(counter: list[int], key: tuple[int, int]) -> list[int]:
        made = philox4x32(tuple(np.array([c], np.uint64) for c in counter), key)  # type: ignore[arg-type]
        return [int(w[0]) for w in made]

    assert words([0] * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert words([ones] * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert words(pi, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_dropout_draws() -> None:
    index = np.arange(200_000)
    u = uniform(7, 9, index)
    # A binomial count lies within 6 standard deviations but for one in 10^9 generators.
    for p in (0.1, 0.5, 0.9):
        assert abs((u < p).sum() - p * index.size) < 6 * math.sqrt(p * (1 - p) * index.size)
        kept = keep_scale(p, 7, 9, index)
        assert set(np.unique(kept)) == {0.0, 1 / (1 - p)}
    assert (uniform(7, 9, index[100:200]) == u[100:200]).all()
    assert (uniform(8, 9, index) != u).any() and (uniform(7, 10, index) != u).any()
    assert (uniform(-1, -1, index) == uniform(2**64 - 1, 2**64 - 1, index)).all()
    assert not keep_scale(1.0, 0, 0, index).any()


def test_alibi_slopes_of_the_paper() -> None:
    np.testing.assert_array_equal(alibi_slopes_of(8), [2.0**-n for n in range(1, 9)])
    expected = [2.0 ** (-8 * n / 8) for n in range(1, 9)] + [2.0 ** (-8 * n / 16) for n in (1, 3, 5, 7)]
    np.testing.assert_array_equal(alibi_slopes_of(12), np.array(expected, np.float32))


@pytest.mark.parametrize(("b", "s_q", "s_kv"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_empty(b: int, s_q: int, s_kv: int) -> None:
    q, k = torch.ones(s_q, b, 2, 4), torch.ones(s_kv, b, 2, 4)
    made = attention_fwd(q, k, k, mask="none", with_max_logit=True, s_quantizer=CurrentQuantizer())
    assert made.out.shape == q.shape and not made.out.any() and made.lse.shape == (b, 2, s_q)
    assert (made.max_logit == -math.inf).all()
    back = attention_bwd(q, q, k, k, made.out, made.lse, made.saved, mask="none")
    assert not back.dq.any() and not back.dk.any() and back.dk.shape == k.shape


Q = torch.ones(4, 2, 4, 8)
K = torch.ones(4, 2, 2, 8)
CU = int32(0, 2, 4)
ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("layout: got 'bhsd'", {"layout": "bhsd"}),
    ("mask: got 'triangle'", {"mask": "triangle"}),
    ("softmax_type: got 'sparse'", {"softmax_type": "sparse"}),
    ("bias_type: got 'post'", {"bias_type": "post"}),
    ("packing: got 'hd3'", {"packing": "hd3"}),
    ("packing: got 3hd with shapes", {"packing": "3hd"}),
    ("q: got shape", {"q": Q[0]}),
    ("q: got dtype torch.int32", {"q": Q.int()}),
    ("k: got head dimension 6", {"k": K[..., :6]}),
    ("v: got shape", {"v": K[:3]}),
    ("k: got 3 groups for 4 heads", {"k": torch.ones(4, 2, 3, 8), "v": torch.ones(4, 2, 3, 8)}),
    ("k: got batch 1", {"k": K[:, :1], "v": K[:, :1]}),
    ("cu_seqlens_q: not given", {"mask": "padding"}),
    ("cu_seqlens_kv: not given", {"mask": "padding", "cu_seqlens_q": CU}),
    (r"cu_seqlens_q: got shape \(2,\), expected \(3,\)", {"mask": "padding", "cu_seqlens_q": CU[:2]}),
    (r"cu_seqlens_q: got \[0, 3, 2\]", {"mask": "padding", "cu_seqlens_q": int32(0, 3, 2)}),
    ("cu_seqlens_q: got lengths up to 5", {"mask": "padding", "cu_seqlens_q": int32(0, 5, 6)}),
    ("cu_seqlens_q_padded: given for layout sbhd", {"cu_seqlens_q_padded": CU}),
    ("attn_mask: not given", {"mask": "arbitrary"}),
    ("attn_mask: got dtype", {"mask": "arbitrary", "attn_mask": torch.ones(4, 4)}),
    ("attn_mask: got shape", {"mask": "arbitrary", "attn_mask": torch.ones(3, 4, dtype=torch.bool)}),
    (r"window: got \(-2, 0\)", {"window": (-2, 0)}),
    ("bias: not given with bias_type post_scale", {"bias_type": "post_scale"}),
    ("bias: given with bias_type none", {"bias": torch.ones(1, 1, 4, 4)}),
    (r"bias: got shape \(1, 3, 4, 4\)", {"bias": torch.ones(1, 3, 4, 4), "bias_type": "pre_scale"}),
    ("alibi_slopes: given with bias_type none", {"alibi_slopes": torch.ones(4)}),
    ("alibi_slopes: got shape", {"alibi_slopes": torch.ones(3), "bias_type": "alibi"}),
    ("softmax_offset: not given", {"softmax_type": "learnable"}),
    ("softmax_offset: given with softmax_type vanilla", {"softmax_offset": torch.ones(4)}),
    ("softmax_offset: got shape", {"softmax_type": "learnable", "softmax_offset": torch.ones(2)}),
    ("softcap: got -1", {"softcap": -1.0}),
    ("dropout_p: got 1.5", {"dropout_p": 1.5}),
    ("rng_state: got None with dropout_p=0.5", {"dropout_p": 0.5}),
    ("out_dtype: got torch.int8", {"out_dtype": torch.int8}),
    ("page_table: given without inference", {"page_table": torch.zeros(2, 1, dtype=torch.int32)}),
    ("page_table: got pages 9 to 9", {"page_table": torch.full((2, 1), 9, dtype=torch.int32), "inference": True}),
    (r"page_table: got shape \(1, 1\)", {"page_table": torch.zeros(1, 1, dtype=torch.int32), "inference": True}),
]


@pytest.mark.parametrize(("message", "wrong"), ERRORS, ids=[e[0] for e in ERRORS])
def test_errors_name_the_argument(message: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        attention_fwd(**{"q": Q, "k": K, "v": K, **wrong})


THD_ERRORS: list[tuple[str, dict[str, Any]]] = [
    ("cu_seqlens_q: not given", {"cu_seqlens_kv": CU}),
    ("cu_seqlens_kv: not given", {"cu_seqlens_q": CU}),
    ("cu_seqlens_q: got sequences that end past", {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_kv": CU}),
    (r"cu_seqlens_kv: got shape \(2,\), expected \(3,\)", {"cu_seqlens_q": CU, "cu_seqlens_kv": int32(0, 4)}),
    ("max_seqlen_kv: got 1", {"cu_seqlens_q": CU, "cu_seqlens_kv": CU, "max_seqlen_kv": 1}),
    ("cu_seqlens_q_padded: got shape", {"cu_seqlens_q": CU, "cu_seqlens_q_padded": int32(0, 4)}),
]


@pytest.mark.parametrize(("message", "wrong"), THD_ERRORS, ids=[e[0] for e in THD_ERRORS])
def test_thd_errors_name_the_argument(message: str, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        attention_fwd(Q[:, 0], K[:, 0], K[:, 0], layout="thd", mask="padding", **wrong)


def test_backward_errors_name_the_argument() -> None:
    made = attention_fwd(Q, K, K)
    with pytest.raises(ValueError, match="dout: got shape"):
        attention_bwd(Q[:3], Q, K, K, made.out, made.lse, made.saved)
    with pytest.raises(ValueError, match="with_dbias: given without bias"):
        attention_bwd(Q, Q, K, K, made.out, made.lse, made.saved, with_dbias=True)
    with pytest.raises(Declined, match="dp_quantizer has mxfp8 scaling"):
        attention_bwd(Q, Q, K, K, made.out, made.lse, made.saved, dp_quantizer=MXFP8Quantizer())


def test_casts_within_the_formula_are_not_allocated_as_results() -> None:
    """What `s_quantizer` and `dp_quantizer` cast is no result: under a result's role it would be taken for one."""
    roles: list[str] = []

    def record(role: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        roles.append(role)
        return torch.empty(shape, dtype=dtype, device=device)

    cast = CurrentQuantizer("e4m3fn")
    q, k, v, dout = (quantize(randn(1, 4, 2, 16, seed=seed), cast, usage="row") for seed in range(4))
    before = alloc.set_allocator(record)
    try:
        made = attention_fwd(q, k, v, layout="bshd", s_quantizer=cast)
        assert sorted(roles) == ["lse", "out"]
        roles.clear()
        attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, layout="bshd", s_quantizer=cast, dp_quantizer=cast)
        assert sorted(roles) == ["dk", "dq", "dv"]
    finally:
        alloc.set_allocator(before)
