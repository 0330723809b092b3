# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""FP8 attention on cuDNN: dense layouts, per-tensor scales, delayed casts. Contract: `te_dispatch.ops.attention`.

Besides the graph a call makes two launches, for inverses of scales and for amaxes. The backward tells no amax of p: the
forward told it.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.checks import attention as checks
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention import eight_bit_graphs as graphs
from te_dispatch_cuda.attention.graphs import BEHIND_DV, BEHIND_LSE, UP_TO_DOUT
from te_dispatch_cuda.attention.run import execute
from te_dispatch_cuda.attention.setting import ALIGNMENT
from te_dispatch_cuda.memory import copied, dense_aligned, empty, stream_of
from te_dispatch_cuda.native import load

_native = load()
FORMAT = "cuda.cudnn_fp8/1"
NAME = "cuda.cudnn_fp8_attention"
_LOW = ALIGNMENT - 1


def _codes(name: str, x: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and their scale's inverse.

    Raises:
        Declined: only the column-wise copy is there.
    """
    if x.row_data is None or x.row_scale_inv is None:
        raise Declined(f"{name}: has no row-wise copy, which cuDNN reads")
    return x.row_data, x.row_scale_inv


def _key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, mask: str, scale: float | None
) -> tuple[Any, ...]:
    return (
        q.get_device(), torch.float8_e4m3fn, layout, None, q.shape, q.stride(), k.shape, k.stride(), v.shape,
        v.stride(), mask, None, 0, None, None, None, None, None, False, scale, "vanilla", 0.0, False,
    )  # fmt: skip


def _record(data: torch.Tensor, inverse: torch.Tensor, quantizer: Quantizer, dtype: torch.dtype) -> Quantized:
    return Quantized(
        data, None, inverse, None, quantizer.encoding, "tensor", CANONICAL_SCALES, tuple(data.shape), dtype, data.device
    )


def _state(quantizer: Any) -> tuple[int, int]:
    """Addresses of a delayed cast's scale and amax."""
    return quantizer.scale.data_ptr(), 0 if quantizer.amax is None else quantizer.amax.data_ptr()


def _run(
    call: graphs.Call, device: int, stream: int, workspace: int, addresses: tuple[int, ...], casts: tuple[Any, ...]
) -> None:
    _native.attention_casts(device, stream, False, casts)
    assert call.graph is not None  # not refused
    execute(call.graph, device, stream, workspace, addresses)
    _native.attention_casts(device, stream, True, casts)


def attention_fwd(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    *,
    layout: str = "sbhd",
    packing: str | None = None,
    mask: str = "causal",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    page_table: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bias_type: str = "none",
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    inference: bool = False,
    with_max_logit: bool = False,
    s_quantizer: Quantizer | None = None,
    out_quantizer: Quantizer | None = None,
    out_dtype: torch.dtype | None = None,
) -> AttentionForward:
    """`s_quantizer` and `out_quantizer` are delayed ones; the manifest keeps everything else away."""
    checks.attention(
        q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, page_table, bias, bias_type, alibi_slopes, softmax_scale,
        softmax_type, softmax_offset, softcap, dropout_p, rng_state,
    )  # fmt: skip
    checks.forward(inference, page_table, s_quantizer, out_quantizer, out_dtype, q.device)
    (qc, qs), (kc, ks), (vc, vs) = _codes("q", q), _codes("k", k), _codes("v", v)
    key = _key(qc, kc, vc, layout, mask, softmax_scale)
    call = graphs.CALLS.get((key, inference)) or graphs.forward(key, inference)
    if call.refused is not None:
        raise Declined(call.refused)
    if call.unfit or (qc.data_ptr() | kc.data_ptr() | vc.data_ptr()) & _LOW:
        qc, kc, vc = copied(qc), copied(kc), copied(vc)
        key = _key(qc, kc, vc, layout, mask, softmax_scale)
        call = graphs.CALLS.get((key, inference)) or graphs.forward(key, inference)
        if call.refused is not None:
            raise Declined(call.refused)
    device, index = q.device, key[0]
    stream = stream_of(index)
    shape = (*qc.shape[:-1], vc.shape[-1])
    out = empty("out.row_data", shape, torch.uint8, device)
    inverse = empty("out.row_scale_inv", (1,), torch.float32, device)
    lse = None
    if not inference:
        rows, batch = (shape[0], shape[1]) if layout == "sbhd" else (shape[1], shape[0])
        lse = empty("lse", (batch, shape[2], rows), torch.float32, device)
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    ws = workspace.data_ptr()
    of_s, amax_s, amax_out = (ws + call.scalars_at + graphs.STEP * i for i in range(3))
    (by_s, state_s), (by_out, state_out) = _state(s_quantizer), _state(out_quantizer)
    casts = (
        (by_s, of_s, 0, 0, amax_s, 0, 0, state_s, 0, 1.0),
        (by_out, inverse.data_ptr(), 0, 0, amax_out, 0, 0, state_out, 0, 1.0),
    )
    addresses = (
        0, qc.data_ptr(), kc.data_ptr(), vc.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        *BEHIND_LSE, qs.data_ptr(), ks.data_ptr(), vs.data_ptr(), of_s, by_s, by_out, amax_s, amax_out,
    )  # fmt: skip
    _run(call, index, stream, ws, addresses, casts)
    assert out_quantizer is not None
    record = _record(out, inverse, out_quantizer, out_dtype or q.dtype)
    return AttentionForward(record, lse, None, None if inference else Saved(NAME, FORMAT))


def attention_bwd(
    dout: Quantized,
    q: Quantized,
    k: Quantized,
    v: Quantized,
    out: Quantized,
    lse: torch.Tensor,
    saved: Saved,
    *,
    layout: str = "sbhd",
    packing: str | None = None,
    mask: str = "causal",
    attn_mask: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    bias: torch.Tensor | None = None,
    bias_type: str = "none",
    alibi_slopes: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    softmax_type: str = "vanilla",
    softmax_offset: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    rng_state: torch.Tensor | None = None,
    deterministic: bool = False,
    s_quantizer: Quantizer | None = None,
    dp_quantizer: Quantizer | None = None,
    dqkv_quantizer: Quantizer | None = None,
    with_dbias: bool = False,
) -> AttentionBackward:
    """`s_quantizer`, `dp_quantizer` and `dqkv_quantizer` are delayed ones."""
    checks.attention(
        q, k, v, layout, packing, mask, attn_mask, window, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
        cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, None, bias, bias_type, alibi_slopes, softmax_scale,
        softmax_type, softmax_offset, softcap, dropout_p, rng_state,
    )  # fmt: skip
    checks.backward(dout, q, v, out, lse, layout, bias, with_dbias, s_quantizer, dp_quantizer, dqkv_quantizer)
    assert dqkv_quantizer is not None
    if not isinstance(dout, Quantized) or not isinstance(out, Quantized):
        raise ValueError(f"dout: got {type(dout).__name__} with out {type(out).__name__}, expected Quantized both")
    (qc, qs), (kc, ks), (vc, vs) = _codes("q", q), _codes("k", k), _codes("v", v)
    (oc, os), (gc, gs) = _codes("out", out), _codes("dout", dout)
    encodings = (dout.encoding, dqkv_quantizer.encoding)
    key = _key(qc, kc, vc, layout, mask, softmax_scale)
    call = graphs.CALLS.get((key, encodings)) or graphs.backward(key, encodings)
    if call.unfit or (qc.data_ptr() | kc.data_ptr() | vc.data_ptr()) & _LOW:
        qc, kc, vc = copied(qc), copied(kc), copied(vc)
        key = _key(qc, kc, vc, layout, mask, softmax_scale)
        call = graphs.CALLS.get((key, encodings)) or graphs.backward(key, encodings)
    if call.refused is not None:
        raise RuntimeError(f"{NAME}: {call.refused}; the forward of this call was another one")
    oc, gc = dense_aligned(oc, ALIGNMENT), dense_aligned(gc, ALIGNMENT)
    device, index = q.device, key[0]
    stream = stream_of(index)
    names = ("dq", "dk", "dv")
    results = [empty(f"{n}.row_data", tuple(x.shape), torch.uint8, device) for n, x in zip(names, (qc, kc, vc))]
    inverses = [empty(f"{n}.row_scale_inv", (1,), torch.float32, device) for n in names]
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    ws = workspace.data_ptr()
    of_s, of_dp, by_dp, amax_dq, amax_dk, amax_dv, amax_dp = (ws + call.scalars_at + graphs.STEP * i for i in range(7))
    (by_s, _), (scale_dp, state_dp), (by_d, state_d) = _state(s_quantizer), _state(dp_quantizer), _state(dqkv_quantizer)
    # cuDNN casts the gradient of q k^T, the operator that of the logits: they differ by the logits' scale.
    factor = q.shape[-1] ** 0.5 if softmax_scale is None else 1.0 / softmax_scale
    casts = (
        (by_s, of_s, 0, 0, 0, 0, 0, 0, 0, 1.0), (scale_dp, of_dp, 0, 0, amax_dp, 0, 0, state_dp, by_dp, factor),
        (by_d, *(x.data_ptr() for x in inverses), amax_dq, amax_dk, amax_dv, state_d, 0, 1.0),
    )  # fmt: skip
    addresses = (
        0, qc.data_ptr(), kc.data_ptr(), vc.data_ptr(), oc.data_ptr(), lse.data_ptr(), *UP_TO_DOUT, gc.data_ptr(),
        *(x.data_ptr() for x in results), *BEHIND_DV, qs.data_ptr(), ks.data_ptr(), vs.data_ptr(), of_s, by_s, 0, 0, 0,
        os.data_ptr(), gs.data_ptr(), of_dp, by_dp, by_d, by_d, by_d, amax_dq, amax_dk, amax_dv, amax_dp,
    )  # fmt: skip
    _run(call, index, stream, ws, addresses, casts)
    made = [_record(x, i, dqkv_quantizer, like.dtype) for x, i, like in zip(results, inverses, (q, k, v))]
    return AttentionBackward(made[0], made[1], made[2], None, None)
