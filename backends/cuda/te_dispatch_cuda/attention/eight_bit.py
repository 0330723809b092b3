# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""FP8 attention on cuDNN: dense layouts, per-tensor scales, delayed casts. Contract: `te_dispatch.ops.attention`.

Besides the graph a call makes two launches, for inverses of scales and for amaxes. The backward tells no amax of p: the
forward told it.
"""

from __future__ import annotations

from typing import Any

import torch

from te_dispatch.backend_kit.attention import attention_backward, attention_forward
from te_dispatch.backend_kit.flash import ALIGNMENT
from te_dispatch.core.errors import Declined
from te_dispatch.numerics.quantized import CANONICAL_SCALES, Quantized
from te_dispatch.numerics.quantizers import Quantizer
from te_dispatch.ops.attention_spec import AttentionSpec, AttentionTensors
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved
from te_dispatch_cuda.attention import eight_bit_graphs as graphs
from te_dispatch_cuda.attention.graphs import BEHIND_DV, BEHIND_LSE, UP_TO_DOUT
from te_dispatch_cuda.attention.run import execute
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


def _forward_call(spec: AttentionSpec, inference: bool) -> graphs.Call:
    call = graphs.CALLS.get((spec, inference)) or graphs.forward(spec, inference)
    if call.refused is not None:
        raise Declined(call.refused)
    return call


@attention_forward
def attention_fwd(
    q: Quantized,
    k: Quantized,
    v: Quantized,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    inference: bool,
    with_max_logit: bool,
    s_quantizer: Quantizer | None,
    out_quantizer: Quantizer | None,
    out_dtype: torch.dtype | None,
) -> AttentionForward:
    """`s_quantizer` and `out_quantizer` are delayed ones; the manifest keeps everything else away."""
    (qc, qs), (kc, ks), (vc, vs) = _codes("q", q), _codes("k", k), _codes("v", v)
    call = _forward_call(spec, inference)
    if call.unfit or (qc.data_ptr() | kc.data_ptr() | vc.data_ptr()) & _LOW:
        qc, kc, vc = copied(qc), copied(kc), copied(vc)
        call = _forward_call(spec.of(qc, kc, vc), inference)
    device, index = spec.device, spec.device.index
    stream = stream_of(index)
    out = empty("out.row_data", spec.out_shape, torch.uint8, device)
    inverse = empty("out.row_scale_inv", (1,), torch.float32, device)
    lse = None if inference else empty("lse", spec.lse_shape, torch.float32, device)
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


@attention_backward
def attention_bwd(
    dout: Quantized,
    q: Quantized,
    k: Quantized,
    v: Quantized,
    out: Quantized,
    lse: torch.Tensor,
    saved: Saved,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    s_quantizer: Quantizer | None,
    dp_quantizer: Quantizer | None,
    dqkv_quantizer: Quantizer | None,
    with_dbias: bool,
) -> AttentionBackward:
    """`s_quantizer`, `dp_quantizer` and `dqkv_quantizer` are delayed ones."""
    assert dqkv_quantizer is not None
    if not isinstance(dout, Quantized) or not isinstance(out, Quantized):
        raise ValueError(f"dout: got {type(dout).__name__} with out {type(out).__name__}, expected Quantized both")
    (qc, qs), (kc, ks), (vc, vs) = _codes("q", q), _codes("k", k), _codes("v", v)
    (oc, os), (gc, gs) = _codes("out", out), _codes("dout", dout)
    encodings = (dout.encoding, dqkv_quantizer.encoding)
    call = graphs.CALLS.get((spec, encodings)) or graphs.backward(spec, encodings)
    if call.unfit or (qc.data_ptr() | kc.data_ptr() | vc.data_ptr()) & _LOW:
        qc, kc, vc = copied(qc), copied(kc), copied(vc)
        spec = spec.of(qc, kc, vc)
        call = graphs.CALLS.get((spec, encodings)) or graphs.backward(spec, encodings)
    if call.refused is not None:
        raise RuntimeError(f"{NAME}: {call.refused}; the forward of this call was another one")
    oc, gc = dense_aligned(oc, ALIGNMENT), dense_aligned(gc, ALIGNMENT)
    device, index = spec.device, spec.device.index
    stream = stream_of(index)
    names = ("dq", "dk", "dv")
    results = [empty(f"{n}.row_data", tuple(x.shape), torch.uint8, device) for n, x in zip(names, (qc, kc, vc))]
    inverses = [empty(f"{n}.row_scale_inv", (1,), torch.float32, device) for n in names]
    workspace = empty("workspace", (call.bytes,), torch.uint8, device)
    ws = workspace.data_ptr()
    of_s, of_dp, by_dp, amax_dq, amax_dk, amax_dv, amax_dp = (ws + call.scalars_at + graphs.STEP * i for i in range(7))
    (by_s, _), (scale_dp, state_dp), (by_d, state_d) = _state(s_quantizer), _state(dp_quantizer), _state(dqkv_quantizer)
    # cuDNN casts the gradient of q k^T, the operator that of the logits: they differ by the logits' scale.
    factor = q.shape[-1] ** 0.5 if spec.softmax_scale is None else 1.0 / spec.softmax_scale
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
