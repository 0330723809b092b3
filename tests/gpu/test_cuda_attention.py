# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention of the cuda backend where the conformance kit does not look: graphs kept, captured, refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_dispatch
from te_dispatch import ops


def _missing() -> str:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no NVIDIA GPU"
    try:
        from te_dispatch.core.errors import Declined
        from te_dispatch_cuda.attention import frontend
    except ImportError as error:
        return f"te_dispatch_cuda is not installed ({error})"
    try:
        frontend.load()
    except Declined as declined:
        return str(declined)
    return ""


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "-")
CUDNN = "cuda.cudnn_attention"


def operands(batch: int, length: int, heads: int = 2, features: int = 64) -> list[torch.Tensor]:
    return [torch.randn(length, batch, heads, features, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
    with te_dispatch.using(attention="cuda"):
        made = ops.attention_fwd(q, k, v, **options)
        assert made.saved is not None and made.saved.implementation == CUDNN
        back = ops.attention_bwd(torch.ones_like(made.out), q, k, v, made.out, made.lse, made.saved, **options)
    return made.out, made.lse, back.dq, back.dk, back.dv


def test_a_graph_is_built_once() -> None:
    from te_dispatch_cuda.attention import calls

    q, k, v = operands(2, 48)
    both(q, k, v)
    known = len(calls.FORWARDS), len(calls.BACKWARDS)
    both(*operands(2, 48))
    assert (len(calls.FORWARDS), len(calls.BACKWARDS)) == known
    both(*operands(2, 56))
    assert (len(calls.FORWARDS), len(calls.BACKWARDS)) == (known[0] + 1, known[1] + 1)


@pytest.mark.parametrize("packed", [True, False])
def test_captured_modules_run_the_graphs_of_other_calls(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of calls that look for them, off alignment and on another stream too, and without looking."""
    from te_dispatch.pytorch.attention.dot_product import DotProductAttention
    from te_dispatch.pytorch.attention.signature import AttentionSignature
    from te_dispatch_cuda.attention import calls

    def steps(module: DotProductAttention, *seeds: int, shift: int = 0) -> list[torch.Tensor]:
        found = []
        for seed in seeds:
            torch.manual_seed(seed)
            shape, memory = (48, 2, 2, 3, 64), torch.empty(48 * 2 * 2 * 3 * 64 + shift, device="cuda")
            x = memory.to(torch.bfloat16)[shift:].normal_().view(shape)
            operands = [x] if packed else [t.contiguous() for t in x.unbind(3)]
            operands = [t.detach().requires_grad_() for t in operands]
            given = {"qkv_layer": operands[0], "qkv_interleave_dim": -2} if packed else {}
            out = module(**given) if packed else module(*operands)
            out.backward(torch.randn_like(out))
            found += [out.detach(), *[t.grad for t in operands]]
        return found

    def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    with te_dispatch.using(attention="cuda"):
        module, plain = (DotProductAttention(2, 64, attention_dropout=0.0) for _ in range(2))
        with monkeypatch.context() as patch:
            patch.setattr(AttentionSignature, "capturing", lambda signature: signature.call)
            expected, shifted = steps(plain, 1, 2, 3), steps(plain, 4, shift=1)
        steps(module, 0, 0)
        (known,) = module._signatures
        assert known.captured.program.attributes["saved_by"] == CUDNN and known.captured.program.backwards
        assert same(steps(module, 4, shift=1), shifted)
        with monkeypatch.context() as patch:
            patch.setattr(calls, "FORWARDS", None)
            patch.setattr(calls, "BACKWARDS", None)
            assert same(steps(module, 1, 2, 3), expected)
            with torch.cuda.stream(torch.cuda.Stream()):
                assert same(steps(module, 1, 2, 3), expected)
            torch.cuda.synchronize()
        assert len(module._signatures) == 1 and all(other.captured is None for other in plain._signatures)


def test_the_process_holds_one_cudnn() -> None:
    from te_dispatch_cuda import libraries

    both(*operands(1, 32))
    torch.backends.cudnn.version()
    assert len(libraries.loaded(libraries.CUDNN)) == 1


def test_capture_replays_with_the_lengths_of_its_tensors() -> None:
    q, k, v = operands(2, 64)
    lengths = [torch.zeros(q.shape[1] + 1, dtype=torch.int32, device="cuda") for _ in range(2)]
    options = {"mask": "padding", "cu_seqlens_q": lengths[0], "cu_seqlens_kv": lengths[1]}

    def fill(longest: int) -> None:
        for cumulative in lengths:
            cumulative.copy_(torch.arange(q.shape[1] + 1) * longest)

    expected = {}
    for longest in (q.shape[0], q.shape[0] // 2):
        fill(longest)
        expected[longest] = [x.clone() for x in both(q, k, v, **options)]
    assert len({float(results[0].float().abs().sum()) for results in expected.values()}) == 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(q, k, v, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = both(q, k, v, **options)
    for longest, wanted in expected.items():
        fill(longest)
        graph.replay()
        torch.cuda.synchronize()
        for name, got, want in zip(("out", "lse", "dq", "dk", "dv"), results, wanted, strict=True):
            # The default backward adds in any order.
            tolerance = 0.0 if name in ("out", "lse") else 0.05
            assert torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance), name


def test_a_new_shape_under_capture_says_what_to_do() -> None:
    q, k, v = operands(3, 40)
    both(*operands(3, 32))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(te_dispatch.CaptureError, match="warm"), torch.cuda.graph(graph):
        both(q, k, v)
    torch.cuda.synchronize()
    both(q, k, v)


def test_streams_and_threads_have_handles_of_their_own() -> None:
    import threading

    q, k, v = operands(2, 64)
    expected = both(q, k, v)
    found: list[tuple[torch.Tensor, ...]] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(20):
                made = both(q, k, v)
        stream.synchronize()
        found.append(made)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for made in found:
        assert torch.equal(made[0], expected[0]) and torch.equal(made[1], expected[1])


def test_the_deterministic_backward_repeats_itself() -> None:
    q, k, v = operands(2, 200)
    name = "cuda.cudnn_attention_deterministic"
    with te_dispatch.using(attention="cuda"):
        made = ops.attention_fwd(q, k, v, deterministic=True)
        assert made.saved is not None and made.saved.implementation == name
        runs = [
            ops.attention_bwd(torch.ones_like(made.out), q, k, v, made.out, made.lse, made.saved, deterministic=True)
            for _ in range(5)
        ]
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run[:3], runs[0][:3], strict=True))


def test_operands_off_alignment_are_served() -> None:
    q, k, v = operands(2, 33)
    expected = both(q, k, v)
    shifted = []
    for x in (q, k, v):
        room = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
        shifted.append(room[1:].view(x.shape).copy_(x))
    found = both(*shifted)
    assert torch.equal(found[0], expected[0])


def test_a_refusal_is_cudnns_own_and_remembered() -> None:
    from te_dispatch.core.errors import NoImplementation
    from te_dispatch_cuda.attention import calls

    q, k, v = operands(2, 48)
    with te_dispatch.using(attention="cuda"), pytest.raises(NoImplementation, match="cuDNN: Bottom right"):
        ops.attention_fwd(q, k[:40], v[:40], mask="causal_bottom_right")
    assert any("Bottom right" in (call.refused or "") for call in calls.FORWARDS.values())


def _delayed(encoding: str, scale: float) -> Any:
    from te_dispatch.numerics.quantizers import DelayedQuantizer

    numbers = {"scale": torch.tensor([scale], device="cuda"), "amax": torch.zeros(1, device="cuda")}
    return DelayedQuantizer(encoding, **numbers)


def _error(got: Any, want: Any) -> float:
    """Root mean square of the difference, over that of what is wanted."""
    a, b = (ops.dequantize(x, dtype=torch.float32) for x in (got, want))
    return float((a - b).square().mean().sqrt() / b.square().mean().sqrt())


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("softmax_scale", [None, 0.05])
def test_eight_bit_attention_differs_from_the_unfused_one_by_its_casts(mask: str, softmax_scale: float | None) -> None:
    """The kit's cases have fewer features than cuDNN's FP8 backward serves on Hopper, which is 128 alone."""
    from te_dispatch.numerics.quantizers import CurrentQuantizer

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("written for Hopper's engines")

    def record(encoding: str) -> Any:
        x = torch.randn(96, 2, 4, 128, device="cuda", dtype=torch.bfloat16)
        return ops.quantize(x, CurrentQuantizer(encoding), usage="row")

    q, k, v, dout = record("e4m3fn"), record("e4m3fn"), record("e4m3fn"), record("e5m2")
    options = {"mask": mask, "softmax_scale": softmax_scale}
    found = {}
    for backend in ("cuda", "torch"):
        casts = {"s_quantizer": _delayed("e4m3fn", 448.0), "out_quantizer": _delayed("e4m3fn", 40.0)}
        of_p = {"s_quantizer": _delayed("e4m3fn", 448.0), "dp_quantizer": _delayed("e5m2", 2048.0)}
        of_gradients = _delayed("e5m2", 16.0)
        with te_dispatch.using(attention=backend):
            made = ops.attention_fwd(q, k, v, **options, **casts)
            back = ops.attention_bwd(
                dout, q, k, v, made.out, made.lse, made.saved, dqkv_quantizer=of_gradients, **options, **of_p
            )
        amaxes = [x.amax.item() for x in (*casts.values(), of_p["dp_quantizer"], of_gradients)]
        found[backend] = made, back, amaxes
    made, back, amaxes = found["cuda"]
    wanted, wanted_back, wanted_amaxes = found["torch"]
    assert made.saved.implementation == "cuda.cudnn_fp8_attention"
    assert torch.allclose(made.lse, wanted.lse, atol=1e-3)
    assert torch.equal(made.out.row_scale_inv, wanted.out.row_scale_inv)
    # A cast to 3 bits behind the point errs by 2.5% of a number at random, one to 2 bits by 5%; they add up.
    assert _error(made.out, wanted.out) < 0.07
    for name in ("dq", "dk", "dv"):
        assert _error(getattr(back, name), getattr(wanted_back, name)) < 0.15, name
    assert amaxes == pytest.approx(wanted_amaxes, rel=0.1)


@pytest.mark.parametrize("inference", [True, False])
def test_the_largest_logit_is_nan_where_a_logit_is(inference: bool) -> None:
    q, k, v = operands(2, 48)
    k[5, 1, 0] = torch.nan
    with te_dispatch.using(attention="cuda"):
        made = ops.attention_fwd(q, k, v, mask="none", with_max_logit=True, inference=inference)
    logits = torch.einsum("sbhd,tbhd->bhst", q.float(), k.float()) / 8
    assert made.max_logit is not None
    torch.testing.assert_close(made.max_logit, logits.amax((0, 2, 3)), equal_nan=True, rtol=1e-3, atol=1e-3)
    assert made.max_logit.isnan().tolist() == [True, False]


def test_the_largest_logit_of_rows_whose_logits_are_all_minus_inf() -> None:
    q, k, v = operands(1, 48)
    bias = torch.zeros(1, 1, 48, 48, device="cuda", dtype=torch.bfloat16)
    bias[:, :, 7] = -torch.inf
    with te_dispatch.using(attention="cuda"):
        made = ops.attention_fwd(
            q, k, v, mask="none", bias=bias, bias_type="post_scale", with_max_logit=True, inference=True
        )
    assert made.max_logit is not None and made.max_logit.isfinite().all()


@pytest.mark.parametrize("shared", [True, False], ids=["one tensor", "two tensors"])
def test_what_a_gradient_has_in_packed_rows_that_see_no_key_does_not_matter(shared: bool) -> None:
    """`shared`: queries and keys have the same cumulative lengths, so that all rows see a key and nothing is copied."""
    q, k, v = (torch.randn(24, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    lengths = torch.tensor([0, 16, 24], device="cuda", dtype=torch.int32)
    keys = lengths if shared else torch.tensor([0, 6, 24], device="cuda", dtype=torch.int32)
    how: dict[str, Any] = {"layout": "thd", "mask": "padding_causal", "window": (2, 0), "cu_seqlens_q": lengths,
                           "cu_seqlens_kv": keys, "max_seqlen_q": 16, "max_seqlen_kv": 18}  # fmt: skip
    with te_dispatch.using(attention="cuda"):
        made = ops.attention_fwd(q, k, v, **how)
        assert made.saved is not None and made.saved.implementation == CUDNN
        nothing = made.lse.isneginf().any(1)
        assert int(nothing.sum()) == (0 if shared else 16 - 8)
        dout = torch.randn_like(made.out)
        found = []
        for fill in (0.0, torch.nan):
            given = torch.where(nothing[:, None, None], torch.full_like(dout, fill), dout)
            back = ops.attention_bwd(given, q, k, v, made.out, made.lse, made.saved, **how)
            found.append([back.dq, back.dk, back.dv])
    for one, other in zip(*found, strict=True):
        assert other.isfinite().all()
        torch.testing.assert_close(one, other)
