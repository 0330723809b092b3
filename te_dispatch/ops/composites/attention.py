# Copyright (c) 2026 the te_dispatch authors. Licensed under Apache-2.0.
"""Attention through the whole score matrix, from a GEMM and a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from te_dispatch.core.facts import CallFacts
from te_dispatch.core.operator import Piece, decomposes
from te_dispatch.ops.attention import out_shape
from te_dispatch.ops.results import AttentionBackward, AttentionForward, Saved

if TYPE_CHECKING:
    import torch


def _unfused_pieces(call: CallFacts) -> Mapping[str, Piece] | None:
    simple = (
        call.get("softmax_type", "vanilla") == "vanilla"
        and not call.get("softcap")
        and call.get("layout") in ("sbhd", "bshd")
        and call.get("mask") in ("none", "causal", "arbitrary")
        and call.get("bias_type", "none") == "none"
        and not call.get("window")
        and not call.get("dropout")
        and not call.get("page_table")
        and not call.get("with_max_logit")
        and call.get("s_quantizer") is None
        and call.get("out_quantizer") is None
        and call.get("dp_quantizer") is None
        and call.get("dqkv_quantizer") is None
        and call.get("q.scaling") == "none"
    )
    if not simple:
        return None
    softmax: CallFacts = {
        "x.dtype": "fp32", "mask": call.get("mask") == "arbitrary", "causal": call.get("mask") == "causal",
        "mask.dtype": "bool" if call.get("mask") == "arbitrary" else None, "out_dtype": None,
    }  # fmt: skip
    product: CallFacts = {
        "a.dtype": call.get("q.dtype"), "b.dtype": call.get("q.dtype"), "a.scaling": "none", "b.scaling": "none",
        "accumulate": False, "epilogue": None, "out": False, "aux": False, "bias": False, "aux_quantizer": None,
        "out_quantizer": None, "split_accumulator": None, "alpha.one": True, "out_dtype": "fp32",
    }  # fmt: skip
    if "dout.dtype" in call:
        return {
            "softmax_fwd": Piece("softmax_fwd", lambda c: softmax),
            "softmax_bwd": Piece("softmax_bwd", lambda c: {"dy.dtype": "fp32", "y.dtype": "fp32", "out_dtype": None}),
            "gemm": Piece("gemm", lambda c: product),
        }
    return {"softmax_fwd": Piece("softmax_fwd", lambda c: softmax), "gemm": Piece("gemm", lambda c: product)}


#: What the composite forward leaves: nothing but its arguments, which the backward has anyway.
UNFUSED_FORMAT = "composite.unfused_attention"


def _per_head(x: torch.Tensor, layout: str | None) -> torch.Tensor:
    """(b, h, s, d) view."""
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.permute(0, 2, 1, 3)


def _probabilities(
    softmax_fwd: Any,
    gemm: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    layout: str,
    mask: str,
    attn_mask: torch.Tensor | None,
    softmax_scale: float | None,
) -> tuple[torch.Tensor, float, torch.Tensor]:
    import torch

    qh, kh = _per_head(q, layout), _per_head(k, layout)
    b, h, sq, d = qh.shape
    g, skv = kh.shape[1], kh.shape[2]
    scale = softmax_scale if softmax_scale is not None else d**-0.5
    z = torch.empty((b, h, sq, skv), dtype=torch.float32, device=q.device)
    for i in range(b):
        for j in range(h):
            operands = qh[i, j].contiguous(), kh[i, j * g // h].contiguous()
            z[i, j] = gemm(*operands, "NT", 1.0, None, False, None, None, None, None, torch.float32, None, None).out
    arbitrary = attn_mask if mask == "arbitrary" else None
    return softmax_fwd(z, arbitrary, scale, mask == "causal", None), scale, z


@decomposes("attention_fwd", pieces=_unfused_pieces, materializes=True, label="unfused_attention")
def unfused_attention(softmax_fwd: Any, gemm: Any) -> Any:
    """Through the whole score matrix, head by head: the last resort of a device with a GEMM and a softmax."""

    def composed(  # type: ignore[no-untyped-def]
        q, k, v, *, layout="sbhd", packing=None, mask="causal", attn_mask=None, window=None, cu_seqlens_q=None,
        cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, page_table=None, bias=None, bias_type="none", alibi_slopes=None, softmax_scale=None,
        softmax_type="vanilla", softmax_offset=None, softcap=0.0, dropout_p=0.0, rng_state=None, deterministic=False,
        inference=False, with_max_logit=False, s_quantizer=None, out_quantizer=None, out_dtype=None,
    ):  # fmt: skip
        import torch

        p, scale, z = _probabilities(softmax_fwd, gemm, q, k, layout, mask, attn_mask, softmax_scale)
        vh = _per_head(v, layout)
        b, h, sq, skv = p.shape
        g = vh.shape[1]
        out = torch.empty(out_shape(q, v, layout), dtype=out_dtype or q.dtype, device=q.device)
        outh = _per_head(out, layout)
        p_cast = p.to(q.dtype)
        for i in range(b):
            for j in range(h):
                vt = vh[i, j * g // h].contiguous()
                outh[i, j] = gemm(
                    p_cast[i, j], vt, "NN", 1.0, None, False, None, None, None, None, torch.float32, None, None
                ).out
        if inference:
            return AttentionForward(out, None, None, None)
        z = z * scale
        if mask == "causal":
            z = z.masked_fill(torch.ones((sq, skv), dtype=torch.bool, device=z.device).triu(1), float("-inf"))
        elif mask == "arbitrary":
            z = z.masked_fill(attn_mask, float("-inf"))
        saved = Saved("composite.unfused_attention", UNFUSED_FORMAT)
        return AttentionForward(out, torch.logsumexp(z, -1), None, saved)

    return composed


@decomposes("attention_bwd", pieces=_unfused_pieces, materializes=True, label="unfused_attention")
def unfused_attention_grad(softmax_fwd: Any, softmax_bwd: Any, gemm: Any) -> Any:
    """Recomputes the score matrix, then dv = p^T dout, ds = softmax'(dout v^T), dq = ds k, dk = ds^T q."""

    def composed(  # type: ignore[no-untyped-def]
        dout, q, k, v, out, lse, saved, *, layout="sbhd", packing=None, mask="causal", attn_mask=None, window=None,
        cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, max_seqlen_q=None,
        max_seqlen_kv=None, bias=None, bias_type="none", alibi_slopes=None, softmax_scale=None,
        softmax_type="vanilla", softmax_offset=None, softcap=0.0, dropout_p=0.0, rng_state=None, deterministic=False,
        s_quantizer=None, dp_quantizer=None, dqkv_quantizer=None, with_dbias=False,
    ):  # fmt: skip
        import torch

        p, scale, _ = _probabilities(softmax_fwd, gemm, q, k, layout, mask, attn_mask, softmax_scale)
        b, h = p.shape[:2]
        qh, kh, vh, doh = (_per_head(x, layout) for x in (q, k, v, dout))
        g = kh.shape[1]

        def product(a: torch.Tensor, b_: torch.Tensor, kind: str) -> Any:
            options = (1.0, None, False, None, None, None, None, torch.float32, None, None)
            return gemm(a.contiguous(), b_.contiguous(), kind, *options).out

        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk = torch.zeros(k.shape, dtype=torch.float32, device=q.device)
        dv = torch.zeros(v.shape, dtype=torch.float32, device=q.device)
        dqh, dkh, dvh = (_per_head(x, layout) for x in (dq, dk, dv))
        for i in range(b):
            for j in range(h):
                group = j * g // h
                dvh[i, group] += product(p[i, j].to(q.dtype), doh[i, j], "TN")
                dp = product(doh[i, j], vh[i, group], "NT")
                ds = softmax_bwd(dp, p[i, j], scale, None).to(q.dtype)
                dqh[i, j] = product(ds, kh[i, group], "NN")
                dkh[i, group] += product(ds, qh[i, j], "TN")
        return AttentionBackward(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None)

    return composed
