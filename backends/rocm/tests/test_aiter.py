# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Implementations on AITER, over a stand-in with its interface (`stand_in/aiter`)."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("te_dispatch_rocm")

from te_dispatch import ops  # noqa: E402
from te_dispatch.core.errors import Declined  # noqa: E402
from te_dispatch.numerics.quantizers import BlockQuantizer  # noqa: E402
from te_dispatch_rocm import aiter, aiter_attention, aiter_gemm  # noqa: E402

STAND_IN = str(Path(__file__).parent / "stand_in")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(STAND_IN)
    aiter._library.cache_clear()
    yield
    aiter._library.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("layout", ["NT", "NN"])
@pytest.mark.parametrize("encoding", ["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_blocks(layout: str, encoding: str, dtype: torch.dtype) -> None:
    m, n, k = 48, 256, 384
    a, b = randn(m, k, dtype=dtype), randn(*((n, k) if layout == "NT" else (k, n)), dtype=dtype)
    left = ops.quantize(a, BlockQuantizer(encoding), usage="row")
    right = ops.quantize(b, BlockQuantizer(encoding, two_d=True), usage="both")
    expected = ops.dequantize(left, dtype=torch.float32) @ (
        ops.dequantize(right, dtype=torch.float32).t() if layout == "NT" else ops.dequantize(right, dtype=torch.float32)
    )
    made = aiter_gemm.gemm(left, right, layout=layout).out
    assert made.dtype is dtype and torch.allclose(made.float(), expected, rtol=2**-7, atol=2**-4)
    out = torch.empty(m, n + 8, dtype=dtype)[:, :n]
    assert aiter_gemm.gemm(left, right, layout=layout, out=out).out is out and torch.equal(out, made)


def test_products_in_fp32_are_left_to_others() -> None:
    left = ops.quantize(randn(8, 128, dtype=torch.float32), BlockQuantizer(), usage="row")
    right = ops.quantize(randn(128, 128, dtype=torch.float32), BlockQuantizer(two_d=True), usage="row")
    with pytest.raises(Declined, match=r"not in torch\.float32"):
        aiter_gemm.gemm(left, right, layout="NT")


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "none": {"mask": "none"},
    "bottom right": {"mask": "causal_bottom_right", "s_q": 24},
    "window": {"mask": "causal", "window": (5, 0)},
    "two-sided window": {"mask": "none", "window": (3, 7)},
    "groups": {"mask": "causal", "groups": 1},
    "scale": {"mask": "none", "softmax_scale": 0.7},
}


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("case", CALLS)
def test_attention(layout: str, case: str) -> None:
    options = dict(CALLS[case])
    s_q, s_kv, groups = options.pop("s_q", 40), 40, options.pop("groups", 2)

    def operand(s: int, heads: int, seed: int) -> torch.Tensor:
        x = torch.randn(2, s, heads, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return x.transpose(0, 1).contiguous() if layout == "sbhd" else x

    q, k, v, dout = operand(s_q, 2, 1), operand(s_kv, groups, 2), operand(s_kv, groups, 3), operand(s_q, 2, 4)
    with torch.enable_grad():
        made = aiter_attention.attention_fwd(q.requires_grad_(), k, v, layout=layout, **options)
    assert not made.out.requires_grad and made.out.is_contiguous()
    q = q.detach()
    grads = aiter_attention.attention_bwd(dout, q, k, v, made.out, made.lse, made.saved, layout=layout, **options)
    from te_dispatch_reference.attention import attention_bwd, attention_fwd

    want = attention_fwd(q, k, v, layout=layout, **options)
    expected = attention_bwd(dout, q, k, v, want.out, want.lse, want.saved, layout=layout, **options)
    assert torch.allclose(made.out.float(), want.out.float(), atol=2**-6, rtol=2**-6)
    assert torch.allclose(made.lse, want.lse, atol=1e-4)
    for mine, theirs in zip(grads[:3], expected[:3]):
        assert torch.allclose(mine.float(), theirs.float(), atol=2**-5, rtol=2**-5)


def test_packed_gradients_are_views_of_one_tensor() -> None:
    whole = randn(16, 2, 3, 2, 32)
    q, k, v = whole.unbind(2)
    options = {"layout": "sbhd", "packing": "3hd", "mask": "causal"}
    made = aiter_attention.attention_fwd(q, k, v, **options)
    packed = aiter_attention.attention_bwd(q, q, k, v, made.out, made.lse, made.saved, **options)
    apart = [x.contiguous() for x in (q, k, v)]
    plain = aiter_attention.attention_bwd(
        apart[0], *apart, made.out, made.lse, made.saved, layout="sbhd", mask="causal"
    )
    for one, other in zip(packed[:3], plain[:3]):
        assert one.untyped_storage().data_ptr() == packed[0].untyped_storage().data_ptr() and torch.equal(one, other)


@pytest.mark.parametrize(
    ("s_q", "mask", "message"),
    [(24, "causal", "bottom right corner"), (48, "causal_bottom_right", "rows that see no key")],
)
def test_diagonals_that_aiter_does_not_have_are_left_to_others(s_q: int, mask: str, message: str) -> None:
    q, k = randn(s_q, 1, 2, 32), randn(40, 1, 2, 32)
    with pytest.raises(Declined, match=message):
        aiter_attention.attention_fwd(q, k, k, layout="sbhd", mask=mask)


def test_an_aiter_that_cannot_be_used_declines_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = randn(16, 1, 1, 32)
    package = tmp_path / "aiter"
    (package / "ops").mkdir(parents=True)
    (package / "ops" / "__init__.py").touch()
    (package / "ops" / "mha.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, message in (
        ("raise RuntimeError('no chip')", "aiter cannot be imported: RuntimeError: no chip"),
        ("def gemm_a8w8_blockscale(): ...", "aiter has no flash_attn_func: releases 0.1"),
    ):
        (package / "__init__.py").write_text(text)
        for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
            del sys.modules[name]
        sys.dont_write_bytecode, kept = True, sys.dont_write_bytecode
        try:
            with pytest.raises(Declined, match=message):
                aiter_attention.attention_fwd(x, x, x, layout="sbhd")
        finally:
            sys.dont_write_bytecode = kept


def test_releases_whose_backward_takes_other_arguments() -> None:
    def first(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
              window_size_right, alibi_slopes, deterministic, rng_state=None): ...  # fmt: skip  # type: ignore[no-untyped-def]

    from aiter.ops import mha

    assert aiter._unasked(first, aiter._BACKWARD) == {}
    assert aiter._unasked(mha._flash_attn_backward, aiter._BACKWARD) == {"dbias": None, "bias": None}
    with pytest.raises(Declined, match="takes no k, v, out"):
        aiter._unasked(lambda dout, q: None, tuple(inspect.signature(first).parameters))


def test_variables_set_options_of_the_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from aiter.ops import mha

    given: list[dict[str, Any]] = []
    backward = mha._flash_attn_backward

    @functools.wraps(backward)
    def recorded(**arguments: Any) -> Any:
        given.append(arguments)
        return backward(**arguments)

    monkeypatch.setattr(mha, "_flash_attn_backward", recorded)
    x = randn(16, 1, 1, 32)
    made = aiter_attention.attention_fwd(x, x, x, layout="sbhd")

    def options(**variables: str) -> dict[str, Any]:
        for name in aiter.BACKWARD_VARIABLES:
            monkeypatch.setenv(name, variables.get(name, ""))
        aiter_attention.attention_bwd(x, x, x, x, made.out, made.lse, made.saved, layout="sbhd")
        return {name: given[-1][name] for name, _ in aiter.BACKWARD_VARIABLES.values() if name in given[-1]}

    assert options() == {}
    assert options(NVTE_CK_IS_V3_ATOMIC_FP32="0") == {"is_v3_atomic_fp32": False}
    both = options(NVTE_CK_IS_V3_ATOMIC_FP32="1", NVTE_CK_HOW_V3_BF16_CVT="2")
    assert both == {"is_v3_atomic_fp32": True, "how_v3_bf16_cvt": 2}
    with pytest.raises(ValueError, match="NVTE_CK_HOW_V3_BF16_CVT=3: expected 0 or 1 or 2"):
        options(NVTE_CK_HOW_V3_BF16_CVT="3")
    with caplog.at_level(logging.WARNING, "te_dispatch"):
        monkeypatch.setenv("NVTE_CK_HOW_V3_BF16_CVT", "1")
        assert aiter._asked(frozenset({"is_v3_atomic_fp32"})) == {}
    assert "NVTE_CK_HOW_V3_BF16_CVT has no effect: this release of AITER has no how_v3_bf16_cvt" in caplog.text
