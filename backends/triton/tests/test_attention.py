# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention beyond the conformance kit: blocks that find their sequences, several blocks of each kind, slopes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_dispatch.conformance.bounds import attention as bounds
from te_dispatch.conformance.bounds.known import Known
from te_dispatch.conformance.spread import Side, read_like_queries, spread


def cumulative(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def operands(rows: int, columns: int, batch: int = 1, heads: int = 2, groups: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    shapes = ((rows, batch, heads, 8), (columns, batch, groups, 8), (columns, batch, groups, 8))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backward: bool = True, **options: Any) -> None:
    """Forward, and backward, against the kit's float64 attention."""
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    call = spread({"q": q, "k": k, "v": v, **options})
    known = bounds.forward(call, torch.float32)
    made = attention_fwd(q, k, v, **options)
    assert made.lse is not None and made.saved is not None
    lse = call.rows_of(torch.where(known.empty, -torch.inf, known.lse.value)[..., 0])
    torch.testing.assert_close(made.lse.double(), lse, rtol=1e-5, atol=1e-5)
    close(call.queries, known.out, made.out)
    if not backward:
        return
    dout = torch.randn(made.out.shape, generator=torch.Generator().manual_seed(0))
    back = attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, **options)
    found, _ = bounds.backward(known, read_like_queries(call, dout), 2.0**-24)
    close(call.queries, found.dq, back.dq)
    close(call.keys, found.dk, back.dk)
    close(call.keys, found.dv, back.dv)


def close(side: Side, expected: Known, actual: torch.Tensor) -> None:
    value = side.write(expected.value).reshape(actual.shape)
    torch.testing.assert_close(actual.double(), value, rtol=1e-4, atol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "mask, window, rows, columns",
    [
        ("none", None, 300, 280), ("causal", None, 300, 280), ("causal_bottom_right", None, 129, 385),
        ("causal_bottom_right", (150, 20), 300, 70), ("none", (150, 20), 290, 300), ("none", (3, -1), 130, 270),
    ],
)  # fmt: skip
def test_tiles_with_and_without_a_mask(mask: str, window: tuple[int, int] | None, rows: int, columns: int) -> None:
    check(*operands(rows, columns, heads=1), mask=mask, window=window)


@pytest.mark.interpreted
def test_more_sequences_than_are_looked_at_together() -> None:
    lengths = [(7 * i) % 3 for i in range(258)]
    q, k, v = (x[:, 0] for x in operands(sum(lengths) + 11, sum(lengths) + 11, heads=1))
    bounds_of = cumulative(*lengths)
    check(q, k, v, layout="thd", mask="causal", cu_seqlens_q=bounds_of, cu_seqlens_kv=bounds_of, backward=False)


@pytest.mark.interpreted
def test_gaps_as_long_as_blocks() -> None:
    lengths, starts = (130, 0, 5, 200), cumulative(400, 128, 133, 200)
    q, k, v = (x[:, 0] for x in operands(1000, 1000, heads=1))
    given = {"cu_seqlens_q": cumulative(*lengths), "cu_seqlens_q_padded": starts}
    given |= {"cu_seqlens_kv": cumulative(*lengths), "cu_seqlens_kv_padded": starts}
    check(q, k, v, layout="thd", mask="padding", **given)


@pytest.mark.interpreted
def test_no_sequences_at_all() -> None:
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    q, k, v = (x[:, 0] for x in operands(5, 6))
    none = cumulative()
    options = {"layout": "thd", "mask": "padding", "cu_seqlens_q": none, "cu_seqlens_kv": none}
    made = attention_fwd(q, k, v, with_max_logit=True, **options)
    assert not made.out.any() and (made.lse == -torch.inf).all() and (made.max_logit == -torch.inf).all()
    back = attention_bwd(torch.ones_like(q), q, k, v, made.out, made.lse, made.saved, **options)
    assert not any(x.any() for x in back[:3])


@pytest.mark.interpreted
@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_is_not_positive(scale: float) -> None:
    check(*operands(40, 30), mask="causal", softmax_scale=scale)


@pytest.mark.interpreted
@pytest.mark.parametrize("heads", [1, 12])
def test_slopes_of_any_number_of_heads(heads: int) -> None:
    check(*operands(9, 17, heads=heads), mask="none", bias_type="alibi")


@pytest.mark.interpreted
def test_what_rows_hold_that_see_nothing_does_not_matter() -> None:
    """Bottom-right causal with more queries than keys: the first ones see no key."""
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    q, k, v = operands(20, 12)
    made = attention_fwd(q, k, v, mask="causal_bottom_right")
    dout = torch.ones_like(made.out)
    dout[:8] = torch.nan
    back = attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, mask="causal_bottom_right")
    assert not made.out[:8].any() and not back.dq[:8].any()
    assert all(x.isfinite().all() for x in back[:3])


@pytest.mark.interpreted
def test_dropout_is_one_mask_for_all_tiles() -> None:
    """Ones as values show the kept share of each row; the backward's tiles are transposed and must agree."""
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    q, k, v = operands(200, 150)
    state = torch.tensor([3, 1 << 40])
    options = {"mask": "none", "dropout_p": 0.25, "rng_state": state}
    v = torch.ones_like(v)
    made = attention_fwd(q, k, v, **options)
    back = attention_bwd(torch.ones_like(made.out), q, k, v, made.out, made.lse, made.saved, **options)
    # The sum of p over rows and columns, dropped alike, seen from either side.
    torch.testing.assert_close(back.dv[..., 0].sum(), made.out[..., 0].sum(), rtol=1e-5, atol=1e-4)
    assert abs(float(made.out.mean()) - 1.0) < 0.02
    other = attention_fwd(q, k, v, mask="none", dropout_p=0.25, rng_state=torch.tensor([3, 1 << 41]))
    assert not torch.equal(other.out, made.out)


def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """A forward with max_logit, and its backward of ones."""
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    made = attention_fwd(q, k, v, with_max_logit=True, **options)
    return made, attention_bwd(torch.ones_like(made.out), q, k, v, made.out, made.lse, made.saved, **options)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"mask": "none"}, {"mask": "causal"}, {"mask": "causal_bottom_right"}, {"mask": "none", "window": (150, 20)},
        {"mask": "causal", "softmax_type": "off-by-one"}, {"mask": "causal", "bias_type": "alibi"},
        {"mask": "padding", "cu_seqlens_q": cumulative(170), "cu_seqlens_kv": cumulative(180)},
    ],
)  # fmt: skip
def test_a_query_of_nan_makes_its_row_nan_and_no_other(options: dict[str, Any]) -> None:
    """Every logit of the row is NaN, in every tile."""
    q, k, v = operands(190, 200)
    expected, expected_back = both(q, k, v, **options)
    row, head = 160, 1
    q[row, :, head] = torch.nan
    made, back = both(q, k, v, **options)
    for found, clean in ((made.out, expected.out), (back.dq, expected_back.dq)):
        found = found.reshape(q.shape).clone()
        assert found[row, :, head].isnan().all()
        found[row, :, head] = 0.0
        clean = clean.reshape(q.shape).clone()
        clean[row, :, head] = 0.0
        torch.testing.assert_close(found, clean)
    assert made.lse[0, head, row].isnan() and made.lse.isnan().sum() == 1
    assert made.max_logit[head].isnan() and made.max_logit[1 - head] == expected.max_logit[1 - head]
    assert back.dk[20:150].isnan().all() and back.dv[20:150].isnan().all()


@pytest.mark.interpreted
@pytest.mark.parametrize("column", [0, 130])
def test_a_key_of_nan_makes_the_rows_nan_that_see_it(column: int) -> None:
    """It is in the first or in the last tile."""
    q, k, v = operands(190, 200)
    k[column] = torch.nan
    made, back = both(q, k, v, mask="causal")
    seen = torch.arange(190) >= column
    assert made.out[seen].isnan().all() and made.out[~seen].isfinite().all()
    assert made.lse[..., seen].isnan().all() and made.lse[..., ~seen].isfinite().all()
    assert made.max_logit.isnan().all()
    assert back.dq[seen].isnan().all() and back.dk[column].isnan().all()


@pytest.mark.interpreted
def test_nan_in_every_operand_is_nan_in_every_result() -> None:
    q, k, v = operands(150, 140)
    for x in (q, k):
        x.fill_(torch.nan)
    made, back = both(q, k, v, mask="causal_bottom_right", bias_type="post_scale", bias=torch.zeros(1, 2, 150, 140))
    assert made.out[:10].reshape(10, -1).eq(0.0).all() and (made.lse[..., :10] == -torch.inf).all()  # see no key
    assert made.out[10:].isnan().all() and made.lse[..., 10:].isnan().all() and made.max_logit.isnan().all()
    assert back.dq[10:].isnan().all() and back.dk.isnan().all() and back.dv.isnan().all()


@pytest.mark.interpreted
def test_nan_in_gaps_and_padding_stays_there() -> None:
    lengths, starts = (130, 0, 5, 100), cumulative(200, 30, 20, 150)
    q, k, v = (x[:, 0] for x in operands(400, 400))
    inside = torch.zeros(400, dtype=torch.bool)
    for length, start in zip(lengths, starts.tolist()):
        inside[start : start + length] = True
    given = {"layout": "thd", "mask": "padding_causal", "cu_seqlens_q": cumulative(*lengths)}
    given |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts, "cu_seqlens_kv": cumulative(*lengths)}
    expected, expected_back = both(q, k, v, **given)
    for x in (q, k, v):
        x[~inside] = torch.nan
    made, back = both(q, k, v, **given)
    for found, clean in zip((*made[:3], *back[:3]), (*expected[:3], *expected_back[:3])):
        assert torch.equal(found, clean)


@pytest.mark.interpreted
@pytest.mark.parametrize("hidden", [slice(0, 130), slice(130, 300)])
def test_a_bias_of_minus_infinity_hides_tiles(hidden: slice) -> None:
    """Those before the first number, too; and rows of nothing else are as if masked."""
    bias = torch.zeros(1, 2, 140, 300)
    bias[..., hidden] = -torch.inf
    bias[:, :, 7] = -torch.inf
    check(*operands(140, 300), mask="none", bias_type="post_scale", bias=bias)


@pytest.mark.interpreted
@pytest.mark.parametrize(("wide", "expected"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_blocks_are_chosen_for_the_widest_operand(
    wide: torch.dtype, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of fp32 outputs of 16-bit operands take twice the shared memory: an H200's was too small for 129 to
    256 features."""
    from te_dispatch_triton import configs
    from te_dispatch_triton.attention import plans
    from te_dispatch_triton.attention.operators import attention_bwd, attention_fwd

    chosen: dict[str, int] = {}
    choose = configs.choose

    def noted(family: str, kernel: str, *rest: Any, **sizes: int) -> configs.Choice:
        chosen[kernel] = sizes["bytes"]
        return choose(family, kernel, *rest, **sizes)

    monkeypatch.setattr(plans.configs, "choose", noted)
    q, k, v = (x.bfloat16() for x in operands(37 if expected == 4 else 39, 5))
    made = attention_fwd(q, k, v, out_dtype=wide)
    assert made.saved is not None and made.out.dtype is wide
    attention_bwd(torch.ones_like(made.out), q, k, v, made.out, made.lse, made.saved)
    assert chosen == {"forward": 2, "queries": expected, "keys": expected}
