# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention against the reference (float64) and PyTorch's own error.

Bound of the fp32 path. Logits below 16 err by (d + 16) u32 * 16, which exp turns into a relative error of p; a row's
sums over s and a gradient's two further products add s u32 each. With d, s <= 48 and values below 8 in magnitude that
is below 2000 u32 * 8, and one rounding to the result's dtype. Low-precision fused kernels round p and dz once to their
dtype as well: 4 u(dtype) of the largest value.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_backend_support import assert_same_bits

from te_dispatch.core.errors import Declined
from te_dispatch.core.facts import DeviceFacts
from te_dispatch.numerics.quantizers import CurrentQuantizer
from te_dispatch_torch import attention, attention_unfused, dropout, quantize
from te_dispatch_torch.implementations import IMPLEMENTATIONS

reference = pytest.importorskip("te_dispatch_reference.attention")

U = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
FP32_PATH = 2000 * 2.0**-24 * 8


def assert_close(got: torch.Tensor | None, want: torch.Tensor | None, extra: float, name: str) -> None:
    assert (got is None) == (want is None), name
    if got is None or want is None:
        return
    assert got.shape == want.shape and torch.equal(got == -torch.inf, want == -torch.inf), name
    got64, want64 = got.double().nan_to_num(0, 0, 0), want.double().nan_to_num(0, 0, 0)
    error, limit = (got64 - want64).abs(), 2 * U[got.dtype] * want64.abs() + extra
    assert not got.isnan().any() and (error <= limit).all(), f"{name}: {(error / limit).max().item():.2f} x bound"


def operands(layout: str, heads: int, groups: int, sq: int, skv: int, d: int = 16, dv: int = 16) -> list[torch.Tensor]:
    def shape(s: int, h: int, n: int) -> tuple[int, ...]:
        return {"sbhd": (s, 2, h, n), "bshd": (2, s, h, n), "thd": (s, h, n)}[layout]

    sizes = [shape(sq, heads, d), shape(skv, groups, d), shape(skv, groups, dv), shape(sq, heads, dv)]
    return [torch.randn(size) for size in sizes]


CU_Q = torch.tensor([0, 9, 12], dtype=torch.int32)
CU_KV = torch.tensor([0, 7, 20], dtype=torch.int32)
LENGTHS = {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_KV}

CASES: dict[str, dict[str, Any]] = {
    "none": {"mask": "none"},
    "causal": {"mask": "causal"},
    "bottom_right": {"mask": "causal_bottom_right"},
    "padding": {"mask": "padding", **LENGTHS},
    "padding_causal": {"mask": "padding_causal", **LENGTHS},
    "padding_bottom_right": {"mask": "padding_causal_bottom_right", "window": (4, 0), **LENGTHS},
    "arbitrary": {"mask": "arbitrary", "attn_mask": torch.rand(2, 1, 12, 20, generator=torch.Generator()) < 0.9},
    "window": {"mask": "none", "window": (3, 2)},
    "pre_scale": {"mask": "causal", "bias_type": "pre_scale", "bias": torch.ones(1, 4, 12, 20).cumsum(-1) * 0.1},
    "post_scale": {"mask": "none", "bias_type": "post_scale", "bias": torch.ones(2, 1, 12, 20).cumsum(-2) * 0.1},
    "alibi": {"mask": "causal_bottom_right", "bias_type": "alibi"},
    "slopes": {"mask": "none", "bias_type": "alibi", "alibi_slopes": torch.rand(2, 4)},
    "softcap": {"mask": "causal", "softcap": 1.5, "softmax_scale": 0.4},
    "softcap_bias": {"softcap": 1.5, "bias_type": "pre_scale", "bias": torch.ones(1, 1, 12, 20).cumsum(-1) * 0.1},
    "off_by_one": {"mask": "arbitrary", "softmax_type": "off-by-one", "attn_mask": torch.ones(12, 1) < 0},
    "learnable": {"mask": "causal", "softmax_type": "learnable", "softmax_offset": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [4, 2])
def test_unfused_equals_the_reference(case: str, layout: str, groups: int) -> None:
    options = {"layout": layout, **CASES[case]}
    q, k, v, dout = operands(layout, 4, groups, 12, 20, dv=8)
    got = attention_unfused.attention_fwd(q, k, v, with_max_logit=True, **options)
    want = reference.attention_fwd(q, k, v, with_max_logit=True, **options)
    for name in ("out", "lse", "max_logit"):
        assert_close(getattr(got, name), getattr(want, name), FP32_PATH, name)
    with_dbias = "bias" in options
    args = (dout, q, k, v, got.out, got.lse)
    mine = attention_unfused.attention_bwd(*args, got.saved, with_dbias=with_dbias, **options)
    theirs = reference.attention_bwd(*args, want.saved, with_dbias=with_dbias, **options)
    for name in mine._fields:
        # Bias and offset gradients sum over batch or rows: 24 terms more.
        assert_close(getattr(mine, name), getattr(theirs, name), FP32_PATH * 24, name)


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right", "none", "causal"])
@pytest.mark.parametrize("padded", [False, True])
def test_thd(mask: str, padded: bool) -> None:
    q, k, v, dout = operands("thd", 4, 2, 20, 28)
    cu = [torch.tensor(c, dtype=torch.int32) for c in ([0, 7, 7, 18], [0, 9, 12, 24])]
    starts = [torch.tensor(c, dtype=torch.int32) for c in ([0, 8, 8, 20], [0, 10, 14, 28])] if padded else [None, None]
    options: dict[str, Any] = {
        "layout": "thd", "mask": mask, "cu_seqlens_q": cu[0], "cu_seqlens_kv": cu[1],
        "cu_seqlens_q_padded": starts[0], "cu_seqlens_kv_padded": starts[1],
    }  # fmt: skip
    want = reference.attention_fwd(q, k, v, **options)
    grads = reference.attention_bwd(dout, q, k, v, want.out, want.lse, want.saved, **options)
    for lengths in ({}, {"max_seqlen_q": 13, "max_seqlen_kv": 16}):
        got = attention_unfused.attention_fwd(q, k, v, **options, **lengths)
        assert_close(got.out, want.out, FP32_PATH, "out")
        assert_close(got.lse, want.lse, FP32_PATH, "lse")
        mine = attention_unfused.attention_bwd(dout, q, k, v, got.out, got.lse, got.saved, **options, **lengths)
        for name in ("dq", "dk", "dv"):
            assert_close(getattr(mine, name), getattr(grads, name), FP32_PATH * 24, name)


def test_padding_may_hold_nan() -> None:
    q, k, v, dout = operands("bshd", 2, 2, 12, 20)
    for x, cu in ((q, CU_Q), (k, CU_KV), (v, CU_KV), (dout, CU_Q)):
        for b in range(2):
            x[b, int(cu[b + 1] - cu[b]) :] = torch.nan
    options: dict[str, Any] = {"layout": "bshd", "mask": "padding", **LENGTHS}
    got = attention_unfused.attention_fwd(q, k, v, **options)
    grads = attention_unfused.attention_bwd(dout, q, k, v, got.out, got.lse, got.saved, **options)
    for x in (got.out, grads.dq, grads.dk, grads.dv):
        assert x.isfinite().all() and x.any()


def test_pages() -> None:
    q = torch.randn(2, 3, 4, 16)
    k, v = torch.randn(6, 4, 2, 16), torch.randn(6, 4, 2, 16)
    options: dict[str, Any] = {
        "layout": "bshd", "mask": "padding_causal_bottom_right", "inference": True,
        "page_table": torch.tensor([[5, 0], [2, 2]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 3, 6], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 7, 11], dtype=torch.int32),
    }  # fmt: skip
    got = attention_unfused.attention_fwd(q, k, v, **options)
    assert_close(got.out, reference.attention_fwd(q, k, v, **options).out, FP32_PATH, "out")
    with pytest.raises(ValueError, match="inference"):
        attention_unfused.attention_fwd(q, k, v, **{**options, "inference": False})


def test_dropout_is_the_same_in_both_directions() -> None:
    """o is linear in v for a fixed mask, so <dout, o(v)> = <dv, v> exactly where the masks agree."""
    q, k, v, dout = operands("sbhd", 2, 2, 32, 48)
    rng = torch.tensor([1234567890123, 77])
    options: dict[str, Any] = {"mask": "causal", "dropout_p": 0.4, "rng_state": rng}
    got = attention_unfused.attention_fwd(q, k, v, **options)
    assert_same_bits(got.out, attention_unfused.attention_fwd(q, k, v, **options).out)
    other = attention_unfused.attention_fwd(q, k, v, **{**options, "rng_state": rng + 1})
    assert not torch.equal(got.out, other.out)
    grads = attention_unfused.attention_bwd(dout, q, k, v, got.out, got.lse, got.saved, **options)
    left, right = (dout.double() * got.out.double()).sum(), (grads.dv.double() * v.double()).sum()
    assert abs(left - right) <= 2.0**-24 * 100 * (dout.abs() * got.out.abs()).sum()
    # And in q and k, by differences of float64's step along a random direction.
    direction, step = torch.randn_like(q), 1e-3
    ends = [attention_unfused.attention_fwd(q + s * direction, k, v, **options).out for s in (step, -step)]
    slope = ((ends[0].double() - ends[1].double()) * dout.double()).sum() / (2 * step)
    along = (grads.dq.double() * direction.double()).sum()
    assert abs(slope - along) <= 1e-3 * dout.norm() * direction.norm()


def test_keep_mask_statistics() -> None:
    """Each count is binomial: 6 standard deviations. Neighbouring seeds and offsets are uncorrelated."""
    n, p = 1 << 20, 0.3
    masks = [
        dropout.keep_mask((n,), p, torch.tensor(state))
        for state in ([0, 0], [1, 0], [2, 0], [1, 1], [1 << 40, 0], [1, 1 << 40], [0, 1])
    ]
    deviation = 6 * (p * (1 - p) / n) ** 0.5
    for i, a in enumerate(masks):
        assert abs(a.float().mean() - (1 - p)) < deviation
        assert abs((a[1:] & a[:-1]).float().mean() - (1 - p) ** 2) < 2 * deviation
        for b in masks[:i]:
            assert abs((a & b).float().mean() - (1 - p) ** 2) < 2 * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("shape", [(4, 4, 33, 33), (4, 2, 20, 33), (4, 1, 33, 20)])
def test_sdpa_cpu(dtype: torch.dtype, layout: str, mask: str, shape: tuple[int, int, int, int]) -> None:
    q, k, v, dout = (x.to(dtype) for x in operands(layout, *shape))
    got = attention.cpu_fwd(q, k, v, layout=layout, mask=mask)
    want = reference.attention_fwd(q.float(), k.float(), v.float(), layout=layout, mask=mask)
    low = 4 * U[dtype] * 8 if dtype != torch.float32 else 0.0
    assert_close(got.out, want.out, FP32_PATH + low, "out")
    assert_close(got.lse, want.lse, FP32_PATH, "lse")
    assert got.out.is_contiguous() and got.saved.format == "torch.sdpa_cpu/1"
    args = (dout, q, k, v, got.out, got.lse)
    mine = attention.cpu_bwd(*args, got.saved, layout=layout, mask=mask)
    theirs = reference.attention_bwd(*(x.float() for x in args), want.saved, layout=layout, mask=mask)
    for name in ("dq", "dk", "dv"):
        assert_close(getattr(mine, name), getattr(theirs, name), (FP32_PATH + low) * 4, name)
    assert attention.cpu_fwd(q, k, v, layout=layout, mask=mask, inference=True).saved is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_sdpa_cpu_are_rounded_once(dtype: torch.dtype) -> None:
    """PyTorch's kernel adds what blocks of queries contribute to 16-bit gradients in 16 bits."""
    q, k, v, dout = (x.to(dtype) for x in operands("bshd", 1, 1, 700, 130))
    out = attention.cpu_fwd(q, k, v, layout="bshd", mask="none")
    mine = attention.cpu_bwd(dout, q, k, v, out.out, out.lse, out.saved, layout="bshd", mask="none")
    exact = [x[0, :, 0].double() for x in (q, k, v, dout)]
    p = torch.softmax(exact[0] @ exact[1].T * q.shape[-1] ** -0.5, -1)
    want = p.T @ exact[3]
    off = (mine.dv[0, :, 0].double() - want).abs()
    assert bool((off <= U[dtype] * want.abs() + 1e-5 * (p.T @ exact[3].abs())).all())
    assert mine.dv.dtype == dtype


@pytest.mark.parametrize(("b", "sq", "skv"), [(0, 4, 4), (1, 0, 5), (2, 5, 0)])
@pytest.mark.parametrize("packing", [None, "2hd"])
def test_sdpa_of_nothing_is_zeros(b: int, sq: int, skv: int, packing: str | None) -> None:
    q, k, v, dout = (x[:b] for x in operands("bshd", 4, 2, sq, skv))
    given = {"layout": "bshd", "mask": "none", "packing": packing}
    got, want = attention.cpu_fwd(q, k, v, **given), reference.attention_fwd(q, k, v, **given)
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)
    mine = attention.cpu_bwd(dout, q, k, v, got.out, got.lse, got.saved, **given)
    theirs = reference.attention_bwd(dout, q, k, v, got.out, got.lse, want.saved, **given)
    assert all(torch.equal(getattr(mine, name), getattr(theirs, name)) for name in ("dq", "dk", "dv"))


def test_sdpa_gives_its_log_sum_exps_row_major() -> None:
    q, k, v, _ = operands("sbhd", 4, 2, 8, 8)
    assert attention.cpu_fwd(q, k, v, mask="none").lse.is_contiguous()


def test_a_call_that_the_fused_kernels_cannot_differentiate_is_not_claimed() -> None:
    """What a backward could only decline is a requirement of both halves."""

    def refused(name: str, **facts: Any) -> set[str]:
        served = {
            "layout": "bshd", "mask": "causal", "q.scaling": "none", "q.dtype": "bf16", "bias_type": "none",
            "softmax_type": "vanilla", "window": False, "softcap": False, "dropout": False, "attn_mask": False,
            "s_quantizer": None, "dp_quantizer": None, "dqkv_quantizer": None, "page_table": False,
            "with_max_logit": False, "out_quantizer": None, "deterministic": False, "out.scaling": "none",
            "head_dim": 64, "head_dim_v": 64,
            "same_head_dim": True, "same_seqlen": True, "seqlen_q": 8, "seqlen_kv": 8,
        }  # fmt: skip
        device = DeviceFacts("cpu", "cpu", "cpu") if name == "cpu" else DeviceFacts("cuda", "nvidia", "sm_90")
        wrong = set()
        for entry in IMPLEMENTATIONS:
            if entry.name in (f"sdpa_{name}", f"sdpa_{name}_bwd"):
                verdicts = [condition.check(served | facts, device) for condition in entry.requires]
                if not all(v.holds for v in verdicts):
                    wrong.add(entry.name)
        return wrong

    for name in ("cpu", "cudnn", "flash", "efficient"):
        both = {f"sdpa_{name}", f"sdpa_{name}_bwd"}
        assert not refused(name)
        assert refused(name, same_head_dim=False, head_dim_v=32) == both
        oblong = refused(name, same_seqlen=False, seqlen_kv=9)
        assert oblong == (both if name in ("cudnn", "flash") else set())
        assert not refused(name, same_seqlen=False, seqlen_kv=9, mask="none")
        assert refused(name, **{"out.scaling": "tensor", "out_quantizer": "delayed"}) == both
        assert refused(name, seqlen_q=1, seqlen_kv=1) == (both if name == "cudnn" else set())


def test_sdpa_declines_before_anything_runs() -> None:
    q, k, v, _ = operands("sbhd", 2, 2, 8, 8, d=16, dv=8)
    with pytest.raises(Declined, match="head dimensions"):
        attention.cpu_fwd(q, k, v, mask="none")
    with pytest.raises(Declined, match="padding"):
        lengths = torch.tensor([0, 8, 16], dtype=torch.int32)
        attention.cpu_fwd(q, k, q, mask="padding", cu_seqlens_q=lengths, cu_seqlens_kv=lengths)
    q, k, v, _ = operands("sbhd", 2, 2, 8, 9)
    with pytest.raises(Declined, match="causal"):
        attention.flash_fwd(q, k, v, mask="causal")
    many = torch.empty(65536, 2, 1, 8)
    for forward in (attention.flash_fwd, attention.cudnn_fwd):
        with pytest.raises(Declined, match="batches up to 65535"):
            forward(many, many, many, layout="bshd", mask="none")
    one = torch.empty(1, 2, 2, 8)
    with pytest.raises(Declined, match="single query"):
        attention.cudnn_fwd(one, one, one, mask="none")


@pytest.mark.parametrize("packing", ["3hd", "h3d", "2hd", "h2d"])
def test_gradients_are_packed_as_promised(packing: str) -> None:
    axis = -3 if packing.endswith("hd") else -2
    q, k, v, dout = operands("bshd", 2, 2, 8, 8)
    for forward, backward in (
        (attention.cpu_fwd, attention.cpu_bwd),
        (attention_unfused.attention_fwd, attention_unfused.attention_bwd),
    ):
        made = forward(q, k, v, layout="bshd")
        plain = backward(dout, q, k, v, made.out, made.lse, made.saved, layout="bshd")
        packed = backward(dout, q, k, v, made.out, made.lse, made.saved, layout="bshd", packing=packing)
        assert_same_bits([x.contiguous() for x in packed[:3]], list(plain[:3]))
        together = packed[:3] if "3" in packing else packed[1:3]
        whole = together[0]._base
        assert whole is not None and whole.is_contiguous()
        for part, view in zip(together, whole.unbind(axis), strict=True):
            assert part.data_ptr() == view.data_ptr() and part.stride() == view.stride()


def test_fp8_attention_casts_where_the_reference_does() -> None:
    """Operands are codes in both; a logit may round to a neighbouring code of p: one e4m3 step, 2^-3 of its value."""
    codes = [quantize.quantize(x, CurrentQuantizer(), usage="row") for x in operands("bshd", 2, 2, 16, 16)]
    q, k, v, dout = codes
    options: dict[str, Any] = {"layout": "bshd", "s_quantizer": CurrentQuantizer()}
    got = attention_unfused.attention_fwd(q, k, v, out_quantizer=CurrentQuantizer(), **options)
    want = reference.attention_fwd(q, k, v, out_quantizer=CurrentQuantizer(), **options)
    assert got.out.encoding == "e4m3fn" and got.out.shape == want.out.shape
    values = [quantize.dequantize(x.out) for x in (got, want)]
    assert ((values[0] - values[1]).abs() <= 2.0**-3 * values[1].abs() + 2.0**-3 * 0.1).all()
    exact = attention_unfused.attention_fwd(q, k, v, layout="bshd")
    assert not torch.equal(exact.out, attention_unfused.attention_fwd(q, k, v, **options).out)
    both = {"dp_quantizer": CurrentQuantizer("e5m2"), "dqkv_quantizer": CurrentQuantizer("e5m2")}
    mine = attention_unfused.attention_bwd(dout, q, k, v, got.out, got.lse, got.saved, **both, **options)
    theirs = reference.attention_bwd(dout, q, k, v, got.out, got.lse, want.saved, **both, **options)
    for name in ("dq", "dk", "dv"):
        a, b = (quantize.dequantize(getattr(x, name)) for x in (mine, theirs))
        assert (a - b).abs().max() <= 2.0**-2 * b.abs().max() and (a - b).norm() <= 2.0**-4 * b.norm()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"layout": "hsbd"}, "layout"),
        ({"mask": "upper"}, "mask"),
        ({"mask": "padding"}, "cu_seqlens_q"),
        ({"mask": "arbitrary"}, "attn_mask"),
        ({"bias_type": "post_scale"}, "bias"),
        ({"softmax_type": "learnable"}, "softmax_offset"),
        ({"dropout_p": 0.5}, "rng_state"),
        ({"dropout_p": 1.5}, "dropout_p"),
    ],
)
def test_errors_name_the_argument(arguments: dict[str, Any], named: str) -> None:
    q, k, v, _ = operands("sbhd", 2, 2, 4, 4)
    with pytest.raises(ValueError, match=named):
        attention_unfused.attention_fwd(q, k, v, **arguments)
